# SPDX-License-Identifier: Apache-2.0
"""How experts lie in a local tensor: matrix after matrix, whatever cuts them, rank by rank."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.process_groups import RankGrid
from megatron.core.weight_sharding import (
    Shard,
    SubWeight,
    WeightSharding,
    check,
    local_boxes,
    local_shape,
    range_boxes,
    shard_range,
)

EXPERTS, FFN, HIDDEN = 12, 6, 5
SHAPES = {"gate": (EXPERTS, FFN, HIDDEN), "up": (EXPERTS, FFN, HIDDEN)}
DOWN = (EXPERTS, HIDDEN, FFN)
EP, ETP = Shard(axis="ep", dim=0), Shard(axis="etp", dim=1)
FUSED = WeightSharding(
    name="gate_up",
    sub_weights=tuple(SubWeight(name=n, shape=s, shards=(EP, ETP)) for n, s in SHAPES.items()),
    interleave=EXPERTS,
    expert=True,
)
PLAIN = WeightSharding.of("down", DOWN, EP, Shard(axis="etp", dim=2), expert=True)
GRIDS = (
    RankGrid(world_size=1),
    RankGrid(world_size=12, ep=12),
    RankGrid(world_size=4, tp=2, etp=1, ep=4),
    RankGrid(world_size=12, tp=2, etp=2, ep=3),
    RankGrid(world_size=12, etp=3, ep=2, pp=2),
    RankGrid(world_size=12, etp=6),
)


def whole(name: str) -> torch.Tensor:
    """Return a logical tensor of different numbers."""
    shape = DOWN if name == "down" else SHAPES[name]
    first = 1000 * ("gate", "up", "down").index(name)
    return first + torch.arange(math.prod(shape)).view(shape)


def laid_out(sharding: WeightSharding, grid: RankGrid, rank: int) -> torch.Tensor:
    """Return a rank's local tensor, filled box by box."""
    local = torch.full(local_shape(sharding, grid), -1).view(-1)
    for box in local_boxes(sharding, grid, grid.coordinates(rank)):
        places = zip(box.offsets, box.sizes, strict=True)
        part = whole(box.name)[tuple(slice(first, first + size) for first, size in places)]
        local[box.start : box.start + box.numel] = part.flatten()
    return local.view(local_shape(sharding, grid))


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"etp{grid.etp} ep{grid.ep}")
def test_a_rank_has_its_experts_one_after_the_other(grid: RankGrid):
    assert check(FUSED, grid) == check(PLAIN, grid) == []
    for rank in range(grid.world_size):
        at = grid.coordinates(rank)
        experts = slice(at["ep"] * EXPERTS // grid.ep, (at["ep"] + 1) * EXPERTS // grid.ep)
        inner = slice(at["etp"] * FFN // grid.etp, (at["etp"] + 1) * FFN // grid.etp)
        fused = laid_out(FUSED, grid, rank)
        assert fused.shape == (2 * EXPERTS // grid.ep, FFN // grid.etp, HIDDEN)
        # [experts, 2 · f/etp, h]: the rows of gate, then those of up
        pairs = fused.view(EXPERTS // grid.ep, -1, HIDDEN)
        wanted = torch.cat([whole("gate")[experts, inner], whole("up")[experts, inner]], 1)
        assert torch.equal(pairs, wanted)
        assert torch.equal(laid_out(PLAIN, grid, rank), whole("down")[experts, :, inner])


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"etp{grid.etp} ep{grid.ep}")
def test_shards_of_experts_know_what_they_hold(grid: RankGrid):
    for sharding in (FUSED, PLAIN):
        flat = laid_out(sharding, grid, grid.world_size - 1).view(-1)
        boxes = local_boxes(sharding, grid, grid.coordinates(grid.world_size - 1))
        inside = 0
        for index in range(7):  # ends inside experts, rows and runs of columns
            start, stop = shard_range(len(flat), 7, index)
            for box in range_boxes(boxes, start, stop):
                places = zip(box.offsets, box.sizes, strict=True)
                part = whole(box.name)[tuple(slice(first, first + n) for first, n in places)]
                at = start + box.start
                assert torch.equal(flat[at : at + box.numel], part.flatten())
                inside += box.numel
        assert inside == len(flat)


def test_experts_that_do_not_divide_are_named():
    found = check(FUSED, RankGrid(world_size=5, ep=5))
    assert found == [
        f"{name}: 12 rows in 5 shards do not interleave by 12 units evenly" for name in SHAPES
    ]
    assert check(FUSED, RankGrid(world_size=4, etp=4)) == [
        f"{name}: dimension 1 of 6 does not divide by etp=4" for name in SHAPES
    ]
