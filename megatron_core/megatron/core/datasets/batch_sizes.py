# SPDX-License-Identifier: Apache-2.0
"""Global batch sizes, and the assignment of samples to microbatches and data-parallel ranks.

`BatchSizes` is the global batch size as a step function of the number of consumed samples:

    g(n) = g_i for t_i ≤ n < t_{i+1},  t_0 = 0

A step that begins at sample n has g(n) samples, even if it extends beyond the next threshold. The
sizes of all steps therefore depend on the number of consumed samples alone, and a resumed run
continues with the same steps.

`Division` divides the g samples of a step into blocks of b in their order; the last block has the
rest, if there is one. With as many `lanes` as there are data-parallel ranks, block i is microbatch
i // lanes of rank i mod lanes:

    sample p of the step  →  block p // b  →  rank (p // b) mod lanes, microbatch p // (b · lanes)

So the blocks do not depend on the number of ranks. Where the last round has fewer blocks than
ranks, the other ranks get a filler: a microbatch without weight in the loss, of as many samples as
rank 0 has in that round.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class BatchSizes:
    """The global batch size of every step of a run.

    Args:
        stages: (t_i, g_i), thresholds in samples, ascending.

    Raises:
        ValueError: the first threshold is not 0, thresholds do not ascend, or a size below 1.
    """

    stages: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        thresholds = [threshold for threshold, _ in self.stages]
        if thresholds[:1] != [0]:
            raise ValueError(f"batch sizes begin at sample 0, not at {thresholds[:1] or 'nothing'}")
        for before, after in pairwise(thresholds):
            if after <= before:
                raise ValueError(
                    f"batch sizes change at sample {before} and then at {after}: thresholds must "
                    "ascend"
                )
        if (smallest := min(size for _, size in self.stages)) < 1:
            raise ValueError(f"a batch size of {smallest}: impossible, use 1 or more")

    @staticmethod
    def constant(size: int) -> BatchSizes:
        """Return the same size for all steps."""
        return BatchSizes(((0, size),))

    @staticmethod
    def ramp(start: int, increment: int, *, samples: int, size: int) -> BatchSizes:
        """Return equal increments from `start` to `size`, evenly over the first `samples` samples.

        Raises:
            ValueError: `size` - `start` is not a multiple of `increment`.
        """
        if increment < 1 or size < start or (size - start) % increment:
            raise ValueError(f"{size} is not {start} and a number of increments of {increment}")
        count = (size - start) // increment
        # If several increments fall on one sample, the last one counts.
        size_by_threshold = {
            -(-i * samples // max(count, 1)): start + i * increment for i in range(count + 1)
        }
        return BatchSizes(tuple(size_by_threshold.items()))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes in order."""
        return tuple(size for _, size in self.stages)

    def at(self, consumed_samples: int) -> int:
        """Return the size of the step that begins after `consumed_samples`."""
        return self.stages[bisect_right(self.stages, consumed_samples, key=lambda s: s[0]) - 1][1]

    def samples(self, steps: int, *, begin: int = 0) -> int:
        """Return the number of samples consumed after some steps.

        Args:
            steps: number of steps.
            begin: samples consumed before these steps.
        """
        consumed, remaining_steps = begin, steps
        for (_, size), (threshold, _) in pairwise(self.stages):
            stage_steps = min(remaining_steps, max(0, -(-(threshold - consumed) // size)))
            consumed, remaining_steps = consumed + stage_steps * size, remaining_steps - stage_steps
        return consumed + remaining_steps * self.stages[-1][1]

    def steps(self, samples: int) -> int:
        """Return the number of complete steps in a run's first `samples` samples."""
        consumed = steps = 0
        for (_, size), (threshold, _) in pairwise(self.stages):
            stage_steps = max(0, -(-(threshold - consumed) // size))
            steps_taken = min((samples - consumed) // size, stage_steps)
            consumed, steps = consumed + steps_taken * size, steps + steps_taken
            if steps_taken < stage_steps:
                return steps
        return steps + (samples - consumed) // self.stages[-1][1]


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
        start = (number * self.lanes + lane) * self.micro_batch_size
        stop = min(start + self.micro_batch_size, self.samples)
        return range(min(start, stop), stop)

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
