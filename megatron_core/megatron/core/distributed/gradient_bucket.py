# SPDX-License-Identifier: Apache-2.0
"""GradientBucket: the gradients of a bucket, from their accumulation in backward to the optimizer.

A bucket has a `GradientBlock` for each of its blocks:

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
from collections.abc import Callable

import torch

from megatron.core.comm.collectives import (
    Pending,
    all_reduce_async,
    reduce_scatter_async,
    reduce_scatter_fp32_async,
)
from megatron.core.device import NullStream, Stream, current_stream, on_stream
from megatron.core.distributed.data_parallel_config import DataParallelConfig
from megatron.core.weight_gather import Bucket, BucketBlock, BufferPool, WeightHandle, reductions


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
