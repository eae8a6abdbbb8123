# SPDX-License-Identifier: Apache-2.0
"""How packed rows are cut over ranks: each row as one, or each document apart. Pure arithmetic.

In zigzag order every rank sees as many pairs of a row of one document. Of several documents, each
on some of the ranks alone, it does not: with two of 3/4 and 1/4 of a row the slowest of two ranks
has 1.6 times the mean. A document that is cut apart is spread over all ranks evenly, but is padded
to a multiple of 2 · cp tokens, so that ranks work on up to 2 · cp - 1 tokens more for each.

    cost of a rank = tokens, padding included · cost of a token + pairs · cost of a pair
                     + pieces · cost of a piece

A piece is what a rank holds of a document in one run: attention has a block or two for each. An
engine that cuts heads instead of tokens is even by either cut, and so is best off without padding.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from megatron.core.context_parallel.cut import SequenceCut

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
class Work:
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
        own = zip(self.pairs, self.pieces, strict=True)
        slowest = max(costs.pair * pairs + costs.piece * pieces for pairs, pieces in own)
        return costs.token * self.tokens + slowest


def joined_documents(documents: Documents) -> tuple[int, ...]:
    """Return where documents begin and end in one row of all rows, one after another."""
    found, first = {0: None}, 0  # ordered, empty documents left out
    for borders in documents:
        found |= dict.fromkeys(first + end for end in borders)
        first += borders[-1]
    return tuple(found)


def cut_documents(
    documents: Documents, size: int, *, multiple: int = 1, at_least: int = 0
) -> SequenceCut:
    """Return the cut of one row that holds all rows, one after another, each document apart.

    Args:
        documents: of each row.
        size: ranks.
        multiple: what the tokens of a rank divide by, for sequence parallelism.
        at_least: tokens of the row, padding included.
    """
    bounds, unit = joined_documents(documents), 2 * size
    lengths = (-(-(end - first) // unit) * unit for first, end in pairwise(bounds))
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
) -> Work:
    """Return what every rank has to do.

    Args:
        cut: of every row.
        documents: of each row.
        window: a query at place q sees only keys k with q - k < window.
        by_heads: attention gives a rank all pairs of some heads, as `a2a` does, which is even
            whatever the cut: a pair counts as its share of the heads.
    """
    runs = [cut.runs(rank) for rank in range(cut.size)]
    pairs, pieces = [0] * cut.size, [0] * cut.size
    for borders in documents:
        seen = _seen_before(borders, window)
        for rank, own in enumerate(runs):
            for run in own:
                pairs[rank] += int(seen[run.end] - seen[run.place])
                inner = bisect_left(borders, run.end) - bisect_right(borders, run.place)
                pieces[rank] += inner + 1
    rows = len(documents)
    if by_heads:
        pairs = [-(-sum(pairs) // cut.size)] * cut.size
        pieces = [sum(len(borders) - 1 for borders in documents)] * cut.size
    return Work(
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
