# SPDX-License-Identifier: Apache-2.0
"""Experts are stored by global index: saved on one grid, loaded byte for byte on any other."""

from __future__ import annotations

import math
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
    read_manifest,
    save_checkpoint,
    weight_chunks,
)
from megatron.core.optimizer import OptimizerConfig
from megatron.core.weight_sharding import STRATEGIES
from tests.support.inputs import generator
from tests.support.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.layouts import poison, same_bits
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
KINDS = ("master", "exp_avg", "exp_avg_sq")
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


def load_and_compare(model: ExpertModel, folder: Path, coordinator) -> int:
    """Load into poisoned memory; return the number of elements compared."""
    chunks = chunks_of(model)
    for chunk in chunks:
        chunk.tensor.copy_(poison(tuple(chunk.tensor.shape), chunk.tensor.dtype))
    load_checkpoint(folder, chunks, coordinator=coordinator)
    for chunk in chunks:
        assert same_bits(chunk.tensor.contiguous(), expected_values(chunk)), chunk
    return sum(chunk.tensor.numel() for chunk in chunks)


def save_and_load_layouts(rank: int, world: int, root: str) -> list[list]:
    """Save on every layout, load on the next two; return each layout's initial weights."""
    torch.set_num_threads(1)
    world_groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    coordinator = Coordinator.from_groups(world_groups, timeout_seconds=20.0)
    models, initial_weights = [], []
    for index, (degrees, parallel) in enumerate(LAYOUTS):
        groups = ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank)
        model = build_model(groups, parallel)
        initial_weights.append(model.shards())
        for chunk in chunks_of(model):
            chunk.tensor.copy_(expected_values(chunk))
        save_checkpoint(root, index, chunks_of(model), {}, coordinator=coordinator)
        models.append(model)
    for index, model in enumerate(models):
        for distance in (1, 2):
            folder = Path(root, f"iter_{(index - distance) % len(LAYOUTS):07d}")
            assert load_and_compare(model, folder, coordinator) > 0
    return initial_weights


def test_experts_load_on_any_other_grid(tmp_path: Path):
    ranks = run_ranks(save_and_load_layouts, 4, str(tmp_path))
    single = build_model(ProcessGroupCollection.single(), {"strategy": STRATEGIES[3]})
    initial_weights = assemble(single.shards())
    for (_, parallel), *rank_shards in zip(LAYOUTS, *ranks, strict=True):
        if "gather_format" in parallel:
            continue  # the gathered weights are rounded, the stored ones are not
        actual = assemble([shard for shards in rank_shards for shard in shards])
        assert all(torch.equal(actual[name], values) for name, values in initial_weights.items())
    numel = sum(math.prod(shape) for shape in SHAPES.values())
    names = {
        *SHAPES,
        BIAS,
        STEPS,
        *(f"optimizer.{kind}/{name}" for kind in KINDS for name in SHAPES),
    }
    for number in range(len(LAYOUTS)):
        folder = tmp_path / f"iter_{number:07d}"
        assert load_and_compare(single, folder, Solo()) == 4 * numel + EXPERTS + 1
        manifest = read_manifest(folder)
        assert set(manifest.tensors) == names
        stored = [
            chunk.box.numel for tensor in manifest.tensors.values() for chunk in tensor.chunks
        ]
        assert sum(stored) == 4 * numel + EXPERTS + 1, "every element is stored once"


def test_comparison_detects_exchanged_experts(tmp_path: Path):
    """`load_and_compare` detects two exchanged experts, as it must on any grid."""
    single = build_model(ProcessGroupCollection.single(), {})
    for chunk in chunks_of(single):
        chunk.tensor.copy_(expected_values(chunk))
    down = next(chunk for chunk in weight_chunks(single.store) if chunk.name == "0.down")
    down.tensor[[1, 2]] = down.tensor[[2, 1]]
    folder = save_checkpoint(tmp_path, 1, chunks_of(single), {}, coordinator=Solo())
    with pytest.raises(AssertionError, match=r"name='0.down'"):
        load_and_compare(single, folder, Solo())


def test_different_number_of_experts_is_refused(tmp_path: Path):
    single = build_model(ProcessGroupCollection.single(), {})
    folder = save_checkpoint(tmp_path, 1, chunks_of(single), {}, coordinator=Solo())
    larger = TensorChunk(
        name="0.down",
        shape=(EXPERTS + 1, *SHAPES["0.down"][1:]),
        offsets=(0, 0, 0),
        tensor=torch.zeros(EXPERTS + 1, *SHAPES["0.down"][1:], dtype=torch.bfloat16),
        replica_ranks=(0,),
    )
    with pytest.raises(CheckpointError, match=r"0\.down"):
        load_checkpoint(folder, [larger], coordinator=Solo())
