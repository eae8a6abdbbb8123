# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the use of buffers under way are seen, every time, with late collectives and poison.

On real communicators most of them pass most runs: a gather is done before anyone reads, a buffer is
free again before anyone writes. Each fault is planted into fresh ranks, and must be noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tests.support.gatherers import gatherer_of
from tests.support.mutants import Mutation, apply, planted
from tests.support.ranks import RankFailure, run_ranks
from tests.support.simulated_links import Late, simulated
from tests.unit_tests.core.distributed.engine_steps import (
    Reference,
    assert_weights,
    built,
    steps_against,
)
from tests.unit_tests.core.distributed.small_model import tokens

GATHERER = "megatron.core.weight_gather.gatherer"
ENGINE = GRADIENTS = "megatron.core.distributed.data_parallel"
ZERO3 = {"strategy": "optim_grads_params", "overlap_param_gather": True}
ZERO2 = {"strategy": "optim_grads", "overlap_param_gather": True}
ONE_BUCKET = {"strategy": "optim_grads", "bucket_bytes": 10**9}
HYBRID = {**ZERO3, "outer": "optim"}


class Watched(Late):
    """Late, and counts what was waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = 0

    def __call__(self, transfer):
        return _WatchedTransfer(self, super().__call__(transfer))


class _WatchedTransfer:
    def __init__(self, link: Watched, late) -> None:
        self.link, self.late = link, late

    def wait(self) -> None:
        self.link.waited += 1
        self.late.wait()


def ordeal(
    rank: int, world: int, config: dict[str, object], faults: Sequence[Mutation] = ()
) -> int:
    """Train, evaluate and fail in turn, all collectives late; return how many there were."""
    for fault in faults:
        apply(fault)
    grid = RankGrid(world_size=world, instances=world // 2)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    with simulated(groups, Watched()) as link:
        model, engine = built(groups, **config)
        reference = Reference(world)
        steps_against(model, engine, reference, ((0,), (1, 2), (3, 4, 5)))
        with engine.evaluation(), torch.no_grad():
            assert model.loss(*tokens(rank, 6)).isfinite()
        steps_against(model, engine, reference, ((7, 8), (9, 10)))
        for last in (False, True):
            engine.begin_step(2)
            engine.backward(model.loss(*tokens(rank, 11)), last=last)
            if not last:
                model.store.handles["scale"].use().sum().backward()  # as far as backward came
            engine.abort()
            _assert_settled(engine)
        steps_against(model, engine, reference, ((12, 13), (14,)))
        engine.start_param_sync(force_sync=True)
        assert link.waited == link.count, "a collective was never waited for"
        assert_weights(engine, reference.weights)
        _assert_settled(engine)
    gatherer = gatherer_of(engine)
    assert gatherer.counts.mismatches <= 2, "the steps that failed"
    assert gatherer.counts.peak_bytes <= gatherer.budget
    return link.count


def _assert_settled(engine) -> None:
    assert engine.pool.live_bytes == gatherer_of(engine).pool.live_bytes == 0


@dataclass(frozen=True)
class Bug:
    """Edits of one mistake: (module, function, code, faulty code) each; where it must show."""

    edits: tuple[tuple[str, str, str, str], ...]
    config: dict[str, object]
    world: int = 2


def bug(module: str, function: str, code: str, faulty: str, config, world: int = 2) -> Bug:
    """Return a mistake of one edit."""
    return Bug(((module, function, code, faulty),), config, world)


BUGS = {
    "a gathered weight is used without a wait": bug(
        GATHERER,
        "Gatherer._finish_all_gather",
        "gathered.pending.wait()",
        "gathered.pending",
        ZERO3,
    ),
    "a gather in place is used without a wait": bug(
        GATHERER,
        "Gatherer._finish_all_gather",
        "gathered.pending.wait()",
        "gathered.pending",
        ZERO2,
    ),
    "weights are read from a buffer that was given back": bug(
        "megatron.core.weight_gather.bucket",
        "BucketBlock.reshard",
        "self.ready, self.encoded = False, None",
        "self.ready, self.encoded = True, None",
        ZERO3,
    ),
    "a block is released by its own use": bug(
        GATHERER,
        "Gatherer.unshard",
        "block.ready = True",
        "block.ready = True; "
        "self.reshards and self.pool.release(self._gathered[block.index].unsharded)",
        ZERO3,
    ),
    "a prefetch goes into the buffer in use": bug(
        GATHERER,
        "Gatherer._start_all_gather",
        "unsharded = self.pool.acquire(*block.buffer_spec)",
        "unsharded = next((g.unsharded for g in self._gathered.values() "
        "if len(g.unsharded) == block.layout.numel), None); "
        "unsharded = self.pool.acquire(*block.buffer_spec) if unsharded is None else unsharded",
        ZERO3,
    ),
    "a gather under way is given back without a wait": bug(
        GATHERER, "Gatherer._reshard", "gathered.pending.wait()", "gathered.pending", ZERO3
    ),
    "whole weights are taken for current after the optimizer": bug(
        GATHERER,
        "Gatherer.invalidate",
        "block.ready = False",
        "block.ready = not self.reshards",
        ZERO2,
    ),
    "the outer gather is skipped": bug(
        GATHERER, "Gatherer.invalidate", "self._outer_stale.add(bucket.index)", "pass", HYBRID, 4
    ),
    "the inner gather does not wait for the outer": bug(
        GATHERER,
        "Gatherer._finish_outer_all_gather",
        "self._outer.pop(bucket.index).wait()",
        "self._outer.pop(bucket.index)",
        HYBRID,
        4,
    ),
    "the input of a reduction is given back before the wait": Bug(
        (
            (
                GRADIENTS,
                "GradientBlock.start_grad_sync",
                "self.num_reductions += 1",
                "self.num_reductions += 1; self.bucket.pool.release(buffer)",
            ),
            (
                GRADIENTS,
                "MicrobatchGradients.finish_grad_sync",
                "self.bucket.pool.release(self._reducing_buffer)",
                "pass",
            ),
        ),
        ZERO3,
    ),
    "a sum is added before the wait": bug(
        GRADIENTS,
        "GradientBlock.finish_grad_sync",
        "self._pending.wait()",
        "self._pending.output",
        ZERO3,
    ),
    "a second reduction starts over the first": bug(
        GRADIENTS, "GradientBlock.start_grad_sync", "self.finish_grad_sync()", "pass", ONE_BUCKET
    ),
    "padding is not zeroed": bug(
        GRADIENTS,
        "MicrobatchGradients.alloc_main_grads",
        "buffer[start:stop].zero_()",
        "pass",
        ZERO3,
    ),
    "the first put adds to a fresh buffer": bug(
        GRADIENTS,
        "GradientBlock._reset",
        "handle.overwrite_main_grad = True",
        "handle.overwrite_main_grad = False",
        ZERO3,
    ),
    "a step adds to the shard of the step before": bug(
        GRADIENTS,
        "GradientBucket.begin_step",
        "self._received.clear()",
        "pass",
        ZERO3,
    ),
    "the outer sum starts before the inner is done": Bug(
        (
            (
                ENGINE,
                "DataParallel.finish",
                "self._wait_for_reductions(0)",
                "pass",
            ),
            (ENGINE, "DataParallel._start_outer_grad_sync", "block.finish_grad_sync()", "pass"),
        ),
        HYBRID,
        4,
    ),
    "a step that failed keeps its buffers": bug(
        GRADIENTS,
        "MicrobatchGradients.abort",
        "self.bucket.pool.release(self._grad_buffer)",
        "pass",
        ZERO3,
    ),
    "what the plan releases is kept": bug(
        GATHERER, "Gatherer._follow", "for index in use.reshard", "for index in ()", ZERO3
    ),
    "gathers on demand never make room": bug(
        GATHERER,
        "Gatherer._all_gather_on_demand",
        "if num_bytes + self.sizes[block.index] <= self.budget:",
        "if True:",
        {**ZERO3, "overlap_param_gather": False},
    ),
}

#: Mistakes of the planting, not of the code.
ACCIDENTS = ("NameError", "TypeError", "AttributeError", "SyntaxError", "no live function")


@pytest.mark.parametrize("config", [ZERO3, ZERO2, ONE_BUCKET], ids=str)
def test_without_a_bug_the_ordeal_is_passed(config: dict[str, object]):
    assert min(run_ranks(ordeal, 2, config)) > 20


def test_without_a_bug_hybrid_sharding_passes_the_ordeal():
    assert min(run_ranks(ordeal, 4, HYBRID)) > 50


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_noticed(name: str):
    found = BUGS[name]
    faults = [planted(*edit) for edit in found.edits]
    with pytest.raises(RankFailure) as error:
        run_ranks(ordeal, found.world, found.config, faults, timeout=20.0)
    assert not any(word in str(error.value) for word in ACCIDENTS), error.value
    print(str(error.value).strip().splitlines()[-1])
