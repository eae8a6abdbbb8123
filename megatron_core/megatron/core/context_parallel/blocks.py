# SPDX-License-Identifier: Apache-2.0
"""Blocks of queries and keys that see each other: what attention between two ranks computes.

A query sees the keys of its own document, under a causal mask none behind itself, in a window none
too far before itself. The visible pairs of two ranks' tokens are cut into squares on the diagonal,
where the order within the block matters, and rectangles, where it does not. Attention then never
looks at a pair of two documents, and needs no mask by document.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

import numpy as np

from megatron.core.context_parallel.cut import Run


@dataclass(frozen=True, order=True)
class Block:
    """Rows, queries and keys of which every pair is visible, but for order and window.

    Args:
        row0, row1: rows of the batch, [row0, row1).
        q0, q1: local indices of the queries, [q0, q1).
        k0, k1: local indices of the keys, [k0, k1).
        q_place, k_place: place of the first query and of the first key; the others follow.
        causal: whether a query sees no key behind itself; the block is then a square on the
            diagonal. False: every pair is visible but for the window.
    """

    row0: int
    row1: int
    q0: int
    q1: int
    k0: int
    k1: int
    q_place: int
    k_place: int
    causal: bool


class Visits(NamedTuple):
    """Where the blocks of one attention lie in a tensor [s, b, ...], in their order.

    Args:
        places: (row0, row1, first, last) of each block.
        is_first: of each block, whether none before overlaps it: its result is stored, not added.
        covers: whether those cover the tensor; where they do not, it must start from zeros.
    """

    places: tuple[tuple[int, int, int, int], ...]
    is_first: tuple[bool, ...]
    covers: bool


class Blocks(tuple[Block, ...]):
    """Blocks of one attention, and what all layers need to know of them, found once.

    Args:
        blocks: in the order in which they are attended.
    """

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        del blocks  # the tuple has them already
        #: How often visits were worked out.
        self.visits_made = 0
        self._visits: dict[tuple[str, int, int], Visits] = {}

    @staticmethod
    def of(blocks: Sequence[Block]) -> Blocks:
        """Return the blocks themselves where they are Blocks already."""
        return blocks if isinstance(blocks, Blocks) else Blocks(blocks)

    def visits(self, side: Literal["query", "key"], rows: int, length: int) -> Visits:
        """Return where the blocks lie in all queries or all keys; work it out the first time.

        Args:
            side: whose tensors, values being keys.
            rows: b.
            length: s, of the queries or the keys.
        """
        asked = (side, rows, length)
        if asked not in self._visits:
            is_query = side == "query"
            places = [(x.row0, x.row1, *((x.q0, x.q1) if is_query else (x.k0, x.k1))) for x in self]
            self._visits[asked] = _visits(places, rows, length)
            self.visits_made += 1
        return self._visits[asked]


def attention_blocks(
    queries: Sequence[Run],
    keys: Sequence[Run],
    *,
    rows: int,
    documents: Sequence[Sequence[int]] | None = None,
    causal: bool = True,
    window: int | None = None,
    joined: bool = False,
) -> Blocks:
    """Return blocks that hold every visible (row, query, key) once; none without a visible pair.

    Args:
        queries, keys: what the two ranks hold.
        rows: b.
        documents: of each row, where its documents begin and end by place, [0, ..., s]; None is
            one document a row. Rows next to each other that agree share blocks.
        causal: a query sees no key behind itself.
        window: a query at place q sees only keys k with q - k < window.
        joined: let rectangles of several runs grow together. `q_place` and `k_place` then hold for
            the first query and key only: for an op that does not count in places, so without
            window and without dropout.

    Raises:
        ValueError: documents that do not cover the rows, or options that do not fit.
    """
    _check(rows, documents, window, joined)
    queries, keys = _merged(queries), _merged(keys)
    end = max((run.end for run in (*queries, *keys)), default=0)
    found: list[Block] = []
    first = 0
    for bounds, same in groupby(_borders(rows, documents, end)):
        last = first + len(list(same))
        pairs = _pairs(_split(queries, bounds), _split(keys, bounds))
        for query, key in pairs:
            shapes = _visible(query, key) if causal else [(query, key, False)]
            for q, k, is_square in shapes:
                q, k = (q, k) if window is None or is_square else _reached(q, k, window)
                if min(q.length, k.length) > 0:
                    found.append(_block((first, last), q, k, is_square))
        first = last
    if rows > 1:
        found = _join(found, "row0", "row1")
    if joined:
        found = _join(_join(found, "k0", "k1"), "q0", "q1")
    return Blocks(sorted(found))


@dataclass(frozen=True)
class _Part:
    """Tokens of one document that follow each other on their rank and in their row."""

    start: int
    length: int
    place: int

    @property
    def end(self) -> int:
        return self.place + self.length

    def between(self, first: int, end: int) -> _Part:
        """Return the tokens of it at places [first, end); its length is not positive if none."""
        first, end = max(first, self.place), min(end, self.end)
        return _Part(self.start + first - self.place, end - first, first)


def _merged(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with those in one that follow each other: documents decide, not sequences."""
    found: list[Run] = []
    for run in runs:
        last = found[-1] if found else None
        if last is not None and (last.stop, last.end) == (run.start, run.place):
            found[-1] = replace(last, length=last.length + run.length)
        else:
            found.append(run)
    return found


def _split(runs: Sequence[Run], bounds: Sequence[int]) -> dict[int, list[_Part]]:
    """Return the parts of the runs in each document, by its number."""
    found: dict[int, list[_Part]] = {}
    for run in runs:
        whole = _Part(run.start, run.length, run.place)
        first = bisect_right(bounds, run.place) - 1
        for number in range(first, bisect_left(bounds, run.end)):
            part = whole.between(bounds[number], bounds[number + 1])
            found.setdefault(number, []).append(part)
    return found


def _pairs(
    queries: dict[int, list[_Part]], keys: dict[int, list[_Part]]
) -> Iterator[tuple[_Part, _Part]]:
    """Yield every pair of parts of one document."""
    for number, parts in queries.items():
        for query in parts:
            for key in keys.get(number, ()):
                yield query, key


def _visible(query: _Part, key: _Part) -> Iterator[tuple[_Part, _Part, bool]]:
    """Yield a causal square where queries and keys are the same tokens, and the rectangles left.

    With queries that begin before the keys, or keys that end behind the queries, those see nothing.
    """
    first, end = max(query.place, key.place), min(query.end, key.end)
    if first >= end:  # no token in common: all of the keys are before the queries, or none
        if key.end <= query.place:
            yield query, key, False
        return
    if end - first == 1:  # one token in common: the keys behind it are left out, the rest is whole
        yield query.between(first, query.end), key.between(key.place, end), False
        return
    yield query.between(first, end), key.between(first, end), True
    yield query.between(first, query.end), key.between(key.place, first), False
    yield query.between(end, query.end), key.between(first, end), False


def _reached(query: _Part, key: _Part, window: int) -> tuple[_Part, _Part]:
    """Leave out the queries that are too far behind all keys, and the keys none of them reaches."""
    query = query.between(query.place, key.end - 1 + window)
    return query, key.between(query.place - window + 1, key.end)


def _block(rows: tuple[int, int], query: _Part, key: _Part, causal: bool) -> Block:
    return Block(
        *rows,
        query.start,
        query.start + query.length,
        key.start,
        key.start + key.length,
        query.place,
        key.place,
        causal,
    )


def _join(blocks: list[Block], low: str, high: str) -> list[Block]:
    """Let blocks grow over those that go on where they end in [low, high) and agree in the rest.

    Squares only grow over rows: no two share queries or keys. Places are not compared along the
    range that grows.
    """
    loose = {"k0": "k_place", "q0": "q_place"}.get(low)
    names = [n for n in Block.__dataclass_fields__ if n not in (low, high, loose)]
    found: dict[tuple, Block] = {}
    done: list[Block] = []
    for block in sorted(blocks, key=lambda b: vars(b)[low]):
        rest = tuple(vars(block)[name] for name in names)
        last = found.get(rest)
        if last is not None and vars(last)[high] == vars(block)[low]:
            found[rest] = replace(last, **{high: vars(block)[high]})
        else:
            if last is not None:
                done.append(last)
            found[rest] = block
    return done + list(found.values())


def _borders(
    rows: int, documents: Sequence[Sequence[int]] | None, end: int
) -> list[tuple[int, ...]]:
    """Return where each row's documents begin and end, empty ones left out."""
    if documents is None:
        return [(0, end)] * rows
    found = []
    for row, bounds in enumerate(documents):
        borders = tuple(int(x) for x in bounds)
        falls = any(b < a for a, b in pairwise(borders))
        if not borders or borders[0] != 0 or falls or borders[-1] < end:
            raise ValueError(
                f"documents of row {row} are {list(borders)}: they must rise from 0 to the row's "
                f"end, at least {end}"
            )
        found.append(tuple(dict.fromkeys(borders)))
    return found


def _visits(places: Sequence[tuple[int, int, int, int]], rows: int, length: int) -> Visits:
    """Return the visits of blocks at (row0, row1, first, last) of a tensor [length, rows, ...]."""
    seen = np.zeros((rows, length), dtype=bool)
    is_first, covered = [], 0
    for row0, row1, first, last in places:
        part = seen[row0:row1, first:last]
        is_first.append(not part.any())
        covered += part.size if is_first[-1] else 0
        part[:] = True
    return Visits(tuple(places), tuple(is_first), covered == seen.size)


def _check(
    rows: int,
    documents: Sequence[Sequence[int]] | None,
    window: int | None,
    joined: bool,
) -> None:
    """Raise ValueError for options that do not fit."""
    if rows < 1:
        raise ValueError(f"attention of {rows} rows: use at least 1")
    if documents is not None and len(documents) != rows:
        raise ValueError(f"documents of {len(documents)} rows for {rows} rows: give one of each")
    if window is not None and window < 1:
        raise ValueError(f"window {window}: use at least 1, or None for no window")
    if window is not None and joined:
        raise ValueError(f"joined blocks have no places for a window of {window}: leave one out")
