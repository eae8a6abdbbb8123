# SPDX-License-Identifier: Apache-2.0
"""A training loop that omits or repeats a call gets an error instead of a silently wrong step."""

from __future__ import annotations

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.optimizer import Optimizer, OptimizerConfig
from megatron.core.weight_sharding import STRATEGIES
from tests.support.ranks import run_ranks
from tests.unit_tests.core.distributed.small_model import SmallModel, tokens

SGD = OptimizerConfig(kind="sgd", clip_grad=0.0)


class Loop:
    """A small model with its engine and optimizer."""

    def __init__(self, groups: ProcessGroupCollection, strategy: str = "no_shard") -> None:
        config = DataParallelConfig(strategy=strategy)
        self.model = SmallModel(groups, config=config)
        self.engine = DataParallel(self.model.store, groups, config=config)
        self.optimizer = Optimizer(self.engine.owned(), groups, config=SGD)

    def loss(self) -> torch.Tensor:
        return self.model.loss(*tokens(self.engine.groups["dense_dp"].rank, 0))

    def gradients(self) -> None:
        self.engine.begin_step()
        self.engine.backward(self.loss(), last=True)
        self.engine.finish()

    def weights(self) -> list[torch.Tensor]:
        return [state.owned.weights.clone() for state in self.optimizer.ranges]


def collect_refusals(loop: Loop) -> dict[str, str]:
    """Return the error of every call that comes too early or twice; then train a step."""
    engine, optimizer, errors = loop.engine, loop.optimizer, {}

    def refused(name: str, call) -> None:
        with pytest.raises(ValueError) as error:
            call()
        errors[name] = str(error.value)

    before = loop.weights()
    refused("plain backward at first", lambda: loop.loss().backward())
    engine.begin_step()
    engine.backward(loop.loss(), last=True)
    for use in ("step", "grad_norm", "count_zeros"):
        call = (lambda: optimizer.step(0.1)) if use == "step" else getattr(optimizer, use)
        refused(f"{use} before finish", call)
    refused("begin_step twice", engine.begin_step)
    engine.abort()
    refused("step after abort", lambda: optimizer.step(0.1))
    refused("plain backward after a step", lambda: loop.loss().backward())
    assert all(torch.equal(a, b) for a, b in zip(before, loop.weights(), strict=True))
    assert optimizer.steps == 0
    with engine.evaluation():
        refused("begin_step in an evaluation", engine.begin_step)
    loop.gradients()
    refused("plain backward after finish", lambda: loop.loss().backward())
    loop.gradients()
    assert optimizer.step(0.1).applied
    return errors


CALLS = {
    "plain backward at first": "begin_step()",
    "step before finish": "finish()",
    "grad_norm before finish": "finish()",
    "count_zeros before finish": "finish()",
    "begin_step twice": "finish() or abort()",
    "step after abort": "begin_step()",
    "plain backward after a step": "begin_step()",
    "begin_step in an evaluation": "evaluation",
    "plain backward after finish": "begin_step()",
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_single_process_refuses_calls_out_of_order(strategy: str) -> None:
    errors = collect_refusals(Loop(ProcessGroupCollection.single(), strategy))
    assert set(errors) == set(CALLS)
    assert not [name for name, call in CALLS.items() if call not in errors[name]]


def forgotten_syncs(engine: DataParallel) -> dict[str, str]:
    """Return the error of every call that follows an update without start_param_sync()."""
    errors = {}
    calls = (engine.begin_step, engine.complete_weights, lambda: engine.evaluation().__enter__())
    for name, call in zip(("begin_step", "complete_weights", "evaluation"), calls, strict=True):
        with pytest.raises(ValueError, match="start_param_sync") as error:
            call()
        errors[name] = str(error.value)
    return errors


def refusals_on_ranks(rank: int, world: int) -> list[dict[str, str]]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    errors_by_strategy = []
    for strategy in STRATEGIES:
        loop = Loop(groups, strategy)
        errors_by_strategy.append(collect_refusals(loop))
        assert bool(loop.engine.gatherers) == (strategy != "no_shard")
        if loop.engine.gatherers:
            assert len(forgotten_syncs(loop.engine)) == 3
        loop.engine.start_param_sync()
        loop.gradients()
    return errors_by_strategy


def test_ranks_refuse_calls_out_of_order() -> None:
    for errors_by_strategy in run_ranks(refusals_on_ranks, 2):
        assert len(errors_by_strategy) == len(STRATEGIES)
        for errors in errors_by_strategy:
            assert set(errors) == set(CALLS)
            assert not [name for name, call in CALLS.items() if call not in errors[name]]
