# SPDX-License-Identifier: Apache-2.0
"""Which parts of weights travel from the ranks of one layout to those of another."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from megatron.core.boxes import Box
from megatron.core.dist_checkpointing.transfer import ChunkHeader, plan_transfers

SHAPE = (7, 10)


def layout(source: random.Random, ranks: int) -> list[list[ChunkHeader]]:
    """Return what some ranks hold of a tensor that is cut along one dimension, with copies."""
    dim = source.choice((0, 1))
    parts = source.randint(1, ranks)
    borders = sorted(source.sample(range(1, SHAPE[dim]), parts - 1))
    boxes = []
    for begin, end in itertools.pairwise([0, *borders, SHAPE[dim]]):
        offsets, sizes = [0, 0], list(SHAPE)
        offsets[dim], sizes[dim] = begin, end - begin
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    order = [rank % parts for rank in range(ranks)]
    return [[ChunkHeader("w", SHAPE, boxes[n], "torch.float32")] for n in order]


@pytest.mark.parametrize("seed", range(30))
def test_each_element_comes_once_whatever_the_layouts(seed: int) -> None:
    source = random.Random(seed)
    senders, receivers = source.randint(1, 5), source.randint(1, 5)
    told = layout(source, senders) + layout(source, receivers)
    plan = plan_transfers(told, senders=senders)
    for target in range(senders, senders + receivers):
        ((_, _, wanted, _),) = told[target]
        count = torch.zeros(SHAPE, dtype=torch.int64)
        for part in plan:
            if part.target == target:
                count[part.box.slices] += 1
                (given,) = told[part.source]
                assert part.source < senders
                whole = torch.zeros(SHAPE)
                whole[given.box.slices] = 1
                assert whole[part.box.slices].all()  # the sender has it
        expected = torch.zeros(SHAPE, dtype=torch.int64)
        expected[wanted.slices] = 1
        assert torch.equal(count, expected)


def test_what_nobody_has_is_named() -> None:
    whole = Box((0, 0), SHAPE)
    half = Box((0, 0), (7, 5))
    mine = [ChunkHeader("w", SHAPE, whole, "torch.float32")]
    for told, named in (
        ([ChunkHeader("w", (7, 11), Box((0, 0), (7, 11)), "torch.float32")], "7, 11"),
        ([ChunkHeader("v", SHAPE, whole, "torch.float32")], "no such tensor"),
        ([ChunkHeader("w", SHAPE, half, "torch.float32")], "each element"),
        ([ChunkHeader("w", SHAPE, whole, "os.system")], "os.system"),
    ):
        with pytest.raises(ValueError, match=named) as found:
            plan_transfers([told, mine], senders=1)
        assert "\n" not in str(found.value)
