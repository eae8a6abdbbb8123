# SPDX-License-Identifier: Apache-2.0
"""Ways to exchange tokens for heads: the library's form, and other forms to race against it.

Each scatters the tokens [s/cp, 1, columns] of this rank to sections of its heads over whole rows,
and gathers the output of the recurrence back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from megatron.core.comm import all_to_all
from megatron.core.context_parallel import SequenceLayout, SequenceSharding
from megatron.core.context_parallel.all_to_all import gather_heads, scatter_heads
from megatron.core.process_groups import Group


class Exchange(torch.autograd.Function):
    """forward an all-to-all of equal parts of rows; dgrad one of the gradient."""

    @staticmethod
    def forward(ctx, x, group: Group):
        ctx.group = group
        return all_to_all(x, group)

    @staticmethod
    def backward(ctx, grad):
        return all_to_all(grad.contiguous(), ctx.group), None


class Form:
    """One form of the exchange, for the tokens of one sequence cut.

    Args:
        cut: the cut of the row.
        group: the context-parallel group.
        sections: columns of each section of a head; the values are the third section.
        heads: n.
    """

    def __init__(
        self, cut: SequenceSharding, group: Group, *, sections: Sequence[int], heads: int
    ) -> None:
        self.cut, self.group, self.sections, self.heads = cut, group, tuple(sections), heads

    def scatter(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return each section [t, n/cp, w] from x [s/cp, 1, columns]."""
        raise RuntimeError("take one of the forms")

    def gather(self, y: torch.Tensor) -> torch.Tensor:
        """Return [s/cp, 1, n, w] from y [t, n/cp, w]."""
        raise RuntimeError("take one of the forms")

    def columns(self) -> list[int]:
        """Return which column of head after head each of this form's is: section after section."""
        width, starts = sum(self.sections), [0, *accumulate(self.sections)]
        return [
            head * width + start + column
            for start, size in zip(starts, self.sections, strict=False)
            for head in range(self.heads)
            for column in range(size)
        ]


class McoreForm(Form):
    """One all-to-all of columns that lie head after head; one gather."""

    def __init__(self, cut: SequenceSharding, group: Group, **shape) -> None:
        super().__init__(cut, group, **shape)
        self.layout = SequenceLayout.make(cut, group.rank, rows=1)

    def scatter(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return each section, a slice of the received buffer."""
        rows, positions = scatter_heads(x.unflatten(2, (self.heads, -1)), self.layout, self.group)
        packed = rows if positions is None else positions.pack(rows)
        return packed.split(self.sections, -1)

    def gather(self, y: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens."""
        placed = gather_heads(y, self.layout, self.group)
        return placed.joined().unflatten(0, (-1, 1))

    def columns(self) -> list[int]:
        """Return the columns as they are."""
        return list(range(self.heads * sum(self.sections)))


class Unfolded(Form):
    """One all-to-all, and one pass for each thing that is then out of place: heads of sections,
    ranks, sequences, rows and columns; autograd differentiates each."""

    def __init__(self, cut: SequenceSharding, group: Group, **shape) -> None:
        super().__init__(cut, group, **shape)
        self.order = torch.tensor(cut.inverse())
        self.undo = torch.empty_like(self.order)
        self.undo[self.order] = torch.arange(len(self.order))

    def scatter(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return each section."""
        cp, whole = self.group.size, [self.heads * size for size in self.sections]
        sections = [section.unflatten(-1, (cp, -1)) for section in x.split(whole, -1)]
        by_rank = torch.cat(sections, -1)  # [s/cp, 1, cp, columns/cp]
        rows = torch.cat(by_rank.unbind(2), 0)  # [s, 1, columns/cp]
        natural = Exchange.apply(rows, self.group).index_select(0, self.order)
        natural = natural.transpose(0, 1).contiguous()[0]
        split_sections = natural.split([size // cp for size in whole], -1)
        return tuple(x.unflatten(-1, (self.heads // cp, -1)) for x in split_sections)

    def gather(self, y: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens."""
        rows = Exchange.apply(y.index_select(0, self.undo), self.group)
        return torch.cat(rows.chunk(self.group.size), 1)[:, None]


class PerSequence(Form):
    """An all-to-all for each section of each sequence."""

    def __init__(self, cut: SequenceSharding, group: Group, **shape) -> None:
        super().__init__(cut, group, **shape)
        bounds, size = cut.bounds, group.size
        self.lengths = [(b - a) // size for a, b in pairwise(bounds)]
        self.orders = [
            torch.tensor(SequenceSharding.of(length * size, size, order=cut.order).inverse())
            for length in self.lengths
        ]
        self.undos = [torch.argsort(order) for order in self.orders]

    def scatter(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return each section."""
        sections = x[:, 0].split([self.heads * size for size in self.sections], -1)
        return self.moved([section.unflatten(-1, (self.heads, -1)) for section in sections])

    def moved(self, sections: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return each section [t, n/cp, w] from the sections [s/cp, n, w] of this rank's tokens."""
        cp = self.group.size
        pieces_by_section: list[list[torch.Tensor]] = [[] for _ in sections]
        for number, order in enumerate(self.orders):
            start = sum(self.lengths[:number])
            for section, sequences in zip(sections, pieces_by_section, strict=True):
                sequence = section[start : start + self.lengths[number]].unflatten(1, (cp, -1))
                rows = sequence.transpose(0, 1).flatten(0, 1).contiguous()
                sequences.append(Exchange.apply(rows, self.group).index_select(0, order))
        return tuple(torch.cat(sequences) for sequences in pieces_by_section)

    def gather(self, y: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens."""
        cp, sequences = self.group.size, []
        lengths = [cp * length for length in self.lengths]
        for sequence, undo in zip(y.split(lengths), self.undos, strict=True):
            rows = Exchange.apply(sequence.index_select(0, undo), self.group)
            sequences.append(rows.unflatten(0, (cp, -1)).transpose(0, 1).flatten(1, 2))
        return torch.cat(sequences)[:, None]


FORMS = (McoreForm, Unfolded, PerSequence)
