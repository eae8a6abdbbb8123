# SPDX-License-Identifier: Apache-2.0
"""The server over HTTP against the engine alone, in turns.

python -m tools.bench.serve

The engine is of the M shape, on one thread; the server's HTTP process is the one that
`megatron.inference.serve` starts. The client is a bare asyncio reader in a process of its own:
`python -m tools.bench.serve --client`, which reads one order a line and answers in JSON; the one
that sends other weights is `--sender`. Wall-clock time, as several processes take part; what each
token costs the HTTP process is its CPU time, which Linux counts in /proc/PID/schedstat.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron.core.dist_checkpointing import Solo, TransferGroup, weight_chunks
from megatron.core.inference.engine import Engine
from megatron.core.inference.requests import EngineRequest
from megatron.core.inference.router import Replicas
from megatron.core.inference.sizes import EngineConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups import Group
from megatron.inference.bench import Load, make_requests
from megatron.inference.serve import http_process
from megatron.inference.server.engine.control import EngineControl
from megatron.inference.server.engine.link import frame
from megatron.inference.server.engine.loop import EngineLoop
from tools.bench.inference import (
    ROWS,
    Nothing,
    engine_of,
    in_turns,
    large_tokenizer,
    llama,
    with_weights_of,
)
from tools.bench.inference import row as ratio_row
from tools.bench.shapes import SHAPES
from tools.bench.table import Row, format_table

VOCABULARY = SHAPES["M"].vocabulary
LONG_TOKENS = 4400
ADMIN_KEY = "of-the-benchmark"
#: Tokens around the 100th and around the 4,000th of a stream.
EARLY, LATE = (50, 450), (3800, 4200)
#: Of buffers of sockets, so that a reader that stalls is soon felt; and what it leaves unread at
#: least, which these and the HTTP process's own of 64 KiB do not hold.
SOCKET_BYTES, UNREAD_BYTES = 1 << 14, 1 << 18


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


async def stall(port: int, body: bytes, finished: asyncio.Event) -> int:
    """Ask for one stream, and read it when others have ended; return its bytes."""
    with socket.socket() as bare:
        bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        bare.connect(("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=bare, limit=1 << 10)
        writer.write(request_of(body))
        await finished.wait()
        size = 0
        while b"[DONE]" not in (line := await reader.readline()):
            size += len(line)
            if not line:
                raise ValueError("the stream has no end")
        writer.close()
    return size


def client() -> None:
    """Answer orders: {"port", "pid", "bodies", "stalled", "marks"}, one a line."""

    async def streams(order: dict[str, Any]) -> dict[str, Any]:
        costs: list[float] = []
        marks = {n: lambda: costs.append(cpu_seconds(order["pid"])) for n in order["marks"]}
        start = time.perf_counter()
        bodies = [json.dumps(body).encode() for body in order["bodies"]]
        stalled, finished = (
            [json.dumps(body).encode() for body in order["stalled"]],
            asyncio.Event(),
        )
        unread = [asyncio.ensure_future(stall(order["port"], body, finished)) for body in stalled]
        outcomes = await asyncio.gather(
            *(read_stream(order["port"], body, marks) for body in bodies)
        )
        seconds = time.perf_counter() - start
        finished.set()
        between = [b - a for times in outcomes for a, b in itertools.pairwise(times)]
        return {
            "seconds": seconds,
            "first": statistics.median(times[0] for times in outcomes),
            "tokens": sum(map(len, outcomes)),
            "between_median": statistics.median(between),
            "between_longest": max(between),
            "between_p99": statistics.quantiles(between, n=100)[98],
            "unread": await asyncio.gather(*unread),
            "costs": costs,
        }

    for line in sys.stdin:
        print(json.dumps(asyncio.run(streams(json.loads(line)))), flush=True)


def sender() -> None:
    """Send the weights of the M shape to each address on stdin, and say how many bytes."""
    chunks = weight_chunks(with_weights_of(llama(SHAPES["M"])).store)
    print("ready", flush=True)
    for line in sys.stdin:
        group = TransferGroup(address=line.strip(), rank=0, senders=1, receivers=1)
        print(group.send(chunks), flush=True)


class Server:
    """An engine that is served.

    Args:
        engine: of it.
        port: that it listens on.
        admin_port: of its administration.
        pid: of its HTTP process.
        reader: the client's process.
    """

    def __init__(
        self, engine: Engine, port: int, admin_port: int, pid: int, reader: subprocess.Popen[str]
    ) -> None:
        self.engine, self._port, self._pid, self._reader = engine, port, pid, reader
        self._admin_port = admin_port

    def ask(
        self,
        requests: Sequence[EngineRequest],
        marks: Sequence[int] = (),
        *,
        stalled: Sequence[EngineRequest] = (),
        meanwhile: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Return what the client measured of requests that it sends at one time, next to others
        that it does not read meanwhile, and what this process does `meanwhile`."""
        self.engine.scheduler.reset_prefix_cache()
        order = {
            "port": self._port,
            "pid": self._pid,
            "bodies": [_body(request) for request in requests],
            "stalled": [_body(request) for request in stalled],
            "marks": list(marks),
        }
        assert self._reader.stdin is not None
        assert self._reader.stdout is not None
        self._reader.stdin.write(json.dumps(order) + "\n")
        self._reader.stdin.flush()
        meanwhile()
        return json.loads(self._reader.stdout.readline())

    def administer(self, action: str, **fields: Any) -> dict[str, Any]:
        """Have something administered; return the answer."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._admin_port}/{action}",
            data=json.dumps(fields).encode(),
            headers={"authorization": f"Bearer {ADMIN_KEY}"},
        )
        with urllib.request.urlopen(request) as response:
            return json.loads(response.read())


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
        "admin_key": ADMIN_KEY,
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
def served(
    engine: Engine, *, send_bytes: int | None = None, weights: GPTModel | None = None
) -> Iterator[Server]:
    """Serve an engine until the block ends.

    Args:
        engine: to serve.
        send_bytes: of buffers of sockets; None is as usual.
        weights: of the engine, which may be replaced.
    """
    command = [sys.executable, "-m", "tools.bench.serve", "--client"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        large_tokenizer(Path(folder), VOCABULARY)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        if send_bytes is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
        admin = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        ports = listener.getsockname()[1], admin.getsockname()[1]
        reader = stack.enter_context(subprocess.Popen(command, **pipes))
        link, pid = stack.enter_context(http_process([listener, admin]))
        link.sendall(frame(_settings(folder)))
        replicas = Replicas(engine, Group.single())
        loaded: Any = SimpleNamespace(model=weights, coordinator=Solo()) if weights else None
        control = EngineControl(replicas, loaded)
        loop = EngineLoop(replicas, link, Group.single(), grammars=None, control=control)
        thread = threading.Thread(target=loop.run)
        thread.start()
        try:
            yield Server(engine, *ports, pid, reader)
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
    load = Load(num_requests=clients, input_tokens=64, min_output_tokens=new, max_output_tokens=new)
    requests = make_requests(load, VOCABULARY)
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
    (request,) = make_requests(
        Load(
            num_requests=1,
            input_tokens=8,
            min_output_tokens=LONG_TOKENS,
            max_output_tokens=LONG_TOKENS,
        ),
        VOCABULARY,
    )
    late, early = [], []
    with served(engine) as server:
        for _ in range(2 if quick else 5):
            costs = server.ask([request], [*EARLY, *LATE])["costs"]
            early.append((costs[1] - costs[0]) / (EARLY[1] - EARLY[0]))
            late.append((costs[3] - costs[2]) / (LATE[1] - LATE[0]))
    what = "server, CPU s of a stream's 4,000th token / of its 100th"
    return [ratio_row(what, late, early, "<= 1.2")]


def stalled_rows(quick: bool) -> list[Row]:
    """Seconds between tokens of streams next to one that nobody reads, by those next to one that is
    read; the model does nothing, so that what the server does shows."""
    engine = Engine(Nothing(VOCABULARY), EngineConfig(max_num_seqs=ROWS, num_blocks=ROWS * 128))
    new = 1500
    load = Load(num_requests=ROWS, input_tokens=8, min_output_tokens=new, max_output_tokens=new)
    *requests, stalled_request = make_requests(load, VOCABULARY)
    with served(engine, send_bytes=SOCKET_BYTES) as server:

        def next_to_a_stalled_one() -> float:
            answers = server.ask(requests, stalled=[stalled_request])
            if answers["unread"][0] < UNREAD_BYTES:
                raise ValueError(
                    f"{answers['unread']} bytes were unread: the reader has not stalled"
                )
            return answers["between_p99"]

        def all_read() -> float:
            return server.ask([*requests, stalled_request])["between_p99"]

        sides = in_turns((next_to_a_stalled_one, all_read), rounds=2 if quick else 5)
    what = f"server, s between tokens (p99) of {ROWS - 1} clients: one stalls / none"
    return [ratio_row(what, *sides, "<= 1.5")]


def weights_rows(quick: bool) -> list[Row]:
    """Return the longest gap between two tokens of a stream, relative to the median gap.

    One row measures it while another process sends new weights of the M shape, one without.
    """
    model = with_weights_of(llama(SHAPES["M"]))
    engine = engine_of(model, optimized=True)
    new = 256
    load = Load(num_requests=4, input_tokens=32, min_output_tokens=new, max_output_tokens=new)
    requests = make_requests(load, VOCABULARY)
    command = [sys.executable, "-m", "tools.bench.serve", "--sender"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes) as training,
        served(engine, weights=model) as server,
    ):
        assert training.stdin is not None
        assert training.stdout is not None
        training.stdout.readline()

        def replace() -> None:
            first_step = engine.stats.steps
            while engine.stats.steps < first_step + new // 8:
                time.sleep(0.001)
            with socket.create_server(("127.0.0.1", 0)) as free:
                address = f"127.0.0.1:{free.getsockname()[1]}"
            training.stdin.write(f"{address}\n")
            training.stdin.flush()
            response = server.administer("weights", address=address)
            if not engine.unfinished:
                raise ValueError("all streams ended before the weights came: the race is void")
            if response["received_bytes"] != int(training.stdout.readline()):
                raise ValueError(f"{response}: other bytes were sent")

        def longest(meanwhile: Callable[[], None]) -> float:
            answers = server.ask(requests, meanwhile=meanwhile)
            return answers["between_longest"] / answers["between_median"]

        sides = (lambda: longest(replace), lambda: longest(lambda: None))
        measured = in_turns(sides, rounds=2 if quick else 7)
        training.stdin.close()
    what = "server, longest gap between tokens by the median one: weights are replaced / are not"
    return [ratio_row(what, *measured)]


def rows(quick: bool) -> list[Row]:
    """Measure all rows, the engine on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        table_rows = [
            *overhead_rows(quick),
            *length_rows(quick),
            *stalled_rows(quick),
            *weights_rows(quick),
        ]
    finally:
        torch.set_num_threads(threads)
    return [{**row, "bench": "serve"} for row in table_rows]


def main() -> None:
    """Measure and print it, or be the client."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer tokens and rounds")
    parser.add_argument("--client", action="store_true", help="send what stdin says")
    parser.add_argument("--sender", action="store_true", help="send weights where stdin says")
    arguments = parser.parse_args()
    if arguments.client:
        client()
    elif arguments.sender:
        sender()
    else:
        print(format_table(rows(arguments.quick)))


if __name__ == "__main__":
    main()
