# SPDX-License-Identifier: Apache-2.0
"""Expert ranks with a capacity: replayed steps without host reads; an overflow is an error.

Tokens beyond the capacity raise on every rank before any weight changes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from megatron.core import Backend, ProcessGroupCollection, RankGrid
from megatron.core.backend import LOCAL
from megatron.core.comm import all_reduce
from megatron.core.distributed import DataParallelConfig
from megatron.core.models import GPTConfig
from megatron.core.moe import CapacityCheck, capacities_of, routers_of
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
    """Return a backend whose expert ranks have room for `factor` times the even share of tokens."""
    return dataclasses.replace(LOCAL, dispatcher=dispatcher, expert_rank_capacity_factor=factor)


def build_checked_step(
    groups: ProcessGroupCollection, *, model: GPTConfig = EXPERTS, **options: Any
) -> TrainStep:
    """Build a training step that checks the capacity of expert ranks."""
    step = build_step(groups, DataParallelConfig(), model=model, **options)
    names = step.model.config.router_names
    step.capacities = CapacityCheck(capacities_of(step.model), names, world=groups["world"])
    return step


def check_replays(rank: int, world: int, grid: dict[str, int], dispatcher: str) -> list[str]:
    """Compare replays with eager steps; return the host syncs of the recording."""
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
@pytest.mark.covers("graph replay matches eager")
def test_capacity_replays_match_eager_steps_bitwise(grid, dispatcher):
    # Only the CPU syncs: it reads the loss factor, and the range of tokens and labels.
    read = ["aten._local_scalar_dense"] * 2 * (1 + 2 * len(("tokens", "labels")))
    for syncs in run_ranks(check_replays, 2, grid, dispatcher):
        assert syncs == read


def weights_of(step: TrainStep) -> list[torch.Tensor]:
    """Return copies of this rank's weights."""
    step.engine.start_param_sync(force_sync=True)
    return [weight.detach().clone() for weight in step.model.parameters()]


def check_overflow(rank: int, world: int) -> list[str]:
    """Route all tokens to one rank beyond its capacity, then raise the capacity."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, ep=2), rank=rank)
    errors = []
    for dispatcher in DISPATCHERS:
        step = build_checked_step(groups, backend=backend_of(dispatcher, 1.5))
        unlimited = build_checked_step(groups, backend=backend_of(dispatcher, None))
        options = {"lr": 1e-2, "weight_decay": 0.0}
        for train_step in (step, unlimited):
            assert train_step(step_batches(rank, 0), **options).applied
            (bias,) = (r.expert_bias for r in routers_of(train_step.model))
            bias.copy_(torch.tensor([0.0, 0.0, 0.0, 9.0, 9.0, 9.0]))
        before = weights_of(step)
        with pytest.raises(ValueError, match="no weight has changed") as error:
            step(step_batches(rank, 1), **options)
        errors.append(str(error.value))
        assert all(torch.equal(*pair) for pair in zip(before, weights_of(step), strict=True))
        ((_, capacity),) = capacities_of(step.model)
        capacity.factor = 2.0
        for i in (1, 2):
            reports = [
                train_step(step_batches(rank, i), **options) for train_step in (step, unlimited)
            ]
            assert [report.applied for report in reports] == [True, True]
            assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-5)
        # NaN may be routed anywhere: such a step counts as a bad step, not as an overflow.
        capacity.factor = 0.5
        with torch.no_grad():
            next(step.model.parameters()).fill_(torch.nan)
        assert not step(step_batches(rank, 3), **options).applied
        assert all_reduce(step.capacities.count(), groups["world"]) > 0.0
    return errors


def test_capacity_overflow_raises_on_every_rank_without_update():
    errors, other_errors = run_ranks(check_overflow, 2)
    assert errors == other_errors
    # 2 rows of 12 tokens, 2 experts each: the even share is 24 slots, all 48 go to one rank.
    for dispatcher, text in zip(DISPATCHERS, errors, strict=True):
        missing = {"allgather": 24, "alltoall": 12}[dispatcher]
        assert "decoder.blocks.3.moe.router" in text
        assert f"{missing} tokens of a microbatch" in text
        assert "--moe-expert-rank-capacity-factor 1.5 x" in text
        assert "2.00 x were routed to it" in text
        assert "resume with 2.1 or more" in text


def check_evaluation(rank: int, world: int) -> list[tuple[Counter[str], Counter[str]]]:
    """Compare evaluations with and without a capacity.

    Returns:
        For each dispatcher, the host reads that only the run with a capacity makes, and the host
        reads that only the run without one makes.
    """
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, ep=2), rank=rank)
    model = dataclasses.replace(EXPERTS, ffn_pattern="EE")
    batches, read_differences = step_batches(rank, 0), []
    for dispatcher in DISPATCHERS:
        losses, reads = {}, {}
        for factor in (None, 2.0, 0.8):
            step = build_checked_step(groups, model=model, backend=backend_of(dispatcher, factor))
            capacities = [capacity for _, capacity in capacities_of(step.model)]
            sizes = [(capacity.room, capacity.share) for capacity in capacities]
            with one_thread(), products_of_a_gpu(), HostReads() as host:
                losses[factor] = step.evaluate(batches)
            reads[factor] = Counter(host.names)
            assert sizes == [(capacity.room, capacity.share) for capacity in capacities]
            assert not any(capacity.in_evaluation for capacity in capacities)
            assert factor != 0.8 or max(int(capacity.excess) for capacity in capacities) > 0
        assert losses[2.0] == pytest.approx(losses[None], rel=1e-6)
        assert losses[0.8] == losses[None], "a token beyond the capacity is dropped"
        read_differences.append((reads[2.0] - reads[None], reads[None] - reads[2.0]))
    return read_differences


def test_evaluation_drops_no_token_and_reads_no_counts():
    """The counts are of two layers and two microbatches."""
    for allgather, alltoall in run_ranks(check_evaluation, 2):
        assert allgather == ({}, {"aten._local_scalar_dense": 2 * 2})
        assert alltoall == ({}, {"tolist": 2 * 2})
