# SPDX-License-Identifier: Apache-2.0
"""Experts on ranks that take a fixed number of rows: results of a single process, and what has no
room."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.comm import trace
from megatron.core.context_parallel import SequenceLayout
from megatron.core.moe.capacity import CapacityCheck, RankCapacity
from megatron.core.process_groups import Group, ProcessGroupCollection, RankGrid
from tests.support.closeness import assert_all_close
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks
from tests.unit_tests.core.moe.single_layer import Layer, Piece, merged
from tests.unit_tests.core.moe.test_dispatch import (
    CONFIGS,
    DISPATCHERS,
    B,
    H,
    Reference,
    S,
    bias_of,
    data_of_rank,
)

FACTOR = 1.9
SAMPLES = torch.arange(B)
Ran = tuple[int, slice, dict[str, torch.Tensor], list[Piece], float]


def on_grid(
    rank: int, world: int, degrees: dict[str, Any], scattered: bool, names: list[str]
) -> list[Ran]:
    """Run layers with every dispatcher."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank)
    lane, tp = groups["dense_dp"].rank, groups["tp"]
    part = slice(0, S)
    if scattered:
        part = slice(tp.rank * S // tp.size, (tp.rank + 1) * S // tp.size)
    hidden, factors = (x[part] for x in data_of_rank(lane))
    layout = SequenceLayout.of_rows(S).with_samples(SAMPLES)
    found = []
    for name in names:
        for dispatcher in DISPATCHERS:
            layer = Layer(
                CONFIGS[name],
                groups,
                hidden_size=H,
                bias=bias_of(name),
                sequence_parallel=scattered,
                dispatcher=dispatcher,
                expert_rank_capacity_factor=FACTOR if name != "one expert for all" else 4.0,
            )
            with trace(groups) as records, nan_memory():
                out, dx = layer.step(hidden, factors, layout)
            assert layer.moe.capacity is not None
            sent = [r.bytes for r in records if r.kind == "all_to_all"]
            assert len(set(sent)) == (dispatcher == "alltoall"), "blocks of one size"
            tensors = {"out": out, "dx": dx}
            assert layer.moe.capacity.excess <= 0
            needed = layer.moe.capacity.needed()
            found.append((lane, part, tensors, layer.gradients(), needed))
    return found


@pytest.mark.parametrize(
    ("degrees", "world", "scattered"),
    [
        ({"ep": 2}, 2, False),
        ({"etp": 2, "ep": 2}, 4, False),
        pytest.param({"tp": 2, "etp": 2, "ep": 2}, 4, True, marks=pytest.mark.slow),
    ],
)
def test_ranks_with_room_equal_one_process(degrees: dict, world: int, scattered: bool):
    tp = degrees.get("tp", 1)
    names = list(CONFIGS) if tp == 1 else list(CONFIGS)[:2]
    runs = run_ranks(on_grid, world, degrees, scattered, names)
    for index, name in enumerate(names):
        wanted = Reference(name, world // tp)
        for number in range(2 * index, 2 * index + 2):
            for lane, part, tensors, *_ in (run[number] for run in runs):
                reference = {k: v[part] for k, v in wanted.lanes[lane].items()}
                assert_all_close(tensors, reference, bound=5e-6)
            pieces = [piece for run in runs for piece in run[number][3]]
            assert_all_close(merged(pieces), wanted.gradients, bound=5e-6)
            most = max(run[number][4] for run in runs)
            assert (most > 1.0) == (name != "some dropped"), "an even load tests no padding"


def test_what_has_no_room_is_counted_and_the_worst_layer_named():
    capacities = [RankCapacity(1.25) for _ in range(3)]
    assert capacities[0].rows(16.0, 100) == 20
    assert capacities[0].rows(16.0, 17) == 17
    check = CapacityCheck(
        zip(("layer 0", "layer 2", "layer 5"), capacities, strict=True),
        ["layer 0", "layer 1", "layer 2", "layer 5"],
        world=Group.single("world"),
    )
    assert check.count().tolist() == [0.0]
    for capacity, rows in zip(capacities, ([20, 3], [26, 21], [22, 30]), strict=True):
        for given in (rows, [1, 0]):  # a microbatch that fits comes after
            capacity.record(torch.tensor(given), 20, 16.0)
    assert check.count().tolist() == [0 + 6 + 10]
    with pytest.raises(
        ValueError, match=r"layer 5 \(and 1 more layers\): 10 tokens .* 1.88 x .* 2 "
    ):
        check.fail()
    check.begin()
    assert check.count().tolist() == [0.0]
