# SPDX-License-Identifier: Apache-2.0
"""OpenAI's responses route with OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.http_server import Served, until

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
ANSWER = (
    "<think>\nHm é</think>\n\nWait…\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ü", "days": 2}}\n</tool_call>'
)
REQUEST: dict[str, Any] = {"model": "next-byte", "input": "hi", "temperature": 0}
REQUEST["max_output_tokens"] = 300


@pytest.fixture
def server(chat_server: Served) -> Served:
    return chat_server


def test_answer_has_the_same_items_whole_and_streamed(
    server: Served, client: openai.OpenAI
) -> None:
    fields = {**REQUEST, "tools": [WEATHER], "metadata": {"a": "b"}}
    server.model.say(ANSWER)
    whole = client.responses.create(**fields)
    server.model.say(ANSWER)
    with client.responses.stream(**fields) as stream:
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
        assert response.usage.output_tokens == len(ANSWER.encode()) + 1
        assert 5 <= response.usage.output_tokens_details.reasoning_tokens <= 24
    assert server.engine.unfinished == 0


@pytest.mark.parametrize("max_output_tokens", [300, 30, 12])
def test_events_validate_against_openais_schema(server: Served, max_output_tokens: int) -> None:
    """The client validates nothing: a missing field of an event fails only when it is read."""
    event_type: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    fields = {**REQUEST, "tools": [WEATHER], "max_output_tokens": max_output_tokens}
    server.model.say(ANSWER)
    response = server.post("/v1/responses", **fields)
    assert Response.model_validate(response.json()).status in ("completed", "incomplete")
    server.model.say(ANSWER)
    lines = server.post("/v1/responses", **fields, stream=True).text.split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    for event in events:
        assert event_type.validate_python(event).type == event["type"]
    with_logprobs = {event["type"] for event in events if event.get("logprobs") == []}
    texts = (
        {"response.output_text.delta", "response.output_text.done"}
        if max_output_tokens > 12
        else set()
    )
    assert with_logprobs == texts
    assert {event["type"] for event in events if "logprobs" in event} == texts
    assert "response.reasoning_text.delta" in {event["type"] for event in events}


def test_output_items_are_accepted_as_input(server: Served, client: openai.OpenAI) -> None:
    server.model.say(ANSWER)
    response = client.responses.create(**REQUEST, tools=[WEATHER])
    result = {
        "type": "function_call_output",
        "call_id": response.output[2].call_id,
        "output": "rain",
    }
    turns = [{"role": "user", "content": "hi"}, *response.output, result]
    requests: list[Any] = []
    add = server.engine.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            server.engine, "add", lambda request: requests.append(request) or add(request)
        )
        server.model.say("ok")
        client.responses.create(
            **{**REQUEST, "input": turns}, tools=[WEATHER], instructions="Be brief."
        )
    text = bytes(requests[0].prompt).decode()
    assert "[system Be brief.][user hi][assistant Wait… thought Hm é called weather" in text
    assert f"[tool rain of {response.output[2].call_id}][answer]" in text


def test_truncated_answer_is_incomplete(server: Served, client: openai.OpenAI) -> None:
    server.model.say("one two")
    response = client.responses.create(**{**REQUEST, "max_output_tokens": 3})
    assert (response.status, response.output_text) == ("incomplete", "one")
    assert response.incomplete_details.reason == "max_output_tokens"


def test_text_and_calls_follow_their_schemas(server: Served, client: openai.OpenAI) -> None:
    json_format = {
        "type": "json_schema",
        "name": "w",
        "schema": WEATHER["parameters"],
        "strict": True,
    }
    server.model.say("<think></think>No.")
    response = client.responses.create(**REQUEST, text={"format": json_format})
    assert json.loads(response.output_text).keys() == {"city", "days"}
    for choice in ("required", {"type": "function", "name": "weather"}):
        server.model.say("<think></think>No.")
        response = client.responses.create(**REQUEST, tools=[WEATHER], tool_choice=choice)
        (call,) = (item for item in response.output if item.type == "function_call")
        assert json.loads(call.arguments).keys() == {"city", "days"}


def test_running_response_is_cancelled(server: Served, client: openai.OpenAI) -> None:
    server.model.say("a" * 4000)
    stream = client.responses.create(**{**REQUEST, "max_output_tokens": 4000}, stream=True)
    name = next(stream).response.id
    before = server.engine.stats.steps
    assert client.responses.cancel(name).status == "cancelled"
    events = list(stream)
    assert events[-1].response.status == "cancelled"
    until(lambda: server.engine.unfinished == 0)
    assert server.engine.stats.steps < before + 3900
    for response_id in (name, "resp_none"):
        with pytest.raises(openai.NotFoundError):
            client.responses.cancel(response_id)


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
def test_unsupported_fields_are_refused(server: Served, fields: dict[str, Any], param: str) -> None:
    response = server.post("/v1/responses", **{**REQUEST, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_error_within_a_stream_is_an_event(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("at 0x7f00")

    monkeypatch.setattr("megatron.inference.server.output_processor.Generation._delta", fails)
    text = server.post("/v1/responses", **REQUEST, stream=True).text
    event, data = text.strip().split("\n")
    assert event == "event: response.failed"
    assert json.loads(data.removeprefix("data: "))["response"]["status"] == "failed"
    assert "0x7f00" not in text
