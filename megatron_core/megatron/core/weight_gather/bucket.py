# SPDX-License-Identifier: Apache-2.0
"""Bucket: weights that lie, are gathered, and whose gradients are reduced, together.

A bucket is one flat buffer. It is stored whole, or one shard of it on each of the ranks that share
it; then the whole exists only while the gatherer holds it (`bind` … `unbind`). Handles see views
of whatever is bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from megatron.core.process_groups import Group
from megatron.core.sharded_buffer import BufferLayout, BufferPlacement, Member, ShardedBuffer
from megatron.core.weight_gather.handle import WeightHandle
from megatron.core.weight_gather.layout import BucketGroups, BucketPlan
from megatron.core.weight_sharding import OUTER_LANES, Placement


class WeightSource(Protocol):
    """Who makes a bucket's weights whole when an op needs them."""

    def consume(self, bucket: Bucket) -> None:
        """Make the bucket current: bound, complete, and kept until another is."""

    def is_late(self, bucket: Bucket) -> bool:
        """Return whether updates by other ranks of what this rank stores have not arrived."""


class Bucket:
    """Weights in one flat buffer.

    Args:
        index: its number in the store.
        plan: which weights it holds.
        handles: they, in the order in which they lie.
        groups: who shares it.
        weights: the whole or this rank's shard.
        placement: which axes cut what; none if this rank is alone on the bucket's lanes.

    Attributes:
        name: of its unit, or of its first and last weight.
        root: its weights belong to no unit.
        part: of the model that its weights belong to.
        owned_range: the elements that this rank's optimizer updates.
        outer_shards: the outer ranks own different parts of the same shard.
        group: the ranks that share it; each owns one of `group.size` ranges of it.
        outer: the ranks that hold the same range, under hybrid sharding; one rank otherwise.
        current: handles may read what is bound without asking anybody.
        source: whom to ask otherwise.
    """

    def __init__(
        self,
        index: int,
        plan: BucketPlan,
        *,
        handles: list[WeightHandle],
        layout: BufferLayout,
        groups: BucketGroups,
        weights: ShardedBuffer,
        placement: Placement,
    ) -> None:
        self.index, self.handles = index, handles
        self.name, self.root, self.part = plan.name, plan.root, plan.part
        self.layout, self.groups, self.weights = layout, groups, weights
        self.placement = placement
        start, stop = weights.shard_range if placement.optimizer else (0, layout.numel)
        self.outer_shards = groups.outer.size > 1 and any(
            axis in placement.optimizer for axis in OUTER_LANES
        )
        if self.outer_shards:
            part = (stop - start) // groups.outer.size
            start += part * groups.outer.rank
            stop = start + part
        self.owned_range = start, stop
        self.current = not self.sharded
        self.source: WeightSource | None = None
        for handle in handles:
            handle.bucket = self
        if not self.sharded:
            self.bind(weights.data)

    @property
    def group(self) -> Group:
        return self.groups.shared

    @property
    def outer(self) -> Group:
        return self.groups.outer

    @property
    def alone(self) -> bool:
        """Whether nobody else has it: it is stored whole, and neither gathered nor reduced."""
        return self.group.size * self.outer.size == 1

    @property
    def sharded(self) -> bool:
        """Whether this rank stores one shard only."""
        return self.weights.placement is BufferPlacement.SHARDED

    @property
    def owned(self) -> torch.Tensor:
        """The weights that this rank's optimizer updates, a view of what it stores."""
        low, _ = self.weights.stored_range
        start, stop = self.owned_range
        return self.weights.data[start - low : stop - low]

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole bucket."""
        return self.layout.numel * self.weights.data.element_size()

    def members(self) -> Iterator[tuple[WeightHandle, Member]]:
        """Pair every handle with its place in the flat buffer."""
        return zip(self.handles, self.layout.members, strict=True)

    def bind(self, whole: torch.Tensor) -> None:
        """Show the handles their weights in `whole` [numel]."""
        for handle, member in self.members():
            handle.whole = whole[member.start : member.stop].view(member.shape)

    def unbind(self) -> None:
        """Take away what was bound: its memory may be used for something else."""
        self.current = False
        for handle in self.handles:
            handle.whole = None

    def need(self) -> None:
        """Have the whole weights made ready.

        Raises:
            ValueError: nobody was asked to gather them.
        """
        if self.source is None:
            raise ValueError(
                f"{self.name} is stored in shards: build DataParallel over its store to use it"
            )
        self.source.consume(self)

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The element ranges that belong to no weight that is trained: padding and frozen ones."""
        found, at = [], 0
        for handle, member in self.members():
            if not handle.trainable:
                continue
            if member.start > at:
                found.append((at, member.start))
            at = member.stop
        return found + ([(at, self.layout.numel)] if at < self.layout.numel else [])


def bytes_of_units(buckets: Iterable[Bucket]) -> tuple[int, int]:
    """Return the bytes of the buckets outside units, and of the largest unit, of those that ranks
    share: its dense weights and its experts, which it needs in turn."""
    root = 0
    largest = {False: 0, True: 0}
    for bucket in buckets:
        expert = bucket.handles[0].sharding.expert
        if bucket.root and not bucket.alone:
            root += bucket.whole_bytes
        elif not bucket.alone:
            largest[expert] = max(largest[expert], bucket.whole_bytes)
    return root, sum(largest.values())
