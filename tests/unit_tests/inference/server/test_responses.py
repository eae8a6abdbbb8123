# SPDX-License-Identifier: Apache-2.0
"""OpenAI's responses, by OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.http_server import Served, served, until
from tests.support.scripted_model import TEMPLATE, Scripted

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells it.",
    "strict": False,
    "parameters": {
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
ASKED: dict[str, Any] = {"model": "next-byte", "input": "hi", "temperature": 0}
ASKED["max_output_tokens"] = 300


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(
        Scripted(),
        template={"source": TEMPLATE, "name": "shows all"},
        formats={"tools": "hermes", "reasoning": "qwen3"},
    ) as found:
        yield found


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_an_answer_is_items_whole_and_streamed(server: Served, client: openai.OpenAI) -> None:
    asked = {**ASKED, "tools": [WEATHER], "metadata": {"a": "b"}}
    server.model.say(SAID)
    whole = client.responses.create(**asked)
    server.model.say(SAID)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert (
        kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    )
    for response in (whole, streamed):
        thought, text, call = response.output
        assert (thought.type, thought.content[0].text) == ("reasoning", "Hm é")
        assert (text.type, response.output_text) == ("message", "Wait…")
        assert (call.type, call.name) == ("function_call", "weather")
        assert json.loads(call.arguments) == {"city": "Ü", "days": 2}
        assert {item.status for item in response.output} == {"completed"}
        assert response.metadata == {"a": "b"}
        assert response.usage.output_tokens == len(SAID.encode()) + 1
        assert 5 <= response.usage.output_tokens_details.reasoning_tokens <= 24
    assert server.engine.unfinished == 0


@pytest.mark.parametrize("longest", [300, 30, 12])
def test_events_follow_openais_schema(server: Served, longest: int) -> None:
    """The client itself checks nothing: a field that an event lacks fails where it is read."""
    event_type: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    asked = {**ASKED, "tools": [WEATHER], "max_output_tokens": longest}
    server.model.say(SAID)
    response = server.post("/v1/responses", **asked)
    assert Response.model_validate(response.json()).status in ("completed", "incomplete")
    server.model.say(SAID)
    lines = server.post("/v1/responses", **asked, stream=True).text.split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    for event in events:
        assert event_type.validate_python(event).type == event["type"]
    with_logprobs = {event["type"] for event in events if event.get("logprobs") == []}
    texts = {"response.output_text.delta", "response.output_text.done"} if longest > 12 else set()
    assert with_logprobs == texts
    assert {event["type"] for event in events if "logprobs" in event} == texts
    assert "response.reasoning_text.delta" in {event["type"] for event in events}


def test_output_may_be_input_again(server: Served, client: openai.OpenAI) -> None:
    server.model.say(SAID)
    first = client.responses.create(**ASKED, tools=[WEATHER])
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "rain"}
    turns = [{"role": "user", "content": "hi"}, *first.output, result]
    seen: list[Any] = []
    add = server.engine.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.engine, "add", lambda one: seen.append(one) or add(one))
        server.model.say("ok")
        client.responses.create(
            **{**ASKED, "input": turns}, tools=[WEATHER], instructions="Be brief."
        )
    text = bytes(seen[0].prompt).decode()
    assert "[system Be brief.][user hi][assistant Wait… thought Hm é called weather" in text
    assert f"[tool rain of {first.output[2].call_id}][answer]" in text


def test_an_answer_that_is_cut_off_is_incomplete(server: Served, client: openai.OpenAI) -> None:
    server.model.say("one two")
    found = client.responses.create(**{**ASKED, "max_output_tokens": 3})
    assert (found.status, found.output_text) == ("incomplete", "one")
    assert found.incomplete_details.reason == "max_output_tokens"


def test_text_and_calls_follow_their_schemas(server: Served, client: openai.OpenAI) -> None:
    shape = {"type": "json_schema", "name": "w", "schema": WEATHER["parameters"], "strict": True}
    server.model.say("<think></think>No.")
    found = client.responses.create(**ASKED, text={"format": shape})
    assert json.loads(found.output_text).keys() == {"city", "days"}
    for choice in ("required", {"type": "function", "name": "weather"}):
        server.model.say("<think></think>No.")
        found = client.responses.create(**ASKED, tools=[WEATHER], tool_choice=choice)
        (call,) = (item for item in found.output if item.type == "function_call")
        assert json.loads(call.arguments).keys() == {"city", "days"}


def test_a_response_is_cancelled_while_it_runs(server: Served, client: openai.OpenAI) -> None:
    server.model.say("a" * 4000)
    stream = client.responses.create(**{**ASKED, "max_output_tokens": 4000}, stream=True)
    name = next(stream).response.id
    before = server.engine.stats.steps
    assert client.responses.cancel(name).status == "cancelled"
    events = list(stream)
    assert events[-1].response.status == "cancelled"
    until(lambda: server.engine.unfinished == 0)
    assert server.engine.stats.steps < before + 3900
    for gone in (name, "resp_none"):
        with pytest.raises(openai.NotFoundError):
            client.responses.cancel(gone)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"include": []}, "include"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input"),
        ({"input": [{"role": "user", "content": "a", "name": "b"}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}},
            "text",
        ),
    ],
)
def test_what_is_not_honoured_is_refused(
    server: Served, fields: dict[str, Any], param: str
) -> None:
    response = server.post("/v1/responses", **{**ASKED, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_an_error_within_a_stream(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("at 0x7f00")

    monkeypatch.setattr("megatron.inference.server.generation.Generation._delta", fails)
    text = server.post("/v1/responses", **ASKED, stream=True).text
    event, data = text.strip().split("\n")
    assert event == "event: response.failed"
    assert json.loads(data.removeprefix("data: "))["response"]["status"] == "failed"
    assert "0x7f00" not in text
