# SPDX-License-Identifier: Apache-2.0
"""Client errors, overload and engine failures: error answers, and requests that continue."""

from __future__ import annotations

import concurrent.futures
import json
import logging
import threading
from typing import Any

import pytest
import torch

from megatron.core.inference import EngineConfig
from megatron.core.transformer import CacheShapes
from megatron.inference.serve import Service, read_key
from megatron.inference.server.app import API_ROUTES
from megatron.inference.server.middleware import MAX_HEADER_BYTES, OPEN_ROUTES
from megatron.inference.server.protocol.api_error import ANTHROPIC_ROUTES
from tests.support.http_server import NextByte, Served, error_of, served, until

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "a", "max_tokens": 3, "temperature": 0}


def test_oversized_bodies_and_headers_are_refused(server: Served) -> None:
    long = json.dumps({"prompt": "a" * 100_000}).encode()
    error_of(server.http.post("/v1/completions", content=long), 413)
    halves = iter([long[:60_000], long[60_000:]])  # in chunks, without a length
    error_of(server.http.post("/v1/completions", content=halves), 413)
    error_of(server.http.get("/v1/models", headers={"x-more": "a" * MAX_HEADER_BYTES}), 431)


def test_unfinished_requests_time_out() -> None:
    with served(body_seconds=0.2) as server:
        for partial_request in (
            b"GET /health HT",
            b"GET /health HTTP/1.1\r\nhost: a\r\n",
            b"",
        ):
            with server.connect() as slow:
                slow.sendall(partial_request)
                assert slow.recv(1000) == b""  # closed
        head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 50\r\n\r\n"
        with server.connect() as slow:
            slow.sendall(head + b'{"prompt"')
            assert b" 408 " in slow.recv(1000).split(b"\r\n")[0]
        # The time limit restarts for each request of a connection and does not include the answer.
        server.model.gate.clear()
        threading.Timer(0.5, server.model.gate.set).start()
        assert server.post("/v1/completions", **TEXT).status_code == 200
        with server.connect() as reused:
            reused.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            answer = b""
            while b"active" not in answer:
                answer += reused.recv(1000)
            reused.sendall(b"GET /hea")
            assert reused.recv(1000) == b""


def test_failing_chat_templates_are_refused() -> None:
    doubles = "{% set n = namespace(x=[1]) %}{% for i in range(50) %}{% set n.x = n.x + n.x %}"
    for source in (
        doubles + "{% endfor %}",
        "{{ raise_exception('no') }}",
        "{{ messages.__class__.__mro__ }}",
    ):
        with served(template={"source": source, "name": "bad"}) as server:
            error_of(server.post("/v1/chat/completions", **CHAT))
            assert server.post("/v1/completions", **TEXT).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_disconnected_clients_request_is_aborted(stream: bool) -> None:
    with served() as server:
        steps = server.engine.stats
        fields = {"prompt": "a" * 40, "max_tokens": 4000, "ignore_eos": True, "stream": stream}
        with server.send("/v1/completions", **fields) as client:
            while stream and b"data: " not in client.recv(100_000):
                pass
            until(lambda: steps.steps > 3)
            server.model.gate.clear()
        # The engine is in or before a step: at most one more step runs for this client.
        before = steps.steps
        until(lambda: server.http.get("/health").json()["active"] == 0)
        server.model.gate.set()
        until(lambda: server.engine.unfinished == 0)
        assert steps.steps <= before + 1
        assert server.engine.scheduler.kv_cache.pool.references == 0


def test_client_that_does_not_read_is_dropped() -> None:
    with served(max_unsent=300) as server:
        fields = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}
        fields |= {"stream": True, "logprobs": 9}
        with server.send("/v1/completions", **fields) as client:
            until(lambda: server.engine.unfinished)
            assert server.post("/v1/completions", **TEXT).json()["choices"][0]["text"] == "bcd"
            until(lambda: server.engine.unfinished == 0)
            assert server.engine.stats.computed < 4000  # the request was aborted
            while client.recv(1 << 16):  # and the connection was closed
                pass


def test_every_route_requires_the_key() -> None:
    with served(key="secret-key") as server:
        paths = [(method, path) for method, path, *_ in API_ROUTES]
        for method, path in [*paths, ("GET", "/openapi.json"), ("GET", "/nowhere")]:
            response = server.http.request(method, path)
            if path in OPEN_ROUTES:
                assert response.status_code == 200
            elif path.startswith(ANTHROPIC_ROUTES):  # see test_chat_apis.py
                assert response.status_code == 401
            else:
                assert error_of(response, 401)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        for authorization in ("", "Bearer", "Bearer wrong", "secret-key", "Basic a"):
            error_of(server.http.get("/v1/models", headers={"authorization": authorization}), 401)
        for valid_headers in ({"authorization": "Bearer secret-key"}, {"x-api-key": "secret-key"}):
            assert server.http.get("/v1/models", headers=valid_headers).status_code == 200


def test_public_hosts_require_an_api_key(tmp_path: Any) -> None:
    assert read_key(Service()) is None
    for host in ("0.0.0.0", "::", "10.1.2.3", "example.org"):
        with pytest.raises(ValueError, match="--api-key-file"):
            read_key(Service(host=host))
    path = tmp_path / "key"
    path.write_text("secret\n")
    assert read_key(Service(host="0.0.0.0", api_key_file=str(path))) == "secret"
    for bad in ("", " \n", "two words", "ключ"):
        path.write_text(bad)
        with pytest.raises(ValueError, match="--api-key-file"):
            read_key(Service(api_key_file=str(path)))


class NotFiniteAfterZ(NextByte):
    """A model that returns NaN for rows whose last token is `z`."""

    def __call__(self, tokens: torch.Tensor, **context: object) -> torch.Tensor:
        logits = super().__call__(tokens, **context)
        logits[tokens.t() == ord("z")] = torch.nan
        return logits


def test_failing_request_does_not_affect_others() -> None:
    with served(NotFiniteAfterZ()) as server, concurrent.futures.ThreadPoolExecutor(2) as pool:
        good = pool.submit(server.post, "/v1/completions", prompt="a", max_tokens=20, temperature=0)
        bad = pool.submit(server.post, "/v1/completions", prompt="x", max_tokens=20, temperature=0)
        error_of(bad.result(), 500)
        assert good.result().json()["choices"][0]["text"] == "bcdefghijklmnopqrstu"
        streamed = server.post("/v1/completions", prompt="x", temperature=0, stream=True)
        assert streamed.status_code == 200
        assert (
            json.loads(streamed.text.strip().split("data: ")[-1])["error"]["code"] == "not_finite"
        )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_engine_death_is_reported_to_all_requests() -> None:
    class Crashing(NextByte):
        def __call__(self, tokens: torch.Tensor, **context: object) -> torch.Tensor:
            logits = super().__call__(tokens, **context)
            if (tokens == ord("!")).any():
                raise RuntimeError  # ends the thread, as a crash ends the process
            return logits

    with served(Crashing()) as server, concurrent.futures.ThreadPoolExecutor(2) as pool:
        server.model.gate.clear()
        running = pool.submit(
            server.post, "/v1/completions", prompt="a", max_tokens=4000, ignore_eos=True
        )
        bad = pool.submit(server.post, "/v1/completions", prompt="!")
        until(lambda: server.http.get("/health").json()["active"] == 2)
        server.model.gate.set()
        until(lambda: not server.thread.is_alive())
        server.link.close()
        for response in (running.result(), bad.result()):
            assert error_of(response, 503)["message"].startswith("the engine has stopped")


def test_draining_server_finishes_and_refuses_requests() -> None:
    with served() as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        server.model.gate.clear()
        running = pool.submit(server.post, "/v1/completions", stream=True, **TEXT)
        until(lambda: server.engine.unfinished)
        server.loop.drain()
        release = threading.Event()
        steps = iter([None, release.wait])
        server.model.before = lambda: (next(steps, None) or (lambda: None))()
        server.model.gate.set()
        until(lambda: server.http.get("/health").status_code == 503)
        error_of(server.post("/v1/completions", **TEXT), 503)
        release.set()
        assert running.result().text.endswith("data: [DONE]\n\n")


def test_full_cache_changes_no_text() -> None:
    requests = [{"prompt": chr(97 + i) * 20, "max_tokens": 40, "temperature": 0} for i in range(6)]
    texts = []
    for blocks in (4096, 5):
        shapes = CacheShapes(attention=((1, 4),))
        with (
            served(engine=EngineConfig(num_blocks=blocks), shapes=shapes) as server,
            concurrent.futures.ThreadPoolExecutor(6) as pool,
        ):
            answers = pool.map(lambda fields: server.post("/v1/completions", **fields), requests)
            texts.append([answer.json()["choices"][0]["text"] for answer in answers])
            full = server.post("/v1/completions", prompt="a" * 100)
            chat = server.post("/v1/chat/completions", **CHAT, max_completion_tokens=200)
            preempted = server.engine.stats.preempted
    assert texts[0] == texts[1]
    assert preempted > 0
    assert "blocks" in error_of(full)["message"]  # too long even without other requests
    assert error_of(full)["param"] == "max_tokens"
    assert error_of(chat)["param"] == "max_completion_tokens"


def test_api_key_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with served(key="secret-key") as server:
        for path in ("/v1/models", "/nowhere", "/metrics"):
            response = server.http.get(path, headers={"authorization": "Bearer secret-key"})
            assert "secret-key" not in response.text
        server.http.get("/v1/models", headers={"authorization": "Bearer secret-kez"})
    assert "secret-ke" not in caplog.text


def test_exception_text_is_logged_but_not_returned(
    server: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("at 0x7f00 in /home")

    monkeypatch.setattr("megatron.inference.server.serving.Server.check_model", fail)
    error = error_of(server.post("/v1/completions", **TEXT), 500)
    assert "0x7f00" not in error["message"]
    assert "0x7f00" in caplog.text
    assert error["request_id"] in caplog.text


def test_request_over_time_limit_is_aborted() -> None:
    with served(request_seconds=0.2) as server:
        server.model.gate.clear()
        error_of(server.post("/v1/completions", **TEXT), 504)
        text = server.post("/v1/completions", **TEXT, stream=True).text
        assert "no response within" in text
        server.model.gate.set()
        until(lambda: server.engine.unfinished == 0)
