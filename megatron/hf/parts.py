# SPDX-License-Identifier: Apache-2.0
"""Which elements of a tensor of theirs are which of ours: equal boxes, in both directions.

A tensor of theirs may be a slice of one of ours (an expert), or several of ours lie in it (keys
and values of latent attention). Both are cut into parts: boxes of whole rows, one run of elements
on both sides, that together cover each tensor once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.core.boxes import Box, intersect


class Part(NamedTuple):
    """The same elements in a tensor of theirs and in one of ours.

    `sizes` are those of the box in the last dimensions of both tensors; before them it has one
    index in either, such as that of an expert.
    """

    theirs: str
    their_offsets: tuple[int, ...]
    ours: str
    our_offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def whole(self) -> Box:
        """All of this part, counted from its first element."""
        return Box((0,) * len(self.sizes), self.sizes)

    def in_theirs(self, box: Box) -> Box:
        """Return a box that counts from this part's first element as one of their tensor."""
        return _placed(box, self.their_offsets)

    def in_ours(self, box: Box) -> Box:
        """Return a box that counts from this part's first element as one of our tensor."""
        return _placed(box, self.our_offsets)

    def common(self, ours: Box) -> Box | None:
        """Return what a box of our tensor has of this part, counted from its first element."""
        whole = self.in_ours(self.whole)
        found = intersect(whole, ours)
        if found is None:
            return None
        dims = len(self.our_offsets) - len(self.sizes)
        seen = found.seen_from(self.our_offsets)
        return Box(seen.offsets[dims:], seen.sizes[dims:])


def _placed(box: Box, offsets: tuple[int, ...]) -> Box:
    dims = len(offsets) - len(box.sizes)
    inner = tuple(a + b for a, b in zip(offsets[dims:], box.offsets, strict=True))
    return Box((*offsets[:dims], *inner), ((1,) * dims + box.sizes))


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedTensor:
    """A tensor of one side and the parts that cover it, in the order of its elements.

    Args:
        name, shape: of it.
        fp32: it is no weight and is in fp32, whatever weights are converted to.
        kept: it stays in the dtype it has, whatever weights are converted to.
        parts: that cover it.
    """

    name: str
    shape: tuple[int, ...]
    fp32: bool = False
    kept: bool = False
    parts: list[Part] = field(default_factory=list)


class TensorMap:
    """All tensors of a model by both names.

    Attributes:
        theirs, ours: by name. Parts come in the order of elements in both.
        copies: tensors of theirs that repeat one of ours, and that files need not have: name and
            name of ours.
    """

    def __init__(self) -> None:
        self.theirs: dict[str, MappedTensor] = {}
        self.ours: dict[str, MappedTensor] = {}
        self.copies: dict[str, str] = {}

    def declare(
        self,
        theirs: tuple[str, tuple[int, ...]],
        ours: tuple[str, tuple[int, ...]],
        *,
        fp32: bool,
        kept: bool = False,
    ) -> None:
        """Say name and shape of a tensor on both sides; any number of times."""
        for side, (name, shape) in ((self.theirs, theirs), (self.ours, ours)):
            if name not in side:
                side[name] = MappedTensor(name=name, shape=shape, fp32=fp32, kept=kept)

    def add(self, part: Part) -> None:
        """Add the next part of two tensors that have been declared."""
        self.theirs[part.theirs].parts.append(part)
        self.ours[part.ours].parts.append(part)

    def add_copy(self, theirs: str, ours: str) -> None:
        """Add a tensor of theirs that repeats one of ours, whose parts are all there."""
        source = self.ours[ours]
        self.copies[theirs] = ours
        zeros = (0,) * len(source.shape)
        self.theirs[theirs] = MappedTensor(
            name=theirs, shape=source.shape, parts=[Part(theirs, zeros, ours, zeros, source.shape)]
        )
