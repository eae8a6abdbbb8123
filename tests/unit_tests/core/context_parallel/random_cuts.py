# SPDX-License-Identifier: Apache-2.0
"""Random rows to shard, and the expected tokens of each rank, built chunk by chunk."""

from __future__ import annotations

import random
from dataclasses import dataclass

from megatron.core.context_parallel import SequenceSharding

SIZES = (1, 2, 3, 4, 8)


@dataclass(frozen=True)
class ShardingCase:
    """One sharded row.

    Args:
        lengths: tokens of each sequence that is sharded separately.
        padded: these lengths with padding.
        size: context-parallel size.
        order: order of the chunks.
        whole: the row is one sequence, so cu_seqlens is None.
    """

    lengths: tuple[int, ...]
    padded: tuple[int, ...]
    size: int
    order: str
    whole: bool = False

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def sharding(self) -> SequenceSharding:
        """Return the sharding under test."""
        bounds = None if self.whole else cumulative(self.lengths)
        padded = cumulative(self.padded) if self.padded != self.lengths else None
        return SequenceSharding.of(
            self.total, self.size, order=self.order, cu_seqlens=bounds, padded_cu_seqlens=padded
        )

    def row_indices(self) -> list[list[int]]:
        """Return the row index of each local token of each rank, -1 for padding."""
        ranks: list[list[int]] = [[] for _ in range(self.size)]
        start = 0
        for length, padded in zip(self.lengths, self.padded, strict=True):
            tokens = [*range(start, start + length)] + [-1] * (padded - length)
            start += length
            num_chunks = self.size if self.order == "contiguous" else 2 * self.size
            if padded % num_chunks:  # an odd length, possible with one rank only
                ranks[0] += tokens
                continue
            chunk_size = padded // num_chunks
            for number in range(num_chunks):
                # Ranks 0 1 2 3 3 2 1 0: the second half is dealt in reverse order.
                rank = number if number < self.size else num_chunks - 1 - number
                ranks[rank] += tokens[number * chunk_size : (number + 1) * chunk_size]
        return ranks


def cumulative(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Return [0, l0, l0 + l1, ...]."""
    return tuple(sum(lengths[:i]) for i in range(len(lengths) + 1))


def random_case(rng: random.Random) -> ShardingCase:
    """Draw a row of one or several sequences, even or uneven, padded or not, some empty."""
    size, order = rng.choice(SIZES), rng.choice(["zigzag", "contiguous"])
    num_chunks = 2 * size if order == "zigzag" and size > 1 else size
    count = rng.choice([1, 1, 2, 3, 5])
    padded = [num_chunks * rng.choice([0, 1, 1, 2, 3, 7]) for _ in range(count)]
    padded[rng.randrange(count)] = num_chunks * rng.choice([1, 2, 5])
    lengths = padded
    if rng.random() < 0.4:
        lengths = [max(0, length - rng.choice([0, 1, 2, num_chunks + 1])) for length in padded]
        if not any(lengths):
            lengths = padded
    return ShardingCase(tuple(lengths), tuple(padded), size, order, whole=count == 1)
