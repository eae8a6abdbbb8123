# SPDX-License-Identifier: Apache-2.0
"""Anthropic's messages routes with Anthropic's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.support.http_server import Served, served
from tests.support.scripted_model import TEMPLATE, Scripted

WEATHER = {
    "name": "weather",
    "description": "Tells it.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
ANSWER = (
    "<think>\nHm é</think>\n\nWait…\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ü", "days": 2}}\n</tool_call>'
)
USER = [{"role": "user", "content": "hi"}]
PLAIN: dict[str, Any] = {"model": "next-byte", "max_tokens": 300, "messages": USER}
#: The route accepts `temperature`, the client has no argument for it.
REQUEST = {**PLAIN, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(
        Scripted(),
        template={"source": TEMPLATE.replace("thinks", "enable_thinking"), "name": "shows all"},
        template_variables=["enable_thinking"],
        formats={"tools": "hermes", "reasoning": "qwen3"},
        key="secret",
    ) as running:
        running.http.headers["x-api-key"] = "secret"
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server.url, api_key="secret", max_retries=0
    ) as anthropic_client:
        yield anthropic_client


def test_answer_has_the_same_blocks_whole_and_streamed(
    server: Served, client: anthropic.Anthropic
) -> None:
    fields = {**REQUEST, "tools": [WEATHER], "messages": [{"role": "user", "content": "q" * 64}]}
    server.model.say(ANSWER)
    client.messages.create(**fields)  # leaves its prompt in the prefix cache
    server.model.say(ANSWER)
    whole = client.messages.create(**fields)
    server.model.say(ANSWER)
    with client.messages.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds.count("content_block_stop") == 3
    for message in (whole, streamed):
        thought, text, call = message.content
        assert (thought.type, thought.thinking) == ("thinking", "Hm é")
        assert (text.type, text.text) == ("text", "Wait…")
        assert (call.type, call.name, call.input) == (
            "tool_use",
            "weather",
            {"city": "Ü", "days": 2},
        )
        assert message.stop_reason == "tool_use"
        assert message.usage.output_tokens == len(ANSWER.encode()) + 1
        assert message.usage.cache_read_input_tokens > 0
    counted = client.messages.count_tokens(
        model="next-byte", messages=fields["messages"], tools=fields["tools"]
    )
    used = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert counted.input_tokens == used


def test_stop_reason_says_why_the_answer_ended(server: Served, client: anthropic.Anthropic) -> None:
    for fields, reason, stop, text in (
        ({}, "end_turn", None, "one two"),
        ({"stop_sequences": ["tw"]}, "stop_sequence", "tw", "one "),
        ({"max_tokens": 3}, "max_tokens", None, "one"),
    ):
        server.model.say("one two")
        message = client.messages.create(**{**REQUEST, **fields})
        assert (message.stop_reason, message.stop_sequence) == (reason, stop)
        assert message.content[0].text == text


def test_blocks_of_earlier_turns_reach_the_template(
    server: Served, client: anthropic.Anthropic
) -> None:
    fields = {**REQUEST, "tools": [WEATHER]}
    server.model.say(ANSWER)
    answer = client.messages.create(**fields)
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "rain", "is_error": True}
    turns = [
        *USER,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
    ]
    requests: list[Any] = []
    add = server.engine.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            server.engine, "add", lambda request: requests.append(request) or add(request)
        )
        server.model.say("ok")
        client.messages.create(
            **{**fields, "messages": turns, "system": "Be brief.", "thinking": {"type": "adaptive"}}
        )
    text = bytes(requests[0].prompt).decode()
    assert "[system Be brief.][user hi][assistant Wait… thought Hm é called weather" in text
    assert text.endswith("[tool Error: rain of c1][user so?][answer]<think>\n")


def test_required_tools_are_called(server: Served, client: anthropic.Anthropic) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        server.model.say("<think></think>No.")
        message = client.messages.create(
            **{**REQUEST, "max_tokens": 900}, tools=[WEATHER], tool_choice=choice
        )
        (call,) = (block for block in message.content if block.type == "tool_use")
        assert call.input.keys() == {"city", "days"}
        assert call.input["days"] in (1, 2)


def test_answer_follows_its_output_schema(server: Served, client: anthropic.Anthropic) -> None:
    server.model.say("<think></think>No.")
    shape = {"type": "json_schema", "schema": WEATHER["input_schema"]}
    message = client.messages.create(**REQUEST, output_config={"format": shape})
    (text,) = (block.text for block in message.content if block.type == "text")
    assert json.loads(text).keys() == {"city", "days"}
    shape = {"type": "json_schema", "schema": {"type": "strin"}}
    with pytest.raises(anthropic.BadRequestError, match="output_config"):
        client.messages.create(**REQUEST, output_config={"format": shape})


def test_arguments_that_are_not_json_are_returned_unparsed(server: Served) -> None:
    server.model.say('<tool_call>{"name": "weather", "arguments": {oops}}</tool_call>')
    message = server.post("/v1/messages", **PLAIN, temperature=0, tools=[WEATHER]).json()
    assert message["content"][0]["input"] == {"unparsed": "{oops}"}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"metadata": {"user_id": "a"}}, "metadata"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 2}, "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 300}}, "thinking"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"thinking": {"type": "disabled", "budget_tokens": 9}}, "thinking"),
        ({"messages": [*USER, {"role": "assistant", "content": "I"}]}, "assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [{**WEATHER, "cache_control": {"type": "ephemeral"}}]}, "tools"),
    ],
)
def test_invalid_requests_have_anthropics_error_shape(
    server: Served, fields: dict[str, Any], text: str
) -> None:
    response = server.post("/v1/messages", **{**PLAIN, **fields})
    assert response.status_code == 400
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert text in body["error"]["message"]
    assert body["request_id"] == response.headers["x-request-id"]


def test_other_errors_have_anthropics_error_shape(
    server: Served, client: anthropic.Anthropic
) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**REQUEST, "model": "other"})
    bad = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
    with bad, pytest.raises(anthropic.AuthenticationError) as raised:
        bad.messages.create(**REQUEST)
    assert raised.value.body["error"]["type"] == "authentication_error"
    long = server.http.post("/v1/messages", content=b"a" * 200_000)
    assert (long.status_code, long.json()["error"]["type"]) == (413, "request_too_large")
    assert server.http.get("/v1/messages").json()["type"] == "error"


def test_error_within_a_stream_is_an_event(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("at 0x7f00")

    monkeypatch.setattr("megatron.inference.server.output_processor.Generation._delta", fails)
    text = server.post("/v1/messages", **PLAIN, stream=True).text
    event, data = text.strip().split("\n")
    assert event == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"
    assert "0x7f00" not in text


@pytest.mark.parametrize("begun_by_prompt", [False, True], ids=["by the model", "by the prompt"])
def test_reasoning_ends_at_its_budget(begun_by_prompt: bool) -> None:
    """The budget ends the reasoning of a model that would continue, after completing the current
    character. The scripted text continues after the mark that closes the reasoning."""
    end, budget = "</think>", len(b"abcdefg ") + 1
    script = ("" if begun_by_prompt else "<think>") + "abcdefg é" + "#" * len(end) + '\n{"a": 1}'
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    shape = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    with served(
        Scripted(),
        template={"source": TEMPLATE.replace("thinks", "enable_thinking"), "name": "shows all"},
        template_variables=["enable_thinking"] if begun_by_prompt else [],
        formats={"tools": None, "reasoning": "qwen3"},
    ) as server:
        for fields in ({}, {"output_config": {"format": shape}}):
            before = server.engine.stats.forced
            server.model.say(script)
            thinking = {"type": "enabled", "budget_tokens": budget}
            answer = server.post(
                "/v1/messages", **PLAIN, **fields, temperature=0, thinking=thinking
            )
            thought, text = answer.json()["content"]
            assert thought["thinking"] == "abcdefg é"
            assert text["text"] == '{"a": 1}'
            assert server.engine.stats.forced >= before + len(end)
            # An answer that ends its reasoning within the budget is unchanged.
            server.model.say(script.replace("#" * len(end), end))
            thinking["budget_tokens"] = 200
            early = server.post("/v1/messages", **PLAIN, **fields, temperature=0, thinking=thinking)
            assert early.json()["content"] == answer.json()["content"]


def test_thinking_budget_needs_a_reasoning_model() -> None:
    thinking = {"type": "enabled", "budget_tokens": 20}
    for changes, reason in (({}, "--reasoning-parser"), ({"stop_tokens": []}, "stop token")):
        reasoning = {"tools": None, "reasoning": "qwen3" if changes else None}
        with served(formats=reasoning, **changes) as server:
            response = server.post("/v1/messages", **PLAIN, thinking=thinking)
            assert response.status_code == 400
            assert reason in response.json()["error"]["message"]
