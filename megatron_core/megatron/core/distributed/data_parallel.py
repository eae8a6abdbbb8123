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
`Gatherer` unshards weights, `GradientBucket` reduces gradients into their storage.

All scaling is in the loss, so every reduction is a plain sum. The reduction of a block starts as
soon as all gradients of its weights have been accumulated; `post_backward` or `finish` reduces the
remaining blocks. `finish` then runs the remaining all-reduces of the gradient plan over model axes
(`ModelSums`). They sum the gradients of weights that are replicated over an axis or a subgroup of
it and process different tokens or heads there, as on tp or in two pipeline stages. One all-reduce
per group sums such ranges of all buckets.

`GradientBucket` stores the gradients of one bucket, from their accumulation in backward to the
optimizer. It has a `GradientBlock` for each of its blocks:

    gradients            backward fills               reduced             the rank stores
    StepGradients        a buffer for the whole step  once, at the end    the sum, its range (optim)
                                                                          or its shard (over gtp)
    MicrobatchGradients  a pool buffer                every microbatch    its shard, fp32

This reduction is a sum over the shard group of the block. A second reduction, of a bucket's shards
over the outer ranks, follows when all its blocks have been reduced for the last time in the step:
under hybrid sharding, and over the data-parallel replicas of weights sharded over gtp. If the
replicas shard gradients too (optim_grads), it follows in every microbatch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, Protocol, TypeAlias, get_args

import torch

from megatron.core.comm.collectives import (
    Pending,
    all_reduce,
    all_reduce_async,
    reduce_scatter_async,
    reduce_scatter_fp32_async,
)
from megatron.core.comm.nccl_memory import RegisteredMemory
from megatron.core.device import NullStream, Stream, current_stream, new_stream, on_stream
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.weight_gather import (
    BACKWARD,
    EVALUATION,
    FORWARD,
    GRANULARITIES,
    Bucket,
    BucketBlock,
    BufferPool,
    Gatherer,
    OwnedRange,
    Storage,
    WeightHandle,
    WeightStore,
    empty_range,
    owned_range,
    reductions,
)
from megatron.core.weight_gather.bucket import Granularity
from megatron.core.weight_gather.gather_format import GatherFormatName, ScaleBlocks, gather_formats
from megatron.core.weight_sharding import OuterStrategy, Placement, Strategy, placement

GRADIENT_DTYPES = (torch.float32, torch.bfloat16)
ReduceScatterPer: TypeAlias = Literal["microbatch", "step"]
REDUCE_SCATTER_PER: tuple[ReduceScatterPer, ...] = get_args(ReduceScatterPer)


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """Settings of the data-parallel engine.

    Args:
        strategy: "no_shard" (gradients are all-reduced, every rank updates all weights), "optim"
            (ZeRO-1: shards the optimizer state), "optim_grads" (ZeRO-2: shards gradients too),
            "optim_grads_params" (ZeRO-3: shards weights too).
        outer: over the outer axis of hybrid sharding, all state is replicated ("no_shard") or the
            optimizer state is sharded once more ("optim").
        overlap_grad_reduce: start the reduction of a bucket as soon as backward has filled it.
            False waits for the end of backward, or with sharded gradients for each reduction.
        overlap_param_gather: overlap all-gathers of weights with computation. False gathers all
            weights after the optimizer step, or with sharded weights each block at its use.
        fsdp_all_gather_in_start_param_sync: with `overlap_param_gather`, start the first
            all-gathers at the end of the optimizer step. False starts them in the next forward,
            which whole iterations captured in a CUDA graph need.
        granularity: with sharded weights, an all-gather covers a "unit" (a layer) or a "weight".
        prefetch_bytes: bytes to gather ahead beyond the next block, with `overlap_param_gather`,
            and for weights sharded over gtp always.
        grad_dtype: of the gradient buffers that backward fills.
        fp32_accumulation: with bf16 gradients, send bf16 but sum in fp32.
        gtp_reduce_scatter_per: gradients of weights sharded over gtp are reduce-scattered in every
            "microbatch", or once a "step", until which each rank stores them unreduced.
        gather_format: format of the all-gather of weights sharded over gtp: "bf16" (their own
            dtype), "fp8", "mxfp8" or "nvfp4".
        gather_scale_blocks: scale blocks of mxfp8 or nvfp4: "2d" squares, or "1d" blocks, with
            separate encodings for forward and backward.
        use_nccl_ub: allocate the buffers of all-gathers and reductions in memory registered with
            NCCL, see `comm.nccl_memory`.
        debug: fill unused buffers with NaN, and compare the order of all-gathers between ranks.

    Raises:
        ValueError: all invalid combinations, in one message.
    """

    strategy: Strategy = "no_shard"
    outer: OuterStrategy = "no_shard"
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = False
    fsdp_all_gather_in_start_param_sync: bool = True
    granularity: Granularity = "unit"
    prefetch_bytes: int = 0
    grad_dtype: torch.dtype = torch.float32
    fp32_accumulation: bool = False
    gtp_reduce_scatter_per: ReduceScatterPer = "microbatch"
    gather_format: GatherFormatName = "bf16"
    gather_scale_blocks: ScaleBlocks = "2d"
    use_nccl_ub: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        problems = []
        try:
            strategy_placement = placement(self.strategy, self.outer)
        except ValueError as error:
            problems.append(str(error))
            strategy_placement = Placement()
        if self.grad_dtype not in GRADIENT_DTYPES:
            problems.append(f"grad_dtype is {self.grad_dtype}: use torch.float32 or torch.bfloat16")
        if self.fp32_accumulation and self.grad_dtype is not torch.bfloat16:
            problems.append("fp32_accumulation is for bf16 gradients: drop it or set grad_dtype")
        if self.fp32_accumulation and not strategy_placement.optimizer:
            problems.append("fp32_accumulation needs a strategy that reduce-scatters: use optim")
        if self.gtp_reduce_scatter_per not in REDUCE_SCATTER_PER:
            names = " or ".join(REDUCE_SCATTER_PER)
            problems.append(f"gtp_reduce_scatter_per {self.gtp_reduce_scatter_per!r}: use {names}")
        if self.gtp_reduce_scatter_per == "step" and strategy_placement.gradient:
            problems.append(
                "gtp_reduce_scatter_per step needs unsharded gradients, which "
                f"{self.strategy} shards: use no_shard or optim, or drop it"
            )
        try:
            gather_formats(self.gather_format, scale_blocks=self.gather_scale_blocks)
        except ValueError as error:
            problems.append(str(error))
        if self.granularity not in GRANULARITIES:
            problems.append(f"granularity {self.granularity!r}: use {' or '.join(GRANULARITIES)}")
        if self.granularity != "unit" and not strategy_placement.weight and not problems:
            problems.append(f"granularity {self.granularity} has no effect with {self.strategy}")
        if self.prefetch_bytes < 0:
            problems.append(f"prefetch_bytes is {self.prefetch_bytes}: use 0 or more")
        if self.overlap_param_gather and not strategy_placement.optimizer and not problems:
            problems.append("overlap_param_gather has no effect with no_shard: nothing is gathered")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def placement(self) -> Placement:
        return placement(self.strategy, self.outer)

    def storage(self, **options: int | bool) -> Storage:
        """Return how a model that this engine will train must store its weights.

        Args:
            options: `bucket_bytes` and `initialize` of `Storage`.
        """
        return Storage(
            strategy=self.strategy,
            outer=self.outer,
            granularity=self.granularity,
            gather_format=self.gather_format,
            gather_scale_blocks=self.gather_scale_blocks,
            **options,  # type: ignore[arg-type]
        )


class GradientBlock(ABC):
    """The gradients of a block with trained weights, from their accumulation in backward to the sum
    over the shard group.

    Args:
        bucket: stores this rank's shard of the sum.
        block: the block of the weights.

    Attributes:
        every_microbatch: gradients are reduced in every microbatch, otherwise once a step.
        counts_in_flight: its bytes count towards the limit of reductions in flight, because its
            reduction uses pool buffers or the reduction over the outer ranks waits for it.
        num_accumulated: gradients accumulated since the last reduction, by weight.
        num_unfinished: weights that still wait for gradients of this microbatch.
        num_reductions: reductions started in this step.
        in_step: a step is running, so gradients may be accumulated.
    """

    every_microbatch: bool

    def __init__(self, bucket: GradientBucket, block: BucketBlock) -> None:
        self.bucket, self.block = bucket, block
        self.trainable = [handle for handle in block.handles if handle.trainable]
        self.num_accumulated: dict[str, int] = {}
        self.num_unfinished = 0
        self.num_reductions = 0
        self.in_step = False
        self.counts_in_flight = (
            self.every_microbatch or bucket.fp32_sum or bucket.bucket.outer.size > 1
        )
        self.bytes = block.layout.numel * bucket.config.grad_dtype.itemsize
        self._grad_buffer: torch.Tensor | None = None
        self._pending: Pending | None = None
        self._addends: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._overwrites_output: bool  # of the reduction in flight, as `_output`
        for handle in self.trainable:
            handle.gradients = self

    @property
    def has_gradients(self) -> bool:
        """Whether gradients have been accumulated whose reduction has not started."""
        return any(self.num_accumulated.values())

    @property
    def is_reducing(self) -> bool:
        """Whether a reduction is in flight."""
        return self._pending is not None

    def begin_step(self) -> None:
        """Reset for a new step: its first gradients overwrite."""
        self.num_reductions = 0
        self.in_step = True
        self._reset()

    def begin_last_microbatch(self) -> None:
        """Count the gradients of the last microbatch from here on. Only a buffer of the whole step
        waits for it; a buffer of one microbatch is counted anew after each reduction."""
        if not self.every_microbatch:
            self._reset_counts()

    @abstractmethod
    def alloc_main_grads(self) -> None:
        """Set `main_grad` of every trained weight."""

    def grad_accumulated(self, handle: WeightHandle) -> None:
        """Count an accumulated gradient; after the last declared one, the block is full.

        Raises:
            ValueError: no step has begun, or the block has been reduced already.
        """
        if not self.in_step:
            raise ValueError(
                f"backward of {handle.name} outside a step: call begin_step() of the DataParallel "
                "engine first"
            )
        if self.is_closed:
            raise ValueError(
                f"{handle.name} got a gradient after the reduction of its gradients had begun: "
                "call backward(loss, last=False) for all microbatches of a step but the last one. "
                f"A weight that a layer uses more than {handle.uses} times in a forward pass must "
                "be declared with as many uses"
            )
        # A tied weight gets one gradient per use. Its block is full after all of them.
        self.num_accumulated[handle.name] += 1
        if self.num_accumulated[handle.name] == handle.uses:
            self.num_unfinished -= 1
            if self.num_unfinished == 0:
                self.bucket.on_full(self)

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether the step's last reduction has started, so that another gradient would miss it."""

    def start_grad_sync(self) -> None:
        """Start the reduction of the accumulated gradients; weights without one count as zero."""
        # All ranks of the group reduce the block, also those where no weight got a gradient.
        if self._grad_buffer is None:
            self.alloc_main_grads()
        assert self._grad_buffer is not None
        for handle in self.trainable:
            if handle.overwrite_main_grad:
                assert handle.main_grad is not None
                handle.main_grad.zero_()
        # The last reduction may still write its output, which this one adds to.
        self.finish_grad_sync()
        bucket, buffer = self.bucket, self._grad_buffer
        if bucket.observe is not None:
            bucket.observe(buffer)
        self._output, self._overwrites_output = bucket.reduction_output(self)
        if isinstance(bucket.stream, NullStream):  # a single rank: there is nothing to overlap
            self._pending = self._start_reduction(buffer)
        else:
            # Backward fills the buffer on the current stream; the reduction reads it after that.
            bucket.stream.wait_stream(current_stream(bucket.pool.device))
            with on_stream(bucket.stream):
                self._pending = self._start_reduction(buffer)
        self.num_reductions += 1

    def finish_grad_sync(self) -> None:
        """Wait for the reduction in flight and add its sum to the step's gradients."""
        if self._pending is None:
            return
        # The current stream waits: it adds the sum, and is the last reader of the pool buffers.
        summed, output = self._pending.wait(), self._output
        self._pending = self._output = None
        assert output is not None
        if self._addends is not None:
            self.bucket.pool.release(self._addends)
            self._addends = None
        # The first sum of a step was reduced directly into the shard, if the dtypes agree. Later
        # microbatches are added to it.
        if summed.data_ptr() != output.data_ptr():
            if self._overwrites_output:
                output.copy_(summed)
            else:
                output.add_(summed)
                if self.bucket.fp32_sum:
                    self.bucket.pool.release(summed)

    def abort(self) -> None:
        """Wait for the reduction in flight and release all pool buffers."""
        self.finish_grad_sync()

    def _start_reduction(self, buffer: torch.Tensor) -> Pending:
        """Start the reduction over the shard group."""
        bucket, output = self.bucket, self._output
        assert output is not None
        group = self.block.bucket.group
        if not bucket.inner.scatter:
            return all_reduce_async(buffer, group, out=buffer)
        if bucket.fp32_sum:
            out = output
            if not self._overwrites_output:
                out = bucket.pool.acquire(len(output), torch.float32)
            self._addends = bucket.pool.acquire(buffer.numel(), buffer.dtype)
            # A sum of bf16 addends in fp32: an all-to-all, and a local sum of what arrived.
            return reduce_scatter_fp32_async(buffer, group, out=out, receive_buffer=self._addends)
        if self._overwrites_output and buffer.dtype is output.dtype:
            return reduce_scatter_async(buffer, group, out=output)
        # In place: the output is this rank's range of the input, which NCCL allows at this offset.
        low, high = self.block.shard_range
        return reduce_scatter_async(buffer, group, out=buffer[low:high])

    def _attach_main_grads(self, buffer: torch.Tensor) -> None:
        self._grad_buffer = buffer
        for handle, member in self.block.members():
            if handle.trainable:
                handle.main_grad = buffer[member.start : member.stop].view(member.shape)

    def _reset(self) -> None:
        for handle in self.trainable:
            handle.overwrite_main_grad = True
        self._reset_counts()

    def _reset_counts(self) -> None:
        self.num_unfinished = len(self.trainable)
        self.num_accumulated = dict.fromkeys((handle.name for handle in self.trainable), 0)


class StepGradients(GradientBlock):
    """Gradients in a persistent buffer that all microbatches accumulate in, reduced once a step.

    Attributes:
        grad_buffer: the buffer, [numel].
    """

    every_microbatch = False

    def __init__(self, bucket: GradientBucket, block: BucketBlock) -> None:
        super().__init__(bucket, block)
        self.grad_buffer = torch.zeros(
            block.layout.numel, dtype=bucket.config.grad_dtype, device=block.data.device
        )
        self.alloc_main_grads()

    def alloc_main_grads(self) -> None:
        self._attach_main_grads(self.grad_buffer)

    @property
    def is_closed(self) -> bool:
        return self.num_reductions > 0


class MicrobatchGradients(GradientBlock):
    """Gradients in a pool buffer for each microbatch, reduced in every microbatch."""

    every_microbatch = True

    def __init__(self, bucket: GradientBucket, block: BucketBlock) -> None:
        super().__init__(bucket, block)
        self._untrained_ranges = block.untrained_ranges
        self._reducing_buffer: torch.Tensor | None = None

    def alloc_main_grads(self) -> None:
        pool = self.bucket.pool
        buffer = pool.acquire(self.block.layout.numel, self.bucket.config.grad_dtype)
        # The reduction sums these elements too. A reused buffer holds any bits there, also NaN.
        for start, stop in self._untrained_ranges:
            buffer[start:stop].zero_()
        self._attach_main_grads(buffer)

    @property
    def is_closed(self) -> bool:
        return self.bucket.outer_launched

    def start_grad_sync(self) -> None:
        super().start_grad_sync()
        # The reduction reads the buffer until `finish_grad_sync`. The next microbatch acquires
        # another one, so backward does not wait.
        self._reducing_buffer = self._grad_buffer
        self._detach_main_grads()
        self._reset()

    def finish_grad_sync(self) -> None:
        super().finish_grad_sync()
        if self._reducing_buffer is not None:
            # Only now: a reduction in flight reads this memory.
            self.bucket.pool.release(self._reducing_buffer)
            self._reducing_buffer = None

    def abort(self) -> None:
        super().abort()
        if self._grad_buffer is not None:
            self.bucket.pool.release(self._grad_buffer)
            self._detach_main_grads()

    def _detach_main_grads(self) -> None:
        self._grad_buffer = None
        for handle in self.trainable:
            handle.main_grad = None


class GradientBucket:
    """The gradients of a bucket with trained weights: its gradient blocks, and this rank's shard of
    their sums, up to the reduction over the outer ranks.

    Args:
        bucket: the bucket of the weights.
        config: settings of the engine.
        pool: the pool of the buffers of one microbatch.
        stream: the stream of reductions; a `NullStream` is the current stream.
        on_full: called when all gradients of a block have been accumulated.

    Attributes:
        model_chunk: the model chunk of its weights.
        gradients: gradients of this rank's owned range, which the optimizer reads.
        inner, outer: the reduction over the shard group, and over the outer ranks.
        fp32_sum: bf16 gradients are summed in fp32, in a second pool buffer.
        num_outer_reductions: reductions over the outer ranks started in this step.
        observe: called with this rank's unreduced gradients before each reduction; must not change
            them.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        config: DataParallelConfig,
        pool: BufferPool,
        stream: Stream,
        on_full: Callable[[GradientBlock], None],
    ) -> None:
        self.bucket, self.config, self.model_chunk = bucket, config, bucket.model_chunk
        self.pool, self.stream, self.on_full = pool, stream, on_full
        once = bucket.gtp and config.gtp_reduce_scatter_per == "step"
        outer_axes = bucket.groups.outer_axes
        self.inner, self.outer = reductions(bucket.placement, outer_axes, per_step=once)
        # A single data-parallel rank reduces nothing, so its sums need no conversion.
        self.fp32_sum = config.fp32_accumulation and self.inner.scatter
        self.num_outer_reductions = 0
        self.observe: Callable[[torch.Tensor], object] | None = None
        kind = MicrobatchGradients if self.inner.every_microbatch else StepGradients
        self.blocks = [kind(self, block) for block in bucket.blocks if block.trainable]
        self._received: set[int] = set()
        self._expected: set[int] | None = None
        self._pending: Pending | None = None
        low, high = bucket.reduced_range
        start, stop = bucket.owned_range
        self._shard: torch.Tensor | None = None
        # If the outer ranks shard gradients too, the inner sum is a pool buffer that lives until
        # the outer reduction; otherwise it is persistent.
        self._keeps_shard = not (self.outer.every_microbatch and bucket.outer.size > 1)
        device = bucket.data.device
        if not self._keeps_shard:
            self.gradients = torch.zeros(stop - start, dtype=torch.float32, device=device)
            return
        if self.inner.every_microbatch or self.fp32_sum or bucket.sharded:
            self._shard = torch.zeros(high - low, dtype=torch.float32, device=device)
        else:
            (block,) = self.blocks
            assert isinstance(block, StepGradients)
            # Reduced in place: the shard is a range of the buffer that backward fills.
            self._shard = block.grad_buffer[low:high]
        self.gradients = self._shard[start - low : stop - low]

    @property
    def every_microbatch(self) -> bool:
        """Whether gradients are stored in shards, and reduced in every microbatch."""
        return self.inner.every_microbatch

    @property
    def outer_launched(self) -> bool:
        """Whether the step's only reduction over the outer ranks has started."""
        return self._keeps_shard and self.num_outer_reductions > 0

    def begin_step(self) -> None:
        """Reset for a new step: its first sums overwrite the shards."""
        self.num_outer_reductions = 0
        self._received.clear()
        # A persistent shard is reduced once, after `begin_last_microbatch`; a pool buffer in every
        # microbatch.
        self._expected = None if self._keeps_shard else self._block_offsets
        for block in self.blocks:
            block.begin_step()

    def begin_last_microbatch(self) -> None:
        """Expect the last reduction of every block in this step."""
        if self._keeps_shard:
            self._expected = self._block_offsets
        for block in self.blocks:
            block.begin_last_microbatch()

    def reduction_output(self, block: GradientBlock) -> tuple[torch.Tensor, bool]:
        """Return the output of a block's reduction, and whether the sum overwrites it."""
        if not (self._keeps_shard or self._received):
            # The outer reduction of the previous microbatch still reads its buffer of shards.
            self.finish_outer_grad_sync()
            low, high = self.bucket.reduced_range
            self._shard = self.pool.acquire(high - low, torch.float32)
        start = block.block.start
        overwrites = start not in self._received
        self._received.add(start)
        if self._expected is not None:  # the outer reduction waits until all have come
            self._expected.discard(start)
        return self._shard_of(block.block), overwrites

    @property
    def is_full(self) -> bool:
        """Whether all reductions of blocks have started that the outer reduction waits for."""
        return self.needs_outer and self._expected is not None and not self._expected

    @property
    def is_complete(self) -> bool:
        """Whether all reductions of blocks have finished that the outer reduction waits for."""
        return self.is_full and not any(block.is_reducing for block in self.blocks)

    @property
    def needs_outer(self) -> bool:
        """Whether a sum of a block has not yet been reduced over the outer ranks."""
        if self.bucket.outer.size == 1:
            return False
        return not self.num_outer_reductions if self._keeps_shard else bool(self._received)

    def start_outer_grad_sync(self) -> None:
        """Start the reduction of this rank's shards over the outer ranks, after the reductions of
        all blocks have finished."""
        group, bucket = self.bucket.outer, self.bucket
        assert self._shard is not None
        output = self.gradients
        if not self._keeps_shard:
            # A block without a gradient in this microbatch, or frozen, counts as zero.
            for block in bucket.blocks:
                if block.start not in self._received:
                    self._shard_of(block).zero_()
            last_block = bucket.blocks[-1]
            # The padding of a pool buffer is reduced too.
            self._shard[last_block.start + len(last_block.data) :].zero_()
            # The first sum is reduced directly into the gradients. Later ones are added to them.
            if self.num_outer_reductions:
                low = bucket.reduced_range[0]
                output = self._shard[bucket.owned_range[0] - low : bucket.owned_range[1] - low]
        # `finish_grad_sync` of the blocks has written the shards on the current stream.
        self.stream.wait_stream(current_stream(self.pool.device))
        with on_stream(self.stream):
            if self.outer.scatter:
                self._pending = reduce_scatter_async(self._shard, group, out=output)
            else:
                self._pending = all_reduce_async(self._shard, group, out=self._shard)
        self.num_outer_reductions += 1
        self._expected = None if self._keeps_shard else self._block_offsets
        if not self._keeps_shard:
            self._received.clear()

    def finish_outer_grad_sync(self) -> None:
        """Wait for the reduction over the outer ranks."""
        if self._pending is None:
            return
        summed = self._pending.wait()
        self._pending = None
        if self._keeps_shard:
            return
        if summed.data_ptr() != self.gradients.data_ptr():
            self.gradients.add_(summed)
        assert self._shard is not None
        self.pool.release(self._shard)
        self._shard = None

    def abort(self) -> None:
        """Wait for the reductions in flight and release all pool buffers."""
        # Wait, also after a failure: a collective in flight writes buffers of the pool.
        for block in self.blocks:
            block.abort()
        self.finish_outer_grad_sync()
        if not self._keeps_shard and self._shard is not None:
            self.pool.release(self._shard)
            self._shard = None

    @property
    def _block_offsets(self) -> set[int]:
        return {entry.block.start for entry in self.blocks}

    def _shard_of(self, block: BucketBlock) -> torch.Tensor:
        """Return the view of a block's shard in this rank's reduced gradients."""
        assert self._shard is not None
        if not self.bucket.sharded:
            return self._shard
        return self._shard[block.start : block.start + len(block.data)]


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
        communicates = any(g.size > 1 for b in store.buckets for g in (b.group, b.outer))
        stream = new_stream(store.device) if communicates else NullStream()
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
