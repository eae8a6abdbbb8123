# SPDX-License-Identifier: Apache-2.0
"""SequenceCut: which tokens of a row each context-parallel rank holds, and where the others are.

A row is split as one, or each of its sequences separately. Zigzag splits a sequence into 2·cp
chunks and gives rank r chunks r and 2·cp - 1 - r, in that order: under a causal mask every rank
then has the same work (Brandon et al. 2023, arXiv 2311.09431). Contiguous gives rank r chunk r of
cp. A rank's chunks follow each other in the order of the sequences. The place of a token is its
index in its row, padding not counted; its local index is its position on its rank. All of this is
integer arithmetic: no tensors, no device.

Whether packed rows are better split as one or document by document is a matter of cost. In zigzag
order every rank computes as many (query, key) pairs of a row of one document, but not of several
documents, each on some of the ranks only: with two of 3/4 and 1/4 of a row the slowest of two ranks
has 1.6 times the mean. A document that is split separately is spread evenly over all ranks, but is
padded to a multiple of 2 · cp tokens, so ranks compute up to 2 · cp - 1 more tokens for each.

    cost of a rank = tokens, padding included · cost of a token + pairs · cost of a pair
                     + pieces · cost of a piece

A piece is a rank's tokens of one document in one run: attention has a block or two for each. An
engine that shards heads instead of tokens is balanced with either split, so it is best off without
padding.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

ZIGZAG, CONTIGUOUS = "zigzag", "contiguous"
PADDING = -1
"""The place of a token that is none."""


@dataclass(frozen=True)
class Run:
    """Tokens that follow each other both in the row and on their rank.

    Args:
        start: local index of the first.
        length: how many.
        place: of the first in the row.
        sequence: number of the separately split sequence they are of.
    """

    start: int
    length: int
    place: int
    sequence: int = 0

    @property
    def stop(self) -> int:
        """Return the local index after the last token."""
        return self.start + self.length

    @property
    def end(self) -> int:
        """Return the place after the last token."""
        return self.place + self.length


@dataclass(frozen=True)
class HaloPiece:
    """Tokens that `source` lends to a run of `target`, which may be the same rank.

    Args:
        source: the rank that holds them.
        start: their first local index there.
        target: the rank that needs them.
        run: number of the run among the target's.
        row: of the run's `width` halo rows, the first they fill.
        length: how many.
    """

    source: int
    start: int
    target: int
    run: int
    row: int
    length: int


@dataclass(frozen=True)
class Halo:
    """The `width` tokens before each run: row j of a run's halo is place `run.place - width + j`.

    Rows that no piece fills lie before the run's sequence: they hold nothing.
    """

    width: int
    pieces: tuple[HaloPiece, ...]

    def received(self, rank: int) -> tuple[HaloPiece, ...]:
        """Return what a rank is lent, by source."""
        found = [piece for piece in self.pieces if piece.target == rank]
        return tuple(sorted(found, key=lambda piece: (piece.source, piece.run, piece.row)))


@dataclass(frozen=True)
class SequenceCut:
    """How the tokens of a row lie over `size` ranks; equal splits compare and hash equal.

    Args:
        length: tokens of the row, padding not counted.
        size: ranks.
        order: "zigzag" or "contiguous".
        bounds: where the sequences that are split separately begin and end, [0, ..., length];
            (0, length) splits the row as one.
        padded: the same with padding after each sequence; equal to `bounds` without.

    Raises:
        ValueError: bounds that are none, or a sequence that does not divide.
    """

    length: int
    size: int
    order: str
    bounds: tuple[int, ...]
    padded: tuple[int, ...]

    @staticmethod
    def of(
        length: int,
        size: int,
        *,
        order: str = ZIGZAG,
        cu_seqlens: Sequence[int] | None = None,
        padded_cu_seqlens: Sequence[int] | None = None,
    ) -> SequenceCut:
        """Return the split of rows of `length` tokens over `size` ranks.

        Args:
            length: tokens of a row, padding not counted.
            size: ranks.
            order: "zigzag" balances causal attention; "contiguous" keeps each rank's tokens in one
                run.
            cu_seqlens: cumulative lengths of the sequences to split separately, on the host; None
                splits the row as one.
            padded_cu_seqlens: the same with padding after each sequence.

        Raises:
            ValueError: bounds that are none, or a sequence that does not divide.
        """
        bounds = (0, length) if cu_seqlens is None else _integers("cu_seqlens", cu_seqlens)
        padded = bounds
        if padded_cu_seqlens is not None:
            padded = _integers("padded_cu_seqlens", padded_cu_seqlens)
        return SequenceCut(length, size, order, bounds, padded)

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"a row of {self.length} tokens cannot be cut: use at least 1")
        if self.size < 1:
            raise ValueError(f"context-parallel-size {self.size}: use at least 1")
        if self.order not in (ZIGZAG, CONTIGUOUS):
            raise ValueError(f"order {self.order!r}: use {ZIGZAG!r} or {CONTIGUOUS!r}")
        _check_cumulative("cu_seqlens", self.bounds)
        if self.bounds[-1] != self.length:
            raise ValueError(
                f"cu_seqlens ends at {self.bounds[-1]}, the row has {self.length} tokens: its last "
                "entry is the row's length"
            )
        if self.padded != self.bounds:
            _check_cumulative("padded_cu_seqlens", self.padded)
            self._check_padding()
        self._check_division()

    def _check_padding(self) -> None:
        """Raise ValueError unless every sequence has room for its tokens."""
        if len(self.padded) != len(self.bounds):
            raise ValueError(
                f"padded_cu_seqlens has {len(self.padded)} entries, cu_seqlens {len(self.bounds)}: "
                "give one for each"
            )
        for number, (real, padded) in enumerate(_pairs(self.bounds, self.padded)):
            if padded[1] - padded[0] < real[1] - real[0]:
                raise ValueError(
                    f"padded_cu_seqlens gives sequence {number} {padded[1] - padded[0]} places, it "
                    f"has {real[1] - real[0]} tokens: padding only adds"
                )

    def _check_division(self) -> None:
        """Raise ValueError unless every padded sequence makes equal chunks."""
        chunks = self._num_chunks
        for number, (_, (start, end)) in enumerate(_pairs(self.bounds, self.padded)):
            length = end - start
            if length % chunks:
                named = "2 x context-parallel-size" if self._folds else "context-parallel-size"
                raise ValueError(
                    f"sequence {number} has {length} tokens, which do not divide by {chunks} "
                    f"({named}, {self.order} order): pad it to {-(-length // chunks) * chunks}"
                )

    @property
    def _folds(self) -> bool:
        """Return whether a rank holds two chunks of a sequence; of one rank nothing is split."""
        return self.order == ZIGZAG and self.size > 1

    @property
    def _num_chunks(self) -> int:
        return 2 * self.size if self._folds else self.size

    @property
    def local_length(self) -> int:
        """Return s/cp: the tokens a rank holds, padding included."""
        return self.padded[-1] // self.size

    @property
    def is_padded(self) -> bool:
        """Return whether ranks hold padding."""
        return self.padded[-1] > self.length

    def runs(self, rank: int) -> tuple[Run, ...]:
        """Return what a rank holds, in local order; padding is in no run.

        Raises:
            ValueError: no such rank.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} of {self.size} context-parallel ranks")
        chunks = (rank, 2 * self.size - 1 - rank) if self._folds else (rank,)
        found: list[Run] = []
        for number, ((bound_start, bound_end), (padded_start, padded_end)) in enumerate(
            _pairs(self.bounds, self.padded)
        ):
            chunk = (padded_end - padded_start) // self._num_chunks
            start = padded_start // self.size
            for chunk_index in chunks:
                begin = bound_start + chunk_index * chunk
                length = min(chunk, bound_end - begin)
                if length > 0:
                    _append(found, Run(start, length, begin, number))
                start += chunk
        return tuple(found)

    def places(self, rank: int) -> list[int]:
        """Return the place of each token that a rank holds, `PADDING` where there is none."""
        found = [PADDING] * self.local_length
        for run in self.runs(rank):
            found[run.start : run.stop] = range(run.place, run.end)
        return found

    def inverse(self) -> list[int]:
        """Return where each place is among the local tokens of rank 0, 1, ... one after another.

        `gathered[inverse]` brings what was gathered from all ranks into the order of the row.
        """
        index = [PADDING] * self.length
        for rank in range(self.size):
            offset = rank * self.local_length
            for run in self.runs(rank):
                index[run.place : run.end] = range(offset + run.start, offset + run.stop)
        return index

    def halo(self, width: int) -> Halo:
        """Return who lends the `width` tokens before each run, of the run's own sequence.

        Args:
            width: tokens: a convolution's width - 1, a window - 1.

        Raises:
            ValueError: a negative width.
        """
        if width < 0:
            raise ValueError(f"a halo of {width} tokens: use 0 or more")
        owned = [(run, rank) for rank in range(self.size) for run in self.runs(rank)]
        owned.sort(key=lambda pair: pair[0].place)
        firsts = [run.place for run, _ in owned]
        pieces: list[HaloPiece] = []
        for target in range(self.size):
            for number, run in enumerate(self.runs(target)):
                top = run.place - width  # the place of halo row 0, in the row or before it
                at = max(top, self.bounds[run.sequence])
                while at < run.place:
                    lender, source = owned[bisect_right(firsts, at) - 1]
                    start = lender.start + at - lender.place
                    length = lender.end - at  # no further than to this run, which is another's
                    pieces.append(HaloPiece(source, start, target, number, at - top, length))
                    at = lender.end
        return Halo(width, tuple(pieces))


def _append(runs: list[Run], run: Run) -> None:
    """Add a run, or let the last one go on where this one begins."""
    if runs and runs[-1].stop == run.start and runs[-1].end == run.place:
        previous = runs[-1]
        if previous.sequence == run.sequence:
            runs[-1] = Run(
                previous.start, previous.length + run.length, previous.place, previous.sequence
            )
            return
    runs.append(run)


def _pairs(
    bounds: Sequence[int], padded: Sequence[int]
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield each sequence's first place and the one after, without and with padding."""
    for i in range(len(bounds) - 1):
        yield (bounds[i], bounds[i + 1]), (padded[i], padded[i + 1])


def _integers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise ValueError(f"{name} {list(values)}: give integers") from error


def _check_cumulative(name: str, values: Sequence[int]) -> None:
    """Raise ValueError unless values start at 0 and never fall."""
    if len(values) < 2:
        raise ValueError(f"{name} {list(values)}: give 0 and the end of each sequence")
    if values[0] != 0:
        raise ValueError(f"{name} starts at {values[0]}: it starts at 0")
    for number, (start, end) in enumerate(pairwise(values)):
        if end < start:
            raise ValueError(
                f"{name} falls from {start} to {end} at sequence {number}: lengths are not negative"
            )


Documents = Sequence[Sequence[int]]
"""Of each row, where its documents begin and end by place, [0, ..., s]."""

ROW, DOCUMENTS, AUTO = "row", "documents", "auto"


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What takes a rank's time, in any unit, the same for all three.

    Args:
        token: all of a layer that looks at one token at a time.
        pair: attention of a query to a key, all heads.
        piece: one more block of attention.
    """

    token: float
    pair: float
    piece: float


@dataclass(frozen=True, kw_only=True)
class AttentionWork:
    """What the ranks have to do of a microbatch.

    Args:
        tokens: of each rank, padding included.
        padding: of them, of all ranks together.
        pairs: queries and keys that see each other, of each rank.
        pieces: parts of documents that it holds.
    """

    tokens: int
    padding: int
    pairs: tuple[int, ...]
    pieces: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Return the pairs of the slowest rank over their mean; 1 is even."""
        return max(self.pairs) * len(self.pairs) / max(1, sum(self.pairs))

    def cost(self, costs: Costs) -> float:
        """Return what the slowest rank costs."""
        work = zip(self.pairs, self.pieces, strict=True)
        slowest = max(costs.pair * pairs + costs.piece * pieces for pairs, pieces in work)
        return costs.token * self.tokens + slowest


def joined_documents(documents: Documents) -> tuple[int, ...]:
    """Return where documents begin and end in one row of all rows, one after another."""
    bounds, row_start = {0: None}, 0  # ordered, empty documents left out
    for borders in documents:
        bounds |= dict.fromkeys(row_start + end for end in borders)
        row_start += borders[-1]
    return tuple(bounds)


def cut_documents(
    documents: Documents, size: int, *, multiple: int = 1, at_least: int = 0
) -> SequenceCut:
    """Return the split of one row that holds all rows, one after another, each document apart.

    Args:
        documents: of each row.
        size: ranks.
        multiple: what the tokens of a rank divide by, for sequence parallelism.
        at_least: tokens of the row, padding included.
    """
    bounds, unit = joined_documents(documents), 2 * size
    lengths = (-(-(end - start) // unit) * unit for start, end in pairwise(bounds))
    padded = [0]
    for length in lengths:
        padded.append(padded[-1] + length)
    step = math.lcm(unit, size * multiple)
    total = -(-max(padded[-1], at_least) // step) * step
    if total > padded[-1]:  # padding of no document
        bounds, padded = (*bounds, bounds[-1]), [*padded, total]
    return SequenceCut.of(bounds[-1], size, cu_seqlens=bounds, padded_cu_seqlens=padded)


def work_of(
    cut: SequenceCut,
    documents: Documents,
    *,
    window: int | None = None,
    by_heads: bool = False,
) -> AttentionWork:
    """Return what every rank has to do.

    Args:
        cut: of every row.
        documents: of each row.
        window: a query at place q sees only keys k with q - k < window.
        by_heads: attention gives a rank all pairs of some heads, as `a2a` does, which is even
            however rows are split: a pair counts as its share of the heads.
    """
    runs = [cut.runs(rank) for rank in range(cut.size)]
    pairs, pieces = [0] * cut.size, [0] * cut.size
    for borders in documents:
        seen = _seen_before(borders, window)
        for rank, rank_runs in enumerate(runs):
            for run in rank_runs:
                pairs[rank] += int(seen[run.end] - seen[run.place])
                inner = bisect_left(borders, run.end) - bisect_right(borders, run.place)
                pieces[rank] += inner + 1
    rows = len(documents)
    if by_heads:
        pairs = [-(-sum(pairs) // cut.size)] * cut.size
        pieces = [sum(len(borders) - 1 for borders in documents)] * cut.size
    return AttentionWork(
        tokens=rows * cut.local_length,
        padding=rows * (cut.padded[-1] - cut.length),
        pairs=tuple(pairs),
        pieces=tuple(pieces),
    )


def _seen_before(borders: Sequence[int], window: int | None) -> np.ndarray:
    """Return how many pairs the queries before each place have, int64 [s + 1]."""
    ends = np.asarray(borders, dtype=np.int64)
    keys = np.arange(1, ends[-1] + 1) - np.repeat(ends[:-1], np.diff(ends))  # [s]
    if window is not None:
        keys = np.minimum(keys, window)
    return np.concatenate([np.zeros(1, dtype=np.int64), keys.cumsum()])
