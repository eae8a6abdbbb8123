# SPDX-License-Identifier: Apache-2.0
"""SequenceSharding: the tokens of a row on each context-parallel rank, and the halos between ranks.

A row is split as one sequence, or each of its sequences separately. Zigzag splits a sequence into
2·cp chunks and gives rank r chunks r and 2·cp - 1 - r, in that order: under a causal mask every
rank then has the same work (Brandon et al. 2023, arXiv 2311.09431). Contiguous gives rank r chunk r
of cp. The chunks of a rank are in the order of the sequences. The row index of a token is its index
in its row, without padding; its local index is its index on its rank. All of this is integer
arithmetic: no tensors, no device.

The choice between splitting packed rows as one or document by document depends on costs. In zigzag
order all ranks compute the same number of (query, key) pairs if the row is one document, but not if
it has several: with documents of 3/4 and 1/4 of a row, the slowest of two ranks has 1.6 times the
mean. A document that is split separately is balanced over all ranks, but is padded to a multiple of
2 · cp tokens, so ranks compute up to 2 · cp - 1 more tokens for each document.

    cost of a rank = tokens with padding · cost of a token + pairs · cost of a pair
                     + local sub-sequences · cost of a sub-sequence

A local sub-sequence is the intersection of a document with a token range of a rank, for which
attention has a block or two. An engine that shards heads instead of tokens is balanced with either
split, and cheapest without padding.
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
"""Row index of a padding token."""


@dataclass(frozen=True)
class TokenRange:
    """Tokens that are contiguous both in the row and on their rank.

    Args:
        start: local index of the first token.
        length: number of tokens.
        row_start: row index of the first token.
        sequence: number of their sequence among the separately split sequences.
    """

    start: int
    length: int
    row_start: int
    sequence: int = 0

    @property
    def stop(self) -> int:
        """Return the local index after the last token."""
        return self.start + self.length

    @property
    def row_end(self) -> int:
        """Return the row index after the last token."""
        return self.row_start + self.length


@dataclass(frozen=True)
class HaloTransfer:
    """Tokens that rank `source` sends for the halo of a token range of `target`; both may be the
    same rank.

    Args:
        source: the rank that holds the tokens.
        start: local index of the first token on `source`.
        target: the rank that needs the tokens.
        run: number of the token range on `target`.
        row: first of the range's `width` halo rows that the tokens fill.
        length: number of tokens.
    """

    source: int
    start: int
    target: int
    run: int
    row: int
    length: int


@dataclass(frozen=True)
class Halo:
    """The `width` tokens before each token range: halo row j has row index `row_start - width + j`.

    Rows that no transfer fills are before the sequence of the range, and stay empty.
    """

    width: int
    transfers: tuple[HaloTransfer, ...]

    def received(self, rank: int) -> tuple[HaloTransfer, ...]:
        """Return the transfers to a rank, sorted by source."""
        received = [transfer for transfer in self.transfers if transfer.target == rank]
        return tuple(sorted(received, key=lambda x: (x.source, x.run, x.row)))


@dataclass(frozen=True)
class SequenceSharding:
    """The distribution of the tokens of a row over `size` ranks; compares and hashes by value.

    Args:
        length: tokens of the row, without padding.
        size: number of context-parallel ranks.
        order: "zigzag" or "contiguous".
        bounds: cumulative lengths of the separately split sequences, [0, ..., length]; (0, length)
            splits the row as one.
        padded: cumulative lengths with padding after each sequence; equal to `bounds` without
            padding.

    Raises:
        ValueError: invalid cumulative lengths, or a sequence that does not divide over the ranks.
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
    ) -> SequenceSharding:
        """Return the split of rows of `length` tokens over `size` ranks.

        Args:
            length: tokens of a row, without padding.
            size: number of context-parallel ranks.
            order: "zigzag" balances causal attention; "contiguous" keeps each rank's tokens
                contiguous in the row.
            cu_seqlens: cumulative lengths of the sequences to split separately, on the host; None
                splits the row as one.
            padded_cu_seqlens: cumulative lengths with padding after each sequence.

        Raises:
            ValueError: invalid cumulative lengths, or a sequence that does not divide over the
                ranks.
        """
        bounds = (0, length) if cu_seqlens is None else _integers("cu_seqlens", cu_seqlens)
        padded = bounds
        if padded_cu_seqlens is not None:
            padded = _integers("padded_cu_seqlens", padded_cu_seqlens)
        return SequenceSharding(length, size, order, bounds, padded)

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"a row of {self.length} tokens cannot be sharded: use at least 1")
        if self.size < 1:
            raise ValueError(f"context-parallel-size {self.size}: use at least 1")
        if self.order not in (ZIGZAG, CONTIGUOUS):
            raise ValueError(f"order {self.order!r}: use {ZIGZAG!r} or {CONTIGUOUS!r}")
        _check_cumulative("cu_seqlens", self.bounds)
        if self.bounds[-1] != self.length:
            raise ValueError(
                f"cu_seqlens ends at {self.bounds[-1]}, but the row has {self.length} tokens: "
                "the last entry is the row's length"
            )
        if self.padded != self.bounds:
            _check_cumulative("padded_cu_seqlens", self.padded)
            self._check_padding()
        self._check_division()

    def _check_padding(self) -> None:
        """Raise ValueError if a sequence is longer than its padded length."""
        if len(self.padded) != len(self.bounds):
            raise ValueError(
                f"padded_cu_seqlens has {len(self.padded)} entries, cu_seqlens "
                f"{len(self.bounds)}: both need one entry per sequence"
            )
        for number, (real, padded) in enumerate(_sequence_ranges(self.bounds, self.padded)):
            if padded[1] - padded[0] < real[1] - real[0]:
                raise ValueError(
                    f"padded_cu_seqlens gives sequence {number} {padded[1] - padded[0]} "
                    f"positions, but it has {real[1] - real[0]} tokens: padding can only add"
                )

    def _check_division(self) -> None:
        """Raise ValueError unless every padded sequence divides into equal chunks."""
        chunks = self._num_chunks
        for number, (_, (start, end)) in enumerate(_sequence_ranges(self.bounds, self.padded)):
            length = end - start
            if length % chunks:
                divisor = (
                    "2 x context-parallel-size" if self._is_zigzag else "context-parallel-size"
                )
                raise ValueError(
                    f"sequence {number} has {length} tokens, which do not divide by {chunks} "
                    f"({divisor}, {self.order} order): pad it to {-(-length // chunks) * chunks}"
                )

    @property
    def _is_zigzag(self) -> bool:
        """Return whether a rank holds two chunks of each sequence, as in zigzag order."""
        return self.order == ZIGZAG and self.size > 1

    @property
    def _num_chunks(self) -> int:
        return 2 * self.size if self._is_zigzag else self.size

    @property
    def local_length(self) -> int:
        """Return s/cp: the tokens of a rank, with padding."""
        return self.padded[-1] // self.size

    @property
    def is_padded(self) -> bool:
        """Return whether ranks hold padding."""
        return self.padded[-1] > self.length

    def runs(self, rank: int) -> tuple[TokenRange, ...]:
        """Return the token ranges of a rank in local order, without padding.

        Raises:
            ValueError: a rank that does not exist.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} of {self.size} context-parallel ranks")
        chunks = (rank, 2 * self.size - 1 - rank) if self._is_zigzag else (rank,)
        ranges: list[TokenRange] = []
        for number, ((bound_start, bound_end), (padded_start, padded_end)) in enumerate(
            _sequence_ranges(self.bounds, self.padded)
        ):
            chunk_length = (padded_end - padded_start) // self._num_chunks
            start = padded_start // self.size
            for chunk_index in chunks:
                begin = bound_start + chunk_index * chunk_length
                length = min(chunk_length, bound_end - begin)
                if length > 0:
                    _append(ranges, TokenRange(start, length, begin, number))
                start += chunk_length
        return tuple(ranges)

    def row_indices(self, rank: int) -> np.ndarray:
        """Return the row index of each token of a rank, int64 [s/cp], `PADDING` for padding.

        Raises:
            ValueError: a rank that does not exist.
        """
        index, row_index = _indices_and_row_indices(
            [(run.start, run.length, run.row_start) for run in self.runs(rank)]
        )
        row_indices = np.full(self.local_length, PADDING, dtype=np.int64)
        row_indices[index] = row_index
        return row_indices

    def inverse(self) -> np.ndarray:
        """Return the index of each token of the row among the concatenated tokens of all ranks,
        int64 [s].

        `gathered[inverse]` brings an all-gather's output into the order of the row.
        """
        runs = [
            (run.start + rank * self.local_length, run.length, run.row_start)
            for rank in range(self.size)
            for run in self.runs(rank)
        ]
        index, row_index = _indices_and_row_indices(runs)
        inverse = np.empty_like(index)
        inverse[row_index] = index
        return inverse

    def halo(self, width: int) -> Halo:
        """Return the transfers of the `width` tokens before each token range, in the same sequence.

        Args:
            width: number of tokens, for instance a convolution's width - 1.

        Raises:
            ValueError: a negative width.
        """
        if width < 0:
            raise ValueError(f"a halo of {width} tokens: use 0 or more")
        owned = [(run, rank) for rank in range(self.size) for run in self.runs(rank)]
        owned.sort(key=lambda pair: pair[0].row_start)
        row_starts = [run.row_start for run, _ in owned]
        transfers: list[HaloTransfer] = []
        for target in range(self.size):
            for number, run in enumerate(self.runs(target)):
                top = run.row_start - width  # row index of halo row 0; may be before the row
                index = max(top, self.bounds[run.sequence])
                while index < run.row_start:
                    holder, source = owned[bisect_right(row_starts, index) - 1]
                    start = holder.start + index - holder.row_start
                    # Ends at or before `run`, because token ranges do not overlap.
                    length = holder.row_end - index
                    transfers.append(
                        HaloTransfer(source, start, target, number, index - top, length)
                    )
                    index = holder.row_end
        return Halo(width, tuple(transfers))


def _indices_and_row_indices(runs: Sequence[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return (index, row index) of each token of runs (first index, length, first row index)."""
    start, length, row_start = np.array(runs, dtype=np.int64).reshape(-1, 3).T
    before = np.repeat(length.cumsum() - length, length)  # tokens of earlier runs
    within = np.arange(before.size) - before
    return np.repeat(start, length) + within, np.repeat(row_start, length) + within


def _append(runs: list[TokenRange], run: TokenRange) -> None:
    """Append a token range, or extend the last range if they are contiguous."""
    if runs and runs[-1].stop == run.start and runs[-1].row_end == run.row_start:
        previous = runs[-1]
        if previous.sequence == run.sequence:
            runs[-1] = TokenRange(
                previous.start, previous.length + run.length, previous.row_start, previous.sequence
            )
            return
    runs.append(run)


def _sequence_ranges(
    bounds: Sequence[int], padded: Sequence[int]
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the (start, end) of each sequence without padding and with padding."""
    for i in range(len(bounds) - 1):
        yield (bounds[i], bounds[i + 1]), (padded[i], padded[i + 1])


def _integers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise ValueError(f"{name} {list(values)}: give integers") from error


def _check_cumulative(name: str, values: Sequence[int]) -> None:
    """Raise ValueError unless values start at 0 and do not decrease."""
    if len(values) < 2:
        raise ValueError(f"{name} {list(values)}: give 0 and the end of each sequence")
    if values[0] != 0:
        raise ValueError(f"{name} starts at {values[0]}: it starts at 0")
    for number, (start, end) in enumerate(pairwise(values)):
        if end < start:
            raise ValueError(
                f"{name} decreases from {start} to {end} at sequence {number}: lengths must "
                "not be negative"
            )


Documents = Sequence[Sequence[int]]
"""Cumulative lengths of the documents of each row, [0, ..., s]."""

ROW, DOCUMENTS, AUTO = "row", "documents", "auto"


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a rank's work, in any common unit of time.

    Args:
        token: cost of a token in the parts of a layer other than attention.
        pair: cost of the attention of a query to a key, over all heads.
        sub_sequence: cost of one more block of attention.
    """

    token: float
    pair: float
    sub_sequence: float


@dataclass(frozen=True, kw_only=True)
class AttentionWork:
    """The work of all ranks on a microbatch.

    Args:
        tokens: tokens of a rank, with padding.
        padding: padding tokens of all ranks together.
        pairs: visible (query, key) pairs of each rank.
        sub_sequences: number of local sub-sequences of each rank.
    """

    tokens: int
    padding: int
    pairs: tuple[int, ...]
    sub_sequences: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Return the pairs of the slowest rank relative to the mean; 1 is balanced."""
        return max(self.pairs) * len(self.pairs) / max(1, sum(self.pairs))

    def cost(self, costs: Costs) -> float:
        """Return the cost of the slowest rank."""
        work = zip(self.pairs, self.sub_sequences, strict=True)
        slowest = max(
            costs.pair * pairs + costs.sub_sequence * sub_sequences for pairs, sub_sequences in work
        )
        return costs.token * self.tokens + slowest


def documents_of(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Return the cumulative lengths of the documents of each row, [0, ..., s].

    Args:
        ids: int [b, s], not decreasing along a row.

    Raises:
        ValueError: ids that decrease.
    """
    documents = []
    for row, numbers in enumerate(ids):
        starts = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        document_ids = numbers[np.concatenate(([0], starts))].tolist()  # the id of each document
        for column, (before, after) in zip(starts.tolist(), pairwise(document_ids), strict=True):
            if after < before:
                raise ValueError(
                    f"document_ids of row {row} decrease from {before} to {after} at column "
                    f"{column}: number documents in ascending order along the row"
                )
        documents.append((0, *starts.tolist(), len(numbers)))
    return tuple(documents)


def ids_of(bounds: Sequence[int]) -> np.ndarray:
    """Return the number of each token's document, int32 [s].

    Args:
        bounds: cumulative lengths of the documents, [0, ..., s].
    """
    return np.repeat(np.arange(len(bounds) - 1, dtype=np.int32), np.diff(bounds))


def joined_documents(documents: Documents) -> tuple[int, ...]:
    """Return the cumulative lengths of all documents in the concatenation of all rows."""
    bounds, row_start = {0: None}, 0  # ordered, empty documents left out
    for row_bounds in documents:
        bounds |= dict.fromkeys(row_start + end for end in row_bounds)
        row_start += row_bounds[-1]
    return tuple(bounds)


def shard_documents(
    documents: Documents, size: int, *, multiple: int = 1, at_least: int = 0
) -> SequenceSharding:
    """Return the split of the concatenation of all rows, with every document split separately.

    Args:
        documents: cumulative lengths of the documents of each row.
        size: number of context-parallel ranks.
        multiple: divisor of a rank's tokens, for sequence parallelism.
        at_least: minimum tokens of the row, with padding.
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
    return SequenceSharding.of(bounds[-1], size, cu_seqlens=bounds, padded_cu_seqlens=padded)


def attention_work(
    sharding: SequenceSharding,
    documents: Documents,
    *,
    window: int | None = None,
    by_heads: bool = False,
) -> AttentionWork:
    """Return the attention work of every rank.

    Args:
        sharding: the split of every row.
        documents: cumulative lengths of the documents of each row.
        window: a query at row index q sees only keys k with q - k < window.
        by_heads: attention is sharded by heads, as in `a2a`: every rank has all pairs for 1/cp of
            the heads, which is balanced for any split of the rows.
    """
    runs = [sharding.runs(rank) for rank in range(sharding.size)]
    pairs, sub_sequences = [0] * sharding.size, [0] * sharding.size
    for bounds in documents:
        pairs_before = _pairs_before(bounds, window)
        for rank, rank_runs in enumerate(runs):
            for run in rank_runs:
                pairs[rank] += int(pairs_before[run.row_end] - pairs_before[run.row_start])
                inner = bisect_left(bounds, run.row_end) - bisect_right(bounds, run.row_start)
                sub_sequences[rank] += inner + 1
    rows = len(documents)
    if by_heads:
        pairs = [-(-sum(pairs) // sharding.size)] * sharding.size
        sub_sequences = [sum(len(bounds) - 1 for bounds in documents)] * sharding.size
    return AttentionWork(
        tokens=rows * sharding.local_length,
        padding=rows * (sharding.padded[-1] - sharding.length),
        pairs=tuple(pairs),
        sub_sequences=tuple(sub_sequences),
    )


def _pairs_before(bounds: Sequence[int], window: int | None) -> np.ndarray:
    """Return the number of visible pairs of all queries before each row index, int64 [s + 1]."""
    ends = np.asarray(bounds, dtype=np.int64)
    keys = np.arange(1, ends[-1] + 1) - np.repeat(ends[:-1], np.diff(ends))  # [s]
    if window is not None:
        keys = np.minimum(keys, window)
    return np.concatenate([np.zeros(1, dtype=np.int64), keys.cumsum()])
