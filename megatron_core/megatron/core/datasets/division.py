# SPDX-License-Identifier: Apache-2.0
"""Division: which samples of a step make up which microbatch of which data-parallel rank.

The g samples of a step are divided into blocks of b in their order; the last block has the rest, if
there is one. With as many `lanes` as there are data-parallel ranks, block i is microbatch
i // lanes of rank i mod lanes:

    sample p of the step  →  block p // b  →  rank (p // b) mod lanes, microbatch p // (b · lanes)

So the blocks do not depend on the number of ranks. Where the last round has fewer blocks than
ranks, the other ranks get a filler: a microbatch without weight in the loss, of as many samples as
rank 0 has in that round.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Division:
    """How a step's samples are divided over data-parallel ranks.

    Args:
        samples: g, of a step, over all data-parallel ranks.
        micro_batch_size: b.
        lanes: how many ranks see different samples.

    Raises:
        ValueError: a number below 1.
    """

    samples: int
    micro_batch_size: int
    lanes: int

    def __post_init__(self) -> None:
        if min(self.samples, self.micro_batch_size, self.lanes) < 1:
            raise ValueError(
                f"{self.samples} samples in microbatches of {self.micro_batch_size} over "
                f"{self.lanes} lanes: impossible"
            )

    @property
    def blocks(self) -> int:
        """Microbatches of a step on all data-parallel ranks together, without fillers."""
        return -(-self.samples // self.micro_batch_size)

    @property
    def rounds(self) -> int:
        """Microbatches of a step on each data-parallel rank, with fillers."""
        return -(-self.blocks // self.lanes)

    @property
    def fillers(self) -> int:
        """Microbatches of a step on all data-parallel ranks together that count for nothing."""
        return self.rounds * self.lanes - self.blocks

    @property
    def is_even(self) -> bool:
        """Whether all microbatches of all data-parallel ranks have b samples."""
        return self.samples == self.rounds * self.lanes * self.micro_batch_size

    def places(self, lane: int, number: int) -> range:
        """Return which samples of the step are in a rank's microbatch; none of them in a filler.

        Args:
            lane: 0 … lanes - 1.
            number: of the microbatch, 0 … rounds - 1.

        Raises:
            ValueError: no such data-parallel rank or microbatch.
        """
        if not (0 <= lane < self.lanes and 0 <= number < self.rounds):
            raise ValueError(
                f"microbatch {number} of lane {lane}: impossible, a step has {self.rounds} on "
                f"{self.lanes} lanes"
            )
        first = (number * self.lanes + lane) * self.micro_batch_size
        last = min(first + self.micro_batch_size, self.samples)
        return range(min(first, last), last)

    def largest(self, number: int) -> int:
        """Return the samples of the largest of all ranks' microbatches of this number."""
        return len(self.places(0, number))

    @property
    def wasted(self) -> float:
        """The share of the samples that ranks compute, or wait for, and that count for nothing."""
        computed = self.lanes * sum(self.largest(number) for number in range(self.rounds))
        return 1.0 - self.samples / computed

    def consumed(self, rounds: int) -> int:
        """Return how many samples all ranks have consumed after so many microbatches of a step."""
        return min(rounds * self.lanes * self.micro_batch_size, self.samples)
