# SPDX-License-Identifier: Apache-2.0
"""Muon updates every expert's matrices separately, however experts are sharded."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.optimizer import MuonConfig, OptimizerConfig
from megatron.core.weight_sharding import STRATEGIES
from tests.support.closeness import assert_all_close, relative_error
from tests.support.ranks import run_ranks
from tests.support.simulated_links import Early, Late, simulated
from tests.unit_tests.core.distributed.expert_weights import (
    EXPERTS,
    FFN,
    LAYERS,
    SHAPES,
    ExpertModel,
    assemble,
    full_gradients,
    is_expert,
    stage_filter,
)
from tests.unit_tests.core.optimizer.test_muon import orthogonal

STEPS, LR, DECAY, MOMENTUM = 2, 0.05, 0.1, 0.9
#: Factors by name, some of them for experts.
LR_FACTORS, DECAY_FACTORS = {"?.gate": 0.5, "0.down": 2.0}, {"1.up": 3.0, "?.router": 0.0}
GRIDS = (
    {"ep": 4},
    {"tp": 2, "etp": 2, "ep": 2},
    {"tp": 2, "etp": 1},
    {"etp": 4},
    {"instances": 2, "ep": 2},
    {"etp": 2, "cp": 2},
    {"pp": 2, "ep": 2},
)


def settings(*, joined: bool) -> OptimizerConfig:
    return OptimizerConfig(
        kind="muon",
        lr_factors=tuple(LR_FACTORS.items()),
        decay_factors=tuple(DECAY_FACTORS.items()),
        clip_grad=0.0,
        muon=MuonConfig(
            momentum=MOMENTUM,
            split_matrices="megatron" if joined else "all",
            scale_mode="shape_scaling",
            round_bytes=2**28 if joined else 4000,
        ),
    )


def train(groups: ProcessGroupCollection, *, joined: bool, strategy: str) -> ExpertModel:
    model = ExpertModel(
        groups,
        parallel={"strategy": strategy},
        optimizer=settings(joined=joined),
        has=stage_filter(groups),
    )
    for step in range(STEPS):
        model.gradients(step, 1)
        assert model.update(LR, DECAY).applied
    return model


def matrices(name: str, *, joined: bool) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Return, for each matrix with `name`, its joined logical tensors and its index in them."""
    layer, _, kind = name.rpartition(".")
    names = (f"{layer}.gate", f"{layer}.up") if joined and kind in ("gate", "up") else (name,)
    return [(names, (e,)) for e in range(EXPERTS)] if is_expert(name) else [(names, ())]


def formula(start: dict[str, torch.Tensor], *, joined: bool) -> dict[str, torch.Tensor]:
    """Return the matrices after the steps by the paper's equations in fp64."""
    names = [name for name, shape in SHAPES.items() if len(shape) > 1]
    weights = {name: start[name].double() for name in names}
    momentum = {name: torch.zeros_like(weights[name]) for name in names}
    for step in range(STEPS):
        gradients = {name: g.double() for name, g in full_gradients(step, 1).items()}
        for name in names:
            momentum[name] = MOMENTUM * momentum[name] + gradients[name]
        for name in names:
            kind = name.rpartition(".")[2]
            lr = LR * {"gate": 0.5, "down": 2.0 if name[0] == "0" else 1.0}.get(kind, 1.0)
            decay = DECAY * {"up": 3.0 if name[0] == "1" else 1.0, "router": 0.0}.get(kind, 1.0)
            for joined_names, index in matrices(name, joined=joined):
                moves = [momentum[n][index] for n in joined_names]
                rows = [len(move) for move in moves]
                full = torch.cat(moves)
                scale = math.sqrt(max(1.0, full.shape[0] / full.shape[1]))
                move = (scale * orthogonal(full, 5)).split(rows)[joined_names.index(name)]
                weights[name][index] = weights[name][index] * (1 - lr * decay) - lr * move
    return weights


@pytest.fixture(scope="module")
def single_process_weights() -> dict[bool, dict[str, torch.Tensor]]:
    """Return the weights after the steps in a single process, with and without joined matrices."""
    groups = ProcessGroupCollection.single()
    return {
        joined: assemble(train(groups, joined=joined, strategy="no_shard").shards())
        for joined in (0, 1)
    }


def test_muon_updates_each_expert_separately(
    single_process_weights: dict[bool, dict[str, torch.Tensor]],
):
    start = assemble(ExpertModel(ProcessGroupCollection.single()).shards())
    expected = {joined: formula(start, joined=joined) for joined in (False, True)}
    for joined, weights in single_process_weights.items():
        assert_all_close({n: weights[n] for n in expected[joined]}, expected[joined])
    for name in expected[False]:  # joining changes gate and up far beyond the bound
        difference = relative_error(expected[False][name], expected[True][name])
        assert (difference > 1e-3) == (name.endswith(("gate", "up"))), name


def train_on_grids(rank: int, world: int) -> list:
    """Train on every grid; return (joined, number of owned matrices, whether an expert is split,
    weight shards) of each run."""
    torch.set_num_threads(1)
    runs = []
    for index, degrees in enumerate(GRIDS):
        groups = ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank)
        hybrid = groups.grid.instances > 1
        for strategy in (STRATEGIES[1 + index % 3], STRATEGIES[3 if hybrid else 0]):
            joined = index % 2 == 0
            with simulated(groups, (Late(), Early())[index % 2]) as link:
                model = train(groups, joined=joined, strategy=strategy)
            assert link.count
            muon = model.optimizer.muon
            splits_expert = [
                box.box.sizes[1] < FFN
                for state in muon.states
                for box in state.owned.boxes
                if box.name.endswith("gate")
            ]
            runs.append((joined, muon.owned_matrices, any(splits_expert), model.shards()))
    return runs


def test_expert_layouts_match_a_single_process(
    single_process_weights: dict[bool, dict[str, torch.Tensor]],
):
    num_split = 0
    for runs in zip(*run_ranks(train_on_grids, 4), strict=True):
        joined = runs[0][0]
        # the experts' matrices, and a layer's mixer, router and shared expert
        matrices_per_layer = EXPERTS * (2 if joined else 3) + 3
        counts = [count for _, count, _, _ in runs]
        assert sum(counts) == LAYERS * matrices_per_layer + 1
        assert max(counts) < 0.5 * sum(counts), "no rank does most of the work"
        num_split += any(splits_expert for _, _, splits_expert, _ in runs)
        weights = assemble([shard for _, _, _, shards in runs for shard in shards])
        assert_all_close(weights, single_process_weights[joined])
    assert num_split > 3, "experts are split in more than three runs"
