# SPDX-License-Identifier: Apache-2.0
"""How a weight, its gradient and its optimizer state are sharded over the grid, and what follows.

A `WeightSharding` is a description of one weight, never a tensor. From it and a `RankGrid` alone
follow: the local shape with its padding; the boxes of the logical tensors that a rank holds, and
where they are in its local tensor or any range of it (initial values, checkpoint chunks and Hugging
Face slices are loops over these); which ranks hold replicas, who counts them in the gradient norm,
the bytes they take; and the gradient plan: the sums that complete the gradient, with the one loss
factor that goes with them.

Terms:

- A *logical tensor* is a tensor of a checkpoint: unfused, unpadded, unsharded. A fused weight
  (q|k|v, gate|up, the projections of a state-space layer) is one weight with several logical
  tensors, its *sub-weights*.
- The *local tensor* is what one rank multiplies with: the weight sharded over its model axes,
  padded to one shape on every rank. Its elements in row-major order are the flat space that buckets
  and shards divide further.
- A `Placement` shards that flat space over data axes: weights, gradients and optimizer state are
  ranges of it. ZeRO shards over all data-parallel ranks, generalized tensor parallelism over gtp.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from megatron.core.boxes import Box, boxes_of_range
from megatron.core.process_groups import DENSE_AXES, EXPERT_AXES, TIED, RankGrid

if TYPE_CHECKING:
    import torch

GradientKind = Literal["identical", "partial"]

#: The data axes: ranks along them see different tokens. Hybrid sharding shards over the inner ones.
SHARD_AXES = ("gtp", "cp", "dp_inner")
REPLICATE_AXES = ("dp_outer",)
DENSE_DATA_AXES = SHARD_AXES + REPLICATE_AXES
EXPERT_DATA_AXES = ("egtp", "edp_inner", "edp_outer")

#: The axis over which generalized tensor parallelism shards weights; for experts it is egtp.
GTP = ("gtp",)

#: The strategies of data parallelism: ZeRO 0, 1, 2 and 3.
Strategy: TypeAlias = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

#: What hybrid sharding does with the optimizer state over the outer axis.
OuterStrategy: TypeAlias = Literal["no_shard", "optim"]
OUTER_STRATEGIES: tuple[OuterStrategy, ...] = get_args(OuterStrategy)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Shards a logical tensor along one dimension over one grid axis.

    Args:
        axis: the axis, for instance "tp" or "ep".
        dim: the dimension of the logical tensor; only dimension 0 may be uneven (it is then
            padded).
        count: number of shards; None means one per rank of the axis. With fewer shards than ranks
            (kv heads < tp), axis / count consecutive ranks hold the same shard: the replica
            sub-group.
    """

    axis: str
    dim: int
    count: int | None = None

    def num_shards(self, grid: RankGrid) -> int:
        """Return the number of shards on this grid."""
        return grid.size(self.axis) if self.count is None else self.count


@dataclass(frozen=True, kw_only=True)
class SubWeight:
    """A logical tensor of a weight, such as the query projection of a fused QKV weight.

    Args:
        name: its name in checkpoints.
        shape: shape of the whole tensor, without padding.
        shards: how it is sharded, the outermost axis first.
        row_multiple: local rows are padded to a multiple of this.
    """

    name: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...] = ()
    row_multiple: int = 1

    def num_shards(self, axis: str, grid: RankGrid) -> int:
        """Return the number of shards along one axis."""
        return math.prod(shard.num_shards(grid) for shard in self.shards if shard.axis == axis)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The data axes that shard each role of a weight; an empty tuple means replicated over data."""

    weight: tuple[str, ...] = ()
    gradient: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()


def placement(strategy: Strategy, outer: OuterStrategy = "no_shard") -> Placement:
    """Return which data axes shard weight, gradient and optimizer state.

    ZeRO stages 0 to 3 (Rajbhandari et al. 2020, section 5) shard over the shard group, which is
    all data-parallel ranks unless the grid has several `instances`. Over the replicate group
    everything is replicated (hybrid sharding, Zhao et al. 2023, section 3.2), except the optimizer
    state if `outer` is "optim".

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
            "data-parallel ranks: use 'optim_grads_params', or one optimizer instance without an "
            "outer strategy"
        )
    stage = STRATEGIES.index(strategy)
    sharded_outside = REPLICATE_AXES if outer == "optim" else ()
    return Placement(
        weight=SHARD_AXES if stage >= 3 else (),
        gradient=SHARD_AXES if stage >= 2 else (),
        optimizer=SHARD_AXES + sharded_outside if stage >= 1 else (),
    )


@dataclass(frozen=True, kw_only=True)
class WeightSharding:
    """Describe one weight as a model multiplies with it.

    Args:
        name: the weight's own name (a fused one differs from its sub-weights' names).
        sub_weights: its logical tensors, concatenated along dimension 0 of the local tensor.
        interleave: number of logical units (kv groups, for instance) by which the sub-weights
            interleave: the local tensor is unit after unit, each with its share of each sub-weight.
            1 is plain concatenation.
        gradient: for every axis of size > 1 that does not shard it and sees different inputs or
            heads: "identical" (each rank computes the whole gradient) or "partial" (each computes
            an addend).
        stages: the pipeline stages that own it; a tied weight is one name with several owners.
            Empty: only the stage that declares it.
        expert: it is on the expert grid (etp, ep, egtp, edp) instead of the dense one.
        weight_decay: whether decoupled weight decay applies.
        gtp: whether generalized tensor parallelism may shard it: over gtp, or over egtp if it is
            an expert weight.
    """

    name: str
    sub_weights: tuple[SubWeight, ...]
    interleave: int = 1
    gradient: Mapping[str, GradientKind] = field(default_factory=dict)
    stages: tuple[int, ...] = ()
    expert: bool = False
    weight_decay: bool = True
    gtp: bool = False

    @staticmethod
    def of(
        name: str, shape: tuple[int, ...], *shards: Shard, row_multiple: int = 1, **fields: object
    ) -> WeightSharding:
        """Describe a weight of one logical tensor, which has the weight's own name."""
        sub_weight = SubWeight(name=name, shape=shape, shards=shards, row_multiple=row_multiple)
        return WeightSharding(name=name, sub_weights=(sub_weight,), **fields)  # type: ignore[arg-type]

    @cached_property
    def axes(self) -> tuple[str, ...]:
        return EXPERT_AXES if self.expert else DENSE_AXES

    @property
    def gtp_axis(self) -> str:
        """The axis over which generalized tensor parallelism shards it, if it does."""
        return "egtp" if self.expert else "gtp"

    @cached_property
    def data_axes(self) -> tuple[str, ...]:
        return EXPERT_DATA_AXES if self.expert else DENSE_DATA_AXES

    def data_axes_of(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the data axes of a placement as axes of this weight's own grid."""
        if not self.expert:
            return axes
        # The expert grid has no cp: its ranks are among those of edp_inner.
        expert_axes = {"gtp": "egtp", "dp_outer": "edp_outer"}
        group_names = {expert_axes.get(axis, "edp_inner") for axis in axes}
        return tuple(axis for axis in EXPERT_DATA_AXES if axis in group_names)

    def placement(self, grid: RankGrid, strategy: Placement) -> Placement:
        """Return the data axes that shard this weight's roles on a grid.

        On a single data-parallel rank nothing is sharded. Otherwise the strategy's axes apply, and
        if `gtp` allows it, each role that the strategy replicates is sharded over gtp. A strategy
        that shards weights does so over all data-parallel ranks, gtp included.
        """
        if all(grid.size(axis) == 1 for axis in self.data_axes):
            return Placement()
        if not self.gtp or strategy.weight or grid.size(self.gtp_axis) == 1:
            return strategy
        return Placement(
            weight=GTP,
            gradient=strategy.gradient or GTP,
            optimizer=strategy.optimizer or GTP,
        )


Coordinates = Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class LocalBox:
    """A box of one logical tensor that lies contiguously in a flat tensor of this rank.

    Args:
        name, shape: the logical tensor.
        box: in logical coordinates.
        start: first element in the flat tensor; it runs for `box.numel` elements.
        counted: this rank is the one among the model-parallel replicas that counts it (norms,
            zeros).
        replica_ranks: the global ranks that hold the same box in such a tensor; empty if unknown.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    start: int
    counted: bool
    replica_ranks: tuple[int, ...] = ()

    @property
    def offsets(self) -> tuple[int, ...]:
        return self.box.offsets

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.box.sizes

    @property
    def numel(self) -> int:
        return self.box.numel

    @property
    def stop(self) -> int:
        return self.start + self.box.numel

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the box's elements in the flat tensor, a view [*sizes]."""
        return flat[self.start : self.stop].view(self.box.sizes)


def check(sharding: WeightSharding, grid: RankGrid) -> list[str]:
    """List the problems of a sharding on this grid; empty without problems."""
    problems = []
    for sub_weight in sharding.sub_weights:
        problems += _shard_problems(sharding, sub_weight, grid)
        first_sub_weight = sharding.sub_weights[0]
        inner_shards = (_inner_shards(sub_weight), _inner_shards(first_sub_weight))
        if sub_weight.shape[1:] != first_sub_weight.shape[1:] or inner_shards[0] != inner_shards[1]:
            problems.append(
                f"{sub_weight.name}: shape {sub_weight.shape} does not stack in {sharding.name}"
            )
    for axis, kind in sharding.gradient.items():
        if kind not in ("identical", "partial"):
            problems.append(f"{sharding.name}: gradient on {axis} is {kind!r}")
    if sharding.interleave > 1 and not problems:
        for sub_weight in sharding.sub_weights:
            rows, num_row_shards = _local_rows(sub_weight, grid), _num_row_shards(sub_weight, grid)
            split = sharding.interleave % num_row_shards and num_row_shards % sharding.interleave
            uneven = rows * num_row_shards != sub_weight.shape[0] or rows % _units(sharding, grid)
            if split or uneven:
                problems.append(
                    f"{sub_weight.name}: {sub_weight.shape[0]} rows in {num_row_shards} shards do "
                    f"not interleave by {sharding.interleave} units evenly"
                )
    return problems


def _shard_problems(sharding: WeightSharding, sub_weight: SubWeight, grid: RankGrid) -> list[str]:
    problems = []
    for shard in sub_weight.shards:
        if shard.axis not in sharding.axes:
            problems.append(f"{sub_weight.name}: axis {shard.axis!r} is not one of {sharding.axes}")
            continue
        size, num_shards = grid.size(shard.axis), shard.num_shards(grid)
        if not 0 <= shard.dim < len(sub_weight.shape):
            problems.append(
                f"{sub_weight.name}: no dimension {shard.dim} in shape {sub_weight.shape}"
            )
        elif num_shards < 1 or size % num_shards:
            problems.append(
                f"{sub_weight.name}: {num_shards} shards do not divide the {size} ranks of "
                f"{shard.axis}"
            )
        elif shard.dim and sub_weight.shape[shard.dim] % num_shards:
            problems.append(
                f"{sub_weight.name}: dimension {shard.dim} of {sub_weight.shape[shard.dim]} does "
                f"not divide by {shard.axis}={num_shards}"
            )
    axes = [shard.axis for shard in sub_weight.shards]
    for axis in sorted(set(axes)):
        if axes.count(axis) > 1:
            problems.append(f"{sub_weight.name}: sharded {axes.count(axis)} times over {axis}")
    return problems


def _inner_shards(sub_weight: SubWeight) -> list[Shard]:
    return [shard for shard in sub_weight.shards if shard.dim]


def local_shape(sharding: WeightSharding, grid: RankGrid) -> tuple[int, ...]:
    """Return the shape of the local tensor, the same on every rank (padding included)."""
    rows = sum(_local_rows(s, grid) for s in sharding.sub_weights)
    first_sub_weight = sharding.sub_weights[0]
    inner = list(first_sub_weight.shape[1:])
    for shard in first_sub_weight.shards:
        if shard.dim:
            inner[shard.dim - 1] //= shard.num_shards(grid)
    return (rows, *inner)


def local_boxes(sharding: WeightSharding, grid: RankGrid, at: Coordinates) -> list[LocalBox]:
    """List the boxes of logical tensors in the local tensor of the rank at coordinates `at`.

    Ascending by `start`. Elements of the local tensor in no box are padding.
    """
    units = _units(sharding, grid)
    width = math.prod(local_shape(sharding, grid)[1:])
    boxes, row = [], 0
    for unit in range(units):
        for sub_weight in sharding.sub_weights:
            rows = _local_rows(sub_weight, grid) // units
            first_row, inner_offsets, inner_sizes = _origin(sub_weight, grid, at)
            first_row += unit * rows
            num_rows = min(rows, sub_weight.shape[0] - first_row)
            if num_rows > 0:
                boxes.append(
                    LocalBox(
                        name=sub_weight.name,
                        shape=sub_weight.shape,
                        box=Box((first_row, *inner_offsets), (num_rows, *inner_sizes)),
                        start=row * width,
                        counted=_replica_index(sharding, sub_weight, grid, at) == 0,
                    )
                )
            row += rows
    return boxes


def range_boxes(boxes: Sequence[LocalBox], start: int, stop: int) -> list[LocalBox]:
    """Restrict local boxes to the elements [start, stop) of the flat tensor.

    `start` of the results is relative to the range's own start. A local box may become several, see
    `boxes_of_range`.
    """
    boxes_in_range = []
    for box in boxes:
        low, high = max(start, box.start), min(stop, box.stop)
        at = low - start
        for sub_box in boxes_of_range(box.box.sizes, low - box.start, high - box.start):
            boxes_in_range.append(replace(box, box=sub_box.within(box.box.offsets), start=at))
            at += sub_box.numel
    return boxes_in_range


def shard_range(numel: int, num_shards: int, index: int, *, quantum: int = 1) -> tuple[int, int]:
    """Return the element range [start, stop) of shard `index` of `num_shards` equal ones.

    Each shard's size is a multiple of `quantum`. The last shards may reach past `numel`: that is
    padding, and the caller allocates `num_shards` times a shard's elements.
    """
    shard_numel = -(-numel // (num_shards * quantum)) * quantum
    return index * shard_numel, (index + 1) * shard_numel


def replica_ranks(
    sharding: WeightSharding,
    sub_weight_name: str,
    *,
    grid: RankGrid,
    rank: int,
    sharded: tuple[str, ...] = (),
) -> tuple[int, ...]:
    """List the global ranks that hold the same boxes of a sub-weight as `rank`, itself included.

    Args:
        sharded: axes of the placement over which the role in question is sharded (ranks along them
            hold different elements).

    Returns:
        Global ranks, ascending.
    """
    sub_weight = next(s for s in sharding.sub_weights if s.name == sub_weight_name)
    at = grid.coordinates(rank)
    sharded_data_axes = sharding.data_axes_of(sharded)
    choices = []
    for axis in sharding.axes:
        size = grid.size(axis)
        num_shards = sub_weight.num_shards(axis, grid)
        if axis == "pp":
            choices.append(tuple(sorted(set(sharding.stages))) or (at[axis],))
        elif axis in sharded_data_axes or num_shards == size:
            choices.append((at[axis],))
        else:
            replicas = size // num_shards
            first_index = at[axis] // replicas * replicas
            choices.append(tuple(range(first_index, first_index + replicas)))
    points = itertools.product(*choices)
    return tuple(sorted(grid.rank_of(**dict(zip(sharding.axes, p, strict=True))) for p in points))


def memory_bytes(
    sharding: WeightSharding,
    grid: RankGrid,
    placement: Placement,
    *,
    weight_bytes: int,
    gradient_bytes: int = 4,
    optimizer_bytes: int = 12,
) -> Fraction:
    """Return the bytes one rank keeps for a weight, its gradient and its optimizer state.

    Args:
        weight_bytes, gradient_bytes, optimizer_bytes: per element of the local tensor; the
            optimizer's include the fp32 master.
    """
    numel = math.prod(local_shape(sharding, grid))
    total = Fraction(0)
    for axes, size in (
        (placement.weight, weight_bytes),
        (placement.gradient, gradient_bytes),
        (placement.optimizer, optimizer_bytes),
    ):
        total += Fraction(
            numel * size, math.prod(grid.size(a) for a in sharding.data_axes_of(axes))
        )
    return total


def _shard_index(shard: Shard, grid: RankGrid, at: Coordinates) -> int:
    return at[shard.axis] * shard.num_shards(grid) // grid.size(shard.axis)


def _num_row_shards(sub_weight: SubWeight, grid: RankGrid) -> int:
    return math.prod(s.num_shards(grid) for s in sub_weight.shards if s.dim == 0)


def _local_rows(sub_weight: SubWeight, grid: RankGrid) -> int:
    return shard_range(
        sub_weight.shape[0], _num_row_shards(sub_weight, grid), 0, quantum=sub_weight.row_multiple
    )[1]


def _units(sharding: WeightSharding, grid: RankGrid) -> int:
    """Return the number of units in one local tensor (1 where a rank holds part of a unit)."""
    return max(1, sharding.interleave // _num_row_shards(sharding.sub_weights[0], grid))


def _origin(
    sub_weight: SubWeight, grid: RankGrid, at: Coordinates
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the first logical row of a rank's shard, and its inner offsets and sizes."""
    index = 0
    offsets, sizes = [0] * (len(sub_weight.shape) - 1), list(sub_weight.shape[1:])
    for shard in sub_weight.shards:  # ordered: an earlier axis is the outer one
        if shard.dim == 0:
            index = index * shard.num_shards(grid) + _shard_index(shard, grid, at)
        else:
            sizes[shard.dim - 1] //= shard.num_shards(grid)
            offsets[shard.dim - 1] += _shard_index(shard, grid, at) * sizes[shard.dim - 1]
    return index * _local_rows(sub_weight, grid), tuple(offsets), tuple(sizes)


def _replica_index(
    sharding: WeightSharding, sub_weight: SubWeight, grid: RankGrid, at: Coordinates
) -> int:
    """Return this rank's number among the model-parallel replicas of a sub-weight (0 counts it)."""
    index = 0
    for axis in sharding.axes:
        if axis in sharding.data_axes:
            continue
        if axis == "pp":
            owners = sharding.stages or (at[axis],)
            index = index * len(owners) + (owners.index(at[axis]) if at[axis] in owners else 0)
            continue
        replicas = grid.size(axis) // sub_weight.num_shards(axis, grid)
        index = index * replicas + at[axis] % replicas
    return index


@dataclass(frozen=True)
class GradientStep:
    """Sum the gradient of some logical tensors of a weight over a group.

    Args:
        group: a name of `GROUP_NAMES`, or "tp/2": 2 consecutive tp ranks.
        sub_weights: names of the logical tensors concerned.
    """

    group: str
    sub_weights: tuple[str, ...]


@dataclass(frozen=True)
class GradientPlan:
    """The reductions of a weight's gradient after backward.

    Args:
        data_group: the group over which gradient buckets are reduced ("dense_dp" or "expert_dp").
        steps: sums over model axes afterwards, in order.
        num_ranks_reached: the number of data-parallel ranks whose tokens the sum includes; the loss
            factor assumes all data-parallel ranks.
    """

    data_group: str
    steps: tuple[GradientStep, ...]
    num_ranks_reached: Fraction


def gradient_plan(sharding: WeightSharding, grid: RankGrid) -> GradientPlan:
    """Derive the sums that make a weight's gradient whole.

    Raises:
        ValueError: an axis of size > 1 neither shards the weight nor has a declared gradient kind,
            it is tied between other stages than the first and the last, or the sums would not reach
            every data-parallel rank exactly once (the silent factor of ep or etp/tp in experts).
    """
    names = tuple(s.name for s in sharding.sub_weights)
    steps = []
    for axis in sharding.axes:
        if axis in sharding.data_axes or axis == "pp" or grid.size(axis) == 1:
            continue
        unsharded, size = [], grid.size(axis)
        for sub_weight in sharding.sub_weights:
            num_shards = sub_weight.num_shards(axis, grid)
            if num_shards == 1 and not any(s.axis == axis for s in sub_weight.shards):
                unsharded.append(sub_weight.name)
            elif num_shards < size:
                # Replicas of a shard feed different consumers (other query heads): addends of one
                # gradient.
                steps.append(GradientStep(f"{axis}/{size // num_shards}", (sub_weight.name,)))
        if unsharded and axis not in sharding.gradient:
            raise ValueError(
                f"{sharding.name}: it is not sharded over {axis}={size}, and its gradient "
                'there is declared neither "identical" nor "partial"'
            )
        if unsharded and sharding.gradient[axis] == "partial":
            steps.append(GradientStep(axis, tuple(unsharded)))
    if len(set(sharding.stages)) > 1:
        if set(sharding.stages) != {0, grid.pp - 1}:
            raise ValueError(
                f"{sharding.name}: owned by stages {sharding.stages} of {grid.pp}; only the first "
                "and the last share weights"
            )
        steps.append(GradientStep(TIED, names))
    data_group = "expert_dp" if sharding.expert else "dense_dp"
    reached = Fraction(math.prod(grid.size(a) for a in sharding.data_axes))
    if sharding.expert:  # dispatch brings the tokens of etp·ep ranks, etp·ep/tp data-parallel ones
        reached *= Fraction(grid.size("etp") * grid.ep, grid.tp)
    num_ranks = math.prod(grid.size(a) for a in DENSE_DATA_AXES)
    if reached != num_ranks:
        raise ValueError(
            f"{sharding.name}: its gradient would be summed over {reached} of {num_ranks} "
            "data-parallel ranks; the expert grid does not cover the dense one"
        )
    return GradientPlan(data_group, tuple(_merge(steps)), reached)


def loss_factor(grid: RankGrid, num_microbatches: int) -> float:
    """Return the factor of a microbatch's mean loss in the step's mean loss: 1 / (dp · gtp ·
    microbatches).

    The microbatch's own mean is over its tokens on all cp ranks. With this factor in the loss every
    gradient reduction is a plain sum, for dense and expert weights alike.
    """
    return 1.0 / (grid.dp * grid.gtp * num_microbatches)


def _merge(steps: list[GradientStep]) -> list[GradientStep]:
    merged: dict[str, tuple[str, ...]] = {}
    for step in steps:
        merged[step.group] = merged.get(step.group, ()) + step.sub_weights
    return [GradientStep(group, names) for group, names in merged.items()]


__all__ = [
    "DENSE_DATA_AXES",
    "EXPERT_DATA_AXES",
    "GTP",
    "OUTER_STRATEGIES",
    "REPLICATE_AXES",
    "SHARD_AXES",
    "STRATEGIES",
    "GradientKind",
    "GradientPlan",
    "GradientStep",
    "LocalBox",
    "OuterStrategy",
    "Placement",
    "Shard",
    "Strategy",
    "SubWeight",
    "WeightSharding",
    "check",
    "gradient_plan",
    "local_boxes",
    "local_shape",
    "loss_factor",
    "memory_bytes",
    "placement",
    "range_boxes",
    "replica_ranks",
    "shard_range",
]
