# SPDX-License-Identifier: Apache-2.0
"""GradientBucket: the gradients of one bucket, from backward's puts to what the optimizer reads.

    gradients   backward fills                  reduced                 kept
    whole       one buffer all step long        once, at the end        it, or its own range (optim)
    cut         a leased buffer a microbatch    in every microbatch     this rank's shard, fp32

A reduction is a sum over the ranks that share the bucket; over the outer ranks of hybrid sharding
another one follows, once a step, of this rank's shard.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.core.comm.collectives import (
    Pending,
    all_reduce_async,
    reduce_scatter_async,
    reduce_scatter_wide_async,
)
from megatron.core.device import Stream, current_stream, on_stream
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.weight_gather import Arena, Bucket, WeightHandle


class GradientBucket:
    """Collect and reduce the gradients of a bucket that has trained weights.

    Args:
        arena: where buffers of one microbatch are leased.
        stream: where reductions run.
        on_full: called when every weight has had all its puts.

    Attributes:
        part: of the model that its weights belong to.
        gradients: what the optimizer reads, [owned].
        cut: gradients are kept in shards, and reduced in every microbatch.
        wide: bf16 gradients are summed in fp32, out of a second leased buffer.
        puts: how often each weight's gradient was put since the last reduction.
        reductions: in this step.
        observe: told this rank's own gradients before each reduction; it must not change them.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        config: DataParallelConfig,
        arena: Arena,
        stream: Stream,
        on_full: Callable[[GradientBucket], None],
    ) -> None:
        self.bucket, self.config, self.placement = bucket, config, bucket.placement
        self.part = bucket.part
        self.arena, self.stream, self.on_full = arena, stream, on_full
        self.trainable = [h for h in bucket.handles if h.trainable]
        self.cut = bool(self.placement.gradient)
        # on a single lane nothing is reduced, and so nothing is widened
        self.wide = config.fp32_accumulation and bool(self.placement.optimizer)
        self.puts: dict[str, int] = {}
        self.waiting = 0
        self.reductions = 0
        self.observe: Callable[[torch.Tensor], object] | None = None
        self._gaps = bucket.gaps
        self._pending: Pending | None = None
        self._outer: Pending | None = None
        self._whole: torch.Tensor | None = None
        self._flying: torch.Tensor | None = None
        self._parts: torch.Tensor | None = None
        device, numel = bucket.weights.data.device, bucket.layout.numel
        low, high = bucket.weights.shard_range if self.placement.optimizer else (0, numel)
        self._shard_range = low, high
        if not self.cut:
            self._whole = torch.zeros(numel, dtype=config.grad_dtype, device=device)
            self._bind(self._whole)
        if self.cut or self.wide:
            self._shard = torch.zeros(high - low, dtype=torch.float32, device=device)
        else:
            assert self._whole is not None
            self._shard = self._whole[low:high]
        start, stop = bucket.owned_range
        self.gradients = self._shard[start - low : stop - low]
        for handle in self.trainable:
            handle.gradients = self

    @property
    def launched(self) -> bool:
        """Whether a reduction has started in this step."""
        return self.reductions > 0

    @property
    def is_open(self) -> bool:
        """Whether it holds gradients that are not being reduced yet."""
        return any(self.puts.values())

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        self.reductions = 0
        self._start_afresh()

    def begin_last(self) -> None:
        """Count from here on the puts of the last microbatch, if they fill a buffer kept so far."""
        if not self.cut:
            self._expect()

    # --- from backward ----------------------------------------------------------------------------

    def open(self) -> None:
        """Give every trained weight a slot, in a leased buffer."""
        self._whole = self.arena.lease(self.bucket.layout.numel, self.config.grad_dtype)
        for start, stop in self._gaps:  # what no put writes takes part in the sum
            self._whole[start:stop].zero_()
        self._bind(self._whole)

    def put_done(self, handle: WeightHandle) -> None:
        """Count a put; with the last one that was declared, the bucket is full.

        Raises:
            ValueError: the bucket has been reduced already.
        """
        if self.launched and not self.cut:
            raise ValueError(
                f"{handle.name} got more gradients than its {handle.uses} declared uses, after "
                "its reduction had begun: declare it once per use, and call last() behind the "
                "puts of all microbatches but the last"
            )
        self.puts[handle.name] += 1
        if self.puts[handle.name] == handle.uses:
            self.waiting -= 1
            if self.waiting == 0:
                self.on_full(self)

    # --- reduction --------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Start summing what was put; weights without a put count as zero."""
        if self._whole is None:
            self.open()
        assert self._whole is not None
        for handle in self.trainable:
            if handle.fresh:
                assert handle.slot is not None
                handle.slot.zero_()
        self.settle()
        whole = self._whole
        if self.observe is not None:
            self.observe(whole)
        self.stream.wait_stream(current_stream(self.arena.device))
        with on_stream(self.stream):
            self._pending = self._sum(whole)
        self.reductions += 1
        if self.cut:
            self._flying, self._whole = whole, None
            for handle in self.trainable:
                handle.slot = None
            self._start_afresh()

    def settle(self) -> None:
        """Wait for the reduction under way and add its result to what this step has."""
        if self._pending is None:
            return
        summed = self._pending.wait()
        self._pending = None
        if self._parts is not None:
            self.arena.release(self._parts)
            self._parts = None
        if not self.cut:
            return
        assert self._flying is not None
        if summed.data_ptr() != self._shard.data_ptr():
            self._shard.add_(summed)
            if self.wide:
                self.arena.release(summed)
        self.arena.release(self._flying)
        self._flying = None

    def reduce_outer(self) -> None:
        """Start summing this rank's shard over the outer ranks."""
        self.settle()
        group = self.bucket.outer
        if group.size == 1:
            return
        self.stream.wait_stream(current_stream(self.arena.device))
        with on_stream(self.stream):
            if self.bucket.outer_shards:
                self._outer = reduce_scatter_async(self._shard, group, out=self.gradients)
            else:
                self._outer = all_reduce_async(self._shard, group, out=self._shard)

    def settle_outer(self) -> None:
        """Wait for the sum over the outer ranks."""
        if self._outer is not None:
            self._outer.wait()
            self._outer = None

    def abort(self) -> None:
        """Wait for what is under way and give every lease back."""
        self.settle()
        self.settle_outer()
        if self.cut and self._whole is not None:
            self.arena.release(self._whole)
            self._whole = None
            for handle in self.trainable:
                handle.slot = None

    def _sum(self, whole: torch.Tensor) -> Pending:
        """Start the sum over the ranks that share the bucket."""
        group, (low, high) = self.bucket.group, self._shard_range
        if not self.placement.optimizer:
            return all_reduce_async(whole, group, out=whole)
        first = not self.cut or self.reductions == 0
        if self.wide:
            out = self._shard
            if not first:
                out = self.arena.lease(high - low, torch.float32)
            self._parts = self.arena.lease(whole.numel(), whole.dtype)
            return reduce_scatter_wide_async(whole, group, out=out, parts=self._parts)
        if self.cut and first and whole.dtype is self._shard.dtype:
            return reduce_scatter_async(whole, group, out=self._shard)
        if self.cut and first:
            self._shard.zero_()
        return reduce_scatter_async(whole, group, out=whole[low:high])

    def _bind(self, whole: torch.Tensor) -> None:
        for handle, member in self.bucket.members():
            if handle.trainable:
                handle.slot = whole[member.start : member.stop].view(member.shape)

    def _start_afresh(self) -> None:
        for handle in self.trainable:
            handle.fresh = True
        self._expect()

    def _expect(self) -> None:
        self.waiting = len(self.trainable)
        self.puts = dict.fromkeys((handle.name for handle in self.trainable), 0)
