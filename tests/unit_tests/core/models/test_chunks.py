# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages on ranks against the whole model: weights, losses, gradients, checkpoints."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import (
    Coordinator,
    Solo,
    TensorChunk,
    load_checkpoint,
    save_checkpoint,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.layer_pattern import StageSplit
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tests.support.closeness import assert_all_close, assert_close_by_metric
from tests.support.inputs import one_thread
from tests.support.ranks import run_ranks
from tests.unit_tests.core.models.chunk_steps import MODELS, built, move, trained, values

#: By ranks: (tp, pattern), pipeline stages are what is left. Chunks of one stage are p apart.
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
each_case = pytest.mark.parametrize(
    "case", CASES, ids=[f"{name}-tp{tp}-{pattern}" for name, tp, pattern in CASES]
)


def split_of(pattern: str, groups: ProcessGroupCollection) -> StageSplit:
    """Cut a pattern for the stages of these groups."""
    return StageSplit.from_pattern(pattern, groups["pp"].size)


def on_ranks(rank: int, world: int) -> dict[tuple, dict]:
    """Build and train every split; return what this rank has of each."""
    found = {}
    grids = {tp: RankGrid(world_size=world, tp=tp, pp=world // tp) for tp, _ in SPLITS[world]}
    groups = {tp: ProcessGroupCollection.create(grid, rank=rank) for tp, grid in grids.items()}
    for (name, config), (tp, pattern) in itertools.product(MODELS.items(), SPLITS[world]):
        options = {"sequence_parallel": tp > 1, "split": split_of(pattern, groups[tp])}
        fresh = GPTModel(config, groups[tp], seed=5, **options)
        held = {
            (each.name, each.box.offsets): each.replica_ranks
            for handle in fresh.store.handles.values()
            for each in fresh.store.chunks(handle)
        }
        parts = {b.handles[0].name: (b.model_chunk, len(b.handles)) for b in fresh.store.buckets}
        initial = values(fresh)
        losses, gradients = trained(built(config, groups[tp], **options))
        found[name, tp, pattern] = {
            "initial": initial,
            "replicas": held,
            "losses": losses,
            "gradients": gradients,
            "parts": parts,
            "ends": (fresh.holds_embedding, fresh.holds_head),
            "chunks": fresh.num_chunks,
            "parameters": (fresh.num_parameters, fresh.store.num_parameters),
        }
    return found


@pytest.fixture(scope="module")
def ranks() -> dict[tuple, list[dict]]:
    """What every rank has of every case."""
    with_two, with_four = run_ranks(on_ranks, 2), run_ranks(on_ranks, 4)
    found = [*with_two, *with_four]
    return {case: [each[case] for each in found if case in each] for case in CASES}


@pytest.fixture(scope="module")
def whole() -> dict[str, dict]:
    """The same of the whole models in one process, every tensor under its name."""
    found = {}
    for name, config in MODELS.items():
        fresh = GPTModel(config, ProcessGroupCollection.single(), seed=5)
        initial = {key: tensor for (key, _), tensor in values(fresh).items()}
        with one_thread():
            losses, gradients = trained(built(config))
        found[name] = {
            "initial": initial,
            "losses": losses,
            "gradients": {key: tensor for (key, _), tensor in gradients.items()},
            "parameters": fresh.store.num_parameters,
        }
    return found


def stages_of(case: tuple, count: int) -> list[range]:
    """Return the ranks of each stage of a case."""
    tp = case[1]
    return [range(first, first + tp) for first in range(0, count, tp)]


def narrowed(tensor: torch.Tensor, offsets: tuple[int, ...], sizes: torch.Size) -> torch.Tensor:
    """Return a box of a tensor."""
    for dim, (first, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, first, size)
    return tensor


@each_case
def test_all_stages_together_have_every_weight_once(case, ranks, whole):
    wanted, found = whole[case[0]]["initial"], ranks[case]
    owners = defaultdict(set)
    elements: dict[str, int] = defaultdict(int)
    for stage, members in enumerate(stages_of(case, len(found))):
        for rank in members:
            for (name, offsets), tensor in found[rank]["initial"].items():
                assert torch.equal(tensor, narrowed(wanted[name], offsets, tensor.shape)), name
                owners[name].add(stage)
                replicas = found[rank]["replicas"][name, offsets]
                assert rank in replicas
                elements[name] += tensor.numel() if rank == replicas[0] else 0
    assert owners.keys() == wanted.keys()
    last = len(found) // case[1] - 1
    for name, stages in owners.items():
        tied = case[0] == "tied" and name == "embedding.weight"
        assert len(stages) == 1 or (tied and stages == {0, last}), name
    assert elements == {name: tensor.numel() for name, tensor in wanted.items()}


@each_case
def test_replicas_are_the_ranks_with_the_same_box(case, ranks):
    found = ranks[case]
    holders = defaultdict(list)
    for rank, each in enumerate(found):
        for key in each["initial"]:
            holders[key].append(rank)
    for each in found:
        for key, replicas in each["replicas"].items():
            assert replicas == tuple(holders[key]), key


@each_case
def test_chunks_lie_in_parts_and_the_ends_where_they_belong(case, ranks, whole):
    found, (name, _, pattern) = ranks[case], case
    stages = stages_of(case, len(found))
    chunks = (pattern.count("|") + 1) // len(stages)
    for stage, members in enumerate(stages):
        for rank in members:
            each = found[rank]
            assert each["chunks"] == chunks
            assert each["ends"] == (stage == 0, stage == len(stages) - 1)
            assert each["parameters"][0] == whole[name]["parameters"]
            if name == "tied" and any(each["ends"]):
                part = 0 if stage == 0 else chunks - 1
                assert each["parts"]["embedding.weight"] == (part, 1)
    local = sum(found[members[0]]["parameters"][1] for members in stages)
    table = math.prod(whole[name]["initial"]["embedding.weight"].shape)
    assert local == whole[name]["parameters"] + (table if name == "tied" else 0)


@each_case
def test_losses_and_gradients_are_those_of_the_whole_model(case, ranks, whole):
    found, wanted, tp = ranks[case], whole[case[0]], case[1]
    compared = set()
    for rank, each in enumerate(found):
        gradients = {f"{n}{o}": t for (n, o), t in each["gradients"].items()}
        reference = {
            f"{n}{o}": narrowed(wanted["gradients"][n], o, t.shape)
            for (n, o), t in each["gradients"].items()
        }
        if gradients:
            assert_all_close(gradients, reference)
        compared |= {name for name, _ in each["gradients"]}
        assert len(each["losses"]) == (2 if rank >= len(found) - tp else 0)
        for i, (loss, nll) in enumerate(each["losses"]):
            assert_close_by_metric("loss", loss, wanted["losses"][i][0])
            assert_close_by_metric("nll", nll, wanted["losses"][i][1])
    assert compared == wanted["gradients"].keys()


def chunks_of(model: GPTModel) -> list[TensorChunk]:
    """Return what a checkpoint holds of a rank's weights."""
    return [
        TensorChunk(
            name=held.name,
            shape=held.shape,
            offsets=held.box.offsets,
            tensor=held.tensor,
            replica_ranks=held.replica_ranks,
        )
        for handle in model.store.handles.values()
        for held in model.store.chunks(handle)
    ]


#: (tp, pattern) by which four ranks load what the one before has saved.
CHAIN = ((1, "*-|*-*||-"), (2, "*|-*-|*|-"), (2, "|*-*-*-"), (4, "*-*-*-"), (1, "*|-|*|-|*|-||"))


def through_the_chain(rank: int, world: int, root: str) -> list[int]:
    """Load what the layout before has saved, and save it again; return the elements held."""
    world_groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    coordinator = Coordinator.from_groups(world_groups, timeout_seconds=20.0)
    counts = []
    for step, (tp, pattern) in enumerate(CHAIN):
        groups = ProcessGroupCollection.create(
            RankGrid(world_size=world, tp=tp, pp=world // tp), rank=rank
        )
        for name, config in MODELS.items():
            # Other values: what is not loaded differs.
            model = GPTModel(config, groups, seed=40 + step, split=split_of(pattern, groups))
            folder = Path(root, name, f"iter_{step:07d}")
            load_checkpoint(folder, chunks_of(model), coordinator=coordinator)
            counts.append(sum(chunk.tensor.numel() for chunk in chunks_of(model)))
            extra = {"step": step}
            save_checkpoint(
                Path(root, name), step + 1, chunks_of(model), extra, coordinator=coordinator
            )
    return counts


def test_a_checkpoint_loads_on_any_other_split(tmp_path):
    models = {
        name: move(GPTModel(c, ProcessGroupCollection.single())) for name, c in MODELS.items()
    }
    for name, model in models.items():
        save_checkpoint(tmp_path / name, 0, chunks_of(model), {}, coordinator=Solo())
    counts = run_ranks(through_the_chain, 4, str(tmp_path))
    assert counts[2][0] == 0, "a stage without weights takes part"
    for name, config in MODELS.items():
        back = GPTModel(config, ProcessGroupCollection.single(), seed=99)
        load_checkpoint(tmp_path / name / f"iter_{len(CHAIN):07d}", chunks_of(back))
        found, wanted = values(back), values(models[name])
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
