# SPDX-License-Identifier: Apache-2.0
"""The server over HTTP against the engine alone, in turns.

python -m tools.bench.serve

The engine is of the M shape, on one thread; the server's HTTP process is the one that
`megatron.inference.serve` starts. The client is a bare asyncio reader in a process of its own:
`python -m tools.bench.serve --client`, which reads one order a line and answers in JSON. Times are
wall-clock times, as several processes take part. The cost of a token in the HTTP process is its CPU
time, which Linux counts in /proc/PID/schedstat.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.core.inference import EngineConfig
from megatron.core.inference.engine import Engine
from megatron.core.inference.requests import EngineRequest
from megatron.core.inference.router import Replicas
from megatron.core.process_groups import Group
from megatron.inference.serve import http_process
from megatron.inference.server.engine.control import EngineControl
from megatron.inference.server.engine.link import frame
from megatron.inference.server.engine.loop import EngineLoop
from tools.bench.harness import run_rows
from tools.bench.inference import (
    ROWS,
    Nothing,
    engine_of,
    in_turns,
    large_tokenizer,
    llama,
    requests_of,
    with_weights_of,
)
from tools.bench.inference import row as ratio_row
from tools.bench.shapes import SHAPES
from tools.bench.table import Row

VOCABULARY = SHAPES["M"].vocabulary
LONG_TOKENS = 4400
#: The argument of the client.
CLIENT = "--client"
#: Tokens around the 100th and around the 4,000th of a stream.
EARLY, LATE = (50, 450), (3800, 4200)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process's first thread, which runs its event loop."""
    text = Path(f"/proc/{pid}/schedstat").read_text(encoding="utf-8")
    return int(text.split()[0]) / 1e9


def request_of(body: bytes) -> bytes:
    """Return the request for one stream."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def read_stream(
    port: int, body: bytes, marks: Mapping[int, Callable[[], None]]
) -> list[float]:
    """Ask for one stream; return the seconds to each of its tokens.

    Args:
        port: of the server.
        body: of the request.
        marks: what to call when so many tokens have come.
    """
    start, times = time.perf_counter(), []
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_of(body))
    while b"[DONE]" not in (line := await reader.readline()):
        if not line:
            raise ValueError("the stream has no end")
        if line.startswith(b"data: "):
            times.append(time.perf_counter() - start)
            if len(times) in marks:
                marks[len(times)]()
    writer.close()
    return times


def client() -> None:
    """Answer orders: {"port", "pid", "bodies", "marks"}, one a line."""

    async def streams(order: dict[str, Any]) -> dict[str, Any]:
        costs: list[float] = []
        marks = {n: lambda: costs.append(cpu_seconds(order["pid"])) for n in order["marks"]}
        start = time.perf_counter()
        bodies = [json.dumps(body).encode() for body in order["bodies"]]
        outcomes = await asyncio.gather(
            *(read_stream(order["port"], body, marks) for body in bodies)
        )
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "first": statistics.median(times[0] for times in outcomes),
            "tokens": sum(map(len, outcomes)),
            "costs": costs,
        }

    for line in sys.stdin:
        print(json.dumps(asyncio.run(streams(json.loads(line)))), flush=True)


class Server:
    """An engine that is served.

    Args:
        engine: of it.
        port: that it listens on.
        pid: of its HTTP process.
        reader: the client's process.
    """

    def __init__(self, engine: Engine, port: int, pid: int, reader: subprocess.Popen[str]) -> None:
        self.engine, self._port, self._pid, self._reader = engine, port, pid, reader

    def ask(self, requests: Sequence[EngineRequest], marks: Sequence[int] = ()) -> dict[str, Any]:
        """Return what the client measured of requests that it sends at one time.

        Args:
            marks: numbers of tokens at which the HTTP process's CPU seconds are read.
        """
        self.engine.scheduler.reset_prefix_cache()
        order = {
            "port": self._port,
            "pid": self._pid,
            "bodies": [_body(request) for request in requests],
            "marks": list(marks),
        }
        assert self._reader.stdin is not None
        assert self._reader.stdout is not None
        self._reader.stdin.write(json.dumps(order) + "\n")
        self._reader.stdin.flush()
        return json.loads(self._reader.stdout.readline())


def _body(request: EngineRequest) -> dict[str, Any]:
    return {
        "prompt": list(request.prompt),
        "max_tokens": request.max_new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


def _settings(folder: str) -> dict[str, Any]:
    card = {"name": "m", "vocab_size": VOCABULARY, "stop_tokens": [], "created": 1}
    return {
        "kind": "settings",
        "key": None,
        "admin_key": None,
        "tokenizer": {"recorded": {"type": None}, "model": folder},
        "template": None,
        "template_variables": [],
        "no_embeddings": "it is made for a benchmark",
        "formats": {"tools": None, "reasoning": None},
        "card": {**card, "max_length": 8192},
        "limits": {"max_body_bytes": 1 << 20, "body_seconds": 20.0, "request_seconds": 600.0},
        "client": {"max_outputs": 100, "max_unsent": 1 << 16},
        "drain_seconds": 20.0,
        "log_format": "text",
        "log_answers": False,
    }


@contextlib.contextmanager
def served(engine: Engine) -> Iterator[Server]:
    """Serve an engine until the block ends."""
    command = [sys.executable, "-m", "tools.bench.serve", CLIENT]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        large_tokenizer(Path(folder), VOCABULARY)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        reader = stack.enter_context(subprocess.Popen(command, **pipes))
        link, pid = stack.enter_context(http_process([listener]))
        link.sendall(frame(_settings(folder)))
        replicas = Replicas(engine, Group.single())
        control = EngineControl(replicas, None)
        loop = EngineLoop(replicas, link, Group.single(), grammars=None, control=control)
        thread = threading.Thread(target=loop.run)
        thread.start()
        try:
            yield Server(engine, listener.getsockname()[1], pid, reader)
        finally:
            loop.drain()
            thread.join()


def alone(engine: Engine, requests: Sequence[EngineRequest]) -> dict[str, Any]:
    """Return what an engine takes for requests without a server."""
    engine.scheduler.reset_prefix_cache()
    start = time.perf_counter()
    waiting = {engine.add(request) for request in requests}
    firsts, tokens = [], 0
    while engine.unfinished:
        for delta in engine.step():
            if delta.request_id in waiting:
                waiting.discard(delta.request_id)
                firsts.append(time.perf_counter() - start)
            tokens += len(delta.tokens)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "first": statistics.median(firsts), "tokens": tokens}


def overhead_rows(quick: bool) -> list[Row]:
    """Return time to first token and tokens/s of the M shape, relative to the bare engine."""
    model = with_weights_of(llama(SHAPES["M"]))
    engines = engine_of(model, optimized=True), engine_of(model, optimized=True)
    with served(engines[0]) as server:
        return [
            row for clients in (1, ROWS) for row in _overhead(server, engines[1], clients, quick)
        ]


def _overhead(server: Server, engine: Engine, clients: int, quick: bool) -> list[Row]:
    """Return the rows of so many clients, against an engine like the server's."""
    new = 32 if quick else 128
    requests = requests_of(clients, 64, new, VOCABULARY)
    measured: list[list[dict[str, Any]]] = [[], []]

    def over_http() -> float:
        measured[0].append(server.ask(requests))
        return measured[0][-1]["first"]

    def without() -> float:
        measured[1].append(alone(engine, requests))
        return measured[1][-1]["first"]

    firsts = in_turns((over_http, without), rounds=2 if quick else 9)
    if any(run["tokens"] != clients * new for side in measured for run in side):
        raise ValueError(f"a side has not {clients * new} tokens: the race is void")
    # The first round is not counted.
    rates = [[run["tokens"] / run["seconds"] for run in side[1:]] for side in measured]
    what = f"server, {clients} clients: {{}} / engine alone"
    return [
        ratio_row(what.format("s to first token"), *firsts, "<= 1.15"),
        ratio_row(what.format("tokens/s"), *rates, ">= 0.9"),
    ]


def length_rows(quick: bool) -> list[Row]:
    """CPU time of the HTTP process for a token of a long stream, by that near its start."""
    engine = Engine(Nothing(VOCABULARY), EngineConfig(max_num_seqs=1, num_blocks=512))
    requests = requests_of(1, 8, LONG_TOKENS, VOCABULARY)
    late, early = [], []
    with served(engine) as server:
        for _ in range(2 if quick else 5):
            costs = server.ask(requests, [*EARLY, *LATE])["costs"]
            early.append((costs[1] - costs[0]) / (EARLY[1] - EARLY[0]))
            late.append((costs[3] - costs[2]) / (LATE[1] - LATE[0]))
    what = "server, CPU s of a stream's 4,000th token / of its 100th"
    return [ratio_row(what, late, early, "<= 1.2")]


def rows(quick: bool = False) -> list[Row]:
    """Measure all rows, the engine on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        table_rows = [*overhead_rows(quick), *length_rows(quick)]
    finally:
        torch.set_num_threads(threads)
    return [{**row, "bench": "serve"} for row in table_rows]


if __name__ == "__main__":
    if sys.argv[1:] == [CLIENT]:
        client()
    else:
        run_rows(rows, __doc__)
