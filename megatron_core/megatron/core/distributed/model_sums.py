# SPDX-License-Identifier: Apache-2.0
"""ModelSums: the sums of the gradient plans over model axes, as ranges of what ranks keep.

They are weights that lie whole on an axis (or twice on part of it) and saw different tokens or
heads there. Every such range of every bucket goes into one all-reduce per group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.comm.collectives import all_reduce
from megatron.core.distributed.gradients import GradientBucket
from megatron.core.sharded_buffer import Member
from megatron.core.weight_gather import WeightHandle, WeightStore


class ModelSums:
    """Collect, per group of the gradient plans, the ranges that have to be summed over it."""

    def __init__(self, store: WeightStore, buckets: Sequence[GradientBucket]) -> None:
        views: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for entry in buckets:
            low, high = entry.bucket.owned_range
            for handle, member in entry.bucket.members():
                if not handle.trainable:
                    continue
                for step in store.plans[handle.name].steps:
                    found = views.setdefault(step.group, [])
                    for start, stop in _ranges(store, handle, member, step.segments):
                        start, stop = max(start, low), min(stop, high)
                        if start < stop:
                            found.append((handle.name, entry.gradients[start - low : stop - low]))
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


def _ranges(
    store: WeightStore, handle: WeightHandle, member: Member, segments: tuple[str, ...]
) -> list[tuple[int, int]]:
    return [
        (member.start + box.start, member.start + box.start + box.numel)
        for box in store.boxes(handle)
        if box.name in segments
    ]
