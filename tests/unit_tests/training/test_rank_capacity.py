# SPDX-License-Identifier: Apache-2.0
"""Ranks of experts with a capacity: steps without a host read, replayed with other routes; and
tokens without room, an error on every rank before anything has changed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from megatron.core.backend import LOCAL, Backend
from megatron.core.comm import all_reduce
from megatron.core.distributed import DataParallelConfig
from megatron.core.models.gpt import GPTConfig
from megatron.core.moe import CapacityCheck, capacities_of, routers_of
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.training.step import TrainStep
from tests.support.device_products import products_of_a_gpu
from tests.support.host_reads import HostReads
from tests.support.inputs import one_thread
from tests.support.ranks import run_ranks
from tests.unit_tests.training.graphed_runs import (
    EXPERTS,
    REPLAYED,
    build_step,
    run_eager_and_recorded,
    step_batches,
)

DISPATCHERS = ("allgather", "alltoall")


def backend_of(dispatcher: str, factor: float | None) -> Backend:
    """Return parts whose ranks of experts have room for so many times the even share."""
    return dataclasses.replace(LOCAL, dispatcher=dispatcher, expert_rank_capacity_factor=factor)


def watched_step(
    groups: ProcessGroupCollection, *, model: GPTConfig = EXPERTS, **options: Any
) -> TrainStep:
    """Return a step that finds tokens without room."""
    step = build_step(groups, DataParallelConfig(), model=model, **options)
    names = step.model.config.router_names
    step.capacities = CapacityCheck(capacities_of(step.model), names, world=groups["world"])
    return step


def replayed(rank: int, world: int, grid: dict[str, int], dispatcher: str) -> list[str]:
    """Compare replays with eager steps; return what the host has read while recording."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, **grid), rank=rank)
    with one_thread(), products_of_a_gpu():
        options = {"model": EXPERTS, "backend": backend_of(dispatcher, 1.9)}
        eager, recorded, step = run_eager_and_recorded(groups, DataParallelConfig(), **options)
    assert step.forward_backward.replays == len(REPLAYED)
    assert recorded.losses == eager.losses
    assert len(set(eager.losses)) == len(eager.losses)
    for key, weight in eager.weights.items():
        assert torch.equal(recorded.weights[key], weight), key
    ((_, capacity),) = capacities_of(step.model)
    assert "ep" not in grid or 1.0 < capacity.needed() < 1.9
    return step.forward_backward.recorder.tape.syncs


@pytest.mark.parametrize(
    ("grid", "dispatcher"),
    [
        ({"ep": 2}, "alltoall"),
        ({"ep": 2}, "allgather"),
        pytest.param({"etp": 2, "tp": 2}, "alltoall", marks=pytest.mark.slow),
    ],
)
@pytest.mark.covers("numbers of eager steps", runs="replays")
def test_capacity_steps_replay_bits_of_eager_steps(grid, dispatcher):
    # On a CPU only: the factor of the loss, and the range of tokens and labels, are read.
    read = ["aten._local_scalar_dense"] * 2 * (1 + 2 * len(("tokens", "labels")))
    for syncs in run_ranks(replayed, 2, grid, dispatcher):
        assert syncs == read


def weights_of(step: TrainStep) -> list[torch.Tensor]:
    """Return copies of what this rank holds of all weights."""
    step.engine.start_param_sync(force_sync=True)
    return [weight.detach().clone() for weight in step.model.parameters()]


def overflowing(rank: int, world: int) -> list[str]:
    """Route all tokens to one rank, which has no room; then make room."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, ep=2), rank=rank)
    found = []
    for dispatcher in DISPATCHERS:
        step = watched_step(groups, backend=backend_of(dispatcher, 1.5))
        wide = watched_step(groups, backend=backend_of(dispatcher, None))
        options = {"lr": 1e-2, "weight_decay": 0.0}
        for each in (step, wide):
            assert each(step_batches(rank, 0), **options).applied
            (bias,) = (r.expert_bias for r in routers_of(each.model))
            bias.copy_(torch.tensor([0.0, 0.0, 0.0, 9.0, 9.0, 9.0]))
        before = weights_of(step)
        with pytest.raises(ValueError, match="no weight has changed") as error:
            step(step_batches(rank, 1), **options)
        found.append(str(error.value))
        assert all(torch.equal(*pair) for pair in zip(before, weights_of(step), strict=True))
        ((_, capacity),) = capacities_of(step.model)
        capacity.factor = 2.0
        for i in (1, 2):
            reports = [each(step_batches(rank, i), **options) for each in (step, wide)]
            assert [report.applied for report in reports] == [True, True]
            assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-5)
        # NaN may be routed anywhere: such a step is a bad one, and no overflow.
        capacity.factor = 0.5
        with torch.no_grad():
            next(step.model.parameters()).fill_(torch.nan)
        assert not step(step_batches(rank, 3), **options).applied
        assert all_reduce(step.capacities.count(), groups["world"]) > 0.0
    return found


def test_capacity_overflow_raises_on_every_rank_without_update():
    first, second = run_ranks(overflowing, 2)
    assert first == second
    # 12 tokens of 2 rows, 2 experts of each: 24 places are the even share, all 48 go to one rank.
    for dispatcher, text in zip(DISPATCHERS, first, strict=True):
        missing = {"allgather": 24, "alltoall": 12}[dispatcher]
        assert "decoder.blocks.3.moe.router" in text
        assert f"{missing} tokens of a microbatch" in text
        assert "--moe-expert-rank-capacity-factor 1.5 x" in text
        assert "2.00 x were routed to it" in text
        assert "resume with 2.1 or more" in text


def evaluated(rank: int, world: int) -> list[tuple[Counter[str], Counter[str]]]:
    """Compare evaluations with and without a capacity; return what the host reads with one more
    often, and without."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, ep=2), rank=rank)
    model = dataclasses.replace(EXPERTS, ffn_pattern="EE")
    batches, found = step_batches(rank, 0), []
    for dispatcher in DISPATCHERS:
        losses, reads = {}, {}
        for factor in (None, 2.0, 0.8):
            step = watched_step(groups, model=model, backend=backend_of(dispatcher, factor))
            capacities = [capacity for _, capacity in capacities_of(step.model)]
            sizes = [(capacity.room, capacity.share) for capacity in capacities]
            with one_thread(), products_of_a_gpu(), HostReads() as host:
                losses[factor] = step.evaluate(batches)
            reads[factor] = Counter(host.names)
            assert sizes == [(capacity.room, capacity.share) for capacity in capacities]
            assert not any(capacity.in_evaluation for capacity in capacities)
            assert factor != 0.8 or max(int(capacity.excess) for capacity in capacities) > 0
        assert losses[2.0] == pytest.approx(losses[None], rel=1e-6)
        assert losses[0.8] == losses[None], "a token without room is left out"
        found.append((reads[2.0] - reads[None], reads[None] - reads[2.0]))
    return found


def test_evaluation_waits_for_no_counts_and_leaves_no_token_out():
    """Two layers and two microbatches."""
    for allgather, alltoall in run_ranks(evaluated, 2):
        assert allgather == ({}, {"aten._local_scalar_dense": 2 * 2})
        assert alltoall == ({}, {"tolist": 2 * 2})
