# SPDX-License-Identifier: Apache-2.0
"""WeightSharding: the description of one weight over the grid. Never a tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from megatron.core.process_groups import DENSE_AXES, EXPERT_AXES, RankGrid

GradientKind = Literal["identical", "partial"]

DENSE_LANES = ("gtp", "cp", "dp")
EXPERT_LANES = ("egtp", "edp")


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


#: The strategies of data parallelism as placements (ZeRO 0, 1, 2, 3: Rajbhandari et al. 2020,
#: section 5).
PLACEMENTS: Mapping[str, Placement] = MappingProxyType(
    {
        "no_shard": Placement(),
        "optim": Placement(optimizer=DENSE_LANES),
        "optim_grads": Placement(gradient=DENSE_LANES, optimizer=DENSE_LANES),
        "optim_grads_params": Placement(
            weight=DENSE_LANES, gradient=DENSE_LANES, optimizer=DENSE_LANES
        ),
    }
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
        # The expert grid has no cp: its ranks are among those of edp.
        wanted = {{"gtp": "egtp"}.get(axis, "edp") for axis in axes}
        return tuple(axis for axis in EXPERT_LANES if axis in wanted)
