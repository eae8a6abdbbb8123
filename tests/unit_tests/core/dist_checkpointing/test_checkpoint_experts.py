# SPDX-License-Identifier: Apache-2.0
"""Experts are stored by global index: saved on one grid, loaded byte for byte on any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.dist_checkpointing import (
    CheckpointError,
    Coordinator,
    Solo,
    TensorChunk,
    load_checkpoint,
    optimizer_chunks,
    save_checkpoint,
    weight_chunks,
)
from megatron.core.optimizer import OptimizerConfig
from megatron.core.weight_sharding import STRATEGIES
from tests.support.inputs import generator
from tests.support.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.layouts import (
    check_single_process_loads,
    fill,
    full_chunks,
    load_and_compare,
    save_and_load_layouts,
)
from tests.unit_tests.core.distributed.expert_weights import (
    EXPERTS,
    SHAPES,
    ExpertModel,
    assemble,
    stage_filter,
)

#: Grids of four ranks, and the options of each grid's data-parallel engine.
LAYOUTS: tuple[tuple[dict[str, int], dict[str, object]], ...] = (
    ({"ep": 4}, {"strategy": STRATEGIES[1]}),
    ({"ep": 2, "etp": 2}, {"strategy": STRATEGIES[0]}),
    ({"tp": 2, "etp": 1, "ep": 2}, {"strategy": STRATEGIES[3]}),
    ({"tp": 2, "etp": 1}, {"strategy": STRATEGIES[1]}),
    ({"pp": 2, "etp": 2}, {"strategy": STRATEGIES[3]}),
    ({"ep": 2, "instances": 2}, {"strategy": STRATEGIES[3], "outer": "optim"}),
    ({"gtp": 2, "ep": 2}, {"strategy": STRATEGIES[1]}),
    ({"gtp": 4, "ep": 2, "egtp": 2}, {"strategy": STRATEGIES[0]}),
    ({"tp": 2, "gtp": 2, "etp": 1, "egtp": 4}, {"strategy": STRATEGIES[2]}),
    (
        {"gtp": 2, "etp": 2, "egtp": 2},
        {"strategy": STRATEGIES[1], "gather_format": "mxfp8", "gtp_reduce_scatter_per": "step"},
    ),
)
#: A buffer of the model that is not a weight, and its global shape.
BIAS, BIAS_SHAPE = "0.router.expert_bias", (EXPERTS,)
STEPS = "optimizer.steps"


def build_model(groups: ProcessGroupCollection, parallel: dict[str, object]) -> ExpertModel:
    """Return bf16 weights with Adam's state, and the router's bias on the router's stage."""
    on_stage = stage_filter(groups)
    model = ExpertModel(
        groups, parallel=parallel, optimizer=OptimizerConfig(), dtype=torch.bfloat16, has=on_stage
    )
    if on_stage("0.router"):
        model.store.declare_state(BIAS, BIAS_SHAPE)
    return model


def chunks_of(model: ExpertModel) -> list[TensorChunk]:
    return weight_chunks(model.store) + optimizer_chunks(model.optimizer)


def logical(name: str) -> torch.Tensor:
    """Return the expected full value of a tensor in the checkpoint."""
    if name == STEPS:
        return torch.tensor(7)
    state, _, weight = name.rpartition("/")
    shape = BIAS_SHAPE if name == BIAS else SHAPES[weight]
    dtype = torch.float32 if state or name == BIAS else torch.bfloat16
    return torch.randn(shape, generator=generator(3, *name.encode())).to(dtype)


def expected_values(chunk: TensorChunk) -> torch.Tensor:
    """Return the expected values of a chunk."""
    ranges = zip(chunk.offsets, chunk.tensor.shape, strict=True)
    return logical(chunk.name)[tuple(slice(begin, begin + size) for begin, size in ranges)]


def save_and_load(rank: int, world: int, root: str) -> list[list]:
    """Save on every layout, load on the next two; return each layout's initial weights."""
    torch.set_num_threads(1)
    world_groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    coordinator = Coordinator.from_groups(world_groups, timeout_seconds=20.0)
    layouts, initial_weights = [], []
    for degrees, parallel in LAYOUTS:
        groups = ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank)
        model = build_model(groups, parallel)
        initial_weights.append(model.shards())
        layouts.append(chunks_of(model))
    save_and_load_layouts(root, layouts, coordinator, expected_values, distances=(1, 2))
    return initial_weights


def test_experts_load_on_any_other_grid(tmp_path: Path):
    ranks = run_ranks(save_and_load, 4, str(tmp_path))
    single = build_model(ProcessGroupCollection.single(), {"strategy": STRATEGIES[3]})
    initial_weights = assemble(single.shards())
    for (_, parallel), *rank_shards in zip(LAYOUTS, *ranks, strict=True):
        if "gather_format" in parallel:
            continue  # the gathered weights are rounded, the stored ones are not
        actual = assemble([shard for shards in rank_shards for shard in shards])
        assert all(torch.equal(actual[name], values) for name, values in initial_weights.items())
    check_single_process_loads(tmp_path, len(LAYOUTS), chunks_of(single), expected_values)


def test_comparison_detects_exchanged_experts(tmp_path: Path):
    """`load_and_compare` detects two exchanged experts, as it must on any grid."""
    chunks = chunks_of(build_model(ProcessGroupCollection.single(), {}))
    fill(chunks, expected_values)
    down = next(chunk for chunk in chunks if chunk.name == "0.down")
    down.tensor[[1, 2]] = down.tensor[[2, 1]]
    folder = save_checkpoint(tmp_path, 1, chunks, {}, coordinator=Solo())
    with pytest.raises(AssertionError, match=r"name='0.down'"):
        load_and_compare(chunks, folder, Solo(), expected_values)


def test_different_number_of_experts_is_refused(tmp_path: Path):
    single = build_model(ProcessGroupCollection.single(), {})
    folder = save_checkpoint(tmp_path, 1, chunks_of(single), {}, coordinator=Solo())
    larger = torch.zeros(EXPERTS + 1, *SHAPES["0.down"][1:], dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"0\.down"):
        load_checkpoint(folder, full_chunks({"0.down": larger}))
