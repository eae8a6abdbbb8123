# SPDX-License-Identifier: Apache-2.0
"""WeightSharding: the description of one weight over the grid. Never a tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megatron.core.rank_grid import DENSE_AXES, EXPERT_AXES, RankGrid

GradientKind = Literal["identical", "partial"]

#: The data axes: ranks along them see different tokens. Hybrid sharding cuts over the inner ones.
INNER_LANES = ("gtp", "cp", "dp_inner")
OUTER_LANES = ("dp_outer",)
DENSE_LANES = INNER_LANES + OUTER_LANES
EXPERT_LANES = ("egtp", "edp_inner", "edp_outer")

#: The strategies of data parallelism: ZeRO 0, 1, 2 and 3.
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")

#: What hybrid sharding does with the optimizer state over the outer axis.
OUTER_STRATEGIES = ("no_shard", "optim")


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One cut of a logical tensor along `dim` over a grid axis.

    Args:
        axis: the axis, for instance "tp" or "ep".
        dim: the dimension of the logical tensor; only dimension 0 may be uneven (it is then
            padded).
        mode: "stay" is computed on as it lies (tensor or expert parallel); "gather" is storage only
            and put together again just before use.
        parts: number of pieces; None means one per rank of the axis. Fewer pieces than ranks (kv
            heads < tp) leave axis / parts consecutive ranks with the same piece: the replica
            sub-group.
    """

    axis: str
    dim: int
    mode: Literal["stay", "gather"] = "stay"
    parts: int | None = None

    def pieces(self, grid: RankGrid) -> int:
        """Return the number of pieces on this grid."""
        return grid.size(self.axis) if self.parts is None else self.parts


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One logical tensor.

    Args:
        name: as a checkpoint spells it.
        shape: whole and unpadded.
        cuts: in order, the outer one first.
        row_multiple: local rows are padded to a multiple of this.
    """

    name: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    row_multiple: int = 1

    @property
    def stay_cuts(self) -> tuple[Cut, ...]:
        return tuple(c for c in self.cuts if c.mode == "stay")

    def pieces(self, axis: str, grid: RankGrid) -> int:
        """Return into how many pieces the `stay` cuts over one axis divide it."""
        return math.prod(c.pieces(grid) for c in self.stay_cuts if c.axis == axis)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The data axes that shard each role of a weight; an empty tuple means replicated over data."""

    weight: tuple[str, ...] = ()
    gradient: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()


def placement(strategy: str, outer: str = "no_shard") -> Placement:
    """Return which data axes shard weight, gradient and optimizer state.

    ZeRO stages 0 to 3 (Rajbhandari et al. 2020, section 5) over the inner lanes, which are all
    lanes unless the grid has `instances`. Over the outer lanes everything is repeated (hybrid
    sharding, Zhao et al. 2023, section 3.2), except the optimizer state if `outer` says so.

    Args:
        strategy: one of `STRATEGIES`.
        outer: one of `OUTER_STRATEGIES`; "optim" only with "optim_grads_params".

    Raises:
        ValueError: an unknown name, or an outer strategy that this strategy cannot have.
    """
    if strategy not in STRATEGIES:
        raise ValueError(
            f"data-parallel sharding strategy {strategy!r}: use one of {', '.join(STRATEGIES)}"
        )
    if outer not in OUTER_STRATEGIES:
        raise ValueError(
            f"outer data-parallel sharding strategy {outer!r}: "
            f"use one of {', '.join(OUTER_STRATEGIES)}"
        )
    if outer == "optim" and strategy != "optim_grads_params":
        raise ValueError(
            f"outer sharding strategy 'optim' with {strategy!r} would be plain sharding over all "
            "lanes: use 'optim_grads_params', or one optimizer instance without an outer strategy"
        )
    stage = STRATEGIES.index(strategy)
    sharded_outside = OUTER_LANES if outer == "optim" else ()
    return Placement(
        weight=INNER_LANES if stage >= 3 else (),
        gradient=INNER_LANES if stage >= 2 else (),
        optimizer=INNER_LANES + sharded_outside if stage >= 1 else (),
    )


@dataclass(frozen=True, kw_only=True)
class WeightSharding:
    """Describe one weight as a model multiplies with it.

    Args:
        name: the weight's own name (a fused one differs from its segments' names).
        segments: its logical tensors, concatenated along dimension 0 of the local tensor.
        interleave: number of logical units (kv groups, for instance) that the segments interleave
            by: the local tensor is unit after unit, each holding its share of every segment. 1 is
            plain concatenation.
        gradient: for every axis of size > 1 that does not cut it and sees different inputs or
            heads: "identical" (each rank computes the whole gradient) or "partial" (each computes
                an addend).
        stages: the pipeline stages that own it; a tied weight is one name with several owners.
            Empty is the one stage that declares it.
        expert: it lies on the expert grid (etp, ep, egtp, edp) instead of the dense one.
        weight_decay: whether decoupled weight decay applies.
    """

    name: str
    segments: tuple[Segment, ...]
    interleave: int = 1
    gradient: Mapping[str, GradientKind] = field(default_factory=dict)
    stages: tuple[int, ...] = ()
    expert: bool = False
    weight_decay: bool = True

    @staticmethod
    def of(
        name: str, shape: tuple[int, ...], *cuts: Cut, row_multiple: int = 1, **more: object
    ) -> WeightSharding:
        """Describe a weight of one logical tensor, which has the weight's own name."""
        segment = Segment(name=name, shape=shape, cuts=cuts, row_multiple=row_multiple)
        return WeightSharding(name=name, segments=(segment,), **more)  # type: ignore[arg-type]

    @property
    def axes(self) -> tuple[str, ...]:
        return EXPERT_AXES if self.expert else DENSE_AXES

    @property
    def lane_axes(self) -> tuple[str, ...]:
        return EXPERT_LANES if self.expert else DENSE_LANES

    def lanes_of(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the data axes of a placement as axes of this weight's own grid."""
        if not self.expert:
            return axes
        # The expert grid has no cp: its ranks are among those of edp_inner.
        own = {"gtp": "egtp", "dp_outer": "edp_outer"}
        wanted = {own.get(axis, "edp_inner") for axis in axes}
        return tuple(axis for axis in EXPERT_LANES if axis in wanted)
