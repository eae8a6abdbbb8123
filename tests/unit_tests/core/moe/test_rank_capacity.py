# SPDX-License-Identifier: Apache-2.0
"""MoE layers with a fixed number of rows per rank, against a single process; overflow counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core import Group, ProcessGroupCollection, RankGrid
from megatron.core.comm import trace
from megatron.core.context_parallel import SequenceLayout
from megatron.core.moe import CapacityCheck
from megatron.core.moe.dispatch import RankCapacity
from tests.support.closeness import assert_all_close
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks
from tests.unit_tests.core.moe.single_layer import Layer, Shard, merged
from tests.unit_tests.core.moe.test_dispatch import (
    CONFIGS,
    DISPATCHERS,
    B,
    H,
    Reference,
    S,
    bias_of,
    inputs_of_rank,
)

FACTOR = 1.9
SAMPLES = torch.arange(B)
RankRun = tuple[int, slice, dict[str, torch.Tensor], list[Shard], float]


def run_layers(
    rank: int, world: int, degrees: dict[str, Any], scattered: bool, names: list[str]
) -> list[RankRun]:
    """Run the layers with every dispatcher."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank)
    dp_rank, tp = groups["dense_dp"].rank, groups["tp"]
    seq_slice = slice(0, S)
    if scattered:
        seq_slice = slice(tp.rank * S // tp.size, (tp.rank + 1) * S // tp.size)
    hidden, factors = (x[seq_slice] for x in inputs_of_rank(dp_rank))
    layout = SequenceLayout.of_rows(S).with_samples(SAMPLES)
    runs = []
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
            runs.append((dp_rank, seq_slice, tensors, layer.gradients(), needed))
    return runs


@pytest.mark.parametrize(
    ("degrees", "world", "scattered"),
    [
        ({"ep": 2}, 2, False),
        ({"etp": 2, "ep": 2}, 4, False),
        pytest.param({"tp": 2, "etp": 2, "ep": 2}, 4, True, marks=pytest.mark.slow),
    ],
)
def test_ranks_with_capacity_match_one_process(degrees: dict, world: int, scattered: bool):
    tp = degrees.get("tp", 1)
    names = list(CONFIGS) if tp == 1 else list(CONFIGS)[:2]
    runs = run_ranks(run_layers, world, degrees, scattered, names)
    for config_index, name in enumerate(names):
        expected_run = Reference(name, world // tp)
        for run_index in range(2 * config_index, 2 * config_index + 2):
            for dp_rank, seq_slice, tensors, *_ in (run[run_index] for run in runs):
                expected = {k: v[seq_slice] for k, v in expected_run.per_rank[dp_rank].items()}
                assert_all_close(tensors, expected, bound=5e-6)
            shards = [shard for run in runs for shard in run[run_index][3]]
            assert_all_close(merged(shards), expected_run.gradients, bound=5e-6)
            max_needed = max(run[run_index][4] for run in runs)
            assert (max_needed > 1.0) == (name != "some dropped"), (
                "an even load does not test padding"
            )


def test_overflow_is_counted_and_worst_layer_named():
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
        for num_rows in (rows, [1, 0]):  # a microbatch that fits comes after
            capacity.record(torch.tensor(num_rows), 20, 16.0)
    assert check.count().tolist() == [0 + 6 + 10]
    with pytest.raises(
        ValueError, match=r"layer 5 \(and 1 more layers\): 10 tokens .* 1.88 x .* 2 "
    ):
        check.fail()
    check.begin()
    assert check.count().tolist() == [0.0]
