# SPDX-License-Identifier: Apache-2.0
"""More clients than the server admits: admitted requests get the engine's tokens, the others a 429,
and neither memory nor pages of the cache leak."""

from __future__ import annotations

import asyncio
import gc
import json

import pytest
import torch

from megatron.core.device import memory_bytes
from megatron.core.inference import EngineConfig
from tests.support.http_server import Served, served, until

CLIENTS, ROWS, QUEUE = 500, 16, 64
TOKENS = 20
LIMITS = {"engine": EngineConfig(num_blocks=4096, max_num_seqs=ROWS), "max_outputs": ROWS + QUEUE}


async def complete(port: int, byte: int) -> tuple[int, dict[str, str], str]:
    """Request a completion; return its status, headers and text."""
    body = {"prompt": chr(byte), "max_tokens": TOKENS, "temperature": 0}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    answer = await reader.read()
    writer.close()
    head_bytes, _, content = answer.partition(b"\r\n\r\n")
    status, *lines = head_bytes.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    fields = json.loads(content)
    text = fields["choices"][0]["text"] if "choices" in fields else fields["error"]["code"]
    return int(status.split()[1]), headers, text


def answers_to_all_clients(server: Served) -> list[tuple[int, dict[str, str], str]]:
    """Send all clients' requests while a step of the engine is blocked; return the answers."""

    async def all_at_once() -> list[tuple[int, dict[str, str], str]]:
        port = int(server.url.rpartition(":")[2])
        tasks = [asyncio.ensure_future(complete(port, 65 + n % 8)) for n in range(CLIENTS)]
        while sum(task.done() for task in tasks) < CLIENTS - ROWS - QUEUE:
            await asyncio.sleep(0.002)
        server.model.gate.set()
        return await asyncio.gather(*tasks)

    server.model.gate.clear()
    return asyncio.run(asyncio.wait_for(all_at_once(), 100))


def check(answers: list[tuple[int, dict[str, str], str]]) -> None:
    """Check the number of admitted requests, and every answer."""
    admitted = [n for n, (status, _, _) in enumerate(answers) if status == 200]
    assert len(admitted) == ROWS + QUEUE
    for n, (status, headers, text) in enumerate(answers):
        if n in admitted:
            byte = 66 + n % 8
            assert text == "".join(map(chr, range(byte, byte + TOKENS)))
        else:
            assert (status, text) == (429, "queue_full")
            assert int(headers["retry-after"]) >= 1


def test_excess_clients_are_refused_with_429() -> None:
    with served(**LIMITS) as server:
        check(answers_to_all_clients(server))
        pool = server.engine.scheduler.kv_cache.pool
        until(lambda: pool.available == pool.num_blocks)


@pytest.mark.slow(seconds=60)
def test_concurrent_requests_leak_no_memory() -> None:
    def resident() -> int:
        gc.collect()
        return memory_bytes(torch.device("cpu"))

    with served(**LIMITS) as server:
        for _ in range(4):
            check(answers_to_all_clients(server))
        before = resident()
        for _ in range(20):
            check(answers_to_all_clients(server))
        assert resident() <= 1.05 * before
