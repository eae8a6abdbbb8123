# SPDX-License-Identifier: Apache-2.0
"""Layout of sharded weights, against brute force over every rank and every element."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from fractions import Fraction

import pytest
import torch

from megatron.core import Placement, RankGrid, WeightSharding
from megatron.core.boxes import Box
from megatron.core.weight_sharding import (
    STRATEGIES,
    LocalBox,
    Shard,
    SubWeight,
    check,
    local_boxes,
    local_shape,
    memory_bytes,
    placement,
    range_boxes,
    replica_ranks,
    shard_range,
)

GRIDS = (
    RankGrid(world_size=1),
    RankGrid(world_size=4, tp=4),
    RankGrid(world_size=8, tp=2, pp=2),
    RankGrid(world_size=12, tp=2, gtp=3),
    RankGrid(world_size=8, tp=4, cp=2, etp=1, ep=4),
    RankGrid(world_size=8, tp=2, etp=2, ep=2, egtp=2),
    RankGrid(world_size=16, tp=4, pp=2, etp=2, ep=4),
)


def random_shardings(rng: random.Random, grid: RankGrid) -> list[WeightSharding]:
    """Draw one sharding of every kind that models use and keep the ones valid on the grid."""
    tp, ep = grid.tp, grid.ep
    heads = rng.choice([n for n in (1, 2, 4, 8) if n % tp == 0 or tp % n == 0])
    width = rng.choice((1, 3, 4))
    rows = rng.randint(1, 5)
    num_kv_shards = min(heads, tp)

    def sub_weight(name, size, *shards, **options):
        return SubWeight(name=name, shape=(size, width), shards=shards, **options)

    def tp_rows(count=None):
        return Shard(axis="tp", dim=0, count=count)

    expert = (Shard(axis="ep", dim=0), Shard(axis="etp", dim=0))
    shardings = [
        WeightSharding.of("vector", (rows,)),
        WeightSharding.of("vocabulary", (rng.randint(1, 40), width), tp_rows()),
        WeightSharding.of(
            "padded", (rng.randint(1, 40), width), tp_rows(), row_multiple=rng.randint(2, 5)
        ),
        WeightSharding.of("row", (rows, tp * width), Shard(axis="tp", dim=1)),
        WeightSharding.of("stem", (rows, 3, 2 * tp, 2), Shard(axis="tp", dim=2)),
        WeightSharding(
            name="qkv",
            sub_weights=(
                sub_weight("q", 2 * tp * heads, tp_rows()),
                sub_weight("k", heads * rows, tp_rows(num_kv_shards)),
                sub_weight("v", heads * rows, tp_rows(num_kv_shards)),
            ),
        ),
        WeightSharding(
            name="interleaved",
            sub_weights=(
                sub_weight("a", tp * 2 * rows, tp_rows()),
                sub_weight("b", tp * 4, tp_rows()),
            ),
            interleave=2 * tp,
        ),
        WeightSharding.of("experts", (ep * grid.etp * rows, width), *expert, expert=True),
        WeightSharding.of(
            "experts_across",
            (ep * rows, grid.etp * width),
            expert[0],
            Shard(axis="etp", dim=1),
            expert=True,
        ),
        WeightSharding.of("tied", (tp * 3, width), tp_rows(), stages=(0, grid.pp - 1)),
        WeightSharding.of("gathered", (7, width), gtp=True),
    ]
    return [d for d in shardings if not check(d, grid)]


def elements(box: LocalBox) -> list[tuple[tuple[int, ...], int]]:
    """List (logical index, index into the flat local tensor) of every element of a box."""
    ranges = [range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)]
    return [(index, box.start + i) for i, index in enumerate(itertools.product(*ranges))]


def grids_and_shardings():
    """Yield every grid with random shardings on it."""
    rng = random.Random(5)
    for grid in GRIDS:
        for _ in range(4):
            for sharding in random_shardings(rng, grid):
                yield grid, sharding


def element_owners(
    grid: RankGrid, sharding: WeightSharding
) -> dict[str, dict[tuple[int, ...], list]]:
    """Map the elements of every sub-weight to the (rank, counted) pairs that hold them."""
    owners: dict[str, dict[tuple[int, ...], list]] = {s.name: {} for s in sharding.sub_weights}
    for rank in range(grid.world_size):
        coordinates = grid.coordinates(rank)
        if sharding.stages and coordinates["pp"] not in sharding.stages:
            continue
        local_indices = []
        boxes = local_boxes(sharding, grid, coordinates)
        for box in boxes:
            for index, local_index in elements(box):
                owners[box.name].setdefault(index, []).append((rank, box.counted))
                local_indices.append(local_index)
        numel = math.prod(local_shape(sharding, grid))
        assert len(set(local_indices)) == len(local_indices), "two elements share a local index"
        assert all(0 <= local_index < numel for local_index in local_indices)
        assert [b.start for b in boxes] == sorted(b.start for b in boxes)
    return owners


def test_ranks_hold_each_element_equally_and_count_it_once():
    kinds = Counter()
    for grid, sharding in grids_and_shardings():
        kinds[sharding.name] += 1
        num_stages = len(set(sharding.stages)) or 1
        num_data_ranks = math.prod(grid.size(a) for a in sharding.data_axes)
        for sub_weight in sharding.sub_weights:
            owners = element_owners(grid, sharding)[sub_weight.name]
            assert set(owners) == set(itertools.product(*map(range, sub_weight.shape)))
            copies = {len(ranks) for ranks in owners.values()}
            ranks_of_weight = (
                grid.world_size // grid.pp * (num_stages if sharding.stages else grid.pp)
            )
            num_shards = math.prod(sub_weight.num_shards(a, grid) for a in sharding.axes)
            assert copies == {ranks_of_weight // num_shards}
            # Without stages every pipeline stage has a separate weight of this name, counted once.
            num_counted = num_data_ranks * (1 if sharding.stages else grid.pp)
            for ranks in owners.values():
                assert sum(counted for _, counted in ranks) == num_counted
    assert len(kinds) == 11, f"some kinds never fit a grid: {kinds}"


def test_replica_ranks_hold_identical_boxes():
    num_replicated = 0
    for grid, sharding in grids_and_shardings():
        boxes = {}
        for rank in range(grid.world_size):
            coordinates = grid.coordinates(rank)
            for sub_weight in sharding.sub_weights:
                rank_boxes = [
                    b for b in local_boxes(sharding, grid, coordinates) if b.name == sub_weight.name
                ]
                stage = "any" if sharding.stages else coordinates["pp"]
                is_owner = not sharding.stages or coordinates["pp"] in sharding.stages
                boxes[rank, sub_weight.name] = is_owner and (
                    stage,
                    [(b.offsets, b.sizes) for b in rank_boxes],
                )
        for (rank, name), content in boxes.items():
            if not content or not content[1]:
                continue
            replicas = tuple(r for r in range(grid.world_size) if boxes[r, name] == content)
            num_replicated += len(replicas) > 1
            assert replica_ranks(sharding, name, grid=grid, rank=rank) == replicas
    assert num_replicated > 100


def test_data_sharding_leaves_only_model_parallel_replicas():
    grid = RankGrid(world_size=8, tp=2, cp=2, etp=1, ep=2)
    dense = WeightSharding.of("w", (4,), gradient={"tp": "identical"})
    expert = WeightSharding.of("e", (4,), Shard(axis="ep", dim=0), expert=True)
    optimizer = placement("optim").optimizer
    assert replica_ranks(dense, "w", grid=grid, rank=3, sharded=optimizer) == (2, 3)
    assert replica_ranks(expert, "e", grid=grid, rank=3) == (1, 3, 5, 7)
    assert replica_ranks(expert, "e", grid=grid, rank=3, sharded=optimizer) == (3,)


def test_hybrid_sharding_replicates_over_outer_ranks():
    grid = RankGrid(world_size=8, cp=2, etp=1, ep=2, instances=2)  # dp 2 x 2, edp 2 x 2
    dense = WeightSharding.of("w", (4,))
    expert = WeightSharding.of("e", (4,), Shard(axis="ep", dim=0), expert=True)
    plain = placement("optim_grads_params")
    assert plain == placement("optim_grads_params", "no_shard")
    assert replica_ranks(dense, "w", grid=grid, rank=1, sharded=plain.weight) == (1, 5)
    assert replica_ranks(expert, "e", grid=grid, rank=1, sharded=plain.weight) == (1, 5)
    hybrid = placement("optim_grads_params", "optim")
    assert (hybrid.weight, hybrid.gradient) == (plain.weight, plain.gradient)
    assert replica_ranks(dense, "w", grid=grid, rank=1, sharded=hybrid.optimizer) == (1,)
    assert replica_ranks(expert, "e", grid=grid, rank=1, sharded=hybrid.optimizer) == (1,)


def test_each_strategy_shards_one_more_role():
    roles = [placement(name) for name in STRATEGIES]
    assert [(bool(p.optimizer), bool(p.gradient), bool(p.weight)) for p in roles] == [
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (True, True, True),
    ]
    for strategy, outer, text in (
        ("zero3", "no_shard", "strategy 'zero3': use one of no_shard, optim, optim_grads"),
        ("optim", "zero1", "outer data-parallel sharding strategy 'zero1': use one of no_shard"),
        ("optim_grads", "optim", "'optim' with 'optim_grads' would be plain sharding over all"),
        ("no_shard", "optim", "use 'optim_grads_params', or one optimizer instance"),
    ):
        with pytest.raises(ValueError, match=text):
            placement(strategy, outer)


def test_values_placed_by_boxes_match_slices_used_by_layers():
    grid = RankGrid(world_size=4, tp=4)
    query, key = torch.arange(16.0).view(16, 1), 100 + torch.arange(6.0).view(6, 1)
    sharding = WeightSharding(
        name="qk",
        sub_weights=(
            SubWeight(name="q", shape=(16, 1), shards=(Shard(axis="tp", dim=0),)),
            SubWeight(name="k", shape=(6, 1), shards=(Shard(axis="tp", dim=0, count=2),)),
        ),
    )
    for rank in range(4):
        local = torch.full(local_shape(sharding, grid), -1.0).view(-1)
        for box in local_boxes(sharding, grid, grid.coordinates(rank)):
            rows = {"q": query, "k": key}[box.name][box.offsets[0] :][: box.sizes[0]]
            local[box.start : box.start + box.numel] = rows.flatten()
        expected = torch.cat([query.chunk(4)[rank], key.chunk(2)[rank // 2]]).flatten()
        assert torch.equal(local, expected)


def test_interleaved_units_hold_rows_of_every_sub_weight():
    grid = RankGrid(world_size=2, tp=2)
    rows = (Shard(axis="tp", dim=0),)
    sharding = WeightSharding(
        name="qkv",
        sub_weights=(
            SubWeight(name="q", shape=(8,), shards=rows),
            SubWeight(name="k", shape=(4,), shards=rows),
        ),
        interleave=4,
    )
    assert [
        (b.name, b.offsets[0], b.sizes[0]) for b in local_boxes(sharding, grid, {**AT, "tp": 1})
    ] == [("q", 4, 2), ("k", 2, 1), ("q", 6, 2), ("k", 3, 1)]


AT = RankGrid(world_size=1).coordinates(0)


def test_local_shapes_include_padding():
    grid = RankGrid(world_size=4, tp=4)
    rows = Shard(axis="tp", dim=0)
    for sharding, shape in (
        (WeightSharding.of("v", (101, 3), rows), (26, 3)),
        (WeightSharding.of("v", (101, 3), rows, row_multiple=8), (32, 3)),
        (WeightSharding.of("v", (5, 3), rows), (2, 3)),
        (WeightSharding.of("w", (5, 8), Shard(axis="tp", dim=1)), (5, 2)),
        (WeightSharding.of("kv", (6, 2), Shard(axis="tp", dim=0, count=2)), (3, 2)),
        (WeightSharding.of("n", (7,)), (7,)),
    ):
        assert check(sharding, grid) == []
        assert local_shape(sharding, grid) == shape
    only_padding = WeightSharding.of("v", (5, 3), rows)
    assert local_boxes(only_padding, grid, {**AT, "tp": 3}) == []


def test_range_boxes_hold_exactly_the_elements_in_range():
    rng = random.Random(11)
    for _ in range(400):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 4)))
        sizes = tuple(rng.randint(1, n) for n in shape)
        offsets = tuple(rng.randint(0, n - m) for n, m in zip(shape, sizes, strict=True))
        box_start = rng.randint(0, 9)
        box = LocalBox(
            name="w", shape=shape, box=Box(offsets, sizes), start=box_start, counted=True
        )
        start, stop = sorted(rng.randint(0, box_start + box.numel + 5) for _ in range(2))
        boxes = range_boxes([box], start, stop)
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        expected = [
            (i, local_index - start)
            for i, local_index in elements(box)
            if start <= local_index < stop
        ]
        assert sorted(e for b in boxes for e in elements(b)) == sorted(expected)
        assert [b.start for b in boxes] == sorted(b.start for b in boxes)
        assert all(b.counted and b.shape == shape for b in boxes)


def test_shard_ranges_are_equal_aligned_and_cover_all():
    rng = random.Random(12)
    for _ in range(200):
        numel, num_shards, quantum = rng.randint(0, 99), rng.randint(1, 7), rng.randint(1, 9)
        shards = [shard_range(numel, num_shards, i, quantum=quantum) for i in range(num_shards)]
        size = shards[0][1]
        assert shards == [(i * size, (i + 1) * size) for i in range(num_shards)]
        assert size % quantum == 0
        assert num_shards * size >= numel > num_shards * (size - quantum) or size == 0 == numel


def test_memory_bytes_match_each_strategy():
    grid = RankGrid(world_size=8, tp=2, cp=2, etp=1, ep=4)  # dp x cp 4, edp 2
    dense = WeightSharding.of("w", (10, 6), Shard(axis="tp", dim=0))  # 30 elements a rank
    expert = WeightSharding.of("e", (8, 6), Shard(axis="ep", dim=0), expert=True)  # 12 a rank
    for name, on_dense, on_expert in (
        ("no_shard", 30 * 18, 12 * 18),
        ("optim", 30 * (2 + 4) + Fraction(30 * 12, 4), 12 * (2 + 4) + Fraction(12 * 12, 2)),
        ("optim_grads", 30 * 2 + Fraction(30 * 16, 4), 12 * 2 + Fraction(12 * 16, 2)),
        ("optim_grads_params", Fraction(30 * 18, 4), Fraction(12 * 18, 2)),
    ):
        strategy_placement = placement(name)
        assert memory_bytes(dense, grid, strategy_placement, weight_bytes=2) == on_dense
        assert memory_bytes(expert, grid, strategy_placement, weight_bytes=2) == on_expert
    inner = Placement(weight=("cp",))
    assert memory_bytes(dense, grid, inner, weight_bytes=2) == 30 * (1 + 4 + 12)


def test_all_problems_of_a_sharding_are_listed():
    grid = RankGrid(world_size=4, tp=4)
    sharding = WeightSharding(
        name="bad",
        sub_weights=(
            SubWeight(name="axis", shape=(8, 6), shards=(Shard(axis="ep", dim=0),)),
            SubWeight(name="dim", shape=(8, 6), shards=(Shard(axis="tp", dim=2),)),
            SubWeight(name="parts", shape=(8, 6), shards=(Shard(axis="tp", dim=0, count=3),)),
            SubWeight(name="none", shape=(8, 6), shards=(Shard(axis="tp", dim=0, count=0),)),
            SubWeight(name="uneven", shape=(8, 6), shards=(Shard(axis="tp", dim=1),)),
            SubWeight(name="stack", shape=(8, 7)),
            SubWeight(name="twice", shape=(8, 6), shards=(Shard(axis="tp", dim=0),) * 2),
        ),
        gradient={"tp": "whole"},  # type: ignore[dict-item]
    )
    text = "\n".join(check(sharding, grid))
    for problem in (
        "axis: axis 'ep' is not one of",
        "dim: no dimension 2 in shape (8, 6)",
        "parts: 3 shards do not divide the 4 ranks of tp",
        "none: 0 shards do not divide the 4 ranks of tp",
        "uneven: dimension 1 of 6 does not divide by tp=4",
        "stack: shape (8, 7) does not stack in bad",
        "twice: sharded 2 times over tp",
        "bad: gradient on tp is 'whole'",
    ):
        assert problem in text


@pytest.mark.parametrize(("rows", "units"), [(6, 4), (8, 6), (12, 8)])
def test_units_that_do_not_interleave_evenly_are_refused(rows: int, units: int):
    shards = (Shard(axis="tp", dim=0),)
    sharding = WeightSharding(
        name="w", sub_weights=(SubWeight(name="a", shape=(rows,), shards=shards),), interleave=units
    )
    (problem,) = check(sharding, RankGrid(world_size=4, tp=4))
    assert f"a: {rows} rows in 4 shards do not interleave by {units} units evenly" in problem


def test_stacked_sub_weights_must_shard_inner_dims_alike():
    across = SubWeight(name="across", shape=(4, 8), shards=(Shard(axis="tp", dim=1),))
    along = SubWeight(name="along", shape=(4, 8), shards=(Shard(axis="tp", dim=0),))
    sharding = WeightSharding(name="w", sub_weights=(across, along))
    (problem,) = check(sharding, RankGrid(world_size=2, tp=2))
    assert problem == "along: shape (4, 8) does not stack in w"
