# SPDX-License-Identifier: Apache-2.0
"""DataParallel: gradients accumulate in flat buckets, which are reduced as they fill.

A step, as its caller sees it:

    engine.begin_step()
    for each microbatch:  engine.backward(loss, last=...)
    engine.finish()           # gradients are whole: on every rank, or each rank's shard of them
    ...                       # the optimizer writes weight shards
    engine.gather_weights()

All scaling is in the loss, so every reduction is a plain sum. In the last microbatch a bucket is
reduced as soon as each of its weights has had all its puts; what finishes later is reduced by
`finish`, which then carries out the remaining sums of the gradient plan (weights whole on tp that
saw different tokens or heads).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.comm.collectives import Pending, all_reduce
from megatron.core.process_groups import Group, ProcessGroupCollection
from megatron.core.sharded_buffer import BufferPlacement, Member, ShardedBuffer
from megatron.core.weight_gather import (
    Bucket,
    OwnedRange,
    WeightHandle,
    WeightStore,
    owned_range,
)
from megatron.core.weight_sharding import placement

#: The strategies this engine carries out; `weight_sharding.placement` defines what each means.
STRATEGIES = ("no_shard", "optim")


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """How gradients are made whole over the data lanes.

    Args:
        strategy: "no_shard" (all-reduce; every rank keeps the whole optimizer state) or "optim"
            (ZeRO-1: reduce-scatter; each rank keeps 1/lanes of it and gathers the weights back).
        overlap_grad_reduce: reduce a bucket as soon as backward has filled it; False waits for the
            end.
    """

    strategy: str = "no_shard"
    overlap_grad_reduce: bool = True

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"data-parallel sharding strategy {self.strategy!r}: "
                f"use one of {', '.join(STRATEGIES)}"
            )


@dataclass
class GradientBucket:
    """A bucket's gradients and how far this step has filled and reduced them."""

    bucket: Bucket
    gradients: ShardedBuffer
    trainable: list[WeightHandle]
    waiting: int = 0
    pending: Pending | None = None
    launched: bool = False


class DataParallel:
    """Give the weights of a store gradient buffers, and reduce those over the data lanes.

    Args:
        store: materialised; frozen weights get no gradient buffer use.
        groups: its process groups.

    Attributes:
        buckets: in the order in which backward fills them.
        launched_in_backward: buckets of this step whose reduction started before `finish`.
    """

    def __init__(
        self,
        store: WeightStore,
        groups: ProcessGroupCollection,
        *,
        config: DataParallelConfig | None = None,
    ) -> None:
        if not store.buckets:
            raise ValueError("materialize the weight store before building DataParallel over it")
        self.store, self.groups = store, groups
        self.config = config or DataParallelConfig()
        self.placement = placement(self.config.strategy)
        self.launched_in_backward = 0
        self._last, self._in_step = False, False
        self._puts: dict[str, int] = {}
        self._bucket_of: dict[str, GradientBucket] = {}
        self.buckets = [self._gradient_bucket(b) for b in store.buckets]
        self._sums = self._model_sums()

    @property
    def sharded(self) -> bool:
        """Whether each rank keeps only its range of the gradients and of the optimizer state."""
        return bool(self.placement.optimizer)

    def owned(self) -> list[OwnedRange]:
        """Return what this rank's optimizer updates, one range per bucket."""
        return [
            owned_range(
                self.store,
                entry.bucket,
                entry.gradients.data,
                span=self._span(entry.bucket),
                sharded_axes=self.placement.optimizer,
            )
            for entry in self.buckets
        ]

    # --- a step -----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        self._in_step, self._last, self.launched_in_backward = True, False, 0
        for entry in self.buckets:
            entry.gradients.placement = BufferPlacement.PARTIAL
            entry.waiting, entry.pending, entry.launched = len(entry.trainable), None, False
            for handle in entry.trainable:
                handle.fresh = True
                self._puts[handle.name] = 0

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Run one microbatch's backward; `last` lets full buckets be reduced while it runs.

        Raises:
            ValueError: no step has begun.
        """
        if not self._in_step:
            raise ValueError("backward outside a step: call begin_step() first")
        self.accumulate(last=last)
        loss.backward()

    def accumulate(self, *, last: bool) -> None:
        """Say whether the step's last puts follow, for callers that split backward."""
        self._last = last

    def finish(self) -> None:
        """Make every gradient whole: reduce what is left, wait, then sum over the model axes.

        Raises:
            ValueError: no step has begun: its sums would be taken twice.
        """
        if not self._in_step:
            raise ValueError("finish outside a step: call begin_step() first")
        for entry in self.buckets:
            for handle, member in zip(
                entry.bucket.handles, entry.bucket.layout.members, strict=True
            ):
                if handle.fresh and handle.trainable:  # not used in this step
                    entry.gradients.data[member.start : member.stop].zero_()
            if entry.trainable and not entry.launched:
                self._launch(entry)
        for entry in self.buckets:
            if entry.pending is not None:
                entry.pending.wait()
                entry.pending = None
        for group, views in self._sums:
            flat = torch.cat(views)
            all_reduce(flat, group, out=flat)
            torch._foreach_copy_(views, list(flat.split([v.numel() for v in views])))
        self._in_step = False

    def abort(self) -> None:
        """Leave a step that failed half-way; the next `begin_step` starts clean."""
        for entry in self.buckets:
            if entry.pending is not None:
                entry.pending.wait()
                entry.pending = None
        self._in_step = False

    def gather_weights(self) -> None:
        """Gather the weights that the optimizer has written shard by shard, if it has."""
        if not self.sharded:
            return
        pending = []
        for entry in self.buckets:
            if not entry.trainable:
                continue
            entry.bucket.weights.placement = BufferPlacement.SHARDED
            pending.append(entry.bucket.weights.redistribute(BufferPlacement.REPLICATED))
        for transfer in pending:
            transfer.wait()

    # --- inside -----------------------------------------------------------------------------------

    def _span(self, bucket: Bucket) -> tuple[int, int]:
        return bucket.weights.shard_range if self.sharded else (0, bucket.layout.numel)

    def _gradient_bucket(self, bucket: Bucket) -> GradientBucket:
        gradients = ShardedBuffer.empty(
            bucket.layout,
            bucket.group,
            placement=BufferPlacement.PARTIAL,
            dtype=torch.float32,
            device=self.store.device,
        )
        trainable = [h for h in bucket.handles if h.trainable]
        entry = GradientBucket(bucket, gradients, trainable)
        for handle, member in zip(bucket.handles, bucket.layout.members, strict=True):
            if handle.trainable:
                handle.slot = gradients.view(member)
                handle.on_put = self._on_put
                self._bucket_of[handle.name] = entry
        return entry

    def _on_put(self, handle: WeightHandle) -> None:
        if not (self._last and self.config.overlap_grad_reduce):
            return
        self._puts[handle.name] += 1
        if self._puts[handle.name] > handle.uses:
            raise ValueError(
                f"{handle.name} got more gradients than its {handle.uses} declared uses, some "
                "perhaps after its reduction had begun: declare it once per use"
            )
        if self._puts[handle.name] != handle.uses:
            return
        entry = self._bucket_of[handle.name]
        entry.waiting -= 1
        if entry.waiting == 0:
            self._launch(entry)
            self.launched_in_backward += 1

    def _launch(self, entry: GradientBucket) -> None:
        entry.launched = True
        target = BufferPlacement.SHARDED if self.sharded else BufferPlacement.REPLICATED
        entry.pending = entry.gradients.redistribute(target)

    def _model_sums(self) -> list[tuple[Group, list[torch.Tensor]]]:
        """Collect, per group of the gradient plans, the ranges that have to be summed over it."""
        views: dict[str, list[torch.Tensor]] = {}
        for entry in self.buckets:
            low, high = self._span(entry.bucket)
            for handle, member in zip(
                entry.bucket.handles, entry.bucket.layout.members, strict=True
            ):
                if not handle.trainable:
                    continue
                for step in self.store.plans[handle.name].steps:
                    found = views.setdefault(step.group, [])
                    for start, stop in self._ranges(handle, member, step.segments):
                        start, stop = max(start, low), min(stop, high)
                        if start < stop:
                            found.append(entry.gradients.data[start:stop])
        # Every rank of the world walks the same names in the same order: sub-groups are made here.
        sums = [(self._group(name), found) for name, found in sorted(views.items())]
        return [(group, found) for group, found in sums if found and group.size > 1]

    def _ranges(
        self, handle: WeightHandle, member: Member, segments: tuple[str, ...]
    ) -> list[tuple[int, int]]:
        return [
            (member.start + box.start, member.start + box.start + box.numel)
            for box in self.store.boxes(handle)
            if box.name in segments
        ]

    def _group(self, name: str) -> Group:
        axis, _, size = name.partition("/")
        return self.groups.subgroups(axis, int(size)) if size else self.groups[axis]
