# SPDX-License-Identifier: Apache-2.0
"""Random rows to cut, and which token each rank then holds, written down chunk by chunk."""

from __future__ import annotations

import random
from dataclasses import dataclass

from megatron.core.context_parallel import SequenceSharding

SIZES = (1, 2, 3, 4, 8)


@dataclass(frozen=True)
class CutCase:
    """One row: real and padded length of each sequence that is cut apart, size and order."""

    lengths: tuple[int, ...]
    padded: tuple[int, ...]
    size: int
    order: str
    whole: bool = False

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def cut(self) -> SequenceSharding:
        """Return the cut under test."""
        bounds = None if self.whole else cumulative(self.lengths)
        padded = cumulative(self.padded) if self.padded != self.lengths else None
        return SequenceSharding.of(
            self.total, self.size, order=self.order, cu_seqlens=bounds, padded_cu_seqlens=padded
        )

    def columns(self) -> list[list[int]]:
        """Return the place of each local token of each rank, -1 for padding."""
        ranks: list[list[int]] = [[] for _ in range(self.size)]
        place = 0
        for length, padded in zip(self.lengths, self.padded, strict=True):
            tokens = [*range(place, place + length)] + [-1] * (padded - length)
            place += length
            parts = self.size if self.order == "contiguous" else 2 * self.size
            if padded % parts:  # of one rank an odd sequence
                ranks[0] += tokens
                continue
            chunk = padded // parts
            chunks = [tokens[i * chunk : (i + 1) * chunk] for i in range(parts)]
            for number, part in enumerate(chunks):
                # 0 1 2 3 3 2 1 0: the second half is dealt out backwards
                ranks[number if number < self.size else parts - 1 - number] += part
        return ranks


def cumulative(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return [0, l0, l0 + l1, ...]."""
    return tuple(sum(lengths[:i]) for i in range(len(lengths) + 1))


def random_case(rng: random.Random) -> CutCase:
    """Draw a row: one sequence or several, even or not, padded or not, some of them empty."""
    size, order = rng.choice(SIZES), rng.choice(["zigzag", "contiguous"])
    parts = 2 * size if order == "zigzag" and size > 1 else size
    count = rng.choice([1, 1, 2, 3, 5])
    padded = [parts * rng.choice([0, 1, 1, 2, 3, 7]) for _ in range(count)]
    padded[rng.randrange(count)] = parts * rng.choice([1, 2, 5])
    lengths = padded
    if rng.random() < 0.4:
        lengths = [max(0, length - rng.choice([0, 1, 2, parts + 1])) for length in padded]
        if not any(lengths):
            lengths = padded
    return CutCase(tuple(lengths), tuple(padded), size, order, whole=count == 1)
