# SPDX-License-Identifier: Apache-2.0
"""The HTTP server in this process: routes, link and engine loop are real, in two threads."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2 as httpx
import pytest
import torch

from megatron.cli.tokenizers import ByteTokenizer
from megatron.core import Group
from megatron.core.inference import Engine, EngineConfig
from megatron.core.inference.model_runner import EngineFeatures
from megatron.core.inference.router import Replicas
from megatron.core.transformer import CacheShapes
from megatron.inference.server import http_process
from megatron.inference.server.engine.control import EngineControl
from megatron.inference.server.engine.loop import EngineLoop
from megatron.inference.server.guided_decoding.grammars import grammars_of
from megatron.training.data.chat import CHATML
from tests.support.stub_model import StubModel

ADMIN_KEY = "admin-key"

END = 256
"""The byte tokenizer's end of a document."""


def next_byte(tokens: torch.Tensor) -> torch.Tensor:
    """Return the successors of bytes; the end of the document follows `~`."""
    return torch.where(tokens == ord("~"), END, (tokens + 1) % END)


class NextByte(StubModel):
    """A model whose most probable token is the successor of the last byte, and EOS after `~`.

    All other tokens are equally probable. A step waits for `gate` and then calls `before`.
    """

    engine: Engine | None = None
    """The engine that runs the model."""

    def __init__(self, cache_shapes: CacheShapes | None = None) -> None:
        super().__init__(END + 1, next_byte, cache_shapes=cache_shapes)
        self.gate = threading.Event()
        self.gate.set()
        self.before: Callable[[], None] = lambda: None

    def __call__(self, tokens: torch.Tensor, **context: object) -> torch.Tensor:
        self.gate.wait()
        self.before()
        return super().__call__(tokens)


class ConstantEmbedder:
    """An embedder without a model that records its texts."""

    max_tokens = 60

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def batch_size(self, lengths: list[int]) -> int:
        return len(lengths)

    def __call__(self, texts: list[list[int]]) -> list[list[float]]:
        self.texts += texts
        return [[1.0, 0.0] for _ in texts]


class Served:
    """A running server.

    Args:
        engine: the engine of the server.
        loop: the engine loop.
        control: the administration of the engine.
        link: the connection between the engine loop and the routes.
        thread: the thread of the engine loop.
        url: base URL of the routes.
    """

    def __init__(
        self,
        engine: Engine,
        loop: EngineLoop,
        control: EngineControl,
        link: socket.socket,
        thread: threading.Thread,
        url: str,
    ) -> None:
        self.engine, self.loop, self.link, self.thread = engine, loop, link, thread
        self.control = control
        self.url = url
        self.admin_url = ""
        self.http = httpx.Client(base_url=url, timeout=30, trust_env=False)

    @property
    def model(self) -> Any:
        return self.engine.runner.model

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.http.post(path, json=fields)

    def ok(self, path: str, **fields: Any) -> dict[str, Any]:
        """Return the JSON of an answer with status 200."""
        response = self.post(path, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    def chunks(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the chunks of a stream without the final [DONE]."""
        response = self.post(path, stream=True, **fields)
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.text.split("\n") if line]
        assert lines[-1] == "data: [DONE]", lines[-1]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def metrics(self) -> dict[str, float]:
        lines = self.http.get("/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def administer(self, action: str, key: str = ADMIN_KEY, **fields: Any) -> httpx.Response:
        """Post an administration request."""
        headers = {"authorization": f"Bearer {key}"}
        url = f"{self.admin_url}/{action}"
        return self.http.post(url, json=fields, headers=headers)

    def connect(self) -> socket.socket:
        """Return a plain connection."""
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=30)

    def send(self, path: str, **fields: Any) -> socket.socket:
        """Return a plain connection on which a request has been posted."""
        body, connection = json.dumps(fields), self.connect()
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        return connection


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """Check the status of an answer and OpenAI's error shape; return the error."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code", "request_id"}
    assert error["request_id"] == response.headers["x-request-id"]
    assert "\n" not in error["message"]
    assert "Traceback" not in error["message"]
    return error


def prompt_of(server: Served, path: str, **fields: Any) -> str:
    """Return the prompt that the engine of a `Scripted` model receives for a request."""
    requests: list[Any] = []
    add = server.engine.add
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            server.engine, "add", lambda request: requests.append(request) or add(request)
        )
        server.model.say("ok")
        server.ok(path, **fields)
    return bytes(requests[0].prompt).decode()


def until(holds: Callable[[], object], seconds: float = 20) -> None:
    """Wait for a condition; the time is only there so that a failure ends."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.002)


def settings(**changes: Any) -> dict[str, Any]:
    """Return the settings of the HTTP process, with some changed by name."""
    options = {
        "key": None,
        "admin_key": None,
        "tokenizer": {"recorded": {"type": "byte"}, "model": None},
        "template": {"source": CHATML, "name": "chatml"},
        "template_variables": [],
        "no_embeddings": "it is made for a test",
        "classifier": None,
        "formats": {"tools": None, "reasoning": None},
        "card": {
            "name": "next-byte",
            "aliases": [],
            "vocab_size": END + 1,
            "max_length": 5000,
            "stop_tokens": [END],
            "created": 1,
        },
        "limits": {"max_body_bytes": 100_000, "body_seconds": 20.0, "request_seconds": 60.0},
        "client": {"max_outputs": 100, "max_unsent": 4096},
        "drain_seconds": 20.0,
        "log_format": "text",
        "log_level": "info",
        "strict_fields": False,
        "response_store_bytes": 0,
        "allowed_origins": [],
    }
    for name, value in changes.items():
        group = next(p for p in (options, *options.values()) if isinstance(p, dict) and name in p)
        group[name] = value
    return options


@contextlib.contextmanager
def served(
    model: Any = None,
    *,
    engine: EngineConfig | None = None,
    shapes: CacheShapes | None = None,
    features: EngineFeatures | None = None,
    loaded: Any = None,
    embedder: Any = None,
    **changes: Any,
) -> Iterator[Served]:
    """Serve a model, `NextByte` if none is given, until the block ends."""
    max_length = settings(**changes)["card"]["max_length"]
    running = Engine(
        model or NextByte(shapes),
        dataclasses.replace(engine or EngineConfig(num_blocks=4096), max_model_len=max_length),
        features=features,
    )
    if isinstance(running.runner.model, NextByte):
        running.runner.model.engine = running
    with served_engine(running, loaded=loaded, embedder=embedder, **changes) as server:
        yield server


@contextlib.contextmanager
def served_engine(
    running: Engine, *, loaded: Any = None, embedder: Any = None, **changes: Any
) -> Iterator[Served]:
    """Serve an engine until the block ends."""
    options = settings(**changes)
    link, other_end = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    # What a client leaves unread soon reaches the server.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    port = listener.getsockname()[1]
    grammars = grammars_of(ByteTokenizer(), options["card"]["stop_tokens"], END + 1)
    replicas = Replicas(running, Group.single())
    control = EngineControl(replicas, loaded)
    components = {"grammars": grammars, "embedder": embedder, "control": control}
    loop = EngineLoop(replicas, link, Group.single(), **components)
    admin = None if options["admin_key"] is None else socket.create_server(("127.0.0.1", 0))
    serving = http_process.serve(other_end, listener, options, admin=admin)
    targets = (loop.run, lambda: asyncio.run(serving))
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    server = Served(running, loop, control, link, threads[0], f"http://127.0.0.1:{port}")
    if admin is not None:
        server.admin_url = f"http://127.0.0.1:{admin.getsockname()[1]}"
    try:
        yield server
    finally:
        server.http.close()
        if isinstance(running.runner.model, NextByte):
            running.runner.model.gate.set()
        with contextlib.suppress(OSError):  # the loop has ended
            loop.drain()
        for thread in threads:
            thread.join(30)
        link.close()
        listener.close()
        if admin is not None:
            admin.close()
        assert not any(thread.is_alive() for thread in threads)
