# SPDX-License-Identifier: Apache-2.0
"""More clients than the server takes: those admitted get the engine's tokens, the others a 429, and
neither memory nor the cache's pages are left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import select

import pytest
import torch

from megatron.core.device import memory_bytes
from megatron.core.inference.engine import EngineConfig
from tests.support.http_server import Served, served, until

CLIENTS, ROWS, QUEUE = 500, 16, 64
TOKENS = 20
LIMITS = {"engine": EngineConfig(num_blocks=4096, max_num_seqs=ROWS), "max_outputs": ROWS + QUEUE}


async def ask(port: int, first: int) -> tuple[int, dict[str, str], str]:
    """Ask for a completion; return its status, headers and text."""
    body = {"prompt": chr(first), "max_tokens": TOKENS, "temperature": 0}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    answer = await reader.read()
    writer.close()
    told, _, rest = answer.partition(b"\r\n\r\n")
    status, *lines = told.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    found = json.loads(rest)
    text = found["choices"][0]["text"] if "choices" in found else found["error"]["code"]
    return int(status.split()[1]), headers, text


def crowd(server: Served) -> list[tuple[int, dict[str, str], str]]:
    """Return the answers to all clients, who ask while the engine is held up in a step."""

    async def all_at_once() -> list[tuple[int, dict[str, str], str]]:
        port = int(server.url.rpartition(":")[2])
        asked = [asyncio.ensure_future(ask(port, 65 + n % 8)) for n in range(CLIENTS)]
        while sum(task.done() for task in asked) < CLIENTS - ROWS - QUEUE:
            await asyncio.sleep(0.002)
        server.model.gate.set()
        return await asyncio.gather(*asked)

    server.model.gate.clear()
    return asyncio.run(asyncio.wait_for(all_at_once(), 100))


def check(answers: list[tuple[int, dict[str, str], str]]) -> None:
    """Assert that as many were admitted as there is room for, and what all were told."""
    admitted = [n for n, (status, _, _) in enumerate(answers) if status == 200]
    assert len(admitted) == ROWS + QUEUE
    for n, (status, headers, text) in enumerate(answers):
        if n in admitted:
            first = 66 + n % 8
            assert text == "".join(map(chr, range(first, first + TOKENS)))
        else:
            assert (status, text) == (429, "queue_full")
            assert int(headers["retry-after"]) >= 1


def test_more_clients_than_there_is_room_for() -> None:
    with served(**LIMITS) as server:
        check(crowd(server))
        pool = server.engine.scheduler.pool
        until(lambda: pool.available == pool.num_blocks)


@pytest.mark.slow(seconds=60)
def test_concurrent_requests_leak_no_memory() -> None:
    def resident() -> int:
        gc.collect()
        return memory_bytes(torch.device("cpu"))

    with served(**LIMITS) as server:
        for _ in range(4):
            check(crowd(server))
        before = resident()
        for _ in range(20):
            check(crowd(server))
        assert resident() <= 1.05 * before


def test_a_client_that_leaves_frees_its_pages_within_a_step() -> None:
    with served() as server:
        steps: list[None] = []
        server.model.before = lambda: steps.append(None)
        pool = server.engine.scheduler.pool
        body = json.dumps({"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True})
        client = server.connect()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall((head + body).encode())
        until(lambda: len(steps) > 20)
        server.model.gate.clear()
        held = len(steps)
        assert pool.available < pool.num_blocks
        client.close()
        assert select.select([server.link], [], [], 20)[0], "the engine is not told"
        server.model.gate.set()
        until(lambda: pool.available == pool.num_blocks)
        # The step that was held up, and one that had begun when the gate closed.
        assert len(steps) <= held + 2
        until(lambda: "megatron:kv_cache_usage_perc 0.0\n" in server.http.get("/metrics").text)
