# SPDX-License-Identifier: Apache-2.0
"""Plans that send weight shards from the ranks of one layout to the ranks of another."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from megatron.core.boxes import Box
from megatron.core.dist_checkpointing.transfer import ChunkHeader, plan_transfers

SHAPE = (7, 10)


def layout(rng: random.Random, ranks: int) -> list[list[ChunkHeader]]:
    """Return each rank's shard of a tensor split along one dimension, some shards replicated."""
    dim = rng.choice((0, 1))
    num_shards = rng.randint(1, ranks)
    bounds = sorted(rng.sample(range(1, SHAPE[dim]), num_shards - 1))
    boxes = []
    for begin, end in itertools.pairwise([0, *bounds, SHAPE[dim]]):
        offsets, sizes = [0, 0], list(SHAPE)
        offsets[dim], sizes[dim] = begin, end - begin
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    order = [rank % num_shards for rank in range(ranks)]
    return [[ChunkHeader("w", SHAPE, boxes[n], "torch.float32")] for n in order]


@pytest.mark.parametrize("seed", range(30))
def test_each_element_is_sent_once_between_any_layouts(seed: int) -> None:
    rng = random.Random(seed)
    senders, receivers = rng.randint(1, 5), rng.randint(1, 5)
    shards = layout(rng, senders) + layout(rng, receivers)
    plan = plan_transfers(shards, senders=senders)
    for target in range(senders, senders + receivers):
        ((_, _, target_box, _),) = shards[target]
        count = torch.zeros(SHAPE, dtype=torch.int64)
        for transfer in plan:
            if transfer.target == target:
                count[transfer.box.slices] += 1
                (sent,) = shards[transfer.source]
                assert transfer.source < senders
                sent_elements = torch.zeros(SHAPE)
                sent_elements[sent.box.slices] = 1
                assert sent_elements[transfer.box.slices].all()  # the sender holds all of the box
        expected = torch.zeros(SHAPE, dtype=torch.int64)
        expected[target_box.slices] = 1
        assert torch.equal(count, expected)


def test_tensor_that_no_sender_holds_is_named() -> None:
    full_box = Box((0, 0), SHAPE)
    half = Box((0, 0), (7, 5))
    receiver = [ChunkHeader("w", SHAPE, full_box, "torch.float32")]
    for sender, message in (
        ([ChunkHeader("w", (7, 11), Box((0, 0), (7, 11)), "torch.float32")], "7, 11"),
        ([ChunkHeader("v", SHAPE, full_box, "torch.float32")], "no such tensor"),
        ([ChunkHeader("w", SHAPE, half, "torch.float32")], "each element"),
        ([ChunkHeader("w", SHAPE, full_box, "os.system")], "os.system"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            plan_transfers([sender, receiver], senders=1)
        assert "\n" not in str(error.value)
