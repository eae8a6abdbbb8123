# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages on ranks against the whole model: weights, replicas, checkpoints.

`tests/parity` compares the losses and gradients of every schedule and split.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.dist_checkpointing import (
    Coordinator,
    Solo,
    TensorChunk,
    load_checkpoint,
    save_checkpoint,
)
from megatron.core.models import GPTModel
from megatron.core.models.layer_pattern import StageSplit
from tests.support.closeness import assert_all_equal
from tests.support.ranks import run_ranks
from tests.unit_tests.core.models.chunk_steps import (
    MODELS,
    move,
    weight_values,
)

#: World size -> (tp, pattern). The other ranks are pipeline stages; chunks of a stage are p apart.
SPLITS = {
    2: (
        (1, "*-*-|*-"),
        (1, "*|-*-*-"),
        (1, "*-|*-|*|-"),
        (1, "|*-*-|*-|"),
    ),
    4: (
        (1, "*-|*-*||-"),
        (1, "*|-|*|-|*|-||"),
        (2, "*-*|-*-"),
    ),
}
CASES = [(name, *split) for world in SPLITS for name in MODELS for split in SPLITS[world]]
for_all_cases = pytest.mark.parametrize(
    "case", CASES, ids=[f"{name}-tp{tp}-{pattern}" for name, tp, pattern in CASES]
)


def split_of(pattern: str, groups: ProcessGroupCollection) -> StageSplit:
    """Split a pattern over the pipeline stages of `groups`."""
    return StageSplit.from_pattern(pattern, groups["pp"].size)


def build_on_ranks(rank: int, world: int) -> dict[tuple, dict]:
    """Build a model with every split; return this rank's values for each."""
    outputs = {}
    grids = {tp: RankGrid(world_size=world, tp=tp, pp=world // tp) for tp, _ in SPLITS[world]}
    groups = {tp: ProcessGroupCollection.create(grid, rank=rank) for tp, grid in grids.items()}
    for (name, config), (tp, pattern) in itertools.product(MODELS.items(), SPLITS[world]):
        options = {"sequence_parallel": tp > 1, "split": split_of(pattern, groups[tp])}
        fresh = GPTModel(config, groups[tp], seed=5, **options)
        replicas = {
            (chunk.name, chunk.box.offsets): chunk.replica_ranks
            for handle in fresh.store.handles.values()
            for chunk in fresh.store.chunks(handle)
        }
        bucket_chunks = {
            b.handles[0].name: (b.model_chunk, len(b.handles)) for b in fresh.store.buckets
        }
        initial = weight_values(fresh)
        outputs[name, tp, pattern] = {
            "initial": initial,
            "replicas": replicas,
            "bucket_chunks": bucket_chunks,
            "holds_ends": (fresh.holds_embedding, fresh.holds_head),
            "chunks": fresh.num_chunks,
            "parameters": (fresh.num_parameters, fresh.store.num_parameters),
        }
    return outputs


@pytest.fixture(scope="module")
def ranks() -> dict[tuple, list[dict]]:
    """The values of all ranks for each case."""
    with_two, with_four = run_ranks(build_on_ranks, 2), run_ranks(build_on_ranks, 4)
    outputs = [*with_two, *with_four]
    return {
        case: [rank_outputs[case] for rank_outputs in outputs if case in rank_outputs]
        for case in CASES
    }


@pytest.fixture(scope="module")
def whole() -> dict[str, dict]:
    """The values of unsplit models in one process, by name."""
    outputs = {}
    for name, config in MODELS.items():
        fresh = GPTModel(config, ProcessGroupCollection.single(), seed=5)
        initial = {key: tensor for (key, _), tensor in weight_values(fresh).items()}
        outputs[name] = {
            "initial": initial,
            "parameters": fresh.store.num_parameters,
        }
    return outputs


def stages_of(case: tuple, count: int) -> list[range]:
    """Return the ranks of each stage of a case."""
    tp = case[1]
    return [range(start, start + tp) for start in range(0, count, tp)]


def slice_of_box(tensor: torch.Tensor, offsets: tuple[int, ...], sizes: torch.Size) -> torch.Tensor:
    """Return a box of a tensor."""
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


@for_all_cases
def test_stages_hold_every_weight_exactly_once(case, ranks, whole):
    expected, outputs = whole[case[0]]["initial"], ranks[case]
    owners = defaultdict(set)
    elements: dict[str, int] = defaultdict(int)
    for stage, members in enumerate(stages_of(case, len(outputs))):
        for rank in members:
            for (name, offsets), tensor in outputs[rank]["initial"].items():
                assert torch.equal(tensor, slice_of_box(expected[name], offsets, tensor.shape)), (
                    name
                )
                owners[name].add(stage)
                replicas = outputs[rank]["replicas"][name, offsets]
                assert rank in replicas
                elements[name] += tensor.numel() if rank == replicas[0] else 0
    assert owners.keys() == expected.keys()
    final_stage = len(outputs) // case[1] - 1
    for name, stages in owners.items():
        tied = case[0] == "tied" and name == "embedding.weight"
        assert len(stages) == 1 or (tied and stages == {0, final_stage}), name
    assert elements == {name: tensor.numel() for name, tensor in expected.items()}


@for_all_cases
def test_replicas_are_the_ranks_with_the_same_box(case, ranks):
    outputs = ranks[case]
    holders = defaultdict(list)
    for rank, rank_outputs in enumerate(outputs):
        for key in rank_outputs["initial"]:
            holders[key].append(rank)
    for rank_outputs in outputs:
        for key, replicas in rank_outputs["replicas"].items():
            assert replicas == tuple(holders[key]), key


@for_all_cases
def test_chunks_and_end_layers_are_on_the_right_stages(case, ranks, whole):
    outputs, (name, _, pattern) = ranks[case], case
    stages = stages_of(case, len(outputs))
    chunks = (pattern.count("|") + 1) // len(stages)
    for stage, members in enumerate(stages):
        for rank in members:
            rank_outputs = outputs[rank]
            assert rank_outputs["chunks"] == chunks
            assert rank_outputs["holds_ends"] == (stage == 0, stage == len(stages) - 1)
            assert rank_outputs["parameters"][0] == whole[name]["parameters"]
            if name == "tied" and any(rank_outputs["holds_ends"]):
                chunk = 0 if stage == 0 else chunks - 1
                assert rank_outputs["bucket_chunks"]["embedding.weight"] == (chunk, 1)
    local = sum(outputs[members[0]]["parameters"][1] for members in stages)
    table = math.prod(whole[name]["initial"]["embedding.weight"].shape)
    assert local == whole[name]["parameters"] + (table if name == "tied" else 0)


def chunks_of(model: GPTModel) -> list[TensorChunk]:
    """Return the tensors of a rank's weights for a checkpoint."""
    return [
        TensorChunk(
            name=chunk.name,
            shape=chunk.shape,
            offsets=chunk.box.offsets,
            tensor=chunk.tensor,
            replica_ranks=chunk.replica_ranks,
        )
        for handle in model.store.handles.values()
        for chunk in model.store.chunks(handle)
    ]


#: (tp, pattern) of four ranks; each layout loads the checkpoint that the previous one saves.
CHAIN = ((1, "*-|*-*||-"), (2, "*|-*-|*|-"), (2, "|*-*-*-"), (4, "*-*-*-"), (1, "*|-|*|-|*|-||"))


def reshard_along_chain(rank: int, world: int, root: str) -> list[int]:
    """Load and save the checkpoint in each layout; return the numbers of local elements."""
    world_groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    coordinator = Coordinator.from_groups(world_groups, timeout_seconds=20.0)
    counts = []
    for step, (tp, pattern) in enumerate(CHAIN):
        groups = ProcessGroupCollection.create(
            RankGrid(world_size=world, tp=tp, pp=world // tp), rank=rank
        )
        for name, config in MODELS.items():
            # Another seed: values that are not loaded differ.
            model = GPTModel(config, groups, seed=40 + step, split=split_of(pattern, groups))
            folder = Path(root, name, f"iter_{step:07d}")
            load_checkpoint(folder, chunks_of(model), coordinator=coordinator)
            counts.append(sum(chunk.tensor.numel() for chunk in chunks_of(model)))
            extra = {"step": step}
            save_checkpoint(
                Path(root, name), step + 1, chunks_of(model), extra, coordinator=coordinator
            )
    return counts


def test_checkpoint_loads_on_any_other_split(tmp_path):
    models = {
        name: move(GPTModel(c, ProcessGroupCollection.single())) for name, c in MODELS.items()
    }
    for name, model in models.items():
        save_checkpoint(tmp_path / name, 0, chunks_of(model), {}, coordinator=Solo())
    counts = run_ranks(reshard_along_chain, 4, str(tmp_path))
    assert counts[2][0] == 0, "a stage without weights takes part"
    for name, config in MODELS.items():
        loaded = GPTModel(config, ProcessGroupCollection.single(), seed=99)
        load_checkpoint(tmp_path / name / f"iter_{len(CHAIN):07d}", chunks_of(loaded))
        actual, expected = weight_values(loaded), weight_values(models[name])
        assert_all_equal(actual, expected)
