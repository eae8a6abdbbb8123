# SPDX-License-Identifier: Apache-2.0
"""DataParallel: one engine for ZeRO 0 to 3 and hybrid sharding.

A step, as its caller sees it:

    engine.begin_step(microbatches)
    for each microbatch:  loss = model.loss(...);  engine.backward(loss, last=...)
    engine.finish()              # gradients are whole: on every rank, or each rank's range of them
    ...                          # the optimizer writes the ranges of `owned()`
    engine.start_param_sync()    # the other ranks' ranges follow, at once or when they are needed

Where a rank has several parts of a model, as the chunks of a pipeline, each with its own order of
microbatches, the caller says more:

    engine.begin_step(program=names of the segments in the order in which they run)
    engine.segment(name)         # before what runs forward or backward through a part
    engine.last(part)            # before the step's last puts into a part
    engine.close(part)           # behind a microbatch's last put into it

A strategy is the placement of weight, gradient and optimizer state on the data axes, nothing else:
`Gatherer` makes cut weights whole, `GradientBucket` sums gradients into where they are kept.

All scaling is in the loss, so every reduction is a plain sum. A bucket is reduced as soon as each
of its weights has had all its puts; what is still open is reduced by `close` or `finish`, which
then carries out the remaining sums of the gradient plan (weights whole on tp that saw different
tokens or heads, weights of two stages).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Protocol

import torch

from megatron.core.device import new_stream
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.gradients import GradientBucket
from megatron.core.distributed.model_sums import ModelSums
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.weight_gather import (
    BACKWARD,
    EVALUATION,
    FORWARD,
    Arena,
    Gatherer,
    OwnedRange,
    WeightStore,
    empty_range,
    owned_range,
)

#: Reductions under way at a time where each holds leases of a whole bucket's gradients.
_REDUCTIONS_UNDER_WAY = 2


class _Phase(Enum):
    """Where an engine is."""

    BETWEEN = "no step"
    STEP = "a step"
    EVALUATION = "an evaluation"


class GradientObserver(Protocol):
    """Who looks at gradients; a CUDA graph records what it does, so it reads none on the host."""

    def begin(self) -> None:
        """Take note that a step begins."""

    def show(self, flat: torch.Tensor) -> None:
        """Look at some gradients of the step, without changing them."""


class DataParallel:
    """Train the weights of a store over the data lanes.

    Args:
        store: materialised for the same strategy; frozen weights get no gradients.
        groups: its process groups.

    Raises:
        ValueError: the store is not materialised, or for another strategy.

    Attributes:
        buckets: those with trained weights, in the order in which backward fills them.
        gatherer: makes weights whole; None if every rank keeps and updates all that it has.
        launched_in_backward: reductions of the last microbatch that started before `finish`.
    """

    def __init__(
        self,
        store: WeightStore,
        groups: ProcessGroupCollection,
        *,
        config: DataParallelConfig | None = None,
    ) -> None:
        if not store.materialized:
            raise ValueError("materialize the weight store before building DataParallel over it")
        self.store, self.groups = store, groups
        self.config = config = config or DataParallelConfig()
        self.placement = config.storage().effective(groups)
        if self.placement.weight != store.placement.weight or (
            self.placement.optimizer != store.placement.optimizer
        ):
            raise ValueError(
                f"the weights are stored for strategy {store.storage.strategy} (outer "
                f"{store.storage.outer}), the engine is to carry out {config.strategy} (outer "
                f"{config.outer}): materialize the store with the engine's config.storage()"
            )
        self.launched_in_backward = 0
        self.arena = Arena(store.device, poison=config.debug)
        self.gatherer: Gatherer | None = None
        if any(bucket.placement.optimizer for bucket in store.buckets):
            self.gatherer = Gatherer(
                store.buckets,
                prefetch=config.overlap_param_gather,
                ahead=config.prefetch_bytes,
                poison=config.debug,
            )
        self._parts = sorted({bucket.part for bucket in store.buckets}, reverse=True)
        stream = new_stream(store.device)
        self.buckets = [
            GradientBucket(
                bucket,
                config=config,
                arena=self.arena,
                stream=stream,
                on_full=self._on_full,
            )
            for bucket in store.buckets
            if any(handle.trainable for handle in bucket.handles)
        ]
        store.give_gradients()
        self._sums = ModelSums(store, self.buckets)
        self._phase = _Phase.BETWEEN
        self._observer: GradientObserver | None = None
        self._last: set[int] = set()
        self._under_way: deque[GradientBucket] = deque()

    @property
    def sharded(self) -> bool:
        """Whether each rank keeps only its range of the optimizer state."""
        return bool(self.placement.optimizer)

    def owned(self) -> list[OwnedRange]:
        """Return what this rank's optimizer updates, one range per bucket; one of nothing if
        there is no bucket."""
        found = [owned_range(self.store, b.bucket, b.gradients) for b in self.buckets]
        return found or [empty_range(self.store)]

    def observe_gradients(self, observer: GradientObserver | None) -> None:
        """Have this rank's own gradients shown, flat and a bucket at a time, before each sum."""
        self._observer = observer
        for bucket in self.buckets:
            bucket.observe = None if observer is None else observer.show

    # --- a step -----------------------------------------------------------------------------------

    def begin_step(self, microbatches: int = 1, *, program: Sequence[str] | None = None) -> None:
        """Forget the last step's gradients.

        Args:
            microbatches: of this step; another number than that costs time, not correctness.
            program: the segments of this step in the order in which they will run, instead of each
                microbatch forward and backward; `segment` then says when each begins. Likewise.
        """
        self._phase, self.launched_in_backward = _Phase.STEP, 0
        self._last.clear()
        if self._observer is not None:
            self._observer.begin()
        for bucket in self.buckets:
            bucket.begin_step()
        if self.gatherer is not None:
            self.gatherer.begin((FORWARD, BACKWARD) * microbatches if program is None else program)
            if program is None:
                self.gatherer.segment(FORWARD)

    def segment(self, name: str) -> None:
        """Say which segment runs from now on: `segment_name(FORWARD or BACKWARD, part)`.

        Raises:
            ValueError: outside of steps and evaluations.
        """
        if self._phase is _Phase.BETWEEN:
            raise ValueError(f"segment {name} outside a step: call begin_step() first")
        if self.gatherer is not None:
            self.gatherer.segment(name)

    def prefetch(self, name: str) -> None:
        """Start the gathers that a segment will need first, without waiting.

        Only with `overlap_param_gather`, and once a step has shown what the segment needs.

        Raises:
            ValueError: outside of steps and evaluations.
        """
        if self._phase is _Phase.BETWEEN:
            raise ValueError(f"prefetch of {name} outside a step: call begin_step() first")
        if self.gatherer is not None:
            self.gatherer.start_segment(name)

    def last(self, part: int) -> None:
        """Say that from here on the step's last microbatch puts gradients into a part's weights.

        With `overlap_grad_reduce`, buckets of the part are reduced as they fill. All earlier
        microbatches must have had their puts.

        Raises:
            ValueError: no step has begun.
        """
        if self._phase is not _Phase.STEP:
            raise ValueError(f"last({part}) outside a step: call begin_step() first")
        self._last.add(part)
        for bucket in self.buckets:
            if bucket.part == part:
                bucket.begin_last()

    def close(self, part: int) -> None:
        """Say that a microbatch has put all its gradients into a part's weights.

        Cut gradients that got fewer puts than were declared are reduced; behind the last
        microbatch, with `overlap_grad_reduce`, so is every bucket of the part that has not been.

        Raises:
            ValueError: no step has begun.
        """
        if self._phase is not _Phase.STEP:
            raise ValueError(f"close({part}) outside a step: call begin_step() first")
        over = part in self._last and self.config.overlap_grad_reduce
        for bucket in self.buckets:
            missing = (bucket.cut and bucket.is_open) or (over and not bucket.launched)
            if bucket.part == part and missing:
                self._reduce(bucket)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Run one microbatch's backward; `last` lets whole gradients be reduced while it runs.

        Raises:
            ValueError: no step has begun.
        """
        if self._phase is not _Phase.STEP:
            raise ValueError("backward outside a step: call begin_step() first")
        self.accumulate(last=last)
        self.segment(BACKWARD)
        loss.backward()
        if self.store.queue is None:
            for part in self._parts:
                self.close(part)
        self.segment(FORWARD)

    def accumulate(self, *, last: bool) -> None:
        """Say whether the step's last puts follow, in all parts at once."""
        for part in self._parts if last else ():
            self.last(part)

    def finish(self) -> None:
        """Make every gradient whole: reduce what is left, wait, then sum over the model axes.

        Raises:
            ValueError: no step has begun: its sums would be taken twice.
        """
        if self._phase is not _Phase.STEP:
            raise ValueError("finish outside a step: call begin_step() first")
        for bucket in self.buckets:
            if (bucket.cut and bucket.is_open) or not bucket.launched:
                self._reduce(bucket)
        self._settle(0)
        for bucket in self.buckets:
            bucket.settle()
            bucket.reduce_outer()
        for bucket in self.buckets:
            bucket.settle_outer()
        self._sums.run()
        if self.gatherer is not None:
            self.gatherer.finish()
            if self.config.debug:
                self.gatherer.check_order()
        self._phase = _Phase.BETWEEN

    def abort(self) -> None:
        """Leave a step that failed half-way; the next `begin_step` starts clean."""
        self._under_way.clear()
        for bucket in self.buckets:
            bucket.abort()
        if self.gatherer is not None:
            self.gatherer.abort()
        self._phase = _Phase.BETWEEN

    # --- between steps ----------------------------------------------------------------------------

    def start_param_sync(self, *, force_sync: bool = False) -> None:
        """Have the other ranks' updates arrive, after the optimizer has written the owned ranges.

        With `overlap_param_gather` they are gathered when they are needed, and the first of them
        started here unless `fsdp_all_gather_in_start_param_sync` is False. Otherwise, or with
        `force_sync`, all are gathered here, except that weights which are stored in shards would
        be released again: they are only with `force_sync`.
        """
        if self.gatherer is None:
            return
        self.gatherer.invalidate()
        if force_sync or not (self.config.overlap_param_gather or self.gatherer.leases):
            self.gatherer.gather_all()
        elif self.config.overlap_param_gather and self.config.fsdp_all_gather_in_start_param_sync:
            self.gatherer.start_early()

    def wait(self) -> None:
        """Wait until nothing is under way between two steps; what was started early stays."""
        if self.gatherer is not None:
            self.gatherer.wait()

    def complete_weights(self) -> None:
        """Have all updates arrive in what this rank stores, before that is saved or read.

        Ranks that store the same hold the same after it. Every rank of the lanes calls this.

        Raises:
            ValueError: a step is under way.
        """
        if self._phase is _Phase.STEP:
            raise ValueError("complete_weights inside a step: finish() or abort() it first")
        if self.gatherer is not None:
            self.gatherer.complete_stored()

    @contextmanager
    def evaluation(self, program: Sequence[str] | None = None) -> Iterator[None]:
        """Run forwards without backward inside, between two steps.

        Args:
            program: the segments that will run, in order, as in `begin_step`; None is one of its
                own for all that runs inside.

        Raises:
            ValueError: a step or an evaluation is under way.
        """
        if self._phase is not _Phase.BETWEEN:
            raise ValueError(f"evaluation inside {self._phase.value}: finish() or leave that first")
        self._phase = _Phase.EVALUATION
        try:
            if self.gatherer is not None:
                self.gatherer.begin((EVALUATION,) if program is None else program)
                if program is None:
                    self.gatherer.segment(EVALUATION)
            yield
            if self.gatherer is not None:
                self.gatherer.finish()
        except BaseException:
            if self.gatherer is not None:
                self.gatherer.abort()
            raise
        finally:
            self._phase = _Phase.BETWEEN

    # --- inside -----------------------------------------------------------------------------------

    def _on_full(self, bucket: GradientBucket) -> None:
        last = bucket.part in self._last
        if not bucket.cut and not (last and self.config.overlap_grad_reduce):
            return
        self._reduce(bucket)
        self.launched_in_backward += last

    def _reduce(self, bucket: GradientBucket) -> None:
        bucket.reduce()
        self._under_way.append(bucket)
        if bucket.cut or bucket.wide:  # what is under way holds leases
            self._settle(_REDUCTIONS_UNDER_WAY - 1 if self.config.overlap_grad_reduce else 0)

    def _settle(self, left: int) -> None:
        """Wait for the oldest reductions until so many are left."""
        while len(self._under_way) > left:
            self._under_way.popleft().settle()
