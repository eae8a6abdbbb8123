# SPDX-License-Identifier: Apache-2.0
"""Random malformed requests: the server answers as its routes document, and keeps serving.

Bodies are drawn from the server's OpenAPI document, so a new route is tested without a change.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import http.client
import json
import logging
import random
import re
import socket
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

import pytest
import torch

from megatron.core.device import memory_bytes
from megatron.inference.server.protocol.api_error import ANTHROPIC_ROUTES
from tests.support.http_server import ConstantEmbedder, Served, served, until

MAX_BODY_BYTES = 100_000
INVALID_HTTP = "Invalid HTTP request received."
"""Uvicorn's answer to bytes that are not HTTP."""
VALID = {"prompt": "a", "max_tokens": 5, "temperature": 0}
#: Values of fields that depend on other fields or on the model, which a schema does not express.
FIELD_VALUES: dict[str, Sequence[Any]] = {
    "model": ["next-byte"] * 5 + ["another"],
    "max_tokens": [1, 2, 7],
    "max_completion_tokens": [1, 7],
    "max_output_tokens": [1, 7],
    "n": [1, 2],
    "regex": ["[a-f]{2}", "(a", "a|"],
    "grammar": ['start: "a"', "start: b"],
    "schema": [{"type": "integer"}, {"not": {}}, {"$ref": "#"}, {"enum": []}],
    "parameters": [{"type": "object"}, {"type": "strin"}],
    "arguments": ["{}", "{"],
    "role": ["user", "assistant", "system", "tool"],
}
UNUSUAL_TEXTS = ["", "\0", "\ud800", "é\u2028", "\U0001f600" * 9, "a" * 3000, "{{ 7 * 7 }}"]
UNUSUAL_TEXTS += ["../%2e"]
UNUSUAL_NUMBERS = [0, -1, 1 << 31, 1 << 63, -(1 << 80), 10**400, 1e308, -0.0, 1.5]
UNUSUAL_NUMBERS += [float("nan"), float("inf")]
UNUSUAL_VALUES = [*UNUSUAL_TEXTS, *UNUSUAL_NUMBERS, None, True, False, [], {}, [[]], [{}]]
UNUSUAL_VALUES += [{"": 1}, [None], "1"]
UNUSUAL_HEADERS = [
    b"content-type: text/plain", b"content-type: application/json; charset=utf-16",
    b"content-type: \xff\xfe", b"content-encoding: gzip", b"accept: " + b"a" * 5000,
    b"accept-encoding: \x80", b"authorization: Bearer \xff", b"x-request-id: a" + b"\xc3\xa9" * 40,
    b"expect: 100-continue", b"host: [", b"host: a/v1/messages?", b"host: \xff", b"cookie: a=\x01",
    b"origin: null", b"connection: upgrade", b"upgrade: websocket", b"content-length: 5",
    b"content-length: -5", b"content-length: " + b"9" * 5000, b"transfer-encoding: chunked",
    b"transfer-encoding: gzip", b"no colon", b"name with spaces: a", b": empty",
]  # fmt: skip
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "get", "A" * 40]
UNUSUAL_PATHS = [
    "/nowhere", "//", "/%00", "/%ff%fe", "/v1", "/v1/completions/", "/v1/messages/nothing",
    "/v1/messages%2fcount_tokens", "/v1/models/%ed%a0%80", "/v1/models/" + "a/" * 200,
    "/v1/responses/%0a/cancel", "/../etc/passwd", "/tokenize?a=%", "/%2e%2e/",
]  # fmt: skip


class ValidBodies:
    """Draw request bodies that the server's OpenAPI document allows.

    Args:
        document: The server's OpenAPI document.
        source: Random number generator.
    """

    def __init__(self, document: dict[str, Any], source: random.Random) -> None:
        self._document, self._source = document, source
        self.routes: list[tuple[str, str, dict[str, Any] | None]] = []
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                body = operation.get("requestBody")
                schema = body and body["content"]["application/json"]["schema"]
                self.routes.append((method.upper(), path, schema))

    def draw(self, schema: dict[str, Any], name: str = "", depth: int = 0) -> Any:
        """Return an instance of a schema for the field `name`."""
        if "$ref" in schema:
            target: Any = self._document
            for key in schema["$ref"].removeprefix("#/").split("/"):
                target = target[key]
            return self.draw(target, name, depth)
        if "const" in schema:
            return schema["const"]
        if name in FIELD_VALUES:
            return copy.deepcopy(self._source.choice(FIELD_VALUES[name]))
        for union in ("anyOf", "oneOf"):
            if union in schema:
                return self.draw(self._source.choice(schema[union]), name, depth)
        if "enum" in schema:
            return self._source.choice(schema["enum"])
        return self._of_type(schema, depth)

    def _of_type(self, schema: dict[str, Any], depth: int) -> Any:
        match schema.get("type"):
            case "object":
                required = schema.get("required", ())
                chance = 0.15 if depth == 0 else 0.4
                return {
                    key: self.draw(inner, key, depth + 1)
                    for key, inner in schema.get("properties", {}).items()
                    if key in required or self._source.random() < chance
                }
            case "array":
                minimum = schema.get("minItems", 0)
                count = self._source.randint(minimum, minimum + 2)
                return [self.draw(schema["items"], "", depth + 1) for _ in range(count)]
            case "string":
                letters = string.ascii_lowercase
                return "".join(self._source.choices(letters, k=self._source.randint(1, 8)))
            case "integer":
                return self._source.randint(0, 2)
            case "number":
                return self._source.random()
            case "boolean":
                return self._source.random() < 0.5
            case "null":
                return None
            case _:
                return self._source.choice([1, "a", {}])


def containers_and_keys(value: Any) -> list[tuple[Any, Any]]:
    """Return all pairs of a container within a value and one of its keys or indices."""
    if not isinstance(value, dict | list):
        return []
    pairs = [(value, key) for key in (value if isinstance(value, dict) else range(len(value)))]
    return pairs + [
        pair for container, key in pairs for pair in containers_and_keys(container[key])
    ]


def mutate(body: Any, source: random.Random) -> Any:
    """Change a random value of a body."""
    root = {"": body}
    pairs = containers_and_keys(body)
    if len(pairs) > 1000:  # nested repetitions take too long to write
        return body
    container, key = source.choice([*pairs, (root, "")])
    nested: Any = copy.deepcopy(source.choice(UNUSUAL_VALUES))
    match source.randrange(6):
        case 0 | 1:
            container[key] = copy.deepcopy(source.choice(UNUSUAL_VALUES))
        case 2:
            del container[key]
        case 3 if isinstance(container[key], dict):
            container[key][source.choice(["more", "é", "", "__class__", *FIELD_VALUES])] = nested
        case 4:
            for _ in range(source.choice([3, 200])):
                nested = [nested] if source.random() < 0.5 else {"a": nested}
            container[key] = nested
        case _:
            container[key] = [container[key]] * source.choice([1, 2, 70])
    return root.get("")


def encode(body: Any, source: random.Random) -> bytes:
    """Encode a body as JSON, sometimes with an error."""
    text = json.dumps(body, ensure_ascii=source.random() < 0.5)
    content = text.encode(errors="surrogatepass")
    cut = source.randrange(len(content) + 1)
    match source.randrange(24):
        case 0:
            return content[:cut]
        case 1:
            return content[:cut] + bytes([source.randrange(256)]) + content[cut + 1 :]
        case 2:
            return text.encode(source.choice(["utf-16", "utf-32", "utf-8-sig"]), "surrogatepass")
        case 3:
            return content + content
        case 4:
            return content[:cut] + source.choice([b"[", b'{"a":']) * 20_000
        case 5:
            return text.replace('"', "'").encode(errors="replace")
        case _:
            return content


class Malformed:
    """Send random requests to a server.

    Args:
        server: The server under test.
        seed: Seed of the requests.
    """

    def __init__(self, server: Served, seed: int) -> None:
        self._server, self._source = server, random.Random(seed)
        document = server.http.get("/openapi.json").json()
        self._bodies = ValidBodies(document, self._source)

    def request(self) -> tuple[str, bytes, bool]:
        """Return a request's path and bytes, and whether the bytes are truncated."""
        source = self._source
        method, path, schema = source.choice(
            [r for r in self._bodies.routes if r[2] or is_rare(source)]
        )
        path = path.replace("{model}", "next-byte").replace("{response_id}", "resp_1")
        content = b""
        if schema is not None:
            body = self._bodies.draw(schema)
            for _ in range(source.choice([0, 1, 1, 1, 2, 3])):
                body = mutate(body, source)
            content = encode(body, source)
        if is_rare(source):
            path = source.choice(UNUSUAL_PATHS)
        if is_rare(source):
            method = source.choice(METHODS)
        headers = [b"host: a", b"content-length: %d" % len(content)]
        if is_rare(source):
            headers.insert(source.randrange(3), source.choice(UNUSUAL_HEADERS))
            # Of equal names, the unusual header may come first.
            headers = list({line.split(b":")[0]: line for line in reversed(headers)}.values())
        lines = [f"{method} {path} HTTP/1.1".encode(), b"connection: close", *headers, b"", b""]
        sent = b"\r\n".join(lines) + content
        framed = headers.count(b"content-length: %d" % len(content)) == 1
        framed &= not any(line.startswith(b"transfer-encoding") for line in headers)
        if is_rare(source):
            sent, framed = sent[: source.randrange(len(sent))], False
        return path, sent, not framed

    def answer(self, sent: bytes, ends_early: bool) -> tuple[http.client.HTTPResponse, str] | None:
        """Send a request; return the answer and its text, None if the connection was closed."""
        with self._server.connect() as connection, contextlib.suppress(ConnectionError):
            connection.sendall(sent)
            if ends_early:
                with contextlib.suppress(OSError):  # the server has answered and closed
                    connection.shutdown(socket.SHUT_WR)
            response = http.client.HTTPResponse(connection)
            with contextlib.suppress(http.client.RemoteDisconnected, http.client.IncompleteRead):
                response.begin()
                return response, response.read().decode()
        return None

    def check_request(self) -> int | None:
        """Send a request, check the answer and return its status, None if there was none."""
        path, sent, ends_early = self.request()
        answered = self.answer(sent, ends_early)
        if answered is None:
            # A body that is too long is refused while it is sent, and the answer may be lost.
            assert ends_early or len(sent) > MAX_BODY_BYTES, sent
            return None
        response, text = answered
        assert response.status < 500, (sent, text)
        assert "Traceback" not in text
        assert "internal error" not in text, (sent, text)
        if response.status >= 400 and text != INVALID_HTTP:
            check_error(path, json.loads(text), response)
        return response.status


def is_rare(source: random.Random) -> bool:
    """Decide at random whether to apply a rare change."""
    return source.random() < 0.06


def check_error(path: str, body: Any, response: http.client.HTTPResponse) -> None:
    """Check that an error body has the shape of its route."""
    if unquote(path).startswith(ANTHROPIC_ROUTES):
        assert body.keys() == {"type", "error", "request_id"}, (path, body)
        assert body["error"].keys() == {"type", "message"}
    else:
        assert body.keys() == {"error"}, (path, body)
        assert body["error"].keys() == {"message", "type", "param", "code", "request_id"}
    fields = body if "type" in body else body["error"]
    assert fields["request_id"] == response.headers["x-request-id"]
    assert "\n" not in body["error"]["message"]


OPTIONS: dict[str, Any] = {
    "max_body_bytes": MAX_BODY_BYTES,
    "no_embeddings": None,
    "max_length": 200,
    "formats": {"tools": "hermes", "reasoning": "qwen3"},
    "template_variables": ["enable_thinking"],
}


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow(seconds=45))])
def test_random_malformed_requests_are_answered(
    caplog: pytest.LogCaptureFixture, count: int
) -> None:
    caplog.set_level(logging.WARNING)
    with served(embedder=ConstantEmbedder(), **OPTIONS) as server:
        malformed = Malformed(server, seed=count)
        expected = server.post("/v1/completions", **VALID).json()["choices"]
        statuses: Counter[int | None] = Counter()
        for number in range(count):
            statuses[malformed.check_request()] += 1
            if number % 100 == 99:
                assert server.post("/v1/completions", **VALID).json()["choices"] == expected
        until(lambda: server.engine.unfinished == 0)
        assert server.engine.scheduler.kv_cache.pool.references == 0
        assert server.http.get("/health").json()["active"] == 0
        counted = server.http.get("/metrics").text
        assert 'status="400"' in counted
        assert not re.findall(r'status="5.*', counted)
        # Most requests are refused and some are valid: both outcomes occurred.
        assert statuses[400] > count / 3, statuses
        assert statuses[200] > count / 50, statuses
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


@pytest.mark.slow(seconds=120)
def test_malformed_requests_leave_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest keeps the records of the log, and the embedder its texts.
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    embedder, cpu = ConstantEmbedder(), torch.device("cpu")
    with served(embedder=embedder, **OPTIONS) as server:
        malformed = Malformed(server, seed=3)
        sizes = []
        for count in (5_000, 15_000):
            for _ in range(count):
                malformed.check_request()
            embedder.texts.clear()
            gc.collect()
            sizes.append(memory_bytes(cpu))
    assert sizes[1] <= 1.05 * sizes[0], sizes
