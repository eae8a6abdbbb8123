# SPDX-License-Identifier: Apache-2.0
"""The data-parallel engine: ZeRO 0 to 3 and hybrid sharding.

A step, as its caller sees it:

    engine.begin_step(microbatches)
    for each microbatch:  loss = model.loss(...);  engine.backward(loss, last=...)
    engine.finish()              # gradients are complete: on every rank, or each rank's range
    ...                          # the optimizer writes the ranges of `owned()`
    engine.start_param_sync()    # all-gather the other ranks' ranges, at once or when needed

Where a rank has several model chunks, as in an interleaved pipeline, each with its own order of
microbatches, the caller specifies more:

    engine.begin_step(program=names of the segments in the order in which they run)
    engine.segment(name)         # before the forward or backward of a model chunk
    engine.last(part)            # before the step's last gradients of a model chunk
    engine.close(part)           # after a microbatch's last gradient of it

A strategy is the placement of weight, gradient and optimizer state on the data axes, nothing else:
`Gatherer` unshards weights, `GradientBucket` reduces gradients into where they are kept.

All scaling is in the loss, so every reduction is a plain sum. A block is reduced as soon as each of
its weights has had all its gradients accumulated; blocks still open are reduced by `close` or
`finish`. `finish` then carries out the remaining sums of the gradient plan over model axes
(`ModelSums`): of weights that are replicated over an axis, or over a subgroup of it, and saw
different tokens or heads there, as on tp or in two pipeline stages. All such ranges of all buckets
go into one all-reduce per group.

`GradientBucket` holds the gradients of one bucket, from accumulation in backward to the optimizer,
and a `GradientBlock` those of each of its blocks:

    gradients            backward fills               reduced             kept
    StepGradients        a buffer for the whole step  once, at the end    it, its own range (optim),
                                                                          or a shard (over gtp)
    MicrobatchGradients  a leased one a microbatch    every microbatch    this rank's shard, fp32

That reduction is a sum over the ranks that share the block. A second one, of a bucket's shards over
the outer ranks, follows when all its blocks have been reduced for the last time: under hybrid
sharding, and over the data-parallel replicas of weights sharded over gtp. Where these shard
gradients too (optim_grads) it follows in every microbatch.
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
    reduce_scatter_wide_async,
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
        strategy: "no_shard" (gradients are all-reduced, every rank updates everything), "optim"
            (ZeRO-1: each rank keeps its shard of the optimizer state), "optim_grads" (ZeRO-2: and
            of the gradients), "optim_grads_params" (ZeRO-3: and of the weights).
        outer: over the outer axis of hybrid sharding, everything is repeated ("no_shard") or the
            optimizer state is sharded once more ("optim").
        overlap_grad_reduce: reduce a bucket as soon as backward has filled it; False waits: for
            the end of backward, or where gradients are sharded, for each reduction.
        overlap_param_gather: gather weights while something else is computed; False gathers all
            after the optimizer step, or where weights are sharded, each when it is needed.
        fsdp_all_gather_in_start_param_sync: with `overlap_param_gather`, start the first gathers at
            the end of the optimizer step; False starts none before the next forward, which whole
            iterations captured in a CUDA graph need.
        granularity: what is gathered at a time where weights are sharded: a "unit" (a layer) or a
            "weight".
        prefetch_bytes: gathered ahead beyond the next block, with `overlap_param_gather`; of
            weights sharded over gtp always.
        grad_dtype: of the gradient buffers that backward fills.
        fp32_accumulation: with bf16 gradients, send bf16 but sum in fp32.
        gtp_reduce_scatter_per: gradients of weights sharded over gtp are reduce-scattered in every
            "microbatch", or once a "step", for which each rank keeps them whole.
        gather_format: in which weights sharded over gtp are gathered: "bf16" (their own dtype),
            "fp8", "mxfp8" or "nvfp4".
        gather_scale_blocks: "2d" blocks of mxfp8's or nvfp4's scales, which are squares, or "1d",
            of which forward and backward gather different ones.
        use_nccl_ub: lease the buffers that weights are gathered to and gradients reduced in from
            memory that NCCL has registered, see `comm.nccl_memory`.
        debug: fill unused buffers with NaN, and compare between the ranks what was gathered.

    Raises:
        ValueError: everything that does not go together, in one message.
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
        found = []
        try:
            cut = placement(self.strategy, self.outer)
        except ValueError as error:
            found.append(str(error))
            cut = Placement()
        if self.grad_dtype not in GRADIENT_DTYPES:
            found.append(f"grad_dtype is {self.grad_dtype}: use torch.float32 or torch.bfloat16")
        if self.fp32_accumulation and self.grad_dtype is not torch.bfloat16:
            found.append("fp32_accumulation is for bf16 gradients: drop it or set grad_dtype")
        if self.fp32_accumulation and not cut.optimizer:
            found.append("fp32_accumulation needs a strategy that reduce-scatters: use optim")
        if self.gtp_reduce_scatter_per not in REDUCE_SCATTER_PER:
            names = " or ".join(REDUCE_SCATTER_PER)
            found.append(f"gtp_reduce_scatter_per {self.gtp_reduce_scatter_per!r}: use {names}")
        if self.gtp_reduce_scatter_per == "step" and cut.gradient:
            found.append(
                f"gtp_reduce_scatter_per step keeps whole gradients, which {self.strategy} shards: "
                "use no_shard or optim, or drop it"
            )
        try:
            gather_formats(self.gather_format, scale_blocks=self.gather_scale_blocks)
        except ValueError as error:
            found.append(str(error))
        if self.granularity not in GRANULARITIES:
            found.append(f"granularity {self.granularity!r}: use {' or '.join(GRANULARITIES)}")
        if self.granularity != "unit" and not cut.weight and not found:
            found.append(f"granularity {self.granularity} has no effect with {self.strategy}")
        if self.prefetch_bytes < 0:
            found.append(f"prefetch_bytes is {self.prefetch_bytes}: use 0 or more")
        if self.overlap_param_gather and not cut.optimizer and not found:
            found.append("overlap_param_gather has no effect with no_shard: nothing is gathered")
        if found:
            raise ValueError("; ".join(found))

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
    """The gradients of a block that has trained weights: from accumulation in backward to the sum
    over the ranks that share the block.

    Args:
        bucket: receives what this rank keeps of the sum.
        block: whose weights they are of.

    Attributes:
        every_microbatch: they are summed in every microbatch, else once a step.
        bounded: its bytes count in the limit of what is under way: its sum holds leases, or
            another one waits for it.
        puts: how often each weight's gradient was accumulated since the last sum.
        sums: in this step.
        in_step: a step has begun and not ended, so gradients may be accumulated.
    """

    every_microbatch: bool

    def __init__(self, bucket: GradientBucket, block: BucketBlock) -> None:
        self.bucket, self.block = bucket, block
        self.trainable = [handle for handle in block.handles if handle.trainable]
        self.puts: dict[str, int] = {}
        self.waiting = 0
        self.sums = 0
        self.in_step = False
        self.bounded = self.every_microbatch or bucket.wide or bucket.bucket.outer.size > 1
        self.bytes = block.layout.numel * bucket.config.grad_dtype.itemsize
        self._whole: torch.Tensor | None = None
        self._pending: Pending | None = None
        self._parts: torch.Tensor | None = None
        self._into: torch.Tensor | None = None
        self._first: bool  # of the sum under way, as `_into`
        for handle in self.trainable:
            handle.gradients = self

    @property
    def is_open(self) -> bool:
        """Whether it holds gradients that are not being summed yet."""
        return any(self.puts.values())

    @property
    def is_under_way(self) -> bool:
        """Whether a sum has started whose result is not here yet."""
        return self._pending is not None

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        self.sums = 0
        self.in_step = True
        self._start_afresh()

    def begin_last(self) -> None:
        """Count the last microbatch's gradients from here on, if they fill a buffer kept so far."""
        if not self.every_microbatch:
            self._expect()

    @abstractmethod
    def alloc_main_grads(self) -> None:
        """Give every trained weight a slot."""

    def grad_accumulated(self, handle: WeightHandle) -> None:
        """Count a put; with the last one that was declared, the block is full.

        Raises:
            ValueError: no step has begun, or it has been summed already.
        """
        if not self.in_step:
            raise ValueError(
                f"backward of {handle.name} outside a step: call begin_step() of the DataParallel "
                "engine first"
            )
        if self.is_late:
            raise ValueError(
                f"{handle.name} got a gradient after the reduction of its gradients had begun: "
                "call backward(loss, last=False) for all microbatches of a step but the last one. "
                f"A weight that a layer uses more than {handle.uses} times in a forward pass must "
                "be declared with as many uses"
            )
        self.puts[handle.name] += 1
        if self.puts[handle.name] == handle.uses:
            self.waiting -= 1
            if self.waiting == 0:
                self.bucket.on_full(self)

    @property
    @abstractmethod
    def is_late(self) -> bool:
        """Whether a gradient accumulated now would miss the sum."""

    def reduce(self) -> None:
        """Start summing what was put; weights without a gradient count as zero."""
        if self._whole is None:
            self.alloc_main_grads()
        assert self._whole is not None
        for handle in self.trainable:
            if handle.overwrite_main_grad:
                assert handle.main_grad is not None
                handle.main_grad.zero_()
        self.settle()
        bucket, whole = self.bucket, self._whole
        if bucket.observe is not None:
            bucket.observe(whole)
        self._into, self._first = bucket.receive(self)
        if isinstance(bucket.stream, NullStream):
            self._pending = self._sum(whole)
        else:
            bucket.stream.wait_stream(current_stream(bucket.pool.device))
            with on_stream(bucket.stream):
                self._pending = self._sum(whole)
        self.sums += 1

    def settle(self) -> None:
        """Wait for the sum under way and add it to what this step has."""
        if self._pending is None:
            return
        summed, into = self._pending.wait(), self._into
        self._pending = self._into = None
        assert into is not None
        if self._parts is not None:
            self.bucket.pool.release(self._parts)
            self._parts = None
        if summed.data_ptr() != into.data_ptr():
            if self._first:
                into.copy_(summed)
            else:
                into.add_(summed)
                if self.bucket.wide:
                    self.bucket.pool.release(summed)

    def abort(self) -> None:
        """Wait for what is under way and give every lease back."""
        self.settle()

    def _sum(self, whole: torch.Tensor) -> Pending:
        """Start the sum over the ranks that share the block."""
        bucket, into = self.bucket, self._into
        assert into is not None
        group = self.block.bucket.group
        if not bucket.inner.scatter:
            return all_reduce_async(whole, group, out=whole)
        if bucket.wide:
            out = into
            if not self._first:
                out = bucket.pool.acquire(len(into), torch.float32)
            self._parts = bucket.pool.acquire(whole.numel(), whole.dtype)
            return reduce_scatter_wide_async(whole, group, out=out, parts=self._parts)
        if self._first and whole.dtype is into.dtype:
            return reduce_scatter_async(whole, group, out=into)
        low, high = self.block.shard_range
        return reduce_scatter_async(whole, group, out=whole[low:high])

    def _bind(self, whole: torch.Tensor) -> None:
        self._whole = whole
        for handle, member in self.block.members():
            if handle.trainable:
                handle.main_grad = whole[member.start : member.stop].view(member.shape)

    def _start_afresh(self) -> None:
        for handle in self.trainable:
            handle.overwrite_main_grad = True
        self._expect()

    def _expect(self) -> None:
        self.waiting = len(self.trainable)
        self.puts = dict.fromkeys((handle.name for handle in self.trainable), 0)


class StepGradients(GradientBlock):
    """A buffer that is kept, filled by all microbatches and summed once.

    Attributes:
        whole: it, [numel].
    """

    every_microbatch = False

    def __init__(self, bucket: GradientBucket, block: BucketBlock) -> None:
        super().__init__(bucket, block)
        self.whole = torch.zeros(
            block.layout.numel, dtype=bucket.config.grad_dtype, device=block.data.device
        )
        self.alloc_main_grads()

    def alloc_main_grads(self) -> None:
        self._bind(self.whole)

    @property
    def is_late(self) -> bool:
        return self.sums > 0


class MicrobatchGradients(GradientBlock):
    """A leased buffer a microbatch, summed in each of them."""

    every_microbatch = True

    def __init__(self, bucket: GradientBucket, block: BucketBlock) -> None:
        super().__init__(bucket, block)
        self._gaps = block.untrained_ranges
        self._flying: torch.Tensor | None = None

    def alloc_main_grads(self) -> None:
        pool = self.bucket.pool
        whole = pool.acquire(self.block.layout.numel, self.bucket.config.grad_dtype)
        for start, stop in self._gaps:  # elements without a gradient take part in the sum
            whole[start:stop].zero_()
        self._bind(whole)

    @property
    def is_late(self) -> bool:
        return self.bucket.outer_launched

    def reduce(self) -> None:
        super().reduce()
        self._flying = self._whole
        self._close()
        self._start_afresh()

    def settle(self) -> None:
        super().settle()
        if self._flying is not None:
            self.bucket.pool.release(self._flying)
            self._flying = None

    def abort(self) -> None:
        super().abort()
        if self._whole is not None:
            self.bucket.pool.release(self._whole)
            self._close()

    def _close(self) -> None:
        self._whole = None
        for handle in self.trainable:
            handle.main_grad = None


class GradientBucket:
    """The gradients of a bucket that has trained weights: those of its blocks, and what their sums
    leave this rank, up to the sum over the outer ranks.

    Args:
        pool: where buffers of one microbatch are leased.
        stream: where reductions run; a `NullStream` is the current one.
        on_full: called when every weight of a block has had all its gradients accumulated.

    Attributes:
        part: the model chunk that its weights belong to.
        gradients: what the optimizer reads, [owned].
        inner, outer: the sums over the ranks that share the bucket, and over the outer ranks.
        wide: bf16 gradients are summed in fp32, out of a second leased buffer.
        outer_sums: over the outer ranks, in this step.
        observe: called with this rank's own gradients before each reduction; must not change
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
        self.inner, self.outer = reductions(
            bucket.placement, bucket.groups.outer_axes, per_step=once
        )
        # on a single data-parallel rank nothing is reduced, and so nothing is widened
        self.wide = config.fp32_accumulation and self.inner.scatter
        self.outer_sums = 0
        self.observe: Callable[[torch.Tensor], object] | None = None
        kind = MicrobatchGradients if self.inner.every_microbatch else StepGradients
        self.blocks = [kind(self, block) for block in bucket.blocks if block.trainable]
        self._received: set[int] = set()
        self._awaited: set[int] | None = None
        self._pending: Pending | None = None
        low, high = bucket.reduced_range
        start, stop = bucket.owned_range
        self._shard: torch.Tensor | None = None
        self._kept = not (self.outer.every_microbatch and bucket.outer.size > 1)
        device = bucket.data.device
        if not self._kept:
            self.gradients = torch.zeros(stop - start, dtype=torch.float32, device=device)
            return
        if self.inner.every_microbatch or self.wide or bucket.sharded:
            self._shard = torch.zeros(high - low, dtype=torch.float32, device=device)
        else:
            (block,) = self.blocks
            assert isinstance(block, StepGradients)
            self._shard = block.whole[low:high]
        self.gradients = self._shard[start - low : stop - low]

    @property
    def every_microbatch(self) -> bool:
        """Whether gradients are kept in shards, and summed in every microbatch."""
        return self.inner.every_microbatch

    @property
    def outer_launched(self) -> bool:
        """Whether the step's only sum over the outer ranks has started."""
        return self._kept and self.outer_sums > 0

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        self.outer_sums = 0
        self._received.clear()
        self._awaited = None if self._kept else self._starts
        for block in self.blocks:
            block.begin_step()

    def begin_last(self) -> None:
        """Expect the step's last sum of every block."""
        if self._kept:
            self._awaited = self._starts
        for block in self.blocks:
            block.begin_last()

    def receive(self, block: GradientBlock) -> tuple[torch.Tensor, bool]:
        """Return where a block's sum goes, and whether that holds nothing yet."""
        if not (self._kept or self._received):
            self.settle_outer()
            low, high = self.bucket.reduced_range
            self._shard = self.pool.acquire(high - low, torch.float32)
        start = block.block.start
        first = start not in self._received
        self._received.add(start)
        if self._awaited is not None:
            self._awaited.discard(start)
        return self._segment(block.block), first

    @property
    def is_full(self) -> bool:
        """Whether every block's sum that the one over the outer ranks waits for has started."""
        return self.needs_outer and self._awaited is not None and not self._awaited

    @property
    def is_complete(self) -> bool:
        """Whether these have ended too."""
        return self.is_full and not any(block.is_under_way for block in self.blocks)

    @property
    def needs_outer(self) -> bool:
        """Whether something has been received that is not being summed over the outer ranks."""
        if self.bucket.outer.size == 1:
            return False
        return not self.outer_sums if self._kept else bool(self._received)

    def reduce_outer(self) -> None:
        """Start summing this rank's shards over the outer ranks; the sums of blocks are done."""
        group, bucket = self.bucket.outer, self.bucket
        assert self._shard is not None
        into = self.gradients
        if not self._kept:
            for block in bucket.blocks:
                if block.start not in self._received:
                    self._segment(block).zero_()
            last = bucket.blocks[-1]
            self._shard[last.start + len(last.data) :].zero_()  # padding takes part in the sum
            if self.outer_sums:
                low = bucket.reduced_range[0]
                into = self._shard[bucket.owned_range[0] - low : bucket.owned_range[1] - low]
        self.stream.wait_stream(current_stream(self.pool.device))
        with on_stream(self.stream):
            if self.outer.scatter:
                self._pending = reduce_scatter_async(self._shard, group, out=into)
            else:
                self._pending = all_reduce_async(self._shard, group, out=self._shard)
        self.outer_sums += 1
        self._awaited = None if self._kept else self._starts
        if not self._kept:
            self._received.clear()

    def settle_outer(self) -> None:
        """Wait for the sum over the outer ranks."""
        if self._pending is None:
            return
        summed = self._pending.wait()
        self._pending = None
        if self._kept:
            return
        if summed.data_ptr() != self.gradients.data_ptr():
            self.gradients.add_(summed)
        assert self._shard is not None
        self.pool.release(self._shard)
        self._shard = None

    def abort(self) -> None:
        """Wait for what is under way and give every lease back."""
        for block in self.blocks:
            block.abort()
        self.settle_outer()
        if not self._kept and self._shard is not None:
            self.pool.release(self._shard)
            self._shard = None

    @property
    def _starts(self) -> set[int]:
        return {entry.block.start for entry in self.blocks}

    def _segment(self, block: BucketBlock) -> torch.Tensor:
        """Return where the shard of a block lies in what this rank keeps of the sums."""
        assert self._shard is not None
        if not self.bucket.sharded:
            return self._shard
        return self._shard[block.start : block.start + len(block.data)]


class ModelSums:
    """Collect, per group of the gradient plans, the ranges that have to be summed over it."""

    def __init__(self, store: WeightStore, buckets: Sequence[GradientBucket]) -> None:
        views: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for entry in buckets:
            for owned in entry.bucket.owned_weights():
                handle = owned.handle
                for step in store.plans[handle.name].steps if handle.trainable else ():
                    found = views.setdefault(step.group, [])
                    for box in store.boxes(handle):
                        start, stop = max(box.start, owned.start), min(box.stop, owned.stop)
                        if box.name in step.segments and start < stop:
                            at = owned.offset + start - owned.start
                            found.append((handle.name, entry.gradients[at : at + stop - start]))
        # By name: the stages that share weights need not have declared them in one order.
        named = [
            (store.groups[name], [view for _, view in sorted(found, key=lambda one: one[0])])
            for name, found in sorted(views.items())
        ]
        self._sums = [(group, found) for group, found in named if found and group.size > 1]

    def run(self) -> None:
        """Carry them out."""
        for group, views in self._sums:
            flat = torch.cat(views)
            all_reduce(flat, group, out=flat)
            torch._foreach_copy_(views, list(flat.split([v.numel() for v in views])))


def _gatherers(store: WeightStore, config: DataParallelConfig) -> list[Gatherer]:
    """Return a gatherer of the buckets stored in shards and one of those updated in ranges, of each
    kind that there is. Weights sharded over gtp are always gathered ahead."""
    found = []
    for sharded in (True, False):
        own = [b for b in store.buckets if b.placement.optimizer and b.sharded == sharded]
        if own:
            gatherer = Gatherer(
                own,
                prefetch=config.overlap_param_gather or any(bucket.gtp for bucket in own),
                prefetch_bytes=config.prefetch_bytes,
                poison=config.debug,
                register_buffers=config.use_nccl_ub,
            )
            found.append(gatherer)
    return found


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
    """Train the weights of a store over the data-parallel ranks.

    Args:
        store: materialised for the same strategy; frozen weights get no gradients.
        groups: its process groups.

    Raises:
        ValueError: the store is not materialised, or for another strategy.

    Attributes:
        buckets: those with trained weights, in the order in which backward fills them.
        gatherers: make weights whole; none if every rank keeps and updates all that it has, two if
            only some weights are stored in shards (those over gtp).
        placement: what the strategy shards on these ranks.
        launched_in_backward: sums of blocks of the last microbatch that started before `finish`.
        outer_in_backward: sums over the outer ranks that started before `finish`.
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
                f"{store.storage.outer}), the engine is to carry out {config.strategy} (outer "
                f"{config.outer}): materialize the store with the engine's config.storage()"
            )
        self.launched_in_backward = self.outer_in_backward = 0
        memory = None
        if config.use_nccl_ub:
            reducing = [g for b in store.buckets for g in (b.group, b.outer)]
            memory = RegisteredMemory(reducing, store.device)
        self.pool = BufferPool(store.device, poison=config.debug, memory=memory)
        self.gatherers = _gatherers(store, config)
        self._parts = sorted({bucket.model_chunk for bucket in store.buckets}, reverse=True)
        # Between streams the host takes 30 microseconds a block, for sums that one rank has anyway.
        sends = any(g.size > 1 for b in store.buckets for g in (b.group, b.outer))
        stream = new_stream(store.device) if sends else NullStream()
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
        self._last: set[int] = set()
        self._under_way: deque[GradientBlock] = deque()
        self._leases_shard: GradientBucket | None = None
        limit = max((block.bytes for block in self._blocks if block.bounded), default=0)
        self._limit = limit if config.overlap_grad_reduce else 0

    @property
    def sharded(self) -> bool:
        """Whether each rank keeps only its range of the optimizer state."""
        return bool(self.placement.optimizer)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of gathered weights at a time, at most, as far as the order of use is known: where
        each weight is gathered by itself over gtp, the first step may show that it needs more."""
        return sum(gatherer.max_unsharded_bytes for gatherer in self.gatherers)

    def owned(self) -> list[OwnedRange]:
        """Return what this rank's optimizer updates, one range per bucket; one of nothing if
        there is no bucket."""
        found = [owned_range(self.store, b.bucket, b.gradients) for b in self.buckets]
        return [replace(one, owner=self) for one in found or [empty_range(self.store)]]

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
                microbatch forward and backward; `segment` then marks when each begins. Likewise.

        Raises:
            ValueError: a step or an evaluation is under way, or updates have not been passed on.
        """
        if self._phase is not _Phase.BETWEEN:
            raise ValueError(
                f"begin_step inside {self._phase.value}: finish() or abort() it first; every "
                "microbatch of a step follows one begin_step()"
            )
        self._check_synced("begin_step")
        self._phase, self._complete = _Phase.STEP, False
        self.launched_in_backward = self.outer_in_backward = 0
        self._last.clear()
        if self._observer is not None:
            self._observer.begin()
        for bucket in self.buckets:
            bucket.begin_step()
        for gatherer in self.gatherers:
            gatherer.begin((FORWARD, BACKWARD) * microbatches if program is None else program)
            if program is None:
                gatherer.segment(FORWARD)

    def segment(self, name: str) -> None:
        """Say which segment runs from now on: `segment_name(FORWARD or BACKWARD, part)`.

        Raises:
            ValueError: outside of steps and evaluations.
        """
        if self._phase is _Phase.BETWEEN:
            raise ValueError(f"segment {name} outside a step: call begin_step() first")
        for gatherer in self.gatherers:
            gatherer.segment(name)

    def prefetch(self, name: str) -> None:
        """Start the gathers that a segment will need first, without waiting.

        Only with `overlap_param_gather`, and once a step has shown what the segment needs.

        Raises:
            ValueError: outside of steps and evaluations.
        """
        if self._phase is _Phase.BETWEEN:
            raise ValueError(f"prefetch of {name} outside a step: call begin_step() first")
        for gatherer in self.gatherers:
            gatherer.start_segment(name)

    def last(self, part: int) -> None:
        """Declare that the step's last microbatch now accumulates gradients of a model chunk.

        With `overlap_grad_reduce`, buckets of the chunk are reduced as they fill. All earlier
        microbatches must have accumulated their gradients.

        Raises:
            ValueError: no step has begun.
        """
        if self._phase is not _Phase.STEP:
            raise ValueError(f"last({part}) outside a step: call begin_step() first")
        self._last.add(part)
        for bucket in self.buckets:
            if bucket.model_chunk == part:
                bucket.begin_last()

    def close(self, part: int) -> None:
        """Declare that a microbatch has accumulated all its gradients of a model chunk's weights.

        Sharded gradients that were accumulated less often than declared are reduced; after the last
        microbatch, with `overlap_grad_reduce`, so is every bucket of the chunk that has not been.

        Raises:
            ValueError: no step has begun.
        """
        if self._phase is not _Phase.STEP:
            raise ValueError(f"close({part}) outside a step: call begin_step() first")
        over = part in self._last and self.config.overlap_grad_reduce
        for bucket in self.buckets:
            if bucket.model_chunk != part:
                continue
            for block in bucket.blocks:
                if (block.every_microbatch and block.is_open) or (over and not block.sums):
                    self._reduce(block)
            if bucket.outer.every_microbatch and bucket.needs_outer:
                self._reduce_outer(bucket)

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
        """Declare whether the step's last gradients follow, in all model chunks at once."""
        for part in self._parts if last else ():
            self.last(part)

    def finish(self) -> None:
        """Make every gradient whole: reduce what is left, wait, then sum over the model axes.

        Raises:
            ValueError: no step has begun: its sums would be taken twice.
        """
        if self._phase is not _Phase.STEP:
            raise ValueError("finish outside a step: call begin_step() first")
        in_backward = self.outer_in_backward
        for block in self._blocks:
            if (block.every_microbatch and block.is_open) or not block.sums:
                self._reduce(block)
        self._settle(0)
        for bucket in self.buckets:
            if bucket.needs_outer:
                self._reduce_outer(bucket)
        self.outer_in_backward = in_backward
        for bucket in self.buckets:
            bucket.settle_outer()
        self._sums.run()
        for gatherer in self.gatherers:
            gatherer.finish()
            if self.config.debug:
                gatherer.check_order()
        self._end_step(complete=True)

    def abort(self) -> None:
        """Leave a step that failed half-way; the next `begin_step` starts clean."""
        self._under_way.clear()
        for bucket in self.buckets:
            bucket.abort()
        for gatherer in self.gatherers:
            gatherer.abort()
        self._end_step(complete=False)

    # --- between steps ----------------------------------------------------------------------------

    def start_param_sync(self, *, force_sync: bool = False) -> None:
        """Have the other ranks' updates arrive, after the optimizer has written the owned ranges.

        With `overlap_param_gather` they are gathered when they are needed, and the first of them
        started here unless `fsdp_all_gather_in_start_param_sync` is False. Otherwise, or with
        `force_sync`, all are gathered here, except that weights which are stored in shards would
        be released again: they are only with `force_sync`.
        """
        self._unsynced = False
        early = self.config.fsdp_all_gather_in_start_param_sync
        for gatherer in self.gatherers:
            gatherer.invalidate()
            if force_sync or not (gatherer.prefetch or gatherer.reshards):
                gatherer.gather_all()
            elif gatherer.prefetch and early:
                gatherer.prefetch_next_step()

    def wait(self) -> None:
        """Wait until nothing is under way between two steps; what was started early stays."""
        for gatherer in self.gatherers:
            gatherer.wait()

    def complete_weights(self) -> None:
        """Have all updates arrive in what this rank stores, before that is saved or read.

        Ranks that store the same hold the same after it. All data-parallel ranks call this.

        Raises:
            ValueError: a step is under way, or updates have not been passed on.
        """
        if self._phase is _Phase.STEP:
            raise ValueError("complete_weights inside a step: finish() or abort() it first")
        self._check_synced("complete_weights")
        for gatherer in self.gatherers:
            gatherer.complete_stored()

    @contextmanager
    def evaluation(self, program: Sequence[str] | None = None) -> Iterator[None]:
        """Run forwards without backward inside, between two steps.

        Args:
            program: the segments that will run, in order, as in `begin_step`; None is one of its
                own for all that runs inside.

        Raises:
            ValueError: a step or an evaluation is under way, or updates have not been passed on.
        """
        if self._phase is not _Phase.BETWEEN:
            raise ValueError(f"evaluation inside {self._phase.value}: finish() or leave that first")
        self._check_synced("evaluation")
        self._phase = _Phase.EVALUATION
        try:
            for gatherer in self.gatherers:
                gatherer.begin((EVALUATION,) if program is None else program)
                if program is None:
                    gatherer.segment(EVALUATION)
            yield
            for gatherer in self.gatherers:
                gatherer.finish()
        except BaseException:
            for gatherer in self.gatherers:
                gatherer.abort()
            raise
        finally:
            self._phase = _Phase.BETWEEN

    # --- what the optimizer calls -----------------------------------------------------------------

    def check_gradients(self) -> None:
        """See that the gradients of `owned()` are complete.

        Raises:
            ValueError: a step has begun that `finish` has not ended.
        """
        if self._phase is _Phase.STEP:
            raise ValueError(
                "the gradients of this step are not summed over the ranks yet: call finish() of "
                "the DataParallel engine after the last backward, before the optimizer's step"
            )
        if not self._complete:
            raise ValueError(
                "the last step was left by abort(), so its gradients are not complete: compute a "
                "step from begin_step() to finish() before the optimizer's step"
            )

    def weights_updated(self) -> None:
        """Take note that the optimizer has written the owned ranges."""
        self._unsynced = bool(self.gatherers)

    # --- inside -----------------------------------------------------------------------------------

    def _check_synced(self, name: str) -> None:
        """See that the optimizer's updates are on their way to the other ranks.

        Raises:
            ValueError: they are not.
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
        last = block.bucket.model_chunk in self._last
        if not block.every_microbatch and not (last and self.config.overlap_grad_reduce):
            return
        self._reduce(block)
        self.launched_in_backward += last

    def _reduce(self, block: GradientBlock) -> None:
        bucket = block.bucket
        if bucket.outer.every_microbatch and bucket.is_full:  # of the microbatch before
            self._reduce_outer(bucket)
        block.reduce()
        self._under_way.append(block)
        if block.bounded:
            self._settle(self._limit)

    def _settle(self, limit: int) -> None:
        """Wait for the oldest sums until what is under way has at most so many bytes; of a bucket
        whose blocks are done, start the sum over the outer ranks."""
        flying = sum(block.bytes for block in self._under_way if block.bounded)
        while self._under_way and (flying > limit or limit == 0):
            block = self._under_way.popleft()
            block.settle()
            flying -= block.bytes * block.bounded
            bucket = block.bucket
            if self.config.overlap_grad_reduce and bucket.is_complete:
                self._reduce_outer(bucket)

    def _reduce_outer(self, bucket: GradientBucket) -> None:
        for block in bucket.blocks:
            block.settle()
        if self._leases_shard is not None:  # one at a time: they hold leases too
            self._leases_shard.settle_outer()
        bucket.reduce_outer()
        self.outer_in_backward += 1
        self._leases_shard = bucket if bucket.outer.every_microbatch else None
        if self._leases_shard is not None and not self.config.overlap_grad_reduce:
            bucket.settle_outer()
