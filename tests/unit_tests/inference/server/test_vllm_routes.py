# SPDX-License-Identifier: Apache-2.0
"""The routes that vLLM adds to OpenAI's, several model names, and pages of other origins."""

from __future__ import annotations

import concurrent.futures
import importlib.metadata
from collections.abc import Iterator

import pytest

from tests.support.http_server import ConstantEmbedder, Served, error_of, served, until

TEXT = {"prompt": "a", "max_tokens": 3, "temperature": 0}
PAGE = "https://chat.example.org"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(
        key="secret",
        aliases=["gpt-4"],
        allowed_origins=[PAGE],
        embedder=ConstantEmbedder(),
        no_embeddings=None,
    ) as running:
        running.http.headers["authorization"] = "Bearer secret"
        yield running


def test_status_routes(server: Served) -> None:
    until(lambda: server.http.get("/ping").status_code == 200)
    assert server.http.post("/ping", headers={"authorization": ""}).status_code == 200
    version = server.http.get("/version").json()["version"]
    assert version == importlib.metadata.version("megatron-lm")
    until(lambda: server.http.get("/load").json() == {"server_load": 0})
    server.model.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        answer = executor.submit(server.post, "/v1/completions", **TEXT)
        try:
            until(lambda: server.http.get("/load").json() == {"server_load": 1})
        finally:
            server.model.gate.set()
        assert answer.result().status_code == 200


def test_only_ping_needs_no_key(server: Served) -> None:
    no_key = {"authorization": ""}
    for path in ("/load", "/version"):
        assert server.http.get(path, headers=no_key).status_code == 401
    assert server.http.post("/invocations", json=TEXT, headers=no_key).status_code == 401


def test_invocations_take_the_body_of_any_route(server: Served) -> None:
    assert server.ok("/invocations", **TEXT)["choices"][0]["text"] == "bcd"
    chat = server.ok("/invocations", messages=[{"role": "user", "content": "a"}], max_tokens=1)
    assert chat["object"] == "chat.completion"
    assert server.ok("/invocations", input="a")["object"] == "list"
    error_of(server.post("/invocations", text="a"))


def test_model_has_several_names(server: Served) -> None:
    models = server.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["next-byte", "gpt-4"]
    assert server.http.get("/v1/models/gpt-4").json()["id"] == "gpt-4"
    assert server.ok("/v1/completions", **TEXT, model="gpt-4")["model"] == "next-byte"
    error_of(server.post("/v1/completions", **TEXT, model="gpt-5"), 404)


def test_only_listed_origins_are_allowed(server: Served, byte_server: Served) -> None:
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
        "authorization": "",
    }
    answer = server.http.options("/v1/completions", headers={**preflight, "origin": PAGE})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    answer = server.http.post("/v1/completions", json=TEXT, headers={"origin": PAGE})
    assert answer.headers["access-control-allow-origin"] == PAGE
    answer = server.http.options("/v1/completions", headers={**preflight, "origin": "https://x.y"})
    assert "access-control-allow-origin" not in answer.headers
    answer = byte_server.http.post("/v1/completions", json=TEXT, headers={"origin": PAGE})
    assert "access-control-allow-origin" not in answer.headers
