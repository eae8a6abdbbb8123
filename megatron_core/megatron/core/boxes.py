# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of boxes: axis-aligned blocks of elements inside a logical tensor.

`Box` is the one description of such a block, for sharding, gathers, optimizer state, checkpoints
and Hugging Face files. `TensorChunk` is a box of a logical tensor with the elements of it that this
rank holds.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


#: Bytes of a tensor that are read, converted or written at a time.
ROW_BOX_BYTES = 4 << 20


class Box(NamedTuple):
    """The elements `offsets[i] <= index[i] < offsets[i] + sizes[i]` of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the index that picks this box out of the tensor it lies in."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))

    def __str__(self) -> str:
        spans = (f"{o}:{o + n}" for o, n in zip(self.offsets, self.sizes, strict=True))
        return f"[{', '.join(spans)}]"

    def seen_from(self, origin: tuple[int, ...]) -> Box:
        """Return the same elements in coordinates that count from `origin`."""
        return Box(tuple(o - a for o, a in zip(self.offsets, origin, strict=True)), self.sizes)

    def within(self, origin: tuple[int, ...]) -> Box:
        """Return the same elements where these coordinates count from `origin`."""
        return Box(tuple(o + a for o, a in zip(self.offsets, origin, strict=True)), self.sizes)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the elements that lie in both boxes, or None if there are none."""
    offsets, sizes = [], []
    for oa, na, ob, nb in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        begin = oa if oa > ob else ob
        end = min(oa + na, ob + nb)
        if end <= begin:
            return None
        offsets.append(begin)
        sizes.append(end - begin)
    return Box(tuple(offsets), tuple(sizes))


def flat_index(sizes: Sequence[int], index: Sequence[int]) -> int:
    """Return the row-major position of `index` in a tensor of shape `sizes`."""
    position = 0
    for size, i in zip(sizes, index, strict=True):
        position = position * size + i
    return position


def boxes_of_range(sizes: tuple[int, ...], begin: int, end: int) -> list[Box]:
    """Cut the row-major element range [begin, end) of a tensor of shape `sizes` into boxes.

    The boxes come in memory order, each is contiguous in it, and for n dimensions there are at
    most 2n - 1: the tail of a first row, whole rows, the head of a last row, recursively.
    """
    if begin >= end:
        return []
    if begin == 0 and end == math.prod(sizes):
        return [Box((0,) * len(sizes), tuple(sizes))]
    row_numel = math.prod(sizes[1:])
    first_row, last_row = begin // row_numel, end // row_numel
    if first_row == last_row:
        row_begin = first_row * row_numel
        return _in_row(first_row, sizes, begin - row_begin, end - row_begin)
    boxes = []
    if begin % row_numel:
        boxes += _in_row(first_row, sizes, begin % row_numel, row_numel)
        first_row += 1
    if last_row > first_row:
        zeros = (0,) * (len(sizes) - 1)
        boxes.append(Box((first_row, *zeros), (last_row - first_row, *sizes[1:])))
    return boxes + _in_row(last_row, sizes, 0, end % row_numel)


def _in_row(row: int, sizes: tuple[int, ...], begin: int, end: int) -> list[Box]:
    inner_boxes = boxes_of_range(sizes[1:], begin, end)
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in inner_boxes]


def row_boxes(
    shape: tuple[int, ...], itemsize: int, *, box_bytes: int = ROW_BOX_BYTES
) -> Iterator[Box]:
    """Cut a tensor into boxes of whole rows that take at most `box_bytes` each, or of a single row.

    Each box is contiguous in the row-major tensor, and the boxes come in memory order. If one index
    of the first dimension takes more than `box_bytes`, that slice is cut along the next dimension.
    """
    if len(shape) == 0:
        yield Box((), ())
        return
    slice_bytes = itemsize * math.prod(shape[1:])
    if len(shape) > 1 and slice_bytes > box_bytes:
        for index in range(shape[0]):
            for box in row_boxes(shape[1:], itemsize, box_bytes=box_bytes):
                yield Box((index, *box.offsets), (1, *box.sizes))
        return
    rows = max(1, box_bytes // max(1, slice_bytes))
    inner_offsets = (0,) * (len(shape) - 1)
    for first_row in range(0, shape[0], rows):
        yield Box((first_row, *inner_offsets), (min(rows, shape[0] - first_row), *shape[1:]))


class BoxIndex:
    """An index of the boxes of one tensor, searched by overlap with another box.

    The boxes are sorted along the dimension with the most distinct offsets, so that a query in a
    tensor of many boxes compares only neighbouring boxes.

    Args:
        boxes: all with the same number of dimensions.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        dims = range(len(boxes[0].sizes) if boxes else 0)
        self._dim = max(dims, key=lambda d: len({b.offsets[d] for b in boxes}), default=None)
        dim = self._dim
        if dim is None:  # no boxes, or scalars: nothing to sort by
            return
        self._order = sorted(range(len(boxes)), key=lambda i: boxes[i].offsets[dim])
        ordered = [boxes[i] for i in self._order]
        self._begins = [box.offsets[dim] for box in ordered]
        # Running maximum of the ends: ascending even if a box contains later ones.
        self._max_ends = list(accumulate((b.offsets[dim] + b.sizes[dim] for b in ordered), max))

    def overlaps(self, box: Box) -> list[tuple[int, Box]]:
        """Return the index of every box that shares elements with `box`, and their intersection."""
        candidates: Sequence[int] = range(len(self._boxes))
        if self._dim is not None:
            begin = box.offsets[self._dim]
            first_index = bisect_right(self._max_ends, begin)
            end_index = bisect_left(self._begins, begin + box.sizes[self._dim])
            candidates = self._order[first_index:end_index]
        intersections = ((i, intersect(self._boxes[i], box)) for i in candidates)
        return [(i, common) for i, common in intersections if common is not None]


def tiles(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Return whether every element of a tensor lies in exactly one of the boxes.

    With the step function s_c(x) = [x >= c], a box is the function prod_d (s_o - s_(o+n))(x_d).
    Products of step functions are linearly independent, so the boxes tile the tensor iff the sum
    of their functions equals the function of the whole tensor. Both are evaluated with random
    numbers modulo a prime in place of the step functions (Schwartz-Zippel lemma): boxes that tile
    always pass, others pass with a probability below dims / 2^60. The time is linear in the number
    of boxes for any layout; comparing pairs is quadratic for boxes that no plane separates.

    Args:
        boxes: with as many dimensions as the tensor.
        shape: of the tensor.
    """
    if 0 in shape:
        return True  # no element
    split_dims = [
        d
        for d, size in enumerate(shape)
        if any(box.offsets[d] or box.sizes[d] != size for box in boxes)
    ]
    steps = [(d, _random_function()) for d in split_dims]
    total = 0
    for offsets, sizes in boxes:
        product = 1
        for d, step in steps:
            product = product * (step(offsets[d]) - step(offsets[d] + sizes[d])) % _PRIME
        total += product
    whole = 1
    for d, step in steps:
        whole = whole * (step(0) - step(shape[d])) % _PRIME
    return total % _PRIME == whole


#: A Mersenne prime: sums of products modulo it fit two machine words.
_PRIME = (1 << 61) - 1


def _random_function() -> Callable[[int], int]:
    """Return a function from integers below 2^128 to random integers."""
    key = secrets.token_bytes(16)

    @lru_cache(maxsize=4096)  # neighbours share coordinates
    def value(coordinate: int) -> int:
        encoded = coordinate.to_bytes(16, "little")
        return int.from_bytes(hashlib.blake2b(encoded, digest_size=8, key=key).digest(), "little")

    return value


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return the indices of two boxes that share an element, or None if no two do.

    This is for error messages; `tiles` detects an overlap in linear time.

    A set of boxes is split along any dimension in which a plane separates them. For the layouts of
    parallel runs this ends in single boxes; only inseparable sets are compared pair by pair.
    """
    if len(boxes) < 2:
        return None
    groups = [[i for i, box in enumerate(boxes) if box.numel]]
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        subgroups = _split_group(boxes, group)
        if len(subgroups) > 1:
            groups += subgroups
            continue
        for position, i in enumerate(group):
            for j in group[position + 1 :]:
                if intersect(boxes[i], boxes[j]) is not None:
                    return (i, j)
    return None


def _split_group(boxes: Sequence[Box], group: list[int]) -> list[list[int]]:
    """Split `group` along the first dimension in which a plane separates its boxes."""
    for dim in range(len(boxes[group[0]].sizes)):
        groups = list(_overlapping_runs(boxes, group, dim))
        if len(groups) > 1:
            return groups
    return [group]


def _overlapping_runs(boxes: Sequence[Box], group: list[int], dim: int) -> Iterator[list[int]]:
    """Yield the groups of boxes whose intervals along `dim` are connected by overlaps."""
    run: list[int] = []
    reach = -1
    for i in sorted(group, key=lambda i: boxes[i].offsets[dim]):
        begin = boxes[i].offsets[dim]
        if run and begin >= reach:
            yield run
            run = []
        run.append(i)
        reach = max(reach, begin + boxes[i].sizes[dim])
    yield run


#: Separates the logical name from the offsets in a file's keys.
OFFSET_MARK = "@"


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorChunk:
    """A box of a logical tensor, and the local tensor with its elements.

    Name, shape and offsets refer to the logical, unpadded, unfused tensor, so that a checkpoint is
    independent of the grid. Padding belongs to no chunk.

    Args:
        name: logical name, without "@" and control characters.
        shape: shape of the whole logical tensor.
        offsets: where the box starts in it.
        tensor: the box itself, [*sizes]: any strides, dtype and device. Loading writes into it.
        replica_ranks: ascending global ranks that hold an identical copy, this one included.
        byte_stream: for saving a box that is too large for memory. Called once, it yields the box's
            bytes in row-major order; each buffer is valid until the next. `tensor` is then on the
            meta device and only has shape and dtype.
        is_late: whether updates by other ranks are pending, so that the chunk cannot be saved.
            None: never.
        if_missing: advice for a checkpoint without the tensor; added to the error.

    Attribute `box` is the box in logical coordinates.

    Raises:
        ValueError: the box does not lie inside `shape`, or a name or a rank is impossible.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor
    replica_ranks: tuple[int, ...]
    byte_stream: Callable[[], Iterator[memoryview]] | None = None
    is_late: Callable[[], bool] | None = None
    if_missing: str = ""
    box: Box = field(init=False)

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable() or OFFSET_MARK in self.name:
            raise ValueError(
                f"tensor name {self.name!r} must be printable, not empty and without "
                f"{OFFSET_MARK!r}: rename the parameter"
            )
        sizes = tuple(self.tensor.shape)
        inside = len(self.shape) == len(self.offsets) == len(sizes) and all(
            offset >= 0 and offset + size <= whole
            for offset, size, whole in zip(self.offsets, sizes, self.shape, strict=True)
        )
        if not inside:
            raise ValueError(
                f"chunk of {self.name}: a box of sizes {list(sizes)} at {list(self.offsets)} does "
                f"not lie inside the logical shape {list(self.shape)}"
            )
        ranks = self.replica_ranks
        if not ranks or ranks[0] < 0 or list(ranks) != sorted(set(ranks)):
            raise ValueError(
                f"chunk of {self.name}: replica_ranks {list(ranks)} must be ascending, distinct "
                "global ranks, this rank included"
            )
        object.__setattr__(self, "box", Box(tuple(self.offsets), sizes))


def chunk_key(name: str, shape: tuple[int, ...], box: Box) -> str:
    """Return the key of a chunk in its safetensors file: `name@offsets`, or the plain name.

    A tensor that is stored as one chunk has its plain name, which any safetensors reader finds.
    """
    if box.sizes == shape:
        return name
    return name + OFFSET_MARK + ",".join(map(str, box.offsets))
