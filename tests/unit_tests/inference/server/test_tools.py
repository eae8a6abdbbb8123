# SPDX-License-Identifier: Apache-2.0
"""Tool calls and reasoning by OpenAI's chat route."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
SAID = "<think>\nHm é</think>\n\nWait…\n" + (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ü", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
USER = [{"role": "user", "content": "hi"}]
#: Ends what is open where the model's own choice is not allowed.
LEANS = {str(ord(c)): 4 for c in '"}],'}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(
        Scripted(),
        template={"source": TEMPLATE, "name": "shows all"},
        template_variables=["thinks"],
        formats={"tools": "hermes", "reasoning": "qwen3"},
    ) as found:
        yield found


def chat(server: Served, status: int = 200, **fields: Any) -> dict[str, Any]:
    asked = {"messages": USER, "temperature": 0, "max_tokens": 900, **fields}
    response = server.post("/v1/chat/completions", **asked)
    assert response.status_code == status, response.text
    return response.json()


def prompt(server: Served, **fields: Any) -> str:
    """Return the prompt of a request, from the engine."""
    seen: list[Any] = []
    add = server.engine.add

    def noted(request: Any) -> int:
        seen.append(request)
        return add(request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.engine, "add", noted)
        server.model.say("ok")
        chat(server, **fields)
    return bytes(seen[0].prompt).decode()


def test_calls_and_reasoning_are_separated_from_text(server: Served) -> None:
    server.model.say(SAID)
    (choice,) = chat(server, tools=TOOLS)["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["reasoning_content"], message["content"]) == ("Hm é", "Wait…")
    first, second = message["tool_calls"]
    assert first["function"] == {"name": "weather", "arguments": '{"city": "Ü", "days": 2}'}
    assert second["function"] == {"name": "now", "arguments": "{}"}
    assert first["id"] != second["id"]
    server.model.say(SAID[:-40])
    (choice,) = chat(server, tools=TOOLS, max_tokens=40)["choices"]
    assert choice["finish_reason"] == "length"


def test_without_tools_calls_are_text(server: Served) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        server.model.say(SAID)
        (choice,) = chat(server, **fields)["choices"]
        assert choice["message"]["content"] == SAID.split("</think>\n\n")[1]
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
    assert "weather" not in prompt(server, tools=TOOLS, tool_choice="none")


def test_the_stream_adds_up_to_the_whole(server: Served) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "next-byte", "messages": USER, "tools": TOOLS}
        asked |= {"temperature": 0, "max_tokens": 900, "logprobs": True}
        server.model.say(SAID)
        whole = client.chat.completions.create(**asked).choices[0]
        server.model.say(SAID)
        with client.chat.completions.stream(**asked) as stream:
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
    assert len(whole.logprobs.content) == len(streamed.logprobs.content) == len(SAID.encode()) + 1


def test_former_calls_and_tools_reach_the_template(server: Served) -> None:
    call = {"id": "c1", "type": "function"}
    call["function"] = {"name": "weather", "arguments": '{"city":"U"}'}
    turns = [
        *USER,
        {"role": "assistant", "tool_calls": [call], "reasoning_content": "Hm"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ]
    found = prompt(server, messages=turns, tools=TOOLS)
    assert '"name": "weather", "parameters": {"type": "object"' in found
    assert '"description": "Tells it."' in found
    assert '[assistant  thought Hm called weather {"city": "U"}][tool rain of c1][answer]' in found


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
def test_calls_that_have_to_be_follow_their_schemas(server: Served, name: str, named: bool) -> None:
    """The model itself would say something else."""
    choice = {"type": "function", "function": {"name": name}} if named else "required"
    begun = "" if named else f'<tool_call>\n{{"name": "{name}'
    server.model.say(f"<think>Hm</think>\n{begun}No, I rather would not.")
    asked = {"tools": TOOLS, "tool_choice": choice, "logit_bias": LEANS}
    (answer,) = chat(server, parallel_tool_calls=False, **asked)["choices"]
    (call,) = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    assert call["function"]["name"] == name
    given = json.loads(call["function"]["arguments"])
    assert given.keys() == ({"city", "days"} if name == "weather" else set())
    assert name == "now" or (len(given["city"]) <= 4 and given["days"] in (1, 2))


def test_a_strict_tool_is_followed_where_it_is_called(server: Served) -> None:
    strict = [{"type": "function", "function": {**WEATHER, "strict": True}}]
    begun = "Wait. " + '<tool_call>\n{"name": "weather", "arguments": '
    for tools, valid in ((TOOLS, False), (strict, True)):
        server.model.say(begun + '{"town": []}}\n</tool_call>')
        (choice,) = chat(server, tools=tools, logit_bias=LEANS)["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert choice["message"]["content"] == "Wait."
        assert (json.loads(call["function"]["arguments"]).keys() == {"city", "days"}) == valid


def test_json_comes_after_reasoning(server: Served) -> None:
    for begun in ("<think>", ""):
        server.model.say(begun + 'Hm</think>{"city": "U", "days": 7}')
        shape = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}
        variables = {} if begun else {"chat_template_kwargs": {"thinks": True}}
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
def test_requests_about_tools_that_cannot_be(
    server: Served, fields: dict[str, Any], param: str
) -> None:
    assert chat(server, 400, **fields)["error"]["param"] == param


def test_schemas_and_arguments_that_cannot_be(server: Served) -> None:
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


def test_a_server_that_reads_no_calls_refuses_tools() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with served() as server:
        assert chat(server, 400, tools=TOOLS)["error"]["param"] == "tools"
        asked = [{"role": "assistant", "tool_calls": [call]}]
        assert chat(server, 400, messages=asked)["error"]["param"] == "messages"
    with served(formats={"tools": "hermes", "reasoning": None}) as server:  # chatml knows no tools
        assert chat(server, 400, tools=TOOLS)["error"]["param"] == "tools"


def test_only_the_model_closes_what_it_has_left_open() -> None:
    """A value that is cut off must not look like a whole one."""
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
