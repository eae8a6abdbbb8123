# SPDX-License-Identifier: Apache-2.0
"""Which elements of a Hugging Face tensor are which of this project's: equal boxes, both ways.

A Hugging Face tensor may be a slice of a tensor here (an expert), or contain several (keys and
values of latent attention). Both are divided into parts: boxes of whole rows, contiguous on both
sides, that together cover each tensor once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.core.boxes import Box, intersect


class Part(NamedTuple):
    """The same elements in a Hugging Face tensor and in one of this project.

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
        """Return a box counted from this part's first element as one of the Hugging Face tensor."""
        return _placed(box, self.their_offsets)

    def in_ours(self, box: Box) -> Box:
        """Return a box counted from this part's first element as one of this project's tensor."""
        return _placed(box, self.our_offsets)

    def common(self, ours: Box) -> Box | None:
        """Return this part's share of a box of this project's tensor, from its first element."""
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
        theirs, ours: Hugging Face's and this project's tensors, by name. Parts are in the order of
            elements in both.
        copies: Hugging Face tensors that repeat one of this project and that files may omit: name
            and this project's name.
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
        """Add a Hugging Face tensor that repeats one of this project, whose parts are all there."""
        source = self.ours[ours]
        self.copies[theirs] = ours
        zeros = (0,) * len(source.shape)
        self.theirs[theirs] = MappedTensor(
            name=theirs, shape=source.shape, parts=[Part(theirs, zeros, ours, zeros, source.shape)]
        )
