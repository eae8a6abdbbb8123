# SPDX-License-Identifier: Apache-2.0
"""Where the elements of a weight lie, against brute force over every rank and every element."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from fractions import Fraction

import pytest
import torch

from megatron.core.boxes import Box
from megatron.core.process_groups import RankGrid
from megatron.core.weight_sharding import (
    STRATEGIES,
    LocalBox,
    Placement,
    Shard,
    SubWeight,
    WeightSharding,
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


def descriptions(source: random.Random, grid: RankGrid) -> list[WeightSharding]:
    """Draw one description of every kind that models have; those that do not fit are left out."""
    tp, ep = grid.tp, grid.ep
    heads = source.choice([n for n in (1, 2, 4, 8) if n % tp == 0 or tp % n == 0])
    width = source.choice((1, 3, 4))
    rows = source.randint(1, 5)
    pieces = min(heads, tp)

    def part(name, size, *cuts, **more):
        return SubWeight(name=name, shape=(size, width), shards=cuts, **more)

    def tp_rows(count=None):
        return Shard(axis="tp", dim=0, count=count)

    expert = (Shard(axis="ep", dim=0), Shard(axis="etp", dim=0))
    drawn = [
        WeightSharding.of("vector", (rows,)),
        WeightSharding.of("vocabulary", (source.randint(1, 40), width), tp_rows()),
        WeightSharding.of(
            "padded", (source.randint(1, 40), width), tp_rows(), row_multiple=source.randint(2, 5)
        ),
        WeightSharding.of("row", (rows, tp * width), Shard(axis="tp", dim=1)),
        WeightSharding.of("stem", (rows, 3, 2 * tp, 2), Shard(axis="tp", dim=2)),
        WeightSharding(
            name="qkv",
            sub_weights=(
                part("q", 2 * tp * heads, tp_rows()),
                part("k", heads * rows, tp_rows(pieces)),
                part("v", heads * rows, tp_rows(pieces)),
            ),
        ),
        WeightSharding(
            name="interleaved",
            sub_weights=(part("a", tp * 2 * rows, tp_rows()), part("b", tp * 4, tp_rows())),
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
    return [d for d in drawn if not check(d, grid)]


def elements(box: LocalBox) -> list[tuple[tuple[int, ...], int]]:
    """List (logical index, place in the local tensor) of every element of a box."""
    ranges = [range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)]
    return [(index, box.start + i) for i, index in enumerate(itertools.product(*ranges))]


def cases():
    """Yield every grid with random descriptions on it."""
    source = random.Random(5)
    for grid in GRIDS:
        for _ in range(4):
            for sharding in descriptions(source, grid):
                yield grid, sharding


def holders(grid: RankGrid, sharding: WeightSharding) -> dict[str, dict[tuple[int, ...], list]]:
    """Map every logical tensor's elements to the (rank, counted) that hold them."""
    found: dict[str, dict[tuple[int, ...], list]] = {s.name: {} for s in sharding.sub_weights}
    for rank in range(grid.world_size):
        at = grid.coordinates(rank)
        if sharding.stages and at["pp"] not in sharding.stages:
            continue
        taken = []
        boxes = local_boxes(sharding, grid, at)
        for box in boxes:
            for index, place in elements(box):
                found[box.name].setdefault(index, []).append((rank, box.counted))
                taken.append(place)
        numel = math.prod(local_shape(sharding, grid))
        assert len(set(taken)) == len(taken), "two elements in one place"
        assert all(0 <= place < numel for place in taken)
        assert [b.start for b in boxes] == sorted(b.start for b in boxes)
    return found


def test_ranks_hold_each_element_equally_and_count_it_once():
    kinds = Counter()
    for grid, sharding in cases():
        kinds[sharding.name] += 1
        stages = len(set(sharding.stages)) or 1
        lanes = math.prod(grid.size(a) for a in sharding.data_axes)
        for segment in sharding.sub_weights:
            held = holders(grid, sharding)[segment.name]
            assert set(held) == set(itertools.product(*map(range, segment.shape)))
            copies = {len(ranks) for ranks in held.values()}
            ranks_of_weight = grid.world_size // grid.pp * (stages if sharding.stages else grid.pp)
            cuts = math.prod(segment.num_shards(a, grid) for a in sharding.axes)
            assert copies == {ranks_of_weight // cuts}
            # Without stages every stage has a weight of its own under this name: one count each.
            times = lanes * (1 if sharding.stages else grid.pp)
            for ranks in held.values():
                assert sum(counted for _, counted in ranks) == times
    assert len(kinds) == 11, f"kinds that never fitted a grid: {kinds}"


def test_replica_ranks_are_those_with_identical_boxes():
    several = 0
    for grid, sharding in cases():
        boxes = {}
        for rank in range(grid.world_size):
            at = grid.coordinates(rank)
            for segment in sharding.sub_weights:
                own = [b for b in local_boxes(sharding, grid, at) if b.name == segment.name]
                stage = "any" if sharding.stages else at["pp"]
                known = not sharding.stages or at["pp"] in sharding.stages
                boxes[rank, segment.name] = known and (
                    stage,
                    [(b.offsets, b.sizes) for b in own],
                )
        for (rank, name), content in boxes.items():
            if not content or not content[1]:
                continue
            same = tuple(r for r in range(grid.world_size) if boxes[r, name] == content)
            several += len(same) > 1
            assert replica_ranks(sharding, name, grid=grid, rank=rank) == same
    assert several > 100


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
    both = placement("optim_grads_params", "optim")
    assert (both.weight, both.gradient) == (plain.weight, plain.gradient)
    assert replica_ranks(dense, "w", grid=grid, rank=1, sharded=both.optimizer) == (1,)
    assert replica_ranks(expert, "e", grid=grid, rank=1, sharded=both.optimizer) == (1,)


def test_the_stages_of_sharding_add_one_role_each():
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
        wanted = torch.cat([query.chunk(4)[rank], key.chunk(2)[rank // 2]]).flatten()
        assert torch.equal(local, wanted)


def test_interleaved_units_hold_their_share_of_every_segment():
    grid = RankGrid(world_size=2, tp=2)
    cut = (Shard(axis="tp", dim=0),)
    sharding = WeightSharding(
        name="qkv",
        sub_weights=(
            SubWeight(name="q", shape=(8,), shards=cut),
            SubWeight(name="k", shape=(4,), shards=cut),
        ),
        interleave=4,
    )
    assert [
        (b.name, b.offsets[0], b.sizes[0]) for b in local_boxes(sharding, grid, {**AT, "tp": 1})
    ] == [("q", 4, 2), ("k", 2, 1), ("q", 6, 2), ("k", 3, 1)]


AT = RankGrid(world_size=1).coordinates(0)


def test_shapes_and_padding():
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


def test_ranges_of_boxes_hold_exactly_the_elements_between():
    source = random.Random(11)
    for _ in range(400):
        shape = tuple(source.randint(1, 5) for _ in range(source.randint(1, 4)))
        sizes = tuple(source.randint(1, n) for n in shape)
        offsets = tuple(source.randint(0, n - m) for n, m in zip(shape, sizes, strict=True))
        first = source.randint(0, 9)
        box = LocalBox(name="w", shape=shape, box=Box(offsets, sizes), start=first, counted=True)
        start, stop = sorted(source.randint(0, first + box.numel + 5) for _ in range(2))
        found = range_boxes([box], start, stop)
        assert len(found) <= max(1, 2 * len(shape) - 1)
        wanted = [(i, at - start) for i, at in elements(box) if start <= at < stop]
        assert sorted(e for b in found for e in elements(b)) == sorted(wanted)
        assert [b.start for b in found] == sorted(b.start for b in found)
        assert all(b.counted and b.shape == shape for b in found)


def test_shards_are_equal_aligned_and_reach_the_end():
    source = random.Random(12)
    for _ in range(200):
        numel, parts, quantum = source.randint(0, 99), source.randint(1, 7), source.randint(1, 9)
        shards = [shard_range(numel, parts, i, quantum=quantum) for i in range(parts)]
        size = shards[0][1]
        assert shards == [(i * size, (i + 1) * size) for i in range(parts)]
        assert size % quantum == 0
        assert parts * size >= numel > parts * (size - quantum) or size == 0 == numel


def test_memory_of_the_strategies():
    grid = RankGrid(world_size=8, tp=2, cp=2, etp=1, ep=4)  # 4 lanes, 2 expert lanes
    dense = WeightSharding.of("w", (10, 6), Shard(axis="tp", dim=0))  # 30 elements a rank
    expert = WeightSharding.of("e", (8, 6), Shard(axis="ep", dim=0), expert=True)  # 12 a rank
    for name, on_dense, on_expert in (
        ("no_shard", 30 * 18, 12 * 18),
        ("optim", 30 * (2 + 4) + Fraction(30 * 12, 4), 12 * (2 + 4) + Fraction(12 * 12, 2)),
        ("optim_grads", 30 * 2 + Fraction(30 * 16, 4), 12 * 2 + Fraction(12 * 16, 2)),
        ("optim_grads_params", Fraction(30 * 18, 4), Fraction(12 * 18, 2)),
    ):
        placed = placement(name)
        assert memory_bytes(dense, grid, placed, weight_bytes=2) == on_dense
        assert memory_bytes(expert, grid, placed, weight_bytes=2) == on_expert
    inner = Placement(weight=("cp",))
    assert memory_bytes(dense, grid, inner, weight_bytes=2) == 30 * (1 + 4 + 12)


def test_every_fault_of_a_description_is_listed():
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
    for part in (
        "axis: axis 'ep' is not one of",
        "dim: no dimension 2 in shape (8, 6)",
        "parts: 3 shards do not divide the 4 ranks of tp",
        "none: 0 shards do not divide the 4 ranks of tp",
        "uneven: dimension 1 of 6 does not divide by tp=4",
        "stack: shape (8, 7) does not stack in bad",
        "twice: sharded 2 times over tp",
        "bad: gradient on tp is 'whole'",
    ):
        assert part in text


@pytest.mark.parametrize(("rows", "units"), [(6, 4), (8, 6), (12, 8)])
def test_units_that_do_not_interleave_evenly_are_refused(rows: int, units: int):
    cut = (Shard(axis="tp", dim=0),)
    sharding = WeightSharding(
        name="w", sub_weights=(SubWeight(name="a", shape=(rows,), shards=cut),), interleave=units
    )
    (problem,) = check(sharding, RankGrid(world_size=4, tp=4))
    assert f"a: {rows} rows in 4 shards do not interleave by {units} units evenly" in problem


def test_stacked_segments_must_be_cut_alike_inside():
    across = SubWeight(name="across", shape=(4, 8), shards=(Shard(axis="tp", dim=1),))
    along = SubWeight(name="along", shape=(4, 8), shards=(Shard(axis="tp", dim=0),))
    sharding = WeightSharding(name="w", sub_weights=(across, along))
    (problem,) = check(sharding, RankGrid(world_size=2, tp=2))
    assert problem == "along: shape (4, 8) does not stack in w"
