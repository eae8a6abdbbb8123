# SPDX-License-Identifier: Apache-2.0
"""Stored responses: conversations that continue by the id of a response, and the store's bound."""

from __future__ import annotations

import gc
import json
import tracemalloc
from typing import Any

import openai
import pytest

from megatron.inference.server.response_store import ResponseStore
from tests.support.http_server import Served, error_of, prompt_of, served

NAME = "next-byte"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [{"type": "function", "name": "get_weather", "parameters": CITY}]


@pytest.fixture
def server(chat_server: Served) -> Served:
    """A server that calls tools and reasons; `say` sets its next answer."""
    return chat_server


def say(server: Served, text: str) -> None:
    server.model.say(text)


def test_conversation_by_id_is_the_conversation_in_full(
    server: Served, client: openai.OpenAI
) -> None:
    say(server, "<think>\nhm\n</think>\nWhich Ulm?")
    response = client.responses.create(
        model=NAME, input="How is Ulm?", instructions="Be brief.", temperature=0
    )
    assert response.store is True
    say(server, "It rains.")
    question = {"role": "user", "content": "On the Danube."}
    second = client.responses.create(
        model=NAME, input=[question], previous_response_id=response.id, temperature=0
    )
    assert second.previous_response_id == response.id
    in_full = [{"role": "user", "content": "How is Ulm?"}]
    in_full += [output.model_dump() for output in response.output]
    in_full += [question]
    say(server, "It rains.")
    full = client.responses.create(model=NAME, input=in_full, temperature=0, store=False)  # type: ignore[arg-type]
    assert full.store is False
    assert second.output_text == full.output_text == "It rains."
    assert second.usage is not None
    assert full.usage is not None
    assert second.usage.input_tokens == full.usage.input_tokens
    # The engine gets the same prompt. Instructions are not carried over.
    by_id = {"input": [question], "previous_response_id": response.id}
    prompt = prompt_of(server, "/v1/responses", **by_id)
    assert prompt == prompt_of(server, "/v1/responses", input=in_full)
    assert "Be brief" not in prompt
    assert "thought hm" in prompt
    # A third turn holds the whole chain, even after the first response is deleted.
    client.responses.delete(response.id)
    prompt = prompt_of(server, "/v1/responses", input="ok", previous_response_id=second.id)
    assert prompt.count("[user") == 3
    assert "It rains." in prompt
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=NAME, input="a", previous_response_id=full.id)


def test_tool_loop_by_id(server: Served, client: openai.OpenAI) -> None:
    say(server, f"<think>\nI call it.\n</think>\n{CALL}")
    fields: dict[str, Any] = {"input": "How is the weather in Ulm?"}
    previous_id = None
    for _ in range(5):
        response = client.responses.create(
            model=NAME, tools=TOOLS, temperature=0, previous_response_id=previous_id, **fields
        )
        calls = [output for output in response.output if output.type == "function_call"]
        if not calls:
            break
        assert json.loads(calls[0].arguments) == {"city": "Ulm"}
        say(server, "It rains in Ulm.")
        call_output = {"type": "function_call_output", "call_id": calls[0].call_id}
        fields["input"] = [{**call_output, "output": "rain"}]
        previous_id = response.id
    assert response.output_text == "It rains in Ulm."
    context = client.responses.input_items.list(response.id, order="asc", limit=2)
    kinds = ["message", "reasoning", "function_call", "function_call_output"]
    assert [entry.type for entry in context] == kinds


def test_stored_response_is_returned_and_deleted(server: Served, client: openai.OpenAI) -> None:
    say(server, "hello")
    response = client.responses.create(
        model=NAME, input="hi", temperature=0, metadata={"topic": "greeting"}
    )
    retrieved = client.responses.retrieve(response.id)
    assert retrieved.model_dump() == response.model_dump()
    newest, *_ = client.responses.input_items.list(response.id)
    assert newest.content[0].text == "hi"  # type: ignore[union-attr]
    client.responses.delete(response.id)
    path = f"/v1/responses/{response.id}"
    for url in (path, f"{path}/input_items"):
        assert response.id in error_of(server.http.get(url), 404)["message"]
    error_of(server.http.delete(path), 404)
    error = error_of(server.post("/v1/responses", input="a", previous_response_id=response.id), 404)
    assert error["param"] == "previous_response_id"


def test_streamed_response_is_stored(server: Served, client: openai.OpenAI) -> None:
    say(server, "hello")
    with client.responses.stream(model=NAME, input="hi", temperature=0) as stream:
        final = stream.get_final_response()
    assert client.responses.retrieve(final.id).output_text == "hello"
    say(server, "hello")
    cut = client.responses.create(model=NAME, input="hi", temperature=0, max_output_tokens=2)
    assert client.responses.retrieve(cut.id).status == "incomplete"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=00000000010", "limit"),
        ("limit=a", "limit"),
        ("order=up", "order"),
        ("after=msg_0", "after"),
    ],
)
def test_invalid_page_of_items(server: Served, query: str, param: str) -> None:
    say(server, "hello")
    response_id = server.ok("/v1/responses", input="hi", temperature=0)["id"]
    error = error_of(server.http.get(f"/v1/responses/{response_id}/input_items?{query}"))
    assert error["param"] == param


def test_oldest_responses_are_evicted(server: Served) -> None:
    ids = []
    for number in range(60):
        say(server, "ok")
        text = f"{number} " + "a" * 4_800
        ids.append(server.ok("/v1/responses", input=text, temperature=0, max_output_tokens=3)["id"])
    paths = [f"/v1/responses/{response_id}" for response_id in ids]
    stored = [server.http.get(path).status_code == 200 for path in paths]
    assert stored == sorted(stored)
    assert stored[-1]
    assert not stored[0]
    answers = [
        server.http.get(path + suffix).content
        for path, is_stored in zip(paths, stored, strict=True)
        if is_stored
        for suffix in ("", "/input_items")
    ]
    assert 100_000 < sum(map(len, answers)) <= 200_000


def test_memory_of_the_store_is_bounded() -> None:
    limit, store = 2_000_000, ResponseStore(2_000_000)
    assert not store.add({"id": "large", "output": "a" * limit}, [])
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(5000):
            text = chr(0x4E00 + number % 1000) * (number % 700)
            assert store.add({"id": f"resp_{number:024}", "output": [text]}, [{"id": "msg_1"}])
            assert store.num_bytes <= limit
        gc.collect()
        assert 0.5 * limit < tracemalloc.get_traced_memory()[0] <= limit
    finally:
        tracemalloc.stop()
    for number in range(5000):
        store.delete(f"resp_{number:024}")
    assert store.num_bytes == 0


def test_response_that_does_not_fit_is_not_stored(caplog: pytest.LogCaptureFixture) -> None:
    with served(response_store_bytes=2000) as server:
        answer = server.ok("/v1/responses", input="a" * 2000, max_output_tokens=1)
        assert answer["store"] is False
        error_of(server.http.get(f"/v1/responses/{answer['id']}"), 404)
    assert answer["id"] in caplog.text


def test_server_without_a_store_refuses(byte_server: Served) -> None:
    for name, value in (("store", True), ("previous_response_id", "resp_1")):
        error = error_of(byte_server.post("/v1/responses", input="a", **{name: value}))
        assert error["param"] == name
    error_of(byte_server.http.get("/v1/responses/resp_1"), 404)
    for method, suffix in (("GET", ""), ("POST", "/cancel")):
        answer = byte_server.http.request(method, f"/v1/responses/a%0Ab%20c{suffix}")
        assert r'response "a\nb c"' in error_of(answer, 404)["message"]


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN", "1e999"])
def test_infinite_numbers_are_refused(byte_server: Served, number: str) -> None:
    """A response repeats fields of the request, and JSON has no such number."""
    body = f'{{"input": "a", "max_output_tokens": 1, "text": {{"grammar": {number}}}}}'
    error_of(byte_server.http.post("/v1/responses", content=body))
