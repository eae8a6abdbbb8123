# SPDX-License-Identifier: Apache-2.0
"""Frames."""

from __future__ import annotations

import asyncio
import socket

import pytest

from megatron.inference.server.engine_client import EngineClient
from megatron.inference.server.protocol import LENGTH, MAX_FRAME_BYTES, FrameReader, frame

MESSAGES = [{"kind": "a", "text": "é\n" * 9}, {"kind": "b"}, {"kind": "c", "ids": list(range(99))}]


@pytest.mark.parametrize("size", [1, 3, 64, 1 << 20])
def test_frames_come_whole_however_they_are_split(size: int) -> None:
    data = b"".join(map(frame, MESSAGES))
    reader, found = FrameReader(), []
    for start in range(0, len(data), size):
        found += reader.feed(data[start : start + size])
    assert found == MESSAGES


def test_a_frame_that_is_too_long_is_refused_by_its_head() -> None:
    with pytest.raises(ValueError, match=str(MAX_FRAME_BYTES + 1)):
        FrameReader().feed(LENGTH.pack(MAX_FRAME_BYTES + 1))


async def sent_together(delays: list[int]) -> list[list[int]]:
    """Return the ids in each write of requests that ask so many turns of the event loop apart."""
    mine, its = socket.socketpair()
    with its:
        reader, writer = await asyncio.open_connection(sock=mine)
        client = EngineClient(reader, writer, max_outputs=9, max_unsent=9)
        write, found = writer.write, []

        def noted(data: bytes) -> None:
            found.append([order["id"] for order in FrameReader().feed(data)])
            write(data)

        writer.write = noted  # type: ignore[method-assign]

        async def ask(turns: int) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            client.add_requests([{"prompt": [5], "max_new_tokens": 2}])

        await asyncio.gather(*map(ask, delays))
        client.abort([0])
        while sum(map(len, found)) < len(delays) + 1:
            await asyncio.sleep(0)
        writer.close()
    return found


@pytest.mark.parametrize(
    ("delays", "expected"),
    [([0, 3, 9], [[0, 1, 2, 0]]), ([0, 40], [[0], [1, 0]])],
    ids=["a burst", "two requests"],
)
def test_simultaneous_requests_are_submitted_together(
    delays: list[int], expected: list[list[int]]
) -> None:
    assert asyncio.run(sent_together(delays)) == expected
