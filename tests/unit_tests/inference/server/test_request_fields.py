# SPDX-License-Identifier: Apache-2.0
"""Fields that do not change the answer: nulls, defaults, fields without effect, unknown fields."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.inference.server.metrics import MAX_IGNORED_NAMES
from tests.support.http_server import ConstantEmbedder, Served, error_of, prompt_of, served
from tests.support.scripted_model import TEMPLATE, Scripted

USER = {"role": "user", "content": "hi"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    CHAT: {"messages": [USER]},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"model": "next-byte", "max_tokens": 30, "messages": [USER]},
    "/v1/embeddings": {"input": "a"},
}

#: Fields as official clients and other servers' clients send them, which leave the answer as it is.
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    # The shape of Codex's requests.
    (
        RESPONSES,
        {
            "instructions": "You are a coding agent.",
            "tools": [
                {
                    "type": "function",
                    "name": "shell",
                    "description": "Run a command.",
                    "strict": False,
                    "parameters": CITY,
                }
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "store": False,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "stream": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "k",
        },
    ),
    # The shape of Claude Code's requests.
    (
        MESSAGES,
        {
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "tools": [{"name": "Bash", "description": "d", "input_schema": CITY}],
            "metadata": {"user_id": "user_1_account__session_2"},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "stream": False,
            "temperature": 1,
        },
    ),
    ("/v1/completions", {"suffix": None, "best_of": 1, "user": "u", "logit_bias": None}),
    ("/v1/completions", {"typical_p": 1.0, "mirostat": 0, "do_sample": True, "min_new_tokens": 0}),
    (CHAT, {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto"}),
    (CHAT, {"modalities": ["text"], "audio": None, "tools": [], "functions": None}),
    (CHAT, {"parallel_tool_calls": True, "tool_choice": "auto", "prompt_cache_key": "k"}),
    (CHAT, {"max_tokens": 40, "max_completion_tokens": 40, "safety_identifier": "s"}),
    (CHAT, {"messages": [{**USER, "name": "eva"}]}),
    (
        CHAT,
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": "a",
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "refusal": None,
                    "tool_calls": None,
                },
                USER,
            ]
        },
    ),
    (
        CHAT,
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": 0}]},
                {"role": "tool", "tool_call_id": "c", "name": "weather", "content": "sunny"},
            ]
        },
    ),
    (RESPONSES, {"include": [], "truncation": "disabled", "service_tier": "auto"}),
    (RESPONSES, {"include": ["reasoning.encrypted_content"], "background": False, "store": False}),
    (RESPONSES, {"reasoning": {"summary": "auto"}, "text": {"format": {"type": "text"}}}),
    (RESPONSES, {"prompt_cache_key": "k", "user": "u", "max_tool_calls": 3, "metadata": {}}),
    (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {
                    "id": "msg_1",
                    "type": "message",
                    "role": "assistant",
                    "phase": None,
                    "status": "completed",
                    "content": [
                        {"type": "output_text", "text": "a", "annotations": [], "logprobs": None}
                    ],
                },
                {"role": "user", "content": "hi"},
            ]
        },
    ),
    (MESSAGES, {"metadata": {"user_id": "u"}, "service_tier": "auto", "context_management": {}}),
    (
        MESSAGES,
        {
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "tools": [
                {"name": "weather", "input_schema": CITY, "cache_control": {"type": "ephemeral"}}
            ],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
                    ],
                }
            ],
        },
    ),
    (MESSAGES, {"thinking": {"type": "adaptive", "display": "summarized"}, "mcp_servers": []}),
    ("/v1/embeddings", {"user": "u", "encoding_format": "float", "dimensions": None}),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server with tools, reasoning and a template that reads the effort."""
    with served(
        Scripted(),
        template={"source": TEMPLATE + "{{ reasoning_effort or '' }}", "name": "shows all"},
        formats={"tools": "hermes", "reasoning": "qwen3"},
        embedder=ConstantEmbedder(),
        no_embeddings=None,
    ) as running:
        yield running


@pytest.mark.parametrize(("path", "fields"), ACCEPTED, ids=lambda value: str(value)[:40])
def test_accepted_fields_leave_no_trace(server: Served, path: str, fields: dict[str, Any]) -> None:
    server.model.say("ok")
    response = server.post(path, **{**BODIES[path], **fields})
    assert response.status_code == 200, response.text
    assert "x-ignored-fields" not in response.headers


@pytest.mark.parametrize("path", BODIES)
def test_null_is_an_absent_field(server: Served, path: str) -> None:
    """Every field of the schema may be null if the body does not need it."""
    server.model.say("ok")
    document = server.http.get("/openapi.json").json()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]["properties"]
    nulls = {name: None for name in fields if name not in BODIES[path]}
    assert nulls
    assert server.post(path, **BODIES[path], **nulls).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"reasoning_effort": "high"}),
        (RESPONSES, {"reasoning": {"effort": "high"}}),
        (MESSAGES, {"output_config": {"effort": "high"}}),
    ],
)
def test_effort_reaches_the_template(server: Served, path: str, fields: dict[str, Any]) -> None:
    server.model.say("ok")
    assert prompt_of(server, path, **BODIES[path], **fields).endswith("high")


def test_name_of_a_message_reaches_the_template() -> None:
    template = {"source": "{% for m in messages %}{{ m.name }}:{{ m.content }}{% endfor %}"}
    with served(Scripted(), template={**template, "name": "names"}) as server:
        prompt = prompt_of(server, CHAT, messages=[{**USER, "name": "eva"}], max_tokens=1)
    assert prompt == "eva:hi"


def test_ignored_fields_are_reported(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    server.model.say("ok")
    body = {**BODIES[MESSAGES], "thread": {"id": 1}, "x\r\ny": 1, "": 2, " b": 3, "é, c ": 4}
    body["messages"] = [{**USER, "color": "red"}, {**USER, "color": "blue"}]
    before = server.metrics()
    with caplog.at_level(logging.INFO, "megatron.inference.server"):
        answers = [server.post(MESSAGES, **body) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    names = answers[0].headers["x-ignored-fields"]
    assert names == r'thread, x\r\ny, "", " b", "\xe9, c ", messages.color'
    counter = 'megatron:ignored_fields_total{field="thread"}'
    assert server.metrics()[counter] - before.get(counter, 0) == 2
    lines = [line for line in caplog.messages if "thread" in line]
    assert len(lines) == 1


def test_unread_effort_is_reported() -> None:
    with served() as server:
        answer = server.post(CHAT, messages=[USER], reasoning_effort="low", max_tokens=1)
    assert answer.headers["x-ignored-fields"] == "reasoning_effort"


def test_many_unknown_fields_are_bounded(server: Served) -> None:
    error_of(server.post("/v1/completions", prompt="a", **{f"x{i:02}y": 1 for i in range(65)}))
    server.model.say("ok")
    for start in range(0, 2 * MAX_IGNORED_NAMES, 50):
        fields = {f"z{start + i}q": 1 for i in range(50)}
        answer = server.post("/v1/completions", prompt="a", **fields)
        assert len(answer.headers["x-ignored-fields"]) < 200
    counters = [name for name in server.metrics() if "ignored_fields_total" in name]
    assert len(counters) == MAX_IGNORED_NAMES + 1


def test_strict_fields_refuse_unknown_fields() -> None:
    with served(strict_fields=True) as server:
        error = error_of(server.post("/v1/completions", prompt="a", thread=1))
        assert error["param"] == "thread"
        error = error_of(server.post(CHAT, messages=[{**USER, "color": "red"}]))
        assert error["param"] == "messages"
        assert server.post("/v1/completions", prompt="a", user="u").status_code == 200
