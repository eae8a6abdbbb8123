# SPDX-License-Identifier: Apache-2.0
"""Frames, and orders that all ranks are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.process_groups import Group
from megatron.inference.server.engine_loop import OrderBroadcast
from megatron.inference.server.protocol import LENGTH, MAX_FRAME_BYTES, Ask, FrameReader, frame
from tests.support.ranks import run_ranks

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


def shared_orders(rank: int, world: int, orders: list[Any]) -> list[Any]:
    group = Group("tp", tuple(range(world)), rank, dist.group.WORLD)
    share = OrderBroadcast(group, torch.device("cpu"))
    return [share(batch if rank == 0 else ()) for batch in orders]


def test_all_ranks_get_the_orders_of_the_first() -> None:
    short = Ask(id=1, prompt=[5, 6], max_new_tokens=2).to_json()
    long = Ask(id=2, prompt=list(range(5000)), max_new_tokens=2).to_json()
    orders = [[], [short], [short, long], [{"kind": "abort", "id": 1}], [long]]
    # As JSON has them.
    expected = [
        [{**o, "stop_tokens": []} if "prompt" in o else o for o in batch] for batch in orders
    ]
    assert run_ranks(shared_orders, 2, orders) == [expected, expected]
