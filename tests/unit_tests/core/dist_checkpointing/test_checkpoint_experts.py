# SPDX-License-Identifier: Apache-2.0
"""Experts in checkpoints by global index: saved on one grid, loaded on any other, byte for byte."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

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
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.weight_sharding import STRATEGIES
from tests.support.inputs import generator
from tests.support.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.layouts import poison, same_bits
from tests.unit_tests.core.distributed.expert_weights import (
    EXPERTS,
    SHAPES,
    ExpertModel,
    of_stage,
    whole_of,
)

#: Grids of four ranks, and what is sharded over their data-parallel ranks.
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
#: A state of the model that is no weight, and its global size.
BIAS, BIAS_SHAPE = "0.router.expert_bias", (EXPERTS,)
KINDS = ("master", "exp_avg", "exp_avg_sq")
STEPS = "optimizer.steps"


def built(groups: ProcessGroupCollection, parallel: dict[str, object]) -> ExpertModel:
    """Return bf16 weights with Adam's state beside them, and a state where the router is."""
    has = of_stage(groups)
    model = ExpertModel(
        groups, parallel=parallel, optimizer=OptimizerConfig(), dtype=torch.bfloat16, has=has
    )
    if has("0.router"):
        model.store.declare_state(BIAS, BIAS_SHAPE)
    return model


def chunks_of(model: ExpertModel) -> list[TensorChunk]:
    return weight_chunks(model.store) + optimizer_chunks(model.optimizer)


def logical(name: str) -> torch.Tensor:
    """Return what a tensor of the checkpoint is to hold."""
    if name == STEPS:
        return torch.tensor(7)
    state, _, weight = name.rpartition("/")
    shape = BIAS_SHAPE if name == BIAS else SHAPES[weight]
    dtype = torch.float32 if state or name == BIAS else torch.bfloat16
    return torch.randn(shape, generator=generator(3, *name.encode())).to(dtype)


def part(chunk: TensorChunk) -> torch.Tensor:
    """Return what a chunk is to hold."""
    places = zip(chunk.offsets, chunk.tensor.shape, strict=True)
    return logical(chunk.name)[tuple(slice(first, first + size) for first, size in places)]


def load_and_compare(model: ExpertModel, folder: Path, coordinator) -> int:
    """Load into memory that held something else; return how many elements were compared."""
    chunks = chunks_of(model)
    for chunk in chunks:
        chunk.tensor.copy_(poison(tuple(chunk.tensor.shape), chunk.tensor.dtype))
    load_checkpoint(folder, chunks, coordinator=coordinator)
    for chunk in chunks:
        assert same_bits(chunk.tensor.contiguous(), part(chunk)), chunk
    return sum(chunk.tensor.numel() for chunk in chunks)


def on_layouts(rank: int, world: int, root: str) -> list[list]:
    """Save on every layout, load on the two next ones; return each layout's initial weights."""
    torch.set_num_threads(1)
    world_groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    coordinator = Coordinator.from_groups(world_groups, timeout_seconds=20.0)
    models, started = [], []
    for number, (degrees, parallel) in enumerate(LAYOUTS):
        groups = ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank)
        model = built(groups, parallel)
        started.append(model.pieces())
        for chunk in chunks_of(model):
            chunk.tensor.copy_(part(chunk))
        save_checkpoint(root, number, chunks_of(model), {}, coordinator=coordinator)
        models.append(model)
    for number, model in enumerate(models):
        for before in (1, 2):
            folder = Path(root, f"iter_{(number - before) % len(LAYOUTS):07d}")
            assert load_and_compare(model, folder, coordinator) > 0
    return started


def test_any_grid_loads_what_any_other_has_saved(tmp_path: Path):
    ranks = run_ranks(on_layouts, 4, str(tmp_path))
    alone = built(ProcessGroupCollection.single(), {"strategy": STRATEGIES[3]})
    wanted = whole_of(alone.pieces())
    for (_, parallel), *pieces in zip(LAYOUTS, *ranks, strict=True):
        if "gather_format" in parallel:
            continue  # what it multiplies with is rounded, what it stores is not
        found = whole_of([piece for one in pieces for piece in one])
        assert all(torch.equal(found[name], values) for name, values in wanted.items())
    numel = sum(math.prod(shape) for shape in SHAPES.values())
    names = {
        *SHAPES,
        BIAS,
        STEPS,
        *(f"optimizer.{kind}/{name}" for kind in KINDS for name in SHAPES),
    }
    for number in range(len(LAYOUTS)):
        folder = tmp_path / f"iter_{number:07d}"
        assert load_and_compare(alone, folder, Solo()) == 4 * numel + EXPERTS + 1
        manifest = read_manifest(folder)
        assert set(manifest.tensors) == names
        stored = [
            math.prod(chunk.box.sizes) for one in manifest.tensors.values() for chunk in one.chunks
        ]
        assert sum(stored) == 4 * numel + EXPERTS + 1, "everything once"


def test_experts_under_another_index_are_seen(tmp_path: Path):
    """The test above would see experts of another rank: here are two that are exchanged."""
    alone = built(ProcessGroupCollection.single(), {})
    for chunk in chunks_of(alone):
        chunk.tensor.copy_(part(chunk))
    down = next(chunk for chunk in weight_chunks(alone.store) if chunk.name == "0.down")
    down.tensor[[1, 2]] = down.tensor[[2, 1]]
    folder = save_checkpoint(tmp_path, 1, chunks_of(alone), {}, coordinator=Solo())
    with pytest.raises(AssertionError, match=r"name='0.down'"):
        load_and_compare(alone, folder, Solo())


def test_another_number_of_experts_is_refused(tmp_path: Path):
    alone = built(ProcessGroupCollection.single(), {})
    folder = save_checkpoint(tmp_path, 1, chunks_of(alone), {}, coordinator=Solo())
    more = TensorChunk(
        name="0.down",
        shape=(EXPERTS + 1, *SHAPES["0.down"][1:]),
        offsets=(0, 0, 0),
        tensor=torch.zeros(EXPERTS + 1, *SHAPES["0.down"][1:], dtype=torch.bfloat16),
        replica_ranks=(0,),
    )
    with pytest.raises(CheckpointError, match=r"0\.down"):
        load_checkpoint(folder, [more], coordinator=Solo())
