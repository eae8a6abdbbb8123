# SPDX-License-Identifier: Apache-2.0
"""Wrong uses of in-flight buffers are always detected with late collectives and poisoned memory.

On real communicators such bugs pass most runs: a gather finishes before the first read, a buffer
is free before the next write. Each bug is planted into fresh ranks and must be detected.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from tests.support.gatherers import gatherer_of
from tests.support.mutants import Mutation, apply, bug_table
from tests.support.ranks import RankFailure, run_ranks
from tests.support.simulated_links import Late, simulated
from tests.unit_tests.core.distributed.engine_steps import (
    Reference,
    assert_weights,
    build_engine,
    train_and_compare,
)
from tests.unit_tests.core.distributed.small_model import tokens

ZERO3 = {"strategy": "optim_grads_params", "overlap_param_gather": True}
ZERO2 = {"strategy": "optim_grads", "overlap_param_gather": True}
SINGLE_BUCKET = {"strategy": "optim_grads", "bucket_bytes": 10**9}
HYBRID = {**ZERO3, "outer": "optim"}


class CountingLate(Late):
    """A `Late` link that counts waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = 0

    def __call__(self, transfer):
        return _CountingTransfer(self, super().__call__(transfer))


class _CountingTransfer:
    def __init__(self, link: CountingLate, late) -> None:
        self.link, self.late = link, late

    def wait(self) -> None:
        self.link.waited += 1
        self.late.wait()


def train_with_fault(
    rank: int, world: int, config: dict[str, object], faults: Sequence[Mutation] = ()
) -> int:
    """Train, evaluate and abort steps, with late collectives; return the number of collectives."""
    for fault in faults:
        apply(fault)
    grid = RankGrid(world_size=world, instances=world // 2)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    with simulated(groups, CountingLate()) as link:
        model, engine = build_engine(groups, **config)
        reference = Reference(world)
        train_and_compare(model, engine, reference, ((0,), (1, 2), (3, 4, 5)))
        with engine.evaluation(), torch.no_grad():
            assert model.loss(*tokens(rank, 6)).isfinite()
        train_and_compare(model, engine, reference, ((7, 8), (9, 10)))
        for is_last in (False, True):
            engine.begin_step(2)
            engine.backward(model.loss(*tokens(rank, 11)), last=is_last)
            if not is_last:
                model.store.handles["scale"].use().sum().backward()  # an incomplete backward
            engine.abort()
            _assert_settled(engine)
        train_and_compare(model, engine, reference, ((12, 13), (14,)))
        engine.start_param_sync(force_sync=True)
        assert link.waited == link.count, "a collective was never waited for"
        assert_weights(engine, reference.weights)
        _assert_settled(engine)
    gatherer = gatherer_of(engine)
    assert gatherer.counts.mismatches <= 2, "only the two aborted steps mismatch"
    assert gatherer.counts.peak_bytes <= gatherer.budget
    return link.count


def _assert_settled(engine) -> None:
    assert engine.pool.live_bytes == gatherer_of(engine).pool.live_bytes == 0


BUGS = bug_table(
    r"""
a gathered weight is used without a wait [ZERO3]
    weight_gather.gatherer Gatherer._finish_all_gather: gathered.pending.wait() => gathered.pending
an in-place gather is used without a wait [ZERO2]
    weight_gather.gatherer Gatherer._finish_all_gather: gathered.pending.wait() => gathered.pending
weights are read from a released buffer [ZERO3]
    weight_gather.bucket BucketBlock.reshard: self.ready, self.encoded = False, None
    => self.ready, self.encoded = True, None
a block's buffer is released while in use [ZERO3]
    weight_gather.gatherer Gatherer.unshard: block.ready = True
    => block.ready = True; self.reshards and
    self.pool.release(self._gathered[block.index].unsharded)
a prefetch writes into the buffer in use [ZERO3]
    weight_gather.gatherer Gatherer._start_all_gather: unsharded =
    self.pool.acquire(*block.buffer_spec)
    => unsharded = next((g.unsharded for g in self._gathered.values() if len(g.unsharded) ==
    block.layout.numel), None); unsharded = self.pool.acquire(*block.buffer_spec) if unsharded is
    None else unsharded
the buffer of a pending gather is released without a wait [ZERO3]
    weight_gather.gatherer Gatherer._reshard: gathered.pending.wait() => gathered.pending
unsharded weights are treated as current after the update [ZERO2]
    weight_gather.gatherer Gatherer.invalidate: block.ready = False
    => block.ready = not self.reshards
the outer gather is skipped [HYBRID]
    weight_gather.gatherer Gatherer.invalidate: self._outer_stale.add(bucket.index) => pass
the inner gather does not wait for the outer gather [HYBRID]
    weight_gather.gatherer Gatherer._finish_outer_all_gather: self._outer.pop(bucket.index).wait()
    => self._outer.pop(bucket.index)
the input of a reduction is released before the wait [ZERO3]
    distributed.gradient_bucket GradientBlock.start_grad_sync: self.num_reductions += 1
    => self.num_reductions += 1; self.bucket.pool.release(buffer)
    && distributed.gradient_bucket MicrobatchGradients.finish_grad_sync:
    self.bucket.pool.release(self._reducing_buffer)
    => pass
a sum is added before the wait [ZERO3]
    distributed.gradient_bucket GradientBlock.finish_grad_sync: self._pending.wait()
    => self._pending.output
a second reduction overwrites the first [SINGLE_BUCKET]
    distributed.gradient_bucket GradientBlock.start_grad_sync: self.finish_grad_sync() => pass
padding is not zeroed [ZERO3]
    distributed.gradient_bucket MicrobatchGradients.alloc_main_grads: buffer[start:stop].zero_()
    => pass
the first gradient is added to an uninitialised buffer [ZERO3]
    distributed.gradient_bucket GradientBlock._reset: handle.overwrite_main_grad = True
    => handle.overwrite_main_grad = False
a step adds to the previous step's shard [ZERO3]
    distributed.gradient_bucket GradientBucket.begin_step: self._received.clear() => pass
the outer reduction starts before the inner has finished [HYBRID]
    distributed.data_parallel DataParallel.finish: self._wait_for_reductions(0) => pass
    && distributed.data_parallel DataParallel._start_outer_grad_sync: block.finish_grad_sync()
    => pass
an aborted step keeps its buffers [ZERO3]
    distributed.gradient_bucket MicrobatchGradients.abort:
    self.bucket.pool.release(self._grad_buffer)
    => pass
blocks released by the plan are kept [ZERO3]
    weight_gather.gatherer Gatherer._follow: for index in use.reshard => for index in ()
gathers on demand never release other blocks [ZERO3 overlap_param_gather=False]
    weight_gather.gatherer Gatherer._all_gather_on_demand: if num_bytes + self.sizes[block.index] <=
    self.budget:
    => if True:
""",
    ZERO3=ZERO3,
    ZERO2=ZERO2,
    SINGLE_BUCKET=SINGLE_BUCKET,
    HYBRID=HYBRID,
)

#: Errors that show a badly planted bug rather than a detected one.
PLANTING_ERRORS = ("NameError", "TypeError", "AttributeError", "SyntaxError", "no live function")


@pytest.mark.parametrize("config", [ZERO3, ZERO2, SINGLE_BUCKET], ids=str)
def test_training_passes_without_a_planted_bug(config: dict[str, object]):
    assert min(run_ranks(train_with_fault, 2, config)) > 20


def test_hybrid_training_passes_without_a_planted_bug():
    assert min(run_ranks(train_with_fault, 4, HYBRID)) > 50


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_detected(name: str):
    faults, config = BUGS[name].mutations(), BUGS[name].settings
    world = 4 if "outer" in config else 2
    with pytest.raises(RankFailure) as error:
        run_ranks(train_with_fault, world, config, faults, timeout=20.0)
    assert not any(word in str(error.value) for word in PLANTING_ERRORS), error.value
    print(str(error.value).strip().splitlines()[-1])
