# SPDX-License-Identifier: Apache-2.0
"""What one rank owns of a bucket: the range of weights and gradients that its optimizer updates.

The range is plain flat tensors plus plain data about them, so an optimizer needs to know nothing of
weights, buckets or strategies, and a checkpoint can name every element of the optimizer's state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron.core.weight_sharding import Box, range_boxes, replica_ranks

if TYPE_CHECKING:
    from megatron.core.weight_gather.store import Bucket, WeightStore


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
        gradients: fp32 [k], a view of the bucket's gradients.
        decayed, undecayed: element ranges with and without weight decay (no padding, no frozen
            weights).
        counted: element ranges that this rank counts in norms; replicas elsewhere do not count
            them.
        boxes: the logical content.
        norm_group: name of the group over which sums of squares of `counted` add up to the whole.
    """

    weights: torch.Tensor
    gradients: torch.Tensor
    decayed: tuple[tuple[int, int], ...]
    undecayed: tuple[tuple[int, int], ...]
    counted: tuple[tuple[int, int], ...]
    boxes: tuple[PlacedBox, ...]
    norm_group: str


def owned_range(
    store: WeightStore,
    bucket: Bucket,
    gradients: torch.Tensor,
    *,
    span: tuple[int, int],
    sharded_axes: tuple[str, ...],
) -> OwnedRange:
    """Describe the elements `span` of a bucket for an optimizer.

    Args:
        gradients: the bucket's whole gradient storage [numel].
        sharded_axes: data axes over which the optimizer's state is cut; () if every lane keeps all.
    """
    low, high = span
    decayed: list[tuple[int, int]] = []
    undecayed: list[tuple[int, int]] = []
    counted: list[tuple[int, int]] = []
    boxes: list[PlacedBox] = []
    for handle, member in zip(bucket.handles, bucket.layout.members, strict=True):
        start, stop = max(member.start, low), min(member.stop, high)
        if start >= stop or not handle.trainable:
            continue
        _extend(decayed if handle.sharding.weight_decay else undecayed, start - low, stop - low)
        for box in range_boxes(store.boxes(handle), start - member.start, stop - member.start):
            at = box.start + start - low
            if box.counted:
                _extend(counted, at, at + box.numel)
            placed = Box(
                name=box.name,
                shape=box.shape,
                offsets=box.offsets,
                sizes=box.sizes,
                start=at,
                counted=box.counted,
            )
            ranks = replica_ranks(
                handle.sharding,
                box.name,
                grid=store.groups.grid,
                rank=store.groups.rank,
                sharded=sharded_axes,
            )
            boxes.append(PlacedBox(placed, ranks))
    expert = bucket.handles[0].sharding.expert
    return OwnedRange(
        weights=bucket.weights.data[low:high],
        gradients=gradients[low:high],
        decayed=tuple(decayed),
        undecayed=tuple(undecayed),
        counted=tuple(counted),
        boxes=tuple(boxes),
        norm_group="world" if sharded_axes else "expert_model" if expert else "model",
    )


def _extend(ranges: list[tuple[int, int]], start: int, stop: int) -> None:
    """Append a range, or lengthen the last one if they touch."""
    if ranges and ranges[-1][1] == start:
        ranges[-1] = (ranges[-1][0], stop)
    else:
        ranges.append((start, stop))
