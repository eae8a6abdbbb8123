# SPDX-License-Identifier: Apache-2.0
"""Which boxes of logical tensors lie where in a rank's local tensor, and in any range of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron.core.rank_grid import RankGrid
from megatron.core.weight_sharding.description import Cut, Placement, Segment, WeightSharding

Coordinates = Mapping[str, int]


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


def check(sharding: WeightSharding, grid: RankGrid) -> list[str]:
    """List what is wrong with a description on this grid; empty if nothing is."""
    found = []
    for segment in sharding.segments:
        found += _cut_problems(sharding, segment, grid)
        first = sharding.segments[0]
        if segment.shape[1:] != first.shape[1:] or _inner_cuts(segment) != _inner_cuts(first):
            found.append(f"{segment.name}: shape {segment.shape} does not stack in {sharding.name}")
    for axis, kind in sharding.gradient.items():
        if kind not in ("identical", "partial"):
            found.append(f"{sharding.name}: gradient on {axis} is {kind!r}")
    if sharding.interleave > 1 and not found:
        for segment in sharding.segments:
            rows, pieces = _local_rows(segment, grid), _row_pieces(segment, grid)
            split = sharding.interleave % pieces and pieces % sharding.interleave
            uneven = rows * pieces != segment.shape[0] or rows % _units(sharding, grid)
            if split or uneven:
                found.append(
                    f"{segment.name}: {segment.shape[0]} rows in {pieces} pieces do not interleave "
                    f"by {sharding.interleave} units evenly"
                )
    return found


def _cut_problems(sharding: WeightSharding, segment: Segment, grid: RankGrid) -> list[str]:
    found = []
    for cut in segment.cuts:
        if cut.axis not in sharding.axes:
            found.append(f"{segment.name}: axis {cut.axis!r} is not one of {sharding.axes}")
            continue
        size, parts = grid.size(cut.axis), cut.pieces(grid)
        if not 0 <= cut.dim < len(segment.shape):
            found.append(f"{segment.name}: no dimension {cut.dim} in shape {segment.shape}")
        elif parts < 1 or size % parts:
            found.append(
                f"{segment.name}: {parts} pieces do not divide the {size} ranks of {cut.axis}"
            )
        elif cut.mode == "stay" and cut.dim and segment.shape[cut.dim] % parts:
            found.append(
                f"{segment.name}: dimension {cut.dim} of {segment.shape[cut.dim]} does not "
                f"divide by {cut.axis}={parts}"
            )
    axes = [cut.axis for cut in segment.stay_cuts]
    for axis in sorted(set(axes)):
        if axes.count(axis) > 1:
            found.append(f"{segment.name}: cut {axes.count(axis)} times over {axis}")
    return found


def _inner_cuts(segment: Segment) -> list[Cut]:
    return [cut for cut in segment.stay_cuts if cut.dim]


def local_shape(sharding: WeightSharding, grid: RankGrid) -> tuple[int, ...]:
    """Return the shape of the local tensor, the same on every rank (padding included)."""
    rows = sum(_local_rows(s, grid) for s in sharding.segments)
    first = sharding.segments[0]
    inner = list(first.shape[1:])
    for cut in first.stay_cuts:
        if cut.dim:
            inner[cut.dim - 1] //= cut.pieces(grid)
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
    """Return the element range [start, stop) of shard `index` of `parts` equal ones.

    Each is a multiple of `quantum`. The last ones may reach past `numel`: that is padding, and the
    caller allocates parts × shard elements.
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
    """List the global ranks that hold the same boxes of a segment as `rank`, itself included.

    Args:
        sharded: axes of the placement over which the role in question is cut (ranks along them hold
            different elements).

    Returns:
        Global ranks, ascending.
    """
    segment = next(s for s in sharding.segments if s.name == segment_name)
    at = grid.coordinates(rank)
    cut_lanes = sharding.lanes_of(sharded)
    choices = []
    for axis in sharding.axes:
        size = grid.size(axis)
        parts = segment.pieces(axis, grid)
        if axis == "pp":
            choices.append(tuple(sorted(set(sharding.stages))) or (at[axis],))
        elif axis in cut_lanes or parts == size:
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
        total += Fraction(numel * size, math.prod(grid.size(a) for a in sharding.lanes_of(axes)))
    return total


def _piece(cut: Cut, grid: RankGrid, at: Coordinates) -> int:
    return at[cut.axis] * cut.pieces(grid) // grid.size(cut.axis)


def _row_pieces(segment: Segment, grid: RankGrid) -> int:
    return math.prod(c.pieces(grid) for c in segment.stay_cuts if c.dim == 0)


def _local_rows(segment: Segment, grid: RankGrid) -> int:
    return shard_range(
        segment.shape[0], _row_pieces(segment, grid), 0, quantum=segment.row_multiple
    )[1]


def _units(sharding: WeightSharding, grid: RankGrid) -> int:
    """Return the number of units in one local tensor (1 where a rank holds part of a unit)."""
    return max(1, sharding.interleave // _row_pieces(sharding.segments[0], grid))


def _origin(
    segment: Segment, grid: RankGrid, at: Coordinates
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the first logical row of a rank's piece, and its inner offsets and sizes."""
    index = 0
    offsets, sizes = [0] * (len(segment.shape) - 1), list(segment.shape[1:])
    for cut in segment.stay_cuts:  # ordered: an earlier cut is the outer one
        if cut.dim == 0:
            index = index * cut.pieces(grid) + _piece(cut, grid, at)
        else:
            sizes[cut.dim - 1] //= cut.pieces(grid)
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
        replicas = grid.size(axis) // segment.pieces(axis, grid)
        index = index * replicas + at[axis] % replicas
    return index


def _rectangles(
    sizes: tuple[int, ...], low: int, high: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Split elements [low, high) of a row-major array into (offsets, sizes, first element)."""
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
