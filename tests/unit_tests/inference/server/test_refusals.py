# SPDX-License-Identifier: Apache-2.0
"""Refused requests of all routes: status 400, the field, the offending value, no engine step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from tests.support.http_server import (
    ADMIN_KEY,
    ConstantEmbedder,
    Served,
    error_of,
    served,
)
from tests.support.scripted_model import TEMPLATE, Scripted

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
USER = [{"role": "user", "content": "hi"}]
FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1]"}}
SURROGATE_CALL = {**CALL, "function": {"name": "f", "arguments": r'{"a": "\ud800"}'}}
ANTHROPIC_TOOL = {"name": "weather", "input_schema": CITY}
#: Valid bodies; each row of a table changes some fields.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"model": "next-byte", "max_tokens": 300, "messages": USER},
    "/v1/embeddings": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}


def say(content: Any, role: str = "user", **fields: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content, **fields}]


Table = dict[str, list[dict[str, Any]]]

#: Fields that would change the answer and are not served, and misspelled fields. As in all tables,
#: the error names the first field.
UNSERVED: Table = {
    "/v1/completions": [
        {"suffix": "x"},
        {"best_of": 2},
        {"max_new_tokens": 5},
        {"typical_p": 0.5},
        {"mirostat": True},
        {"temprature": 0},
        {"maxTokens": 3},
        {"top-p": 0.5},
        {"stop_token": [1]},
        {"stream_options": {"includeUsage": True}},
    ],
    "/v1/chat/completions": [
        {"functions": [{"name": "f"}]},
        {"modalities": ["text", "audio"]},
        {"store": True},
        {"reasoning_effort": "huge"},
        {"tools": [{**FUNCTION, "function": {"name": "f", "parameter": CITY}}]},
        {"messages": say("a", audio={"id": "a"})},
    ],
    "/v1/responses": [
        {"background": True},
        {"reasoning": {"efort": "low"}},
        {"top_logprobs": 2},
        {"conversation": "conv_1"},
        {"input": [{"type": "reasoning", "encrypted_content": "abc"}]},
    ],
    "/v1/messages": [
        {"mcp_servers": [{"url": "http://x"}]},
        {"container": "c"},
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"max_token": 3},
    ],
    "/v1/embeddings": [{"dimensions": 4}],
}

#: Values of `/v1/completions` outside their range, which the message names.
OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("n", 5_000_000), ("n", 0), ("logprobs", 10**9), ("logprobs", -1), ("max_tokens", 10**12),
    ("max_tokens", -5), ("temperature", -1), ("temperature", "1"), ("top_p", 0),
    ("top_p", 1.5), ("top_k", -2), ("min_p", 2), ("presence_penalty", 3), ("repetition_penalty", 0),
    ("seed", 1 << 70), ("stop", [""]), ("stop", ["a"] * 17), ("stop", "a" * 257),
    ("stop_token_ids", [-1]), ("logit_bias", {"97": 200}), ("logit_bias", {"a": 1}), ("prompt", []),
    ("prompt", [[]]), ("prompt", ["a"] * 65), ("prompt", {"a": 1}), ("prompt", [1, "a"]),
    ("prompt", [1 << 40]), ("prompt", [-1]), ("priority", 1 << 40), ("stream", 1),
]  # fmt: skip

#: JSON Schema keywords that are not annotations and cannot be enforced.
UNSUPPORTED = (
    {"not": {"type": "string"}},
    {"if": {"type": "string"}, "then": {"minLength": 1}, "else": {}},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"type": "integer"}},
    {"type": "array", "contains": {}, "minContains": 1},
    {"type": "array", "contains": {}, "maxContains": 1},
    {"type": "array", "unevaluatedItems": False},
    {"type": "object", "propertyNames": {"minLength": 2}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "dependentSchemas": {"a": {}}},
    {"type": "object", "dependencies": {"a": ["b"]}},
    {"type": "object", "unevaluatedProperties": False},
    {"$dynamicRef": "#a"},
    {"type": "string", "format": "nonsense"},
)

#: Grammars that are invalid, empty, ambiguous or not enforceable.
GRAMMARS: list[dict[str, Any]] = [
    {"json": {"type": "strin"}},
    {"json": {"$ref": "http://127.0.0.1:1/never"}},
    {"regex": "(a"},
    {"grammar": 'start: "a" b'},
    {"choice": ["a"], "regex": "a"},
    {"regex": ""},
    {"choice": []},
    {},
    *({"json": schema} for schema in UNSUPPORTED),
]

#: Fields with invalid values, and valid fields that contradict each other.
INVALID: Table = {
    "/v1/completions": [
        *({name: value} for name, value in OUT_OF_RANGE),
        *({"structured_outputs": grammar} for grammar in GRAMMARS),
        {"ignore_eos": True, "structured_outputs": {"regex": "a"}},
        {"stream_options": {"include_usage": True}},
    ],
    "/v1/chat/completions": [
        {"tools": [FUNCTION, FUNCTION]},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{**FUNCTION, "function": {"name": "a b"}}]},
        *(
            {
                "tools": [{**FUNCTION, "function": {"name": "f", "parameters": parameters}}],
                "tool_choice": "required",
            }
            for parameters in ({"type": "array"}, {"not": {}}, {"properties": {"a": 1}})
        ),
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [FUNCTION]},
        {"response_format": {"type": "json_object"}, "tools": [FUNCTION]},
        {"top_logprobs": 2},
        {"max_tokens": 1, "max_completion_tokens": 2},
        {"messages": say("", "king")},
        {"messages": say("a", tool_call_id="1")},
        {"messages": say("a", "tool")},
        {"messages": say(None, "assistant")},
        {"messages": say(None, "assistant", tool_calls=[CALL])},
        {"messages": say(None, "assistant", tool_calls=[SURROGATE_CALL])},
        {"messages": say("\ue0f0")},
        {
            "structured_outputs": {"regex": "a"},
            "chat_template_kwargs": {"enable_thinking": True},
        },
    ],
    "/v1/responses": [
        {"store": True},
        {"previous_response_id": "resp_1"},
        {"include": ["message.output_text.logprobs"]},
        {"input": []},
        {"input": say([{"type": "input_image"}])},
        {"input": [{"type": "item_reference", "id": "a"}]},
        {"input": say("\ue0f0")},
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"}]},
        {"tools": [{"type": "web_search"}]},
        {"tool_choice": "required"},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}},
    ],
    "/v1/messages": [
        {"max_tokens": None},
        {"temperature": 2},
        {"thinking": {"type": "enabled", "budget_tokens": 300}},
        {"thinking": {"type": "enabled"}},
        {"thinking": {"type": "disabled", "budget_tokens": 9}},
        {"messages": say([{"type": "image"}])},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "tool"}},
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "strin"}}}},
        {"output_format": {"type": "json_schema", "schema": {"type": "strin"}}},
    ],
    "/tokenize": [{"prompt": None}, {"prompt": "a", "messages": USER}],
    "/v1/embeddings": [
        {"input": ""},
        {"input": [[1], []]},
        {"encoding_format": "int8"},
    ],
}

#: Path, fields of which the error names the first, and the value that the message repeats.
NAMED_VALUES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": [257]}, "257"),
    ("/v1/completions", {"prompt": "a" * 5000}, "5000"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 5000}, "5000"),
    ("/v1/chat/completions", {"messages": say("a" * 5000)}, "5000"),
    ("/v1/chat/completions", {"messages": say([{"type": "image"}])}, "messages.0.content.0.type"),
    ("/v1/chat/completions", {"chat_template_kwargs": {"other": 1}}, "other"),
    ("/v1/chat/completions", {"chat_template_kwargs": {"messages": 1}}, "messages"),
    (
        "/v1/messages",
        {"messages": [*USER, *say("I", "assistant")], "tools": [ANTHROPIC_TOOL]},
        "assistant",
    ),
    # The message has the names and values of the request, and lists what a field accepts.
    ("/v1/completions", {"allowed_token_ids": [257]}, "allowed_token_ids has token id 257"),
    ("/v1/completions", {"min_tokens": 17}, "min_tokens is 17: use 0 to max_tokens, 16"),
    ("/v1/completions", {"logit_bias": {"999": 1}}, "logit_bias names token 999"),
    ("/v1/completions", {"guided_regex": "(a"}, "guided_regex cannot be used"),
    ("/v1/completions", {"guided_regex": 5}, "guided_regex: "),
    ("/v1/completions", {"guided_json": "5"}, "guided_json is 5"),
    ("/v1/completions", {"guided_choice": []}, "guided_choice: "),
    ("/v1/completions", {"guided_whitespace_pattern": " "}, "guided_whitespace_pattern: "),
    ("/v1/completions", {"guided_choice": ["a"], "guided_grammar": "b"}, "guided_grammar"),
    ("/v1/completions", {"guided_regex": "a", "use_beam_search": True}, "guided_regex cannot"),
    ("/v1/completions", {"do_sample": False, "temperature": 0.5}, "0.5"),
    ("/v1/completions", {"early_stopping": "maybe"}, "true, false or 'never', not \"maybe\""),
    ("/v1/completions", {"prompt": 5}, "a string or an array, not 5"),
    ("/v1/completions", {"prompt": ["a", 1]}, "prompt.1: Input should be a string, not 1"),
    ("/v1/completions", {"prompt": ["a"] * 65}, "65"),
    ("/v1/completions", {"top_p": 0}, "not 0"),
    ("/v1/completions", {"max tokens": 5}, '"max tokens": this field is unknown: use max_tokens'),
    ("/v1/completions", {"response_format": {"type": "x"}}, "'json_schema', not \"x\""),
    (
        "/v1/chat/completions",
        {"tool_choice": {"type": "x"}},
        "tool_choice.type: Input should be 'function' or 'allowed_tools', not \"x\"",
    ),
    ("/v1/chat/completions", {"tool_choice": {"type": "function"}}, "tool_choice.function"),
    (
        "/v1/chat/completions",
        {"messages": [*USER, {"role": "user", "contnt": "a"}]},
        "messages.1.contnt: this field is unknown: use messages.1.content",
    ),
    ("/v1/chat/completions", {"messages": [{"rol": "user"}]}, "use messages.0.role"),
    ("/v1/responses", {"tools": [{"type": "web_search"}]}, "tools.0.type: "),
    ("/v1/responses", {"input": [{"type": "x"}]}, "'function_call_output', not \"x\""),
    ("/v1/embeddings", {"input": ["a", ""]}, "input.1 has no tokens"),
    ("/v1/embeddings", {"input": ["a", "b" * 61]}, "input.1: "),
    ("/v1/embeddings", {"input": [[1], [9999]]}, "input.1 has token id 9999"),
    ("/v1/completions", {"prompt_logprobs": 1, "stream": True}, "stream"),
    ("/v1/completions", {"truncate_prompt_tokens": 0}, "0"),
    ("/v1/completions", {"guided_json": "{"}, "guided_json"),
    ("/v1/completions", {"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "give"),
    ("/v1/chat/completions", {"continue_final_message": True}, "assistant"),
    ("/detokenize", {"tokens": [257]}, "257"),
    ("/v1/embeddings", {"input": [9999]}, "9999"),
    ("/v1/embeddings", {"input": "a" * 5001}, "5001"),
    ("/v1/embeddings", {"input": "a" * 61}, "--inference-max-tokens"),
]
REFUSED = [
    *((path, row, "") for t in (UNSERVED, INVALID) for path, rows in t.items() for row in rows),
    *NAMED_VALUES,
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server with everything that a request may ask for."""
    with served(
        Scripted(),
        template={"source": TEMPLATE, "name": "shows all"},
        template_variables=["enable_thinking"],
        formats={"tools": "hermes", "reasoning": "qwen3"},
        embedder=ConstantEmbedder(),
        no_embeddings=None,
        admin_key=ADMIN_KEY,
    ) as running:
        yield running


def refusal(response: httpx.Response, path: str) -> tuple[str, str | None]:
    """Check status and error shape of a route; return the message and the field it names.

    Anthropic's errors name a field only in the message."""
    if not path.startswith("/v1/messages"):
        error = error_of(response)
        return error["message"], error["param"]
    body = response.json()
    assert response.status_code == 400, response.text
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["request_id"] == response.headers["x-request-id"]
    assert "\n" not in body["error"]["message"]
    message = body["error"]["message"]
    return message, re.match(r"\w*", message)[0]


@pytest.mark.parametrize(("path", "fields", "value"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused_field_is_named(
    server: Served, path: str, fields: dict[str, Any], value: str
) -> None:
    steps = server.engine.stats.steps
    message, param = refusal(server.post(path, **{**BODIES[path], **fields}), path)
    assert param == next(iter(fields))
    assert value in message
    assert server.engine.stats.steps == steps
    assert server.engine.unfinished == 0


@pytest.mark.parametrize("path", BODIES)
def test_changed_bodies_are_valid_otherwise(server: Served, path: str) -> None:
    server.model.say("ok")
    assert server.post(path, **BODIES[path]).status_code == 200


@pytest.mark.parametrize(
    ("action", "fields"),
    [
        ("pause", {"mode": "sideways"}),
        ("sleep", {"level": 3}),
        ("profile", {"steps": 0}),
        ("weights", {}),
        ("weights", {"load": "a\0b"}),
        ("weights", {"address": "a\0b"}),
        ("weights", {"load": "x", "address": "y"}),
    ],
)
def test_refused_administration_changes_nothing(
    server: Served, action: str, fields: dict[str, Any]
) -> None:
    message = error_of(server.administer(action, **fields))["message"]
    assert ("null character" in message) == any("\0" in str(v) for v in fields.values())
    assert not server.engine.paused
    assert not server.engine.asleep


MISPLACED_FIELDS: list[tuple[str, dict[str, Any], str, str]] = [
    ("/rerank", {"query": "a", "document": ["a"]}, "document", "use documents"),
    ("/classify", {"prompt": "a"}, "input", "prompt is an unknown field"),
    ("/classify", {"inputs": "a"}, "inputs", "use input"),
    ("/v1/completions", {"promt": "a"}, "promt", "use prompt"),
    ("/v1/messages", {"max_token": 5, "messages": USER, "model": "m"}, "max_token", "max_tokens"),
    ("/score", {"text_1": 5, "text_2": "a"}, "text_1", "a string, an object or an array, not 5"),
    ("/score", {"text_1": ["a", 5], "text_2": "a"}, "text_1", "text_1.1: "),
    ("/score", {"queries": [{"txt": "a"}], "text_2": "a"}, "queries", "use queries.0.text"),
]


@pytest.mark.parametrize(("path", "body", "param", "text"), MISPLACED_FIELDS)
def test_unknown_field_in_place_of_a_required_field(
    server: Served, path: str, body: dict[str, Any], param: str, text: str
) -> None:
    message, named = refusal(server.post(path, **body), path)
    assert named == param
    assert text in message


DEEP = b'{"prompt": "a", "user": ' + b"[" * 1200 + b"]" * 1200 + b"}"


@pytest.mark.parametrize("path", ["/v1/completions", "/invocations"])
@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"prompt": "\\ud800"}', "lone surrogate \\ud800"),
        (b'{"prompt": "\\udc00"}', "lone surrogate \\udc00"),
        (b'{"prompt": "\\u12"}', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (DEEP, "200 levels"),
        (DEEP.replace(b"[" * 1200 + b"]" * 1200, b"[" * 199 + b"]" * 199), ""),
        (b'{"prompt": "a",}', "trailing comma at line 1 column 16"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_invalid_json_is_explained(server: Served, path: str, body: bytes, text: str) -> None:
    response = server.http.post(path, content=body)
    if text:
        assert text in error_of(response)["message"]
    else:
        assert response.status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"nothing", None),
        (b"[]", None),
        (b"17", None),
        (b'{"prompt": "\xff"}', None),
        (b'{"prompt": ' + b"[" * 40_000, None),
        (b'{"prompt": 1e999}', "prompt"),
        (b'{"prompt": "\\ud800"}', None),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "prompt": 5}', "prompt"),
        (b'{"prompt": "a", "logit_bias": {"7": 1, "8": 1, "7": 1}}', "7"),
        (b'{"prompt": "a", "structured_outputs": {"json": {"a": [{"b": 1, "\\u0062": 2}]}}}', "b"),
        (b'{"prompt": "a", "\\ud800": 1, "\\ud800": 1}', "\\ud800"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_invalid_json_and_duplicate_keys_are_refused(
    server: Served, body: bytes, param: str | None
) -> None:
    error = error_of(server.http.post("/v1/completions", content=body))
    assert error["param"] == param
    assert param is None or param in error["message"]


CALLED = say(None, "assistant", tool_calls=[{**CALL, "function": {"name": "f", "arguments": "{}"}}])
HERMES = {"formats": {"tools": "hermes", "reasoning": None}}
QWEN = {"formats": {"tools": None, "reasoning": "qwen3"}}
REGEX = {"structured_outputs": {"regex": "a"}}
NO_STOP: dict[str, Any] = {"stop_tokens": []}
BUDGET = {"thinking": {"type": "enabled", "budget_tokens": 20}}


@pytest.mark.parametrize(
    ("changes", "path", "fields", "param", "text"),
    [
        ({}, "/v1/chat/completions", {"tools": [FUNCTION]}, "tools", ""),
        ({}, "/v1/chat/completions", {"messages": CALLED}, "messages", ""),
        # The chatml template has no tools.
        (HERMES, "/v1/chat/completions", {"tools": [FUNCTION]}, "tools", ""),
        ({"template": None}, "/v1/chat/completions", {}, None, "template"),
        ({"max_outputs": 8}, "/v1/completions", {"n": 9}, "n", "8"),
        ({"no_embeddings": "because"}, "/v1/embeddings", {}, None, "because"),
        (NO_STOP, "/v1/completions", REGEX, "structured_outputs", "stop token"),
        ({}, "/v1/messages", BUDGET, "thinking", "--reasoning-parser"),
        ({**NO_STOP, **QWEN}, "/v1/messages", BUDGET, "thinking", "stop token"),
    ],
)
def test_server_without_a_feature_refuses_its_fields(
    changes: dict[str, Any], path: str, fields: dict[str, Any], param: str | None, text: str
) -> None:
    with served(**changes) as server:
        message, named = refusal(server.post(path, **{**BODIES[path], **fields}), path)
    assert named == param
    assert text in message
