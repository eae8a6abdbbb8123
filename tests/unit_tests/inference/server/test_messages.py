# SPDX-License-Identifier: Apache-2.0
"""Anthropic's routes, by Anthropic's client."""

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
SAID = (
    "<think>\nHm é</think>\n\nWait…\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ü", "days": 2}}\n</tool_call>'
)
USER = [{"role": "user", "content": "hi"}]
PLAIN: dict[str, Any] = {"model": "next-byte", "max_tokens": 300, "messages": USER}
#: The client has no such argument, the route has the field.
ASKED = {**PLAIN, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(
        Scripted(),
        template={"source": TEMPLATE.replace("thinks", "enable_thinking"), "name": "shows all"},
        template_variables=["enable_thinking"],
        formats={"tools": "hermes", "reasoning": "qwen3"},
        key="secret",
    ) as found:
        found.http.headers["x-api-key"] = "secret"
        yield found


@pytest.fixture
def client(server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as found:
        yield found


def test_an_answer_is_blocks_whole_and_streamed(
    server: Served, client: anthropic.Anthropic
) -> None:
    asked = {**ASKED, "tools": [WEATHER], "messages": [{"role": "user", "content": "q" * 64}]}
    server.model.say(SAID)
    client.messages.create(**asked)  # leaves its prompt in the prefix cache
    server.model.say(SAID)
    whole = client.messages.create(**asked)
    server.model.say(SAID)
    with client.messages.stream(**asked) as stream:
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
        assert message.usage.output_tokens == len(SAID.encode()) + 1
        assert message.usage.cache_read_input_tokens > 0
    counted = client.messages.count_tokens(
        model="next-byte", messages=asked["messages"], tools=asked["tools"]
    )
    used = whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert counted.input_tokens == used


def test_why_answers_end(server: Served, client: anthropic.Anthropic) -> None:
    for fields, reason, stop, text in (
        ({}, "end_turn", None, "one two"),
        ({"stop_sequences": ["tw"]}, "stop_sequence", "tw", "one "),
        ({"max_tokens": 3}, "max_tokens", None, "one"),
    ):
        server.model.say("one two")
        found = client.messages.create(**{**ASKED, **fields})
        assert (found.stop_reason, found.stop_sequence) == (reason, stop)
        assert found.content[0].text == text


def test_blocks_of_former_turns_reach_the_template(
    server: Served, client: anthropic.Anthropic
) -> None:
    asked = {**ASKED, "tools": [WEATHER]}
    server.model.say(SAID)
    answer = client.messages.create(**asked)
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "rain", "is_error": True}
    turns = [
        *USER,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
    ]
    seen: list[Any] = []
    add = server.engine.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.engine, "add", lambda one: seen.append(one) or add(one))
        server.model.say("ok")
        client.messages.create(
            **{**asked, "messages": turns, "system": "Be brief.", "thinking": {"type": "adaptive"}}
        )
    text = bytes(seen[0].prompt).decode()
    assert "[system Be brief.][user hi][assistant Wait… thought Hm é called weather" in text
    assert text.endswith("[tool Error: rain of c1][user so?][answer]<think>\n")


def test_tools_that_have_to_be_called(server: Served, client: anthropic.Anthropic) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        server.model.say("<think></think>No.")
        found = client.messages.create(
            **{**ASKED, "max_tokens": 900}, tools=[WEATHER], tool_choice=choice
        )
        (call,) = (block for block in found.content if block.type == "tool_use")
        assert call.input.keys() == {"city", "days"}
        assert call.input["days"] in (1, 2)


def test_an_answer_follows_a_schema(server: Served, client: anthropic.Anthropic) -> None:
    server.model.say("<think></think>No.")
    shape = {"type": "json_schema", "schema": WEATHER["input_schema"]}
    found = client.messages.create(**ASKED, output_config={"format": shape})
    (text,) = (block.text for block in found.content if block.type == "text")
    assert json.loads(text).keys() == {"city", "days"}
    shape = {"type": "json_schema", "schema": {"type": "strin"}}
    with pytest.raises(anthropic.BadRequestError, match="output_config"):
        client.messages.create(**ASKED, output_config={"format": shape})


def test_arguments_that_are_no_json_are_not_lost(server: Served) -> None:
    server.model.say('<tool_call>{"name": "weather", "arguments": {oops}}</tool_call>')
    found = server.post("/v1/messages", **PLAIN, temperature=0, tools=[WEATHER]).json()
    assert found["content"][0]["input"] == {"unparsed": "{oops}"}


@pytest.mark.parametrize(
    ("fields", "told"),
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
def test_errors_have_anthropics_shape(server: Served, fields: dict[str, Any], told: str) -> None:
    response = server.post("/v1/messages", **{**PLAIN, **fields})
    assert response.status_code == 400
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert told in body["error"]["message"]
    assert body["request_id"] == response.headers["x-request-id"]


def test_other_errors_have_it_too(server: Served, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ASKED, "model": "other"})
    bad = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
    with bad, pytest.raises(anthropic.AuthenticationError) as raised:
        bad.messages.create(**ASKED)
    assert raised.value.body["error"]["type"] == "authentication_error"
    long = server.http.post("/v1/messages", content=b"a" * 200_000)
    assert (long.status_code, long.json()["error"]["type"]) == (413, "request_too_large")
    assert server.http.get("/v1/messages").json()["type"] == "error"


def test_an_error_within_a_stream(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("at 0x7f00")

    monkeypatch.setattr("megatron.inference.server.generation.Generation._delta", fails)
    text = server.post("/v1/messages", **PLAIN, stream=True).text
    event, data = text.strip().split("\n")
    assert event == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"
    assert "0x7f00" not in text


@pytest.mark.parametrize("begun", [False, True], ids=["by the model", "by the prompt"])
def test_reasoning_ends_at_its_budget(begun: bool) -> None:
    """The model would reason on; a character that the budget ends in is finished. Its script goes
    on where the mark that closes the reasoning ends."""
    end, budget = "</think>", len(b"abcdefg ") + 1
    said = ("" if begun else "<think>") + "abcdefg é" + "#" * len(end) + '\n{"a": 1}'
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    shape = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    with served(
        Scripted(),
        template={"source": TEMPLATE.replace("thinks", "enable_thinking"), "name": "shows all"},
        template_variables=["enable_thinking"] if begun else [],
        formats={"tools": None, "reasoning": "qwen3"},
    ) as server:
        for fields in ({}, {"output_config": {"format": shape}}):
            before = server.engine.stats.forced
            server.model.say(said)
            thinking = {"type": "enabled", "budget_tokens": budget}
            answer = server.post(
                "/v1/messages", **PLAIN, **fields, temperature=0, thinking=thinking
            )
            thought, text = answer.json()["content"]
            assert thought["thinking"] == "abcdefg é"
            assert text["text"] == '{"a": 1}'
            assert server.engine.stats.forced >= before + len(end)
            # One that ends its reasoning before is left alone.
            server.model.say(said.replace("#" * len(end), end))
            thinking["budget_tokens"] = 200
            other = server.post("/v1/messages", **PLAIN, **fields, temperature=0, thinking=thinking)
            assert other.json()["content"] == answer.json()["content"]


def test_a_budget_needs_a_model_that_reasons() -> None:
    thinking = {"type": "enabled", "budget_tokens": 20}
    for changes, wrong in (({}, "--reasoning-parser"), ({"stop_tokens": []}, "ends")):
        reasoning = {"tools": None, "reasoning": "qwen3" if changes else None}
        with served(formats=reasoning, **changes) as server:
            response = server.post("/v1/messages", **PLAIN, thinking=thinking)
            assert response.status_code == 400
            assert wrong in response.json()["error"]["message"]
