# SPDX-License-Identifier: Apache-2.0
"""Frames of the engine link, and batches of requests that arrive together."""

from __future__ import annotations

import asyncio
import socket

import pytest

from megatron.inference.server.engine.client import EngineClient
from megatron.inference.server.engine.link import LENGTH, MAX_FRAME_BYTES, FrameReader, frame

MESSAGES = [{"kind": "a", "text": "é\n" * 9}, {"kind": "b"}, {"kind": "c", "ids": list(range(99))}]


@pytest.mark.parametrize("size", [1, 3, 64, 1 << 20])
def test_frames_are_reassembled_from_any_split(size: int) -> None:
    data = b"".join(map(frame, MESSAGES))
    reader, messages = FrameReader(), []
    for start in range(0, len(data), size):
        messages += reader.feed(data[start : start + size])
    assert messages == MESSAGES


def test_oversized_frame_is_refused_by_its_header() -> None:
    with pytest.raises(ValueError, match=str(MAX_FRAME_BYTES + 1)):
        FrameReader().feed(LENGTH.pack(MAX_FRAME_BYTES + 1))


async def writes_of_requests(delays: list[int]) -> list[list[int]]:
    """Submit requests after `delays` turns of the event loop; return the ids of each write."""
    client_socket, engine_socket = socket.socketpair()
    with engine_socket:
        reader, writer = await asyncio.open_connection(sock=client_socket)
        client = EngineClient(reader, writer, max_outputs=9, max_unsent=9)
        write, writes = writer.write, []

        def recorded_write(data: bytes) -> None:
            writes.append([order["id"] for order in FrameReader().feed(data)])
            write(data)

        writer.write = recorded_write  # type: ignore[method-assign]

        async def submit(turns: int) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            client.add_requests([{"prompt": [5], "max_new_tokens": 2}])

        await asyncio.gather(*map(submit, delays))
        client.abort([0])
        while sum(map(len, writes)) < len(delays) + 1:
            await asyncio.sleep(0)
        writer.close()
    return writes


@pytest.mark.parametrize(
    ("delays", "expected"),
    [([0, 3, 9], [[0, 1, 2, 0]]), ([0, 40], [[0], [1, 0]])],
    ids=["burst", "two requests"],
)
def test_simultaneous_requests_are_submitted_together(
    delays: list[int], expected: list[list[int]]
) -> None:
    assert asyncio.run(writes_of_requests(delays)) == expected
