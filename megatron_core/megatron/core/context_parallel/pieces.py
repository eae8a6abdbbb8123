# SPDX-License-Identifier: Apache-2.0
"""OwnPieces: the parts of documents that a rank holds, and how those of all ranks go on.

A piece is what a run and a document share. Pieces follow each other in the order of the local
tokens, row after row. A piece that begins where its document does begins from nothing; another goes
on where the piece before it ended, and that is on another rank, since a rank joins runs that meet.
So only the last piece of a run is continued, and only the first continues another.

Everything is worked out on the host, for all ranks alike: what nobody needs, nobody sends.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron.core.context_parallel.cut import Run, SequenceCut
from megatron.core.context_parallel.token_rows import TokenRows, known_documents

if TYPE_CHECKING:
    from megatron.core.context_parallel.layout import SequenceLayout


@dataclass(frozen=True)
class Link:
    """A document that goes on from one rank's piece to another's.

    Args:
        source: the rank that holds the piece before.
        export: number of that piece among those of `source` that are continued.
        target: the rank that holds the piece behind.
        entry: number of that piece among those of `target` that continue others.
    """

    source: int
    export: int
    target: int
    entry: int


Chain = tuple[Link, ...]
"""Links one behind the other: the piece behind each is the one before the next."""


@dataclass(frozen=True)
class PieceHalo:
    """The `width` tokens before each piece, of its own document: who sends which to whom.

    Args:
        send_index: int64 [n], the packed tokens to send, by receiving rank.
        send_counts, receive_counts: how many go to each rank, and come from it.
        take: int64 [N · width], which received token each row of the halo is; the number of those
            received where there is none.
        place: int64 [m], the row of the halo that each received token is.
    """

    send_index: torch.Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    take: torch.Tensor
    place: torch.Tensor


@dataclass(frozen=True)
class _Lent:
    """Tokens of one row of the batch that a run borrows: where they lie at both ends."""

    source: int
    target: int
    row: int
    run: int
    first: int
    start: int
    length: int

    @property
    def order(self) -> tuple[int, int, int]:
        """Order what one rank sends another, at both of them alike."""
        return self.row, self.run, self.first


class OwnPieces(TokenRows):
    """The pieces of a rank, made once for a microbatch; they are packed as its sequences.

    Args:
        cut: of every row.
        rank: whose pieces.
        documents: of each row, where its documents begin and end by place, [0, ..., s].
        device: where layers work.

    Attributes:
        exports: own pieces that others continue; `export_slots` of the rank that has most.
        entries: own pieces that continue others; `entry_slots` of the rank that has most.
        chains: the links of all ranks.
    """

    def __init__(
        self,
        cut: SequenceCut,
        rank: int,
        *,
        documents: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> None:
        self.cut, self.rank = cut, rank
        self._documents, self._runs = documents, cut.runs(rank)
        self._firsts: dict[tuple[int, int], int] = {}  # (row, run): its first piece
        lasts: dict[tuple[int, int], int] = {}
        bounds = [0]
        for row, borders in enumerate(documents):
            for number, run in enumerate(self._runs):
                self._firsts[row, number] = len(bounds) - 1
                for length in _lengths(run, borders):
                    bounds.append(bounds[-1] + length)
                lasts[row, number] = len(bounds) - 2
        batch = len(documents)
        columns = _spread([(run.start, run.length) for run in self._runs])
        places = columns * batch + np.arange(batch)[:, None]  # [b, tokens of a row]
        super().__init__(
            places.reshape(-1),
            bounds if len(bounds) > 1 else (0, 0),
            length=cut.local_length,
            batch=batch,
            device=device,
        )
        ends = _Ends(cut)
        self.chains: tuple[Chain, ...] = tuple(
            chain for row, borders in enumerate(documents) for chain in ends.chains(row, borders)
        )
        self.exports = tuple(lasts[key] for key in ends.exports[rank])
        self.entries = tuple(self._firsts[key] for key in ends.entries[rank])
        self.export_slots = max(map(len, ends.exports))
        self.entry_slots = max(map(len, ends.entries))

    @property
    def crossed(self) -> bool:
        """Return whether any document goes on from one rank to another; all ranks say the same."""
        return bool(self.chains)

    @property
    def chained(self) -> bool:
        """Return whether any piece both continues another and is continued."""
        return any(len(chain) > 1 for chain in self.chains)

    def halo(self, width: int) -> PieceHalo:
        """Return who lends the `width` tokens before each piece, made once.

        Raises:
            ValueError: a negative width.
        """
        return self.sequences.made(("halo", width), lambda: self._halo(width))

    def _halo(self, width: int) -> PieceHalo:
        lent = list(_lent(self.cut, width, self._documents, rank=self.rank))
        sent = sorted((p for p in lent if p.source == self.rank), key=lambda p: (p.target, p.order))
        got = sorted((p for p in lent if p.target == self.rank), key=lambda p: (p.source, p.order))
        starts = [run.start for run in self._runs]
        before = [0, *accumulate(run.length for run in self._runs)]  # packed tokens of a row
        send = []
        for piece in sent:
            run = bisect_right(starts, piece.start) - 1
            first = piece.row * before[-1] + before[run] + piece.start - starts[run]
            send.append((first, piece.length))
        places = [
            (self._firsts[piece.row, piece.run] * width + piece.first, piece.length)
            for piece in got
        ]
        place = _spread(places)
        take = np.full(self.sequences.count * width, len(place), dtype=np.int64)
        take[place] = np.arange(len(place))
        ranks = range(self.cut.size)
        moved = self.sequences.moved
        return PieceHalo(
            moved(_spread(send)),
            tuple(sum(p.length for p in sent if p.target == rank) for rank in ranks),
            tuple(sum(p.length for p in got if p.source == rank) for rank in ranks),
            moved(take),
            moved(place),
        )


def own_pieces(layout: SequenceLayout, batch: int) -> OwnPieces:
    """Return the pieces of a layout's rank; without a cut, of whole rows.

    Args:
        layout: of this rank.
        batch: b.

    Raises:
        ValueError: rows of another number than the layout's, or documents known by ids alone.
    """
    documents = known_documents(layout, batch)
    device, cut = layout.positions.device, layout.cut
    if cut is None:
        cut = SequenceCut.of(layout.positions.shape[0], 1)
    return OwnPieces(cut, layout.rank, documents=documents, device=device)


class _Ends:
    """The ends of runs over which documents go on, numbered for each rank as they are met: row
    after row, by place. All ranks meet them in this order."""

    def __init__(self, cut: SequenceCut) -> None:
        owned = [
            (run, number, rank)
            for rank in range(cut.size)
            for number, run in enumerate(cut.runs(rank))
        ]
        self._owned = sorted(owned, key=lambda one: one[0].place)
        self.exports: list[list[tuple[int, int]]] = [[] for _ in range(cut.size)]  # (row, run)
        self.entries: list[list[tuple[int, int]]] = [[] for _ in range(cut.size)]

    def chains(self, row: int, borders: Sequence[int]) -> Iterator[Chain]:
        """Yield the chains of a row, whose documents have these borders."""
        links: list[Link] = []
        for (run, number, source), (behind, other, target) in pairwise(self._owned):
            following = borders[bisect_right(borders, run.place)]  # the border behind its first
            if links and following <= run.end:
                yield tuple(links)
                links = []
            if behind.place == borders[bisect_left(borders, behind.place)]:
                continue
            exports, entries = self.exports[source], self.entries[target]
            links.append(Link(source, len(exports), target, len(entries)))
            exports.append((row, number))
            entries.append((row, other))
        if links:
            yield tuple(links)


def _lengths(run: Run, borders: Sequence[int]) -> list[int]:
    """Return the lengths of the pieces that documents make of a run."""
    inner = borders[bisect_right(borders, run.place) : bisect_left(borders, run.end)]
    return [end - first for first, end in pairwise((run.place, *inner, run.end)) if end > first]


def _lent(
    cut: SequenceCut, width: int, documents: Sequence[Sequence[int]], *, rank: int
) -> Iterator[_Lent]:
    """Yield what a rank lends and borrows, of all rows, less what is of earlier documents."""
    places = [[run.place for run in cut.runs(target)] for target in range(cut.size)]
    pieces = [piece for piece in cut.halo(width).pieces if rank in (piece.source, piece.target)]
    for row, borders in enumerate(documents):
        for piece in pieces:
            place = places[piece.target][piece.run]
            top = place - width  # the place of the halo's first row
            # Where the document of the run's first token begins; all is cut if that is the run's.
            begin = borders[bisect_right(borders, place) - 1]
            less = max(0, begin - (top + piece.row))
            if less < piece.length:
                yield _Lent(
                    source=piece.source,
                    target=piece.target,
                    row=row,
                    run=piece.run,
                    first=piece.row + less,
                    start=piece.start + less,
                    length=piece.length - less,
                )


def _spread(parts: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the numbers of parts (first, length), one after another."""
    if not parts:
        return np.zeros(0, dtype=np.int64)
    return np.concatenate([np.arange(first, first + length) for first, length in parts])
