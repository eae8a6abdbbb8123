# SPDX-License-Identifier: Apache-2.0
"""Muon on experts: every expert's matrices by themselves, wherever their pieces lie."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.core.optimizer import MuonConfig, OptimizerConfig
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
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
    is_expert,
    of_stage,
    whole_gradients,
    whole_of,
)
from tests.unit_tests.core.optimizer.test_muon import orthogonal

STEPS, LR, DECAY, MOMENTUM = 2, 0.05, 0.1, 0.9
#: Factors by name, of which some are those of experts.
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
        has=of_stage(groups),
    )
    for step in range(STEPS):
        model.gradients(step, 1)
        assert model.update(LR, DECAY).applied
    return model


def matrices(name: str, *, joined: bool) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Return the logical tensors that are joined with one, and the index of each matrix in them."""
    layer, _, kind = name.rpartition(".")
    names = (f"{layer}.gate", f"{layer}.up") if joined and kind in ("gate", "up") else (name,)
    return [(names, (e,)) for e in range(EXPERTS)] if is_expert(name) else [(names, ())]


def formula(start: dict[str, torch.Tensor], *, joined: bool) -> dict[str, torch.Tensor]:
    """Return the matrices after the steps by the paper's equations in fp64, one at a time."""
    names = [name for name, shape in SHAPES.items() if len(shape) > 1]
    weights = {name: start[name].double() for name in names}
    momentum = {name: torch.zeros_like(weights[name]) for name in names}
    for step in range(STEPS):
        given = {name: g.double() for name, g in whole_gradients(step, 1).items()}
        for name in names:
            momentum[name] = MOMENTUM * momentum[name] + given[name]
        for name in names:
            kind = name.rpartition(".")[2]
            lr = LR * {"gate": 0.5, "down": 2.0 if name[0] == "0" else 1.0}.get(kind, 1.0)
            decay = DECAY * {"up": 3.0 if name[0] == "1" else 1.0, "router": 0.0}.get(kind, 1.0)
            for whole, index in matrices(name, joined=joined):
                moves = [momentum[n][index] for n in whole]
                rows = [len(move) for move in moves]
                full = torch.cat(moves)
                scale = math.sqrt(max(1.0, full.shape[0] / full.shape[1]))
                move = (scale * orthogonal(full, 5)).split(rows)[whole.index(name)]
                weights[name][index] = weights[name][index] * (1 - lr * decay) - lr * move
    return weights


@pytest.fixture(scope="module")
def alone() -> dict[bool, dict[str, torch.Tensor]]:
    """Return the weights that one process has after the steps, with and without joined ones."""
    groups = ProcessGroupCollection.single()
    return {j: whole_of(train(groups, joined=j, strategy="no_shard").pieces()) for j in (0, 1)}


def test_one_process_takes_expert_by_expert(alone: dict[bool, dict[str, torch.Tensor]]):
    start = whole_of(ExpertModel(ProcessGroupCollection.single()).pieces())
    wanted = {joined: formula(start, joined=joined) for joined in (False, True)}
    for joined, found in alone.items():
        assert_all_close({n: found[n] for n in wanted[joined]}, wanted[joined])
    for name in wanted[False]:  # what joining does is far above the bound, where there is any
        apart = relative_error(wanted[False][name], wanted[True][name])
        assert (apart > 1e-3) == (name.endswith(("gate", "up"))), name


def on_grids(rank: int, world: int) -> list:
    """Train on every grid; return of each run whether weights were joined, how many matrices this
    rank orthogonalised, whether any of its pieces was part of an expert, and its weights."""
    torch.set_num_threads(1)
    found = []
    for number, degrees in enumerate(GRIDS):
        groups = ProcessGroupCollection.create(RankGrid(world_size=world, **degrees), rank=rank)
        hybrid = groups.grid.instances > 1
        for strategy in (STRATEGIES[1 + number % 3], STRATEGIES[3 if hybrid else 0]):
            joined = number % 2 == 0
            with simulated(groups, (Late(), Early())[number % 2]) as link:
                model = train(groups, joined=joined, strategy=strategy)
            assert link.count
            muon = model.optimizer.muon
            parts = [
                placed.box.sizes[1] < FFN
                for state in muon.states
                for placed in state.owned.boxes
                if placed.name.endswith("gate")
            ]
            found.append((joined, muon.owned_matrices, any(parts), model.pieces()))
    return found


def test_ranks_equal_one_process(alone: dict[bool, dict[str, torch.Tensor]]):
    cut = 0
    for runs in zip(*run_ranks(on_grids, 4), strict=True):
        joined = runs[0][0]
        each = EXPERTS * (2 if joined else 3) + 3  # mixer, router and shared of a layer
        counts = [count for _, count, _, _ in runs]
        assert sum(counts) == LAYERS * each + 1
        assert max(counts) < 0.5 * sum(counts), "one rank does most of the work"
        cut += any(parts for _, _, parts, _ in runs)
        found = whole_of([piece for _, _, _, pieces in runs for piece in pieces])
        assert_all_close(found, alone[joined])
    assert cut > 3, "hardly any expert was in pieces"
