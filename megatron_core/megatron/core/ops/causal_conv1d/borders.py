# SPDX-License-Identifier: Apache-2.0
"""Borders: where a convolution over packed tokens meets the beginning or the end of a sequence.

The W-1 first tokens of a sequence are its head, the last ones its tail; of a shorter sequence all
are both. A plain convolution over all tokens is right everywhere else. What is not plain is put
together from a small table of rows, by index: m head or tail rows, and behind them what lies before
each sequence, W-1 rows each. Row m alone stands for zeros where nothing lies there.
"""

from __future__ import annotations

import numpy as np

from megatron.core.ops.sequences import Sequences


class Borders:
    """Index maps of one width, int64 on the device; columns of taps are in the order of weights.

    Args:
        sequences: of the packed tokens.
        width: W, at least 2.

    Attributes:
        count: m.
        head, tail: [m], the tokens.
        window: [m, W], what a head token sees: rows of [head; before].
        reach: [m, W], what sees a tail token: rows of [tail; zero].
        seen: [N · (W-1), W], what sees the rows before sequences: rows of [head; zero].
        last: [N · (W-1)], the last rows of each sequence: rows of [tail; before].
        tail_last: [m], which of `last` a tail token is.
        before_last: [N · (W-1)], which of `last` a row before is: rows of [last; zero].
    """

    def __init__(self, sequences: Sequences, width: int) -> None:
        near, lengths = width - 1, np.asarray(sequences.lengths, dtype=np.int64)
        starts = np.asarray(sequences.bounds[:-1], dtype=np.int64)
        counts = np.minimum(lengths, near)
        first = counts.cumsum() - counts  # of each sequence, among head rows as among tail rows
        self.count = m = int(counts.sum())
        number = np.repeat(np.arange(len(lengths)), counts)
        place = np.arange(m) - first[number]
        back = near - np.arange(width)  # of each tap, how many tokens it looks back
        moved = sequences.moved
        self.head = moved(starts[number] + place)
        self.tail = moved((starts + lengths - counts)[number] + place)

        at = place[:, None] - back
        before = m + (number * near)[:, None] + near + at
        self.window = moved(np.where(at >= 0, first[number][:, None] + at, before))
        at = place[:, None] + back
        self.reach = moved(np.where(at < counts[number][:, None], first[number][:, None] + at, m))

        row = np.tile(np.arange(near), len(lengths))  # of the rows before each sequence
        number = np.repeat(np.arange(len(lengths)), near)
        at = row[:, None] - near + back
        inside = (at >= 0) & (at < counts[number][:, None])
        self.seen = moved(np.where(inside, first[number][:, None] + at, m))
        at = row - near + counts[number]
        carried = m + number * near + row + lengths[number]
        self.last = moved(np.where(at >= 0, first[number] + at, carried))
        left = row - lengths[number]
        self.before_last = moved(np.where(left >= 0, number * near + left, len(lengths) * near))
        number = np.repeat(np.arange(len(lengths)), counts)
        self.tail_last = moved(number * near + near - counts[number] + place)

    @staticmethod
    def of(sequences: Sequences, width: int) -> Borders:
        """Return those of a width, made once."""
        return sequences.made(("borders", width), lambda: Borders(sequences, width))
