# SPDX-License-Identifier: Apache-2.0
"""The sums that make a weight's gradient whole, and the one loss factor that goes with them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from megatron.core.rank_grid import TIED, RankGrid
from megatron.core.weight_sharding.description import DENSE_LANES, WeightSharding


@dataclass(frozen=True)
class GradientStep:
    """Sum the gradient of some logical tensors of a weight over a group.

    Args:
        group: a name of `GROUP_NAMES`, or "tp/2": 2 consecutive tp ranks.
        segments: the logical tensors concerned.
    """

    group: str
    segments: tuple[str, ...]


@dataclass(frozen=True)
class GradientPlan:
    """All that happens to a weight's gradient after backward.

    Args:
        lanes: the group that its buckets are reduced over ("lanes" or "expert_lanes").
        steps: sums over model axes, in order, after that.
        lanes_reached: the number of data lanes whose tokens the result holds; the loss factor
            assumes all.
    """

    lanes: str
    steps: tuple[GradientStep, ...]
    lanes_reached: Fraction


def gradient_plan(sharding: WeightSharding, grid: RankGrid) -> GradientPlan:
    """Derive the sums that make a weight's gradient whole.

    Raises:
        ValueError: an axis of size > 1 neither cuts the weight nor has a declared gradient kind, it
            is tied between other stages than the first and the last, or the sums would not reach
            every data lane exactly once (the silent factor of ep or etp/tp in experts).
    """
    names = tuple(s.name for s in sharding.segments)
    steps = []
    for axis in sharding.axes:
        if axis in sharding.lane_axes or axis == "pp" or grid.size(axis) == 1:
            continue
        whole, size = [], grid.size(axis)
        for segment in sharding.segments:
            parts = segment.pieces(axis, grid)
            if parts == 1 and not any(c.axis == axis for c in segment.stay_cuts):
                whole.append(segment.name)
            elif parts < size:
                # Replicas of a piece feed different consumers (other query heads): addends of one
                # gradient.
                steps.append(GradientStep(f"{axis}/{size // parts}", (segment.name,)))
        if whole and axis not in sharding.gradient:
            raise ValueError(
                f"{sharding.name}: nothing cuts it over {axis}={size} and its gradient there "
                'is not declared "identical" or "partial"'
            )
        if whole and sharding.gradient[axis] == "partial":
            steps.append(GradientStep(axis, tuple(whole)))
    if len(set(sharding.stages)) > 1:
        if set(sharding.stages) != {0, grid.pp - 1}:
            raise ValueError(
                f"{sharding.name}: owned by stages {sharding.stages} of {grid.pp}; only the first "
                "and the last share weights"
            )
        steps.append(GradientStep(TIED, names))
    lanes = "expert_lanes" if sharding.expert else "lanes"
    reached = Fraction(math.prod(grid.size(a) for a in sharding.lane_axes))
    if sharding.expert:  # dispatch brings the tokens of etp·ep ranks, which are etp·ep/tp lanes
        reached *= Fraction(grid.size("etp") * grid.ep, grid.tp)
    every = math.prod(grid.size(a) for a in DENSE_LANES)
    if reached != every:
        raise ValueError(
            f"{sharding.name}: its gradient would hold {reached} of {every} data lanes; the expert "
            "grid does not cover the dense one"
        )
    return GradientPlan(lanes, tuple(_merge(steps)), reached)


def loss_factor(grid: RankGrid, num_microbatches: int) -> float:
    """Return the factor of a microbatch's mean loss in the step's mean loss: 1 / (dp · gtp ·
    microbatches).

    The microbatch's own mean is over its tokens on all cp ranks. With it in the loss every gradient
    sum is a plain sum, for dense and expert weights alike.
    """
    return 1.0 / (grid.dp * grid.gtp * num_microbatches)


def _merge(steps: list[GradientStep]) -> list[GradientStep]:
    merged: dict[str, tuple[str, ...]] = {}
    for step in steps:
        merged[step.group] = merged.get(step.group, ()) + step.segments
    return [GradientStep(group, segments) for group, segments in merged.items()]
