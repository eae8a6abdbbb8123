# SPDX-License-Identifier: Apache-2.0
"""Storage: how the weights of a store are divided into buckets and over the ranks that share them.

strategy             stored            a bucket is
no_shard, optim,     whole             about `bucket_bytes` of fp32 gradients, in reverse order
optim_grads                            of declaration (backward's order: early ones fill first)
optim_grads_params   in shards         one unit (a layer), or a run of weights outside any unit; by
                                       weight: a matrix and the vectors declared behind it

Dense weights and experts have lanes of their own, and weights of another dtype buckets. A bucket
whose lanes are one rank is stored whole under every strategy, and neither gathered nor reduced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from megatron.core.process_groups import Group, ProcessGroupCollection
from megatron.core.weight_gather.handle import WeightHandle
from megatron.core.weight_sharding import (
    DENSE_LANES,
    EXPERT_LANES,
    GradientPlan,
    Placement,
    placement,
)

GRANULARITIES = ("unit", "weight")


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How weights are stored.

    Args:
        strategy: the strategy of the data-parallel engine that will be built over the store.
        outer: what hybrid sharding does over the outer data axis: "no_shard" or "optim".
        bucket_bytes: fp32 gradient bytes after which a bucket closes, where weights are stored
            whole; a weight is never split.
        granularity: of weights that are stored in shards: a bucket is a "unit" or a "weight".
        initialize: write initial values; otherwise zeros.

    Raises:
        ValueError: an unknown granularity.
    """

    strategy: str = "no_shard"
    outer: str = "no_shard"
    bucket_bytes: int = 160_000_000
    granularity: str = "unit"
    initialize: bool = True

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"granularity {self.granularity!r}: use {' or '.join(GRANULARITIES)}")

    @property
    def placement(self) -> Placement:
        return placement(self.strategy, self.outer)

    def effective(self, groups: ProcessGroupCollection) -> Placement:
        """Return the placement on these ranks: none where each is alone on its lanes, those of
        dense weights and those of experts.

        Where it is alone on one of them only, buckets of these have no placement of their own.
        """
        lanes = (DENSE_LANES, EXPERT_LANES)
        sizes = [groups.grid.size(axis) for axes in lanes for axis in axes]
        return Placement() if max(sizes) == 1 else self.placement


@dataclass(frozen=True)
class BucketPlan:
    """The weights of a bucket to be, before anything is allocated.

    Args:
        name: of its unit, or of its first and last weight.
        handles: in the order in which backward fills them.
        root: they belong to no unit.
        part: of the model that they belong to.
    """

    name: str
    handles: list[WeightHandle]
    root: bool
    part: int = 0


def bucket_plans(
    handles: Iterable[WeightHandle],
    plans: Mapping[str, GradientPlan],
    *,
    units: Mapping[str, str | None],
    parts: Mapping[str, int],
    storage: Storage,
    cut: bool,
) -> list[BucketPlan]:
    """Divide weights into buckets, each of one lane group, one dtype and one part.

    A weight of several pipeline stages has a bucket to itself: its owners then lay it out alike,
    and hold the same ranges of it, whatever else they have.

    Args:
        handles: in order of declaration.
        plans: by weight name.
        units: the unit of each weight by name; None if it is in none.
        parts: the part of each weight by name.
        cut: weights are stored in shards; else buckets are filled by bytes.

    Returns:
        In the order in which backward fills them.
    """
    found: list[BucketPlan] = []
    opened: dict[tuple[str, torch.dtype], list[WeightHandle]] = {}
    unit: str | None = None
    part = 0

    def close(kind: tuple[str, torch.dtype]) -> None:
        members = opened.pop(kind)
        first, last = members[-1].name, members[0].name
        name = unit or (first if first == last else f"{first} ... {last}")
        found.append(BucketPlan(name, members, unit is None, part))

    # Backward goes through the last part first, in whatever order the parts were declared.
    for handle in sorted(reversed(list(handles)), key=lambda h: -parts[h.name]):
        kind = plans[handle.name].lanes, handle.dtype
        shared = len(set(handle.sharding.stages)) > 1
        if shared or parts[handle.name] != part:
            for other in list(opened):
                close(other)
            part = parts[handle.name]
        if cut and units[handle.name] != unit:
            for other in list(opened):
                close(other)
            unit = units[handle.name]
        opened.setdefault(kind, []).append(handle)
        if cut:
            full = storage.granularity == "weight" and len(handle.shape) > 1
        else:
            size = sum(4 * math.prod(h.shape) for h in opened[kind])
            full = size >= storage.bucket_bytes
        if full or shared:
            close(kind)
    for kind in list(opened):
        close(kind)
    return found


@dataclass(frozen=True)
class BucketGroups:
    """Who shares a bucket: its owners, the ranks that hold the same range, and who gathers it."""

    shared: Group
    outer: Group
    gather: Group

    @staticmethod
    def of(groups: ProcessGroupCollection, lanes: str, placement: Placement) -> BucketGroups:
        """Choose the groups for the lanes ("lanes" or "expert_lanes") of a placement."""
        alone = Group.single("outer", groups.rank)
        hybrid = groups.grid.instances > 1 and bool(placement.optimizer)
        shared = groups[lanes.replace("lanes", "inner_lanes") if hybrid else lanes]
        outer = groups[lanes.replace("lanes", "outer_lanes")] if hybrid else alone
        # Gathers have a communicator of their own: they never queue behind gradients.
        gather = groups[lanes.replace("lanes", "gather_lanes")] if placement.weight else shared
        return BucketGroups(shared, outer, gather)
