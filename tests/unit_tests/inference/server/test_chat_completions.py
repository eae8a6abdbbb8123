# SPDX-License-Identifier: Apache-2.0
"""Tool calls and reasoning of OpenAI's chat route."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.support.http_server import Served, served
from tests.support.scripted_model import TEMPLATE, Scripted

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "Tells it.", "parameters": CITY}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": {"name": "now"}},
]
ANSWER = "<think>\nHm é</think>\n\nWait…\n" + (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ü", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
USER = [{"role": "user", "content": "hi"}]
#: Favours closing characters where the grammar forbids the model's choice.
CLOSING_BIAS = {str(ord(c)): 4 for c in '"}],'}


@pytest.fixture
def server(chat_server: Served) -> Served:
    return chat_server


def chat(server: Served, status: int = 200, **fields: Any) -> dict[str, Any]:
    request = {"messages": USER, "temperature": 0, "max_tokens": 900, **fields}
    response = server.post("/v1/chat/completions", **request)
    assert response.status_code == status, response.text
    return response.json()


def prompt(server: Served, **fields: Any) -> str:
    """Return the prompt that the engine receives for a request."""
    requests: list[Any] = []
    add = server.engine.add

    def recorded_add(request: Any) -> int:
        requests.append(request)
        return add(request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.engine, "add", recorded_add)
        server.model.say("ok")
        chat(server, **fields)
    return bytes(requests[0].prompt).decode()


def test_calls_and_reasoning_are_separate_from_text(server: Served) -> None:
    server.model.say(ANSWER)
    (choice,) = chat(server, tools=TOOLS)["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["reasoning_content"], message["content"]) == ("Hm é", "Wait…")
    weather_call, now_call = message["tool_calls"]
    assert weather_call["function"] == {"name": "weather", "arguments": '{"city": "Ü", "days": 2}'}
    assert now_call["function"] == {"name": "now", "arguments": "{}"}
    assert weather_call["id"] != now_call["id"]
    server.model.say(ANSWER[:-40])
    (choice,) = chat(server, tools=TOOLS, max_tokens=40)["choices"]
    assert choice["finish_reason"] == "length"


def test_calls_are_text_without_tools(server: Served) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        server.model.say(ANSWER)
        (choice,) = chat(server, **fields)["choices"]
        assert choice["message"]["content"] == ANSWER.split("</think>\n\n")[1]
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
    assert "weather" not in prompt(server, tools=TOOLS, tool_choice="none")


def test_streamed_answer_equals_the_whole_answer(server: Served, client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "next-byte", "messages": USER, "tools": TOOLS}
    request |= {"temperature": 0, "max_tokens": 900, "logprobs": True}
    server.model.say(ANSWER)
    whole = client.chat.completions.create(**request).choices[0]
    server.model.say(ANSWER)
    with client.chat.completions.stream(**request) as stream:
        events = list(stream)
        streamed = stream.get_final_completion().choices[0]
    kinds = [event.type for event in events]
    assert "tool_calls.function.arguments.delta" in kinds
    assert kinds.count("tool_calls.function.arguments.done") == 2
    for message in (whole.message, streamed.message):
        assert (message.content, message.reasoning_content) == ("Wait…", "Hm é")
        assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [
            ("weather", '{"city": "Ü", "days": 2}'),
            ("now", "{}"),
        ]
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    assert len(whole.logprobs.content) == len(streamed.logprobs.content) == len(ANSWER.encode()) + 1


def test_earlier_calls_and_tools_reach_the_template(server: Served) -> None:
    call = {"id": "c1", "type": "function"}
    call["function"] = {"name": "weather", "arguments": '{"city":"U"}'}
    turns = [
        *USER,
        {"role": "assistant", "tool_calls": [call], "reasoning_content": "Hm"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ]
    rendered = prompt(server, messages=turns, tools=TOOLS)
    assert '"name": "weather", "parameters": {"type": "object"' in rendered
    assert '"description": "Tells it."' in rendered
    assert (
        '[assistant  thought Hm called weather {"city": "U"}][tool rain of c1][answer]' in rendered
    )


def test_template_gets_only_allowed_arguments(server: Served) -> None:
    assert prompt(server).endswith("[answer]")
    thinks = {"chat_template_kwargs": {"thinks": True}}
    assert prompt(server, **thinks).endswith("[answer]<think>\n")
    server.model.say("Hm</think>\nYes")
    message = chat(server, **thinks)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm", "Yes")
    for name in ("other", "messages"):
        error = chat(server, 400, chat_template_kwargs={name: True})["error"]
        assert error["param"] == "chat_template_kwargs"
        assert name in error["message"]


@pytest.mark.parametrize("name", ["weather", "now"])
@pytest.mark.parametrize("named", [False, True])
def test_required_calls_follow_their_schemas(server: Served, name: str, named: bool) -> None:
    """Without the grammar, the model would generate another text."""
    choice = {"type": "function", "function": {"name": name}} if named else "required"
    prefix = "" if named else f'<tool_call>\n{{"name": "{name}'
    server.model.say(f"<think>Hm</think>\n{prefix}No, I rather would not.")
    fields = {"tools": TOOLS, "tool_choice": choice, "logit_bias": CLOSING_BIAS}
    (answer,) = chat(server, parallel_tool_calls=False, **fields)["choices"]
    (call,) = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    assert call["function"]["name"] == name
    arguments = json.loads(call["function"]["arguments"])
    assert arguments.keys() == ({"city", "days"} if name == "weather" else set())
    assert name == "now" or (len(arguments["city"]) <= 4 and arguments["days"] in (1, 2))


def test_only_strict_tools_enforce_their_schema(server: Served) -> None:
    strict = [{"type": "function", "function": {**WEATHER, "strict": True}}]
    prefix = "Wait. " + '<tool_call>\n{"name": "weather", "arguments": '
    for tools, valid in ((TOOLS, False), (strict, True)):
        server.model.say(prefix + '{"town": []}}\n</tool_call>')
        (choice,) = chat(server, tools=tools, logit_bias=CLOSING_BIAS)["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert choice["message"]["content"] == "Wait."
        assert (json.loads(call["function"]["arguments"]).keys() == {"city", "days"}) == valid


def test_json_follows_reasoning(server: Served) -> None:
    for prefix in ("<think>", ""):
        server.model.say(prefix + 'Hm</think>{"city": "U", "days": 7}')
        shape = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}
        variables = {} if prefix else {"chat_template_kwargs": {"thinks": True}}
        message = chat(server, response_format=shape, **variables)["choices"][0]["message"]
        assert message["reasoning_content"] == "Hm"
        assert json.loads(message["content"])["days"] in (1, 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
        ),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": [{"role": "user", "content": "a", "tool_call_id": "1"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ue0f0"}]}, "messages"),
        ({"functions": []}, "functions"),
    ],
)
def test_invalid_tool_requests_are_refused_by_field(
    server: Served, fields: dict[str, Any], param: str
) -> None:
    assert chat(server, 400, **fields)["error"]["param"] == param


def test_invalid_schemas_and_arguments_are_refused(server: Served) -> None:
    for parameters in ({"type": "array"}, {"not": {}}, {"properties": {"a": {"type": "strin"}}}):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        error = chat(server, 400, tools=[tool], tool_choice="required")["error"]
        assert error["param"] == "tools"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1]"}}
    error = chat(server, 400, messages=[{"role": "assistant", "tool_calls": [call]}])["error"]
    assert error["param"] == "messages"
    fields: dict[str, Any] = {"structured_outputs": {"regex": "a"}}
    fields["chat_template_kwargs"] = {"thinks": True}
    assert chat(server, 400, **fields)["error"]["param"] == "structured_outputs"


def test_server_without_tool_parser_refuses_tools() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with served() as server:
        assert chat(server, 400, tools=TOOLS)["error"]["param"] == "tools"
        messages = [{"role": "assistant", "tool_calls": [call]}]
        assert chat(server, 400, messages=messages)["error"]["param"] == "messages"
    # The chatml template has no tools.
    with served(formats={"tools": "hermes", "reasoning": None}) as server:
        assert chat(server, 400, tools=TOOLS)["error"]["param"] == "tools"


def test_truncated_argument_is_closed_only_at_a_normal_end() -> None:
    """A truncated value must not look complete."""
    cut = "<function=weather>\n<parameter=days>\n2\n</parameter>\n<parameter=city>\nUlm"
    with served(
        Scripted(),
        template={"source": TEMPLATE, "name": "shows all"},
        formats={"tools": "qwen3_coder", "reasoning": None},
    ) as server:
        for fields in ({}, {"max_tokens": len(cut)}, {"stop": "lm"}):
            server.model.say(cut)
            (choice,) = chat(server, tools=TOOLS, **fields)["choices"]
            (call,) = choice["message"]["tool_calls"]
            text = '{"days": 2, "city": "U' + ("" if "stop" in fields else "lm")
            assert call["function"]["arguments"] == text + ("" if fields else '"}')
