# SPDX-License-Identifier: Apache-2.0
"""How one weight, its gradient and its optimizer state lie over the grid, and everything that
follows from it.

A `WeightSharding` is a description, never a tensor. From it and a `RankGrid` alone are derived: the
local shape with its padding, the boxes of the logical tensors that a rank holds (initial values,
checkpoint chunks and Hugging Face slices are loops over these), which ranks hold replicas of them,
who counts them in the gradient norm, the bytes they take, and the gradient plan with its one
factor.

Vocabulary of this module:

- A *logical tensor* is what a checkpoint names: unfused, unpadded, whole. A fused weight (q|k|v,
gate|up, the
  projections of a state-space layer) is one weight with several logical tensors, its *segments*.
- The *local tensor* is what one rank multiplies with: the `stay` cuts applied, padded so that it
has one shape
  on every rank. Its elements in row-major order are the flat space that buckets and shards cut
  further.
- A `gather` cut (generalized tensor parallelism, ZeRO-3) and a placement (ZeRO-1/2) are ranges of
that flat
  space; a row-aligned range is the same thing with a larger quantum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

from megatron.core.process_groups import DENSE_AXES, EXPERT_AXES, RankGrid

GradientKind = Literal["identical", "partial"]
Coordinates = Mapping[str, int]

_DENSE_LANES = ("gtp", "cp", "dp")
_EXPERT_LANES = ("egtp", "edp")


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


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One logical tensor: its checkpoint name, unpadded shape, cuts, and the multiple its local
    rows pad to."""

    name: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    row_multiple: int = 1


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
        "optim": Placement(optimizer=_DENSE_LANES),
        "optim_grads": Placement(gradient=_DENSE_LANES, optimizer=_DENSE_LANES),
        "optim_grads_params": Placement(
            weight=_DENSE_LANES, gradient=_DENSE_LANES, optimizer=_DENSE_LANES
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
        return _EXPERT_LANES if self.expert else _DENSE_LANES


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box of one logical tensor that lies contiguously in a rank's local tensor.

    Args:
        name, shape: the logical tensor.
        offsets, sizes: the box in logical coordinates.
        start: first element in the flat local tensor; it runs for `numel` elements.
        counted: this rank is the one among the model-parallel replicas that counts it (norms,
            zeros).
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    counted: bool

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


# --- shapes and boxes -----------------------------------------------------------------------------


def check(sharding: WeightSharding, grid: RankGrid) -> list[str]:
    """List what is wrong with a description on this grid; empty if nothing is."""
    found = []
    for segment in sharding.segments:
        for cut in segment.cuts:
            if cut.axis not in sharding.axes:
                found.append(f"{segment.name}: axis {cut.axis!r} is not one of {sharding.axes}")
                continue
            size, parts = grid.size(cut.axis), _parts(cut, grid)
            if not 0 <= cut.dim < len(segment.shape):
                found.append(f"{segment.name}: no dimension {cut.dim} in shape {segment.shape}")
            elif size % parts:
                found.append(
                    f"{segment.name}: {parts} pieces do not divide the {size} ranks of {cut.axis}"
                )
            elif cut.dim and segment.shape[cut.dim] % parts:
                found.append(
                    f"{segment.name}: dimension {cut.dim} of {segment.shape[cut.dim]} does not "
                    f"divide by {cut.axis}={parts}"
                )
        if segment.shape[1:] != sharding.segments[0].shape[1:]:
            found.append(f"{segment.name}: shape {segment.shape} does not stack in {sharding.name}")
    for axis, kind in sharding.gradient.items():
        if kind not in ("identical", "partial"):
            found.append(f"{sharding.name}: gradient on {axis} is {kind!r}")
    if sharding.interleave > 1 and not found:
        for segment in sharding.segments:
            rows = _local_rows(segment, grid)
            if rows * _row_pieces(segment, grid) != segment.shape[0] or rows % _units(
                sharding, grid
            ):
                found.append(f"{segment.name}: {segment.shape[0]} rows do not interleave evenly")
    return found


def local_shape(sharding: WeightSharding, grid: RankGrid) -> tuple[int, ...]:
    """Return the shape of the local tensor, the same on every rank (padding included)."""
    rows = sum(_local_rows(s, grid) for s in sharding.segments)
    first = sharding.segments[0]
    inner = list(first.shape[1:])
    for cut in _stay(first):
        if cut.dim:
            inner[cut.dim - 1] //= _parts(cut, grid)
    return (rows, *inner)


def local_boxes(sharding: WeightSharding, grid: RankGrid, at: Coordinates) -> list[Box]:
    """List the boxes of logical tensors in the local tensor of the rank at coordinates `at`.

    Ascending by `start`. Elements of the local tensor in no box are padding.
    """
    units = _units(sharding, grid)
    width = math.prod(local_shape(sharding, grid)[1:])
    boxes, row = [], 0
    for unit in range(units):
        for segment in sharding.segments:
            rows = _local_rows(segment, grid) // units
            first, inner_offsets, inner_sizes = _origin(segment, grid, at)
            first += unit * rows
            kept = min(rows, segment.shape[0] - first)
            if kept > 0:
                boxes.append(
                    Box(
                        name=segment.name,
                        shape=segment.shape,
                        offsets=(first, *inner_offsets),
                        sizes=(kept, *inner_sizes),
                        start=row * width,
                        counted=_replica_index(sharding, segment, grid, at) == 0,
                    )
                )
            row += rows
    return boxes


def range_boxes(boxes: Sequence[Box], start: int, stop: int) -> list[Box]:
    """Cut local boxes down to the elements [start, stop) of the flat local tensor.

    An element range of a row-major n-d box is at most 2n - 1 boxes: the tail of a row, whole rows,
    the head of a row, and so on inwards. `start` of the results is relative to the range's own
    start.
    """
    found = []
    for box in boxes:
        low, high = max(start, box.start), min(stop, box.start + box.numel)
        if low < high:
            for offsets, sizes, at in _rectangles(box.sizes, low - box.start, high - box.start):
                found.append(
                    Box(
                        name=box.name,
                        shape=box.shape,
                        offsets=tuple(o + d for o, d in zip(box.offsets, offsets, strict=True)),
                        sizes=sizes,
                        start=box.start + at - start,
                        counted=box.counted,
                    )
                )
    return found


def shard_range(numel: int, parts: int, index: int, *, quantum: int = 1) -> tuple[int, int]:
    """Return the element range [start, stop) of shard `index`: equal shards, each a multiple of
    `quantum`.

    The last ones may reach past `numel`: that is padding, and the caller allocates parts × shard
    elements.
    """
    part = -(-numel // (parts * quantum)) * quantum
    return index * part, (index + 1) * part


def replica_ranks(
    sharding: WeightSharding,
    segment_name: str,
    *,
    grid: RankGrid,
    rank: int,
    sharded: tuple[str, ...] = (),
) -> tuple[int, ...]:
    """List the global ranks that hold the same boxes of a segment as `rank`, itself included,
    ascending.

    Args:
        sharded: data axes over which the role in question is cut (they then hold different
            elements).
    """
    segment = next(s for s in sharding.segments if s.name == segment_name)
    at = grid.coordinates(rank)
    choices = []
    for axis in sharding.axes:
        size = grid.size(axis)
        parts = math.prod(_parts(c, grid) for c in _stay(segment) if c.axis == axis)
        if axis == "pp":
            choices.append(sharding.stages or (at[axis],))
        elif axis in sharded or parts == size:
            choices.append((at[axis],))
        else:
            replicas = size // parts
            first = at[axis] // replicas * replicas
            choices.append(tuple(range(first, first + replicas)))
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
    """Return the bytes one rank keeps for a weight: weight + gradient + optimizer state (masters
    included)."""
    numel = math.prod(local_shape(sharding, grid))
    total = Fraction(0)
    for axes, size in (
        (placement.weight, weight_bytes),
        (placement.gradient, gradient_bytes),
        (placement.optimizer, optimizer_bytes),
    ):
        lanes = sharding.lane_axes if axes else ()
        total += Fraction(numel * size, math.prod(grid.size(a) for a in lanes))
    return total


# --- the gradient plan ----------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientStep:
    """Sum the gradient of some logical tensors of a weight over a group.

    Args:
        group: a name of `process_groups.GROUP_AXES`, or "tp/2": the sub-group of 2 consecutive tp
            ranks.
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
        ValueError: an axis of size > 1 neither cuts the weight nor has a declared gradient kind, or
            the sums would not reach every data lane exactly once (the silent factor of ep or etp/tp
            in experts).
    """
    names = tuple(s.name for s in sharding.segments)
    steps = []
    for axis in sharding.axes:
        if axis in sharding.lane_axes or axis == "pp" or grid.size(axis) == 1:
            continue
        whole, size = [], grid.size(axis)
        for segment in sharding.segments:
            parts = math.prod(_parts(c, grid) for c in _stay(segment) if c.axis == axis)
            if parts == 1 and not any(c.axis == axis for c in _stay(segment)):
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
        steps.append(GradientStep("tied", names))
    lanes = "expert_lanes" if sharding.expert else "lanes"
    reached = Fraction(math.prod(grid.size(a) for a in sharding.lane_axes))
    if sharding.expert:  # dispatch brings the tokens of etp·ep ranks, which are etp·ep/tp lanes
        reached *= Fraction(grid.size("etp") * grid.ep, grid.tp)
    every = math.prod(grid.size(a) for a in _DENSE_LANES)
    if reached != every:
        raise ValueError(
            f"{sharding.name}: its gradient would hold {reached} of {every} data lanes; the expert grid "
            "does not cover the dense one"
        )
    return GradientPlan(lanes, tuple(_merge(steps)), reached)


def loss_factor(grid: RankGrid, num_microbatches: int) -> float:
    """Return the factor of a microbatch's mean loss in the step's mean loss: 1 / (dp · gtp ·
    microbatches).

    The microbatch's own mean is over its tokens on all cp ranks. With it in the loss every gradient
    sum is a plain sum, for dense and expert weights alike.
    """
    return 1.0 / (grid.dp * grid.gtp * num_microbatches)


# --- arithmetic -----------------------------------------------------------------------------------


def _merge(steps: list[GradientStep]) -> list[GradientStep]:
    merged: dict[str, tuple[str, ...]] = {}
    for step in steps:
        merged[step.group] = merged.get(step.group, ()) + step.segments
    return [GradientStep(group, segments) for group, segments in merged.items()]


def _parts(cut: Cut, grid: RankGrid) -> int:
    return grid.size(cut.axis) if cut.parts is None else cut.parts


def _stay(segment: Segment) -> list[Cut]:
    return [c for c in segment.cuts if c.mode == "stay"]


def _piece(cut: Cut, grid: RankGrid, at: Coordinates) -> int:
    return at[cut.axis] * _parts(cut, grid) // grid.size(cut.axis)


def _row_pieces(segment: Segment, grid: RankGrid) -> int:
    return math.prod(_parts(c, grid) for c in _stay(segment) if c.dim == 0)


def _local_rows(segment: Segment, grid: RankGrid) -> int:
    return shard_range(
        segment.shape[0], _row_pieces(segment, grid), 0, quantum=segment.row_multiple
    )[1]


def _units(sharding: WeightSharding, grid: RankGrid) -> int:
    """Number of interleaved units in one local tensor (1 where a rank holds a fraction of a
    unit)."""
    return max(1, sharding.interleave // _row_pieces(sharding.segments[0], grid))


def _origin(
    segment: Segment, grid: RankGrid, at: Coordinates
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the first logical row of a rank's piece, and the offsets and sizes of its inner
    dimensions."""
    index = 0
    offsets, sizes = [0] * (len(segment.shape) - 1), list(segment.shape[1:])
    for cut in _stay(segment):  # ordered: an earlier cut is the outer one
        if cut.dim == 0:
            index = index * _parts(cut, grid) + _piece(cut, grid, at)
        else:
            sizes[cut.dim - 1] //= _parts(cut, grid)
            offsets[cut.dim - 1] += _piece(cut, grid, at) * sizes[cut.dim - 1]
    return index * _local_rows(segment, grid), tuple(offsets), tuple(sizes)


def _replica_index(
    sharding: WeightSharding, segment: Segment, grid: RankGrid, at: Coordinates
) -> int:
    """Return this rank's number among the model-parallel replicas of a segment (0 counts it)."""
    index = 0
    for axis in sharding.axes:
        if axis in sharding.lane_axes:
            continue
        if axis == "pp":
            owners = sharding.stages or (at[axis],)
            index = index * len(owners) + (owners.index(at[axis]) if at[axis] in owners else 0)
            continue
        replicas = grid.size(axis) // math.prod(
            _parts(c, grid) for c in _stay(segment) if c.axis == axis
        )
        index = index * replicas + at[axis] % replicas
    return index


def _rectangles(
    sizes: tuple[int, ...], low: int, high: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Split elements [low, high) of a row-major array into boxes (offsets, sizes, first
    element)."""
    if low >= high:
        return []
    if len(sizes) == 1:
        return [((low,), (high - low,), low)]
    row = math.prod(sizes[1:])
    first, last = -(-low // row), high // row
    if first > last:  # inside one row
        inner = _rectangles(sizes[1:], low - last * row, high - last * row)
        return [((last, *o), (1, *s), last * row + at) for o, s, at in inner]
    found = []
    if low < first * row:
        inner = _rectangles(sizes[1:], low - (first - 1) * row, row)
        found += [((first - 1, *o), (1, *s), (first - 1) * row + at) for o, s, at in inner]
    if first < last:
        zeros = (0,) * (len(sizes) - 1)
        found.append(((first, *zeros), (last - first, *sizes[1:]), first * row))
    if last * row < high:
        inner = _rectangles(sizes[1:], 0, high - last * row)
        found += [((last, *o), (1, *s), last * row + at) for o, s, at in inner]
    return found
