# SPDX-License-Identifier: Apache-2.0
"""The data-parallel engine: ZeRO 0 to 3 and hybrid sharding.

A step, as its caller sees it:

    engine.begin_step(microbatches)
    for each microbatch:  loss = model.loss(...);  engine.backward(loss, last=...)
    engine.finish()              # gradients are complete: on every rank, or each rank's range
    ...                          # the optimizer writes the ranges of `owned()`
    engine.start_param_sync()    # all-gather the other ranks' ranges, now or at their first use

A rank with several model chunks, as in an interleaved pipeline, runs each chunk with its own order
of microbatches. The caller then declares more:

    engine.begin_step(program=names of the segments in the order in which they run)
    engine.enter_segment(name)                     # before the forward or backward of a model chunk
    engine.begin_last_backward(model_chunk)  # before the last microbatch's gradients of the chunk
    engine.post_backward(model_chunk)        # after the last gradient of each microbatch

A strategy is only a placement of weights, gradients and optimizer state on the data axes.
`Gatherer` unshards weights, `GradientBucket` (`gradient_bucket.py`) reduces gradients into their
storage. The engine decides when.

All scaling is in the loss, so every reduction is a plain sum. The reduction of a block starts as
soon as all gradients of its weights have been accumulated; `post_backward` or `finish` reduces the
remaining blocks. `finish` then runs the remaining all-reduces of the gradient plan over model axes
(`ModelSums`). They sum the gradients of weights that are replicated over an axis or a subgroup of
it and process different tokens or heads there, as on tp or in two pipeline stages. One all-reduce
per group sums such ranges of all buckets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Protocol

import torch

from megatron.core.comm.collectives import all_reduce
from megatron.core.comm.symmetric_memory import RegisteredMemory
from megatron.core.device import NullStream, Stream, current_stream, new_stream
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.distributed.gradient_bucket import GradientBlock, GradientBucket
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.weight_gather import (
    BACKWARD,
    EVALUATION,
    FORWARD,
    BufferPool,
    Gatherer,
    OwnedRange,
    WeightStore,
    empty_range,
    owned_range,
)


class ModelSums:
    """The all-reduces of the gradient plans over model axes.

    One for each group; two where some weights are sharded over gtp and others are replicated.
    """

    def __init__(self, store: WeightStore, buckets: Sequence[GradientBucket]) -> None:
        # Shards over gtp have other sizes on other gtp ranks. In one tensor with them, a
        # replicated gradient would have another offset on each gtp rank, so an all-reduce of more
        # than two ranks would add its terms in another order: the replicas would drift apart.
        views: dict[tuple[str, bool], list[tuple[str, torch.Tensor]]] = {}
        for entry in buckets:
            for owned in entry.bucket.owned_weights():
                handle = owned.handle
                for step in store.plans[handle.name].steps if handle.trainable else ():
                    group_views = views.setdefault((step.group, entry.bucket.gtp), [])
                    for box in store.boxes(handle):
                        start, stop = max(box.start, owned.start), min(box.stop, owned.stop)
                        if box.name in step.sub_weights and start < stop:
                            at = owned.offset + start - owned.start
                            group_views.append(
                                (handle.name, entry.gradients[at : at + stop - start])
                            )
        # Sorted by name: pipeline stages may declare the weights that they share in other orders,
        # and the concatenated tensors of the all-reduce must agree.
        self._sums = [
            (store.groups[name], [view for _, view in sorted(named_views, key=lambda x: x[0])])
            for (name, _), named_views in sorted(views.items(), key=lambda x: x[0])
            if named_views and store.groups[name].size > 1
        ]

    def run(self) -> None:
        """Run all all-reduces, each on one concatenated tensor."""
        for group, views in self._sums:
            # One collective per group: many of these tensors are norm weights of a few kilobytes.
            flat = torch.cat(views)
            all_reduce(flat, group, out=flat)
            torch._foreach_copy_(views, list(flat.split([v.numel() for v in views])))


def _gatherers(store: WeightStore, config: DataParallelConfig) -> list[Gatherer]:
    """Return a gatherer of the buckets stored in shards and a gatherer of the buckets stored whole
    whose optimizer state is sharded, each if there are any. Weights sharded over gtp are always
    prefetched."""
    gatherers = []
    for sharded in (True, False):
        buckets = [b for b in store.buckets if b.placement.optimizer and b.sharded == sharded]
        if buckets:
            gatherer = Gatherer(
                buckets,
                prefetch=config.overlap_param_gather or any(bucket.gtp for bucket in buckets),
                prefetch_bytes=config.prefetch_bytes,
                poison=config.debug,
                register_buffers=config.use_nccl_ub,
            )
            gatherers.append(gatherer)
    return gatherers


class _Phase(Enum):
    """The state of an engine."""

    BETWEEN = "no step"
    STEP = "a step"
    EVALUATION = "an evaluation"


class GradientObserver(Protocol):
    """Observes gradients. A CUDA graph captures its operations, so it must not read them on the
    host."""

    def begin(self) -> None:
        """Begin a step."""

    def show(self, flat: torch.Tensor) -> None:
        """Observe some gradients of the step, without changing them."""


class DataParallel:
    """Train the weights of a store over the data-parallel ranks.

    Args:
        store: a store materialised for the same strategy; frozen weights get no gradients.
        groups: the process groups of the store.
        config: settings; None are the defaults.

    Raises:
        ValueError: the store is not materialised, or for another strategy.

    Attributes:
        buckets: buckets with trained weights, in the order in which backward fills them.
        gatherers: unshard weights; empty if every rank stores and updates whole weights, two if
            only weights over gtp are stored in shards.
        placement: the axes that shard weights, gradients and optimizer state on these ranks.
        launched_in_backward: reductions of blocks of the last microbatch started before `finish`.
        outer_in_backward: reductions over the outer ranks started before `finish`.
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
        self.placement, stored = config.storage().effective(groups), store.storage.effective(groups)
        if (self.placement.weight, self.placement.optimizer) != (stored.weight, stored.optimizer):
            raise ValueError(
                f"the weights are stored for strategy {store.storage.strategy} (outer "
                f"{store.storage.outer}), but the engine uses {config.strategy} (outer "
                f"{config.outer}): materialize the store with the engine's config.storage()"
            )
        self.launched_in_backward = self.outer_in_backward = 0
        memory = None
        if config.use_nccl_ub:
            reducing = [g for b in store.buckets for g in (b.group, b.outer)]
            memory = RegisteredMemory(reducing, store.device)
        self.pool = BufferPool(store.device, poison=config.debug, memory=memory)
        self.gatherers = _gatherers(store, config)
        self._model_chunks = sorted({bucket.model_chunk for bucket in store.buckets}, reverse=True)
        # Stream switches cost the host 30 microseconds per block, in vain on a single rank.
        # The CPU has a stream that does nothing; work on it is enqueued on the device's current
        # stream.
        communicates = any(g.size > 1 for b in store.buckets for g in (b.group, b.outer))
        stream = new_stream(store.device if communicates else torch.device("cpu"))
        self.buckets = [
            GradientBucket(
                bucket,
                config=config,
                pool=self.pool,
                stream=stream,
                on_full=self._on_full,
            )
            for bucket in store.buckets
            if bucket.trainable
        ]
        self._blocks = [block for bucket in self.buckets for block in bucket.blocks]
        store.disable_param_grads()
        self._sums = ModelSums(store, self.buckets)
        self._phase = _Phase.BETWEEN
        self._complete, self._unsynced = True, False
        self._observer: GradientObserver | None = None
        self._last_backward_chunks: set[int] = set()
        self._in_flight: deque[GradientBlock] = deque()
        self._outer_bucket: GradientBucket | None = None
        # Memory for one reduction in flight while backward fills the next buffer.
        limit = max((block.bytes for block in self._blocks if block.counts_in_flight), default=0)
        self._max_in_flight_bytes = limit if config.overlap_grad_reduce else 0

    @property
    def sharded(self) -> bool:
        """Whether the optimizer state is sharded."""
        return bool(self.placement.optimizer)

    @property
    def gathered_bytes(self) -> int:
        """Maximum bytes of unsharded weights at a time, as far as the order of use is known: the
        first step may raise it for weights gathered one by one over gtp."""
        return sum(gatherer.max_unsharded_bytes for gatherer in self.gatherers)

    def owned(self) -> list[OwnedRange]:
        """Return the ranges that this rank's optimizer updates, one per bucket; an empty range if
        there is no bucket."""
        ranges = [owned_range(self.store, b.bucket, b.gradients) for b in self.buckets]
        return [replace(owned, owner=self) for owned in ranges or [empty_range(self.store)]]

    def observe_gradients(self, observer: GradientObserver | None) -> None:
        """Show this rank's unreduced gradients to an observer, one flat buffer before each
        reduction; None removes the observer."""
        self._observer = observer
        for bucket in self.buckets:
            bucket.observe = None if observer is None else observer.show

    # --- a step -----------------------------------------------------------------------------------

    def begin_step(self, microbatches: int = 1, *, program: Sequence[str] | None = None) -> None:
        """Begin a step, whose first gradients overwrite the last step's gradients.

        Args:
            microbatches: number of microbatches of this step. A wrong number costs time, because
                the gather plan does not match, but not correctness.
            program: the segments of this step in the order in which they will run; None is forward
                and backward of each microbatch. `enter_segment` marks the begin of each. A wrong
                program costs time, but not correctness.

        Raises:
            ValueError: a step or an evaluation is running, or updates have not been synchronised.
        """
        if self._phase is not _Phase.BETWEEN:
            raise ValueError(
                f"begin_step inside {self._phase.value}: call finish() or abort() first; "
                "every microbatch of a step follows one begin_step()"
            )
        self._check_synced("begin_step")
        self._phase, self._complete = _Phase.STEP, False
        self.launched_in_backward = self.outer_in_backward = 0
        self._last_backward_chunks.clear()
        if self._observer is not None:
            self._observer.begin()
        for bucket in self.buckets:
            bucket.begin_step()
        for gatherer in self.gatherers:
            gatherer.begin((FORWARD, BACKWARD) * microbatches if program is None else program)
            if program is None:
                gatherer.enter_segment(FORWARD)

    def enter_segment(self, name: str) -> None:
        """Declare that a segment runs from now on: `segment_name(FORWARD or BACKWARD, chunk)`.

        Raises:
            ValueError: outside of steps and evaluations.
        """
        if self._phase is _Phase.BETWEEN:
            raise ValueError(f"segment {name} outside a step: call begin_step() first")
        for gatherer in self.gatherers:
            gatherer.enter_segment(name)

    def prefetch_segment(self, name: str) -> None:
        """Start the first all-gathers of a segment, without waiting.

        Only with `overlap_param_gather`, and after a step has recorded the segment's weights.

        Raises:
            ValueError: outside of steps and evaluations.
        """
        if self._phase is _Phase.BETWEEN:
            raise ValueError(f"prefetch of {name} outside a step: call begin_step() first")
        for gatherer in self.gatherers:
            gatherer.prefetch_segment(name)

    def begin_last_backward(self, model_chunk: int) -> None:
        """Declare that the step's last microbatch now accumulates gradients of a model chunk.

        With `overlap_grad_reduce`, buckets of the chunk are reduced as they fill. All earlier
        microbatches must have accumulated their gradients.

        Raises:
            ValueError: no step has begun.
        """
        if self._phase is not _Phase.STEP:
            raise ValueError(
                f"begin_last_backward({model_chunk}) outside a step: call begin_step() first"
            )
        self._last_backward_chunks.add(model_chunk)
        for bucket in self.buckets:
            if bucket.model_chunk == model_chunk:
                bucket.begin_last_microbatch()

    def post_backward(self, model_chunk: int) -> None:
        """Declare that a microbatch has accumulated all its gradients of a model chunk's weights.

        This reduces sharded gradients that were accumulated less often than declared. After the
        last microbatch, with `overlap_grad_reduce`, it reduces all remaining buckets of the chunk.

        Raises:
            ValueError: no step has begun.
        """
        if self._phase is not _Phase.STEP:
            raise ValueError(
                f"post_backward({model_chunk}) outside a step: call begin_step() first"
            )
        is_last = model_chunk in self._last_backward_chunks and self.config.overlap_grad_reduce
        for bucket in self.buckets:
            if bucket.model_chunk != model_chunk:
                continue
            for block in bucket.blocks:
                if (block.every_microbatch and block.has_gradients) or (
                    is_last and not block.num_reductions
                ):
                    self._start_grad_sync(block)
            if bucket.outer.every_microbatch and bucket.needs_outer:
                self._start_outer_grad_sync(bucket)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Run one microbatch's backward.

        Args:
            loss: the loss of the microbatch.
            last: this is the last microbatch of the step, so reductions overlap with backward.

        Raises:
            ValueError: no step has begun.
        """
        if self._phase is not _Phase.STEP:
            raise ValueError("backward outside a step: call begin_step() first")
        self.set_is_last_backward(last)
        self.enter_segment(BACKWARD)
        loss.backward()
        # With a queue the weight gradients are not computed yet; the schedule calls this later.
        if self.store.queue is None:
            for model_chunk in self._model_chunks:
                self.post_backward(model_chunk)
        self.enter_segment(FORWARD)

    def set_is_last_backward(self, is_last: bool) -> None:
        """Declare whether the next backward is the step's last one, for all model chunks."""
        for model_chunk in self._model_chunks if is_last else ():
            self.begin_last_backward(model_chunk)

    def finish(self) -> None:
        """Complete all gradients: start the remaining reductions, wait for every reduction, and
        all-reduce over the model axes.

        Raises:
            ValueError: no step has begun; a second call would sum gradients twice.
        """
        if self._phase is not _Phase.STEP:
            raise ValueError("finish outside a step: call begin_step() first")
        # Every rank starts the remaining reductions in the order of the blocks, so that collectives
        # match although the ranks may have accumulated different gradients.
        in_backward = self.outer_in_backward
        for block in self._blocks:
            if (block.every_microbatch and block.has_gradients) or not block.num_reductions:
                self._start_grad_sync(block)
        self._wait_for_reductions(0)
        for bucket in self.buckets:
            if bucket.needs_outer:
                self._start_outer_grad_sync(bucket)
        self.outer_in_backward = in_backward
        for bucket in self.buckets:
            bucket.finish_outer_grad_sync()
        # After the data axes: the all-reduces over model axes sum complete gradients.
        self._sums.run()
        for gatherer in self.gatherers:
            gatherer.finish()
            if self.config.debug:
                gatherer.check_order()
        self._end_step(complete=True)

    def abort(self) -> None:
        """Leave a step that failed half-way; the next `begin_step` starts clean."""
        self._in_flight.clear()
        for bucket in self.buckets:
            bucket.abort()
        for gatherer in self.gatherers:
            gatherer.abort()
        self._end_step(complete=False)

    # --- between steps ----------------------------------------------------------------------------

    def start_param_sync(self, *, force_sync: bool = False) -> None:
        """All-gather the other ranks' updates, after the optimizer has written the owned ranges.

        With `overlap_param_gather` weights are gathered at their use, and the first all-gathers
        start here unless `fsdp_all_gather_in_start_param_sync` is False. Otherwise, or with
        `force_sync`, all weights are gathered here. Weights stored in shards are gathered here with
        `force_sync` only, because they are resharded immediately.
        """
        self._unsynced = False  # also without any gatherer, where no rank shares an update
        early = self.config.fsdp_all_gather_in_start_param_sync
        for gatherer in self.gatherers:
            # First of all: every cached weight that other ranks update is stale.
            gatherer.invalidate()
            if force_sync or not (gatherer.prefetch or gatherer.reshards):
                gatherer.gather_all()
            elif gatherer.prefetch and early:
                gatherer.prefetch_next_step()

    def wait(self) -> None:
        """Wait for all all-gathers in flight between two steps; their weights stay unsharded."""
        for gatherer in self.gatherers:
            gatherer.wait()

    def complete_weights(self) -> None:
        """Complete this rank's stored weights with the updates of all ranks, to save or read them.

        Afterwards replicas store the same values. This is collective over data-parallel ranks.

        Raises:
            ValueError: a step is running, or updates have not been synchronised.
        """
        if self._phase is _Phase.STEP:
            raise ValueError("complete_weights inside a step: call finish() or abort() first")
        self._check_synced("complete_weights")
        for gatherer in self.gatherers:
            gatherer.sync_storage()

    @contextmanager
    def evaluation(self, program: Sequence[str] | None = None) -> Iterator[None]:
        """Run forward passes without backward inside, between two steps.

        Args:
            program: the segments that will run, in order, as in `begin_step`; None is one segment
                for all forward passes.

        Raises:
            ValueError: a step or an evaluation is running, or updates have not been synchronised.
        """
        if self._phase is not _Phase.BETWEEN:
            raise ValueError(
                f"evaluation inside {self._phase.value}: call finish() or leave it first"
            )
        self._check_synced("evaluation")
        self._phase = _Phase.EVALUATION
        try:
            for gatherer in self.gatherers:
                gatherer.begin((EVALUATION,) if program is None else program)
                if program is None:
                    gatherer.enter_segment(EVALUATION)
            yield
            for gatherer in self.gatherers:
                gatherer.finish()
        # Also KeyboardInterrupt: an all-gather in flight must not outlive the evaluation.
        except BaseException:
            for gatherer in self.gatherers:
                gatherer.abort()
            raise
        finally:
            self._phase = _Phase.BETWEEN

    # --- what the optimizer calls -----------------------------------------------------------------

    def check_gradients(self) -> None:
        """Check that the gradients of `owned()` are complete.

        Raises:
            ValueError: `finish` has not ended the step, or `abort` has ended it.
        """
        if self._phase is _Phase.STEP:
            raise ValueError(
                "the gradients of this step are not summed over the ranks yet: call finish() of "
                "the DataParallel engine after the last backward, before the optimizer's step"
            )
        if not self._complete:
            raise ValueError(
                "the last step was aborted, so its gradients are incomplete: compute a step "
                "from begin_step() to finish() before the optimizer's step"
            )

    def weights_updated(self) -> None:
        """Record that the optimizer has written the owned ranges."""
        self._unsynced = bool(self.gatherers)

    # --- inside -----------------------------------------------------------------------------------

    def _check_synced(self, name: str) -> None:
        """Check that `start_param_sync` has followed the last optimizer step.

        Raises:
            ValueError: it has not.
        """
        if self._unsynced:
            raise ValueError(
                f"{name}: the optimizer has updated weights that other ranks share: call "
                "start_param_sync() after every optimizer step"
            )

    def _end_step(self, *, complete: bool) -> None:
        self._phase, self._complete = _Phase.BETWEEN, complete
        for block in self._blocks:
            block.in_step = False

    def _on_full(self, block: GradientBlock) -> None:
        is_last = block.bucket.model_chunk in self._last_backward_chunks
        # A persistent buffer accumulates over microbatches; only the last one completes it.
        if not block.every_microbatch and not (is_last and self.config.overlap_grad_reduce):
            return
        self._start_grad_sync(block)
        self.launched_in_backward += is_last

    def _start_grad_sync(self, block: GradientBlock) -> None:
        bucket = block.bucket
        # The outer reduction of the previous microbatch must start before its shards are reused.
        if bucket.outer.every_microbatch and bucket.is_full:
            self._start_outer_grad_sync(bucket)
        block.start_grad_sync()
        self._in_flight.append(block)
        if block.counts_in_flight:
            self._wait_for_reductions(self._max_in_flight_bytes)

    def _wait_for_reductions(self, max_bytes: int) -> None:
        """Wait for the oldest reductions until at most `max_bytes` are in flight; if all blocks of
        a bucket are then reduced, start its reduction over the outer ranks."""
        # Oldest first: reductions of a communicator finish in the order of their start.
        num_bytes = sum(block.bytes for block in self._in_flight if block.counts_in_flight)
        while self._in_flight and (num_bytes > max_bytes or max_bytes == 0):
            block = self._in_flight.popleft()
            block.finish_grad_sync()
            num_bytes -= block.bytes * block.counts_in_flight
            bucket = block.bucket
            if self.config.overlap_grad_reduce and bucket.is_complete:
                self._start_outer_grad_sync(bucket)

    def _start_outer_grad_sync(self, bucket: GradientBucket) -> None:
        # The outer reduction reads the sums of all blocks.
        for block in bucket.blocks:
            block.finish_grad_sync()
        # At most one outer reduction is in flight, because each has a pool buffer for its shards.
        if self._outer_bucket is not None:
            self._outer_bucket.finish_outer_grad_sync()
        bucket.start_outer_grad_sync()
        self.outer_in_backward += 1
        self._outer_bucket = bucket if bucket.outer.every_microbatch else None
        if self._outer_bucket is not None and not self.config.overlap_grad_reduce:
            bucket.finish_outer_grad_sync()


def num_unplanned_uses(engine: DataParallel) -> int:
    """Return the number of uses of weights so far that no plan foresaw."""
    counts = [gatherer.counts for gatherer in engine.gatherers]
    return sum(count.on_demand + count.mismatches for count in counts)


def unrecordable(engine: DataParallel) -> str | None:
    """Return why an engine's step cannot be recorded, and the fix; None if it can."""
    config = engine.config
    prefetch = any(gatherer.prefetch for gatherer in engine.gatherers)
    if (config.overlap_param_gather or prefetch) and config.fsdp_all_gather_in_start_param_sync:
        return (
            "a recorded step cannot wait for an all-gather that was started before it: set "
            "fsdp_all_gather_in_start_param_sync to False"
        )
    if config.debug:
        return "debug compares orders on the host, which a recorded step cannot do: set it to False"
    return None


class StepRecording:
    """The recording of one step of an engine, from `prepare` to `close`.

    A captured step runs no Python when it is replayed, and must not wait for GPU work outside
    the capture. So, between `begin_step` and `finish` of the captured step:

    - it waits for no earlier event: no collective is in flight, and the pools start empty,
      because a buffer released earlier carries an event;
    - side streams fork from the capturing stream inside the capture and join it before its end;
    - every use of an unsharded weight follows the plan;
    - all weights are stale as after an applied update, so that a replay gathers every weight, also
      if the captured step follows a skipped update.

    Afterwards the buffers acquired during the capture belong to the recording, and eager steps
    acquire others. A weight that the engine counts as stale after a replay may be up to date,
    never the reverse.

    Args:
        engine: an engine between two steps.

    Raises:
        ValueError: collectives of the engine span two steps, or it reads gradients on the host.

    Attributes:
        buffers: pool buffers that replays write, reserved for the recording.
    """

    def __init__(self, engine: DataParallel) -> None:
        if reason := unrecordable(engine):
            raise ValueError(reason)
        self.engine = engine
        self.buffers: list[torch.Tensor] = []
        self._num_unplanned = 0
        self._counts: list[tuple[int, int]] = []

    @property
    def _streams(self) -> list[Stream]:
        streams = [gatherer.stream for gatherer in self.engine.gatherers]
        streams += [bucket.stream for bucket in self.engine.buckets[:1]]
        return [stream for stream in streams if not isinstance(stream, NullStream)]

    def prepare(self) -> None:
        """Bring the engine to its state after an applied update, with no collective in flight.

        This is collective: every rank calls it for the same step, as `start_param_sync`.
        """
        engine = self.engine
        engine.start_param_sync()
        # A free buffer carries an event of an eager step, which a capture may not wait for.
        engine.pool.trim()
        for gatherer in engine.gatherers:
            assert not gatherer.in_flight
            gatherer.pool.trim()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Enclose the captured step, on the capturing stream."""
        self._note()
        yield
        capturing = current_stream(self.engine.store.device)
        # A capture must end on the stream where it began, with all forked streams joined.
        for stream in self._streams:
            capturing.wait_stream(stream)

    def close(self) -> None:
        """Reserve the pool buffers of the captured step for its replays.

        Raises:
            ValueError: the captured step used weights in another order than the step before it.
        """
        engine = self.engine
        # Replays write these addresses, so no eager step may acquire them.
        self.buffers += engine.pool.take_free_buffers()
        for gatherer in engine.gatherers:
            self.buffers += gatherer.pool.take_free_buffers()
        # An unplanned use would have waited for an event that is not part of the graph.
        if num_unplanned_uses(engine) != self._num_unplanned:
            raise ValueError(
                "the recorded step needed weights in another order than the step before: a "
                "recorded step must run the same layers every time"
            )
        for i, (gatherer, before) in enumerate(zip(engine.gatherers, self._counts, strict=True)):
            counts = gatherer.counts
            self._counts[i] = counts.gathers - before[0], counts.prefetched - before[1]
            # The capture has only recorded these all-gathers: the first replay starts them.
            counts.gathers, counts.prefetched = before

    def replayed(self) -> None:
        """Count the all-gathers of a replay."""
        for gatherer, (gathers, prefetched) in zip(
            self.engine.gatherers, self._counts, strict=True
        ):
            gatherer.counts.gathers += gathers
            gatherer.counts.prefetched += prefetched

    def _note(self) -> None:
        self._num_unplanned = num_unplanned_uses(self.engine)
        self._counts = [(g.counts.gathers, g.counts.prefetched) for g in self.engine.gatherers]
