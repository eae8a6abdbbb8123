# SPDX-License-Identifier: Apache-2.0
"""The layout of flat buffers, and buffers that hold a shard."""

from __future__ import annotations

import random

import pytest
import torch

from megatron.core.process_groups import Group, ProcessGroupCollection, RankGrid
from megatron.core.sharded_buffer import BufferLayout, BufferPlacement, ShardedBuffer
from tests.support.ranks import run_ranks

REPLICATED, SHARDED = BufferPlacement.REPLICATED, BufferPlacement.SHARDED
SHAPES = [("a", (3, 5)), ("b", (7,)), ("c", (2, 2, 2))]


def buffer(layout: BufferLayout, group: Group, placement: BufferPlacement) -> ShardedBuffer:
    """Return an fp32 buffer of zeros."""
    device = torch.device("cpu")
    return ShardedBuffer.empty(
        layout, group, placement=placement, dtype=torch.float32, device=device
    )


def test_members_are_aligned_apart_and_inside_and_shards_are_even():
    source = random.Random(3)
    for _ in range(200):
        shapes = [
            (str(i), tuple(source.randint(1, 6) for _ in range(source.randint(1, 3))))
            for i in range(source.randint(1, 6))
        ]
        parts, member_quantum, shard_quantum = (source.randint(1, 8) for _ in range(3))
        layout = BufferLayout.of(
            shapes, parts=parts, member_quantum=member_quantum, shard_quantum=shard_quantum
        )
        assert [(m.name, m.shape) for m in layout.members] == shapes
        assert all(m.start % member_quantum == 0 for m in layout.members)
        ends = [0, *(m.stop for m in layout.members)]
        gaps = [m.start - end for m, end in zip(layout.members, ends[:-1], strict=True)]
        assert all(0 <= gap < member_quantum for gap in gaps)
        bounds = [layout.shard(i) for i in range(parts)]
        assert [b for b, _ in bounds] == [0, *(e for _, e in bounds)][:-1]
        assert bounds[-1][1] == layout.numel
        assert ends[-1] <= layout.numel < ends[-1] + parts * shard_quantum
        assert all((e - b) % shard_quantum == 0 for b, e in bounds)


def test_views_are_of_the_storage():
    layout = BufferLayout.of(SHAPES, parts=1)
    whole = buffer(layout, Group.single(), REPLICATED)
    for i, member in enumerate(layout.members):
        whole.view(member).fill_(i + 1.0)
        assert whole.view(member).shape == member.shape
    counts = [int((whole.data == i).sum()) for i in (1, 2, 3)]
    assert counts == [15, 7, 8]


def test_a_layout_for_other_ranks_is_an_error():
    layout = BufferLayout.of(SHAPES, parts=2)
    with pytest.raises(ValueError, match="a layout for 2 shards on a group of 1"):
        buffer(layout, Group.single(), REPLICATED)


def shards(rank: int, world: int) -> None:
    """Check a buffer that holds one shard only."""
    lanes = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)["lanes"]
    layout = BufferLayout.of(SHAPES, parts=world, member_quantum=4, shard_quantum=4)
    small = buffer(layout, lanes, SHARDED)
    assert small.data.numel() == layout.numel // world
    assert small.shard().data_ptr() == small.data.data_ptr()
    with pytest.raises(ValueError, match="a: this buffer holds one shard"):
        small.view(layout.members[0])
    whole = buffer(layout, lanes, REPLICATED)
    whole.shard().fill_(1.0)
    assert whole.data.nonzero().flatten().tolist() == list(range(*layout.shard(rank)))


def test_a_buffer_of_one_shard():
    run_ranks(shards, 2)
