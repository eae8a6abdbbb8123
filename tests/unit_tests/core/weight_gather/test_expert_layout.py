# SPDX-License-Identifier: Apache-2.0
"""Layout of experts in a local tensor: consecutive matrices under any sharding, on every rank."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core import RankGrid, WeightSharding
from megatron.core.weight_sharding import (
    Shard,
    SubWeight,
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


def logical(name: str) -> torch.Tensor:
    """Return a logical tensor whose elements all differ."""
    shape = DOWN if name == "down" else SHAPES[name]
    first_value = 1000 * ("gate", "up", "down").index(name)
    return first_value + torch.arange(math.prod(shape)).view(shape)


def fill_local(sharding: WeightSharding, grid: RankGrid, rank: int) -> torch.Tensor:
    """Return a rank's local tensor, filled box by box."""
    local = torch.full(local_shape(sharding, grid), -1).view(-1)
    for box in local_boxes(sharding, grid, grid.coordinates(rank)):
        ranges = zip(box.offsets, box.sizes, strict=True)
        box_values = logical(box.name)[tuple(slice(begin, begin + size) for begin, size in ranges)]
        local[box.start : box.start + box.numel] = box_values.flatten()
    return local.view(local_shape(sharding, grid))


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"etp{grid.etp} ep{grid.ep}")
def test_ranks_store_their_experts_consecutively(grid: RankGrid):
    assert check(FUSED, grid) == check(PLAIN, grid) == []
    for rank in range(grid.world_size):
        coordinates = grid.coordinates(rank)
        experts = slice(
            coordinates["ep"] * EXPERTS // grid.ep, (coordinates["ep"] + 1) * EXPERTS // grid.ep
        )
        ffn_rows = slice(
            coordinates["etp"] * FFN // grid.etp, (coordinates["etp"] + 1) * FFN // grid.etp
        )
        fused = fill_local(FUSED, grid, rank)
        assert fused.shape == (2 * EXPERTS // grid.ep, FFN // grid.etp, HIDDEN)
        # [experts, 2 · f/etp, h]: gate's rows, then up's rows
        pairs = fused.view(EXPERTS // grid.ep, -1, HIDDEN)
        expected = torch.cat(
            [logical("gate")[experts, ffn_rows], logical("up")[experts, ffn_rows]], 1
        )
        assert torch.equal(pairs, expected)
        assert torch.equal(fill_local(PLAIN, grid, rank), logical("down")[experts, :, ffn_rows])


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"etp{grid.etp} ep{grid.ep}")
def test_range_boxes_describe_every_element_of_expert_shards(grid: RankGrid):
    for sharding in (FUSED, PLAIN):
        flat = fill_local(sharding, grid, grid.world_size - 1).view(-1)
        boxes = local_boxes(sharding, grid, grid.coordinates(grid.world_size - 1))
        num_elements = 0
        for index in range(7):  # shards end inside experts, rows and column ranges
            start, stop = shard_range(len(flat), 7, index)
            for box in range_boxes(boxes, start, stop):
                ranges = zip(box.offsets, box.sizes, strict=True)
                box_values = logical(box.name)[
                    tuple(slice(begin, begin + n) for begin, n in ranges)
                ]
                position = start + box.start
                assert torch.equal(flat[position : position + box.numel], box_values.flatten())
                num_elements += box.numel
        assert num_elements == len(flat)


def test_indivisible_expert_counts_are_named():
    problems = check(FUSED, RankGrid(world_size=5, ep=5))
    assert problems == [
        f"{name}: 12 rows in 5 shards do not interleave by 12 units evenly" for name in SHAPES
    ]
    assert check(FUSED, RankGrid(world_size=4, etp=4)) == [
        f"{name}: dimension 1 of 6 does not divide by etp=4" for name in SHAPES
    ]
