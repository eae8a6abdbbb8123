# SPDX-License-Identifier: Apache-2.0
"""What one rank owns of a bucket: the range of weights and gradients that its optimizer updates.

The range is plain flat tensors plus plain data about them, so an optimizer needs to know nothing of
weights, buckets or strategies, and a checkpoint can name every element of the optimizer's state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from megatron.core.weight_sharding import Box, range_boxes, replica_ranks

if TYPE_CHECKING:
    from megatron.core.weight_gather.bucket import Bucket
    from megatron.core.weight_gather.handle import WeightHandle
    from megatron.core.weight_gather.store import WeightStore


#: Groups over which the norms of owned ranges add up.
NORM_GROUPS = ("expert_model", "model", "world")


@dataclass(frozen=True)
class PlacedBox:
    """A box of a logical tensor in a flat range, and the global ranks that hold the same box."""

    box: Box
    replica_ranks: tuple[int, ...]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the box's elements in a flat tensor that covers the range, a view [sizes]."""
        start = self.box.start
        return flat[start : start + self.box.numel].view(self.box.sizes)


@dataclass(frozen=True, eq=False)
class OwnedRange:
    """A range of one bucket.

    Args:
        weights: [k], a view of the bucket's weights.
        gradients: [k], what this rank keeps of the bucket's gradients.
        decayed, undecayed: element ranges with and without weight decay (no padding, no frozen
            weights).
        counted: element ranges that this rank counts in norms; replicas elsewhere do not count
            them.
        boxes: the logical content.
        norm_group: one of `NORM_GROUPS`, the group over which sums of squares of `counted` add up
            to the whole, times `replicas`.
        replicas: ranks of that group that hold the same range.
    """

    weights: torch.Tensor
    gradients: torch.Tensor
    decayed: tuple[tuple[int, int], ...]
    undecayed: tuple[tuple[int, int], ...]
    counted: tuple[tuple[int, int], ...]
    boxes: tuple[PlacedBox, ...]
    norm_group: str
    replicas: int = 1


@dataclass(frozen=True)
class HeldBox:
    """A box of a logical tensor in this rank's memory.

    Args:
        box: in logical coordinates.
        tensor: its elements, a view [sizes].
        replica_ranks: the global ranks that store the same box.
    """

    box: Box
    tensor: torch.Tensor
    replica_ranks: tuple[int, ...]


def held_boxes(store: WeightStore, handle: WeightHandle) -> list[HeldBox]:
    """List what this rank stores of a weight."""
    bucket, stored = handle.bucket, handle.anchor.detach().view(-1)
    assert bucket is not None
    member = next(m for h, m in bucket.members() if h is handle)
    low, high = bucket.weights.stored_range
    start, stop = max(member.start, low), min(member.stop, high)
    if start >= stop:
        return []
    replicas = _replicas(store, handle, store.placement.weight)
    return [
        HeldBox(
            box,
            stored[box.start : box.start + box.numel].view(box.sizes),
            replicas[box.name],
        )
        for box in range_boxes(store.boxes(handle), start - member.start, stop - member.start)
    ]


def empty_range(store: WeightStore) -> OwnedRange:
    """Describe what the optimizer of a rank without trained weights updates: nothing, on the
    store's device, and yet it takes part in every sum over all ranks."""
    nothing = torch.empty(0, dtype=store.dtype, device=store.device)
    return OwnedRange(
        weights=nothing,
        gradients=nothing.float(),
        decayed=(),
        undecayed=(),
        counted=(),
        boxes=(),
        norm_group="world" if store.placement.optimizer else "model",
    )


def owned_range(
    store: WeightStore,
    bucket: Bucket,
    gradients: torch.Tensor,
) -> OwnedRange:
    """Describe what this rank's optimizer updates of a bucket.

    Args:
        gradients: of the owned range [high - low].
    """
    low, high = bucket.owned_range
    sharded_axes = store.placement.optimizer
    decayed: list[tuple[int, int]] = []
    undecayed: list[tuple[int, int]] = []
    counted: list[tuple[int, int]] = []
    boxes: list[PlacedBox] = []
    grid = store.groups.grid
    for handle, member in bucket.members():
        start, stop = max(member.start, low), min(member.stop, high)
        if start >= stop or not handle.trainable:
            continue
        _extend(decayed if handle.sharding.weight_decay else undecayed, start - low, stop - low)
        replicas = _replicas(store, handle, sharded_axes)
        for box in range_boxes(store.boxes(handle), start - member.start, stop - member.start):
            at = box.start + start - low
            if box.counted:
                _extend(counted, at, at + box.numel)
            boxes.append(PlacedBox(replace(box, start=at), replicas[box.name]))
    sharding = bucket.handles[0].sharding
    lanes = sharding.lanes_of(sharded_axes)
    uncut = [axis for axis in sharding.lane_axes if axis not in lanes]
    return OwnedRange(
        weights=bucket.owned,
        gradients=gradients,
        decayed=tuple(decayed),
        undecayed=tuple(undecayed),
        counted=tuple(counted),
        boxes=tuple(boxes),
        norm_group="world" if sharded_axes else "expert_model" if sharding.expert else "model",
        replicas=math.prod(grid.size(axis) for axis in uncut) if sharded_axes else 1,
    )


def _replicas(
    store: WeightStore, handle: WeightHandle, sharded: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    """Return the ranks that hold the same boxes, by logical tensor: experts have many boxes."""
    grid, rank = store.groups.grid, store.groups.rank
    return {
        segment.name: replica_ranks(
            handle.sharding, segment.name, grid=grid, rank=rank, sharded=sharded
        )
        for segment in handle.sharding.segments
    }


def _extend(ranges: list[tuple[int, int]], start: int, stop: int) -> None:
    """Append a range, or lengthen the last one if they touch."""
    if ranges and ranges[-1][1] == start:
        ranges[-1] = (ranges[-1][0], stop)
    else:
        ranges.append((start, stop))
