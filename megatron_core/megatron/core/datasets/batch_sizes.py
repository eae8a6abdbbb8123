# SPDX-License-Identifier: Apache-2.0
"""Global batch sizes, and the assignment of samples to microbatches and data-parallel ranks.

`BatchSizes` is the global batch size as a step function of the number of consumed samples:

    g(n) = g_i for t_i ≤ n < t_{i+1},  t_0 = 0

A step that begins at sample n has g(n) samples, even if it extends beyond the next threshold. The
sizes of all steps therefore depend on the number of consumed samples alone, and a resumed run
continues with the same steps.

`Division` divides the g samples of a step into blocks of b samples, in order; the last block may be
smaller. With d data-parallel ranks, block i is microbatch i // d of rank i mod d:

    sample p of the step  →  block p // b  →  rank (p // b) mod d, microbatch p // (b · d)

The blocks therefore do not depend on the number of ranks. If the last round has fewer blocks than
ranks, the remaining ranks get a padding microbatch, with weight 0 in the loss, and as many samples
as rank 0 has in that round.
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
    """Division of a step's samples over the data-parallel ranks.

    Args:
        samples: g, the number of samples of the step, over all data-parallel ranks.
        micro_batch_size: b, the number of samples of a microbatch.
        data_parallel_size: d, the number of ranks that see different samples.

    Raises:
        ValueError: a number below 1.
    """

    samples: int
    micro_batch_size: int
    data_parallel_size: int

    def __post_init__(self) -> None:
        if min(self.samples, self.micro_batch_size, self.data_parallel_size) < 1:
            raise ValueError(
                f"{self.samples} samples in microbatches of {self.micro_batch_size} over "
                f"{self.data_parallel_size} data-parallel ranks: impossible"
            )

    @property
    def blocks(self) -> int:
        """Microbatches of a step on all data-parallel ranks, without padding microbatches."""
        return -(-self.samples // self.micro_batch_size)

    @property
    def rounds(self) -> int:
        """Microbatches of a step on each data-parallel rank, with padding microbatches."""
        return -(-self.blocks // self.data_parallel_size)

    @property
    def padding_microbatches(self) -> int:
        """Padding microbatches of a step on all data-parallel ranks."""
        return self.rounds * self.data_parallel_size - self.blocks

    @property
    def is_even(self) -> bool:
        """Whether all microbatches of all data-parallel ranks have b samples."""
        return self.samples == self.rounds * self.data_parallel_size * self.micro_batch_size

    def sample_range(self, rank: int, number: int) -> range:
        """Return the samples of the step in a rank's microbatch; empty for a padding microbatch.

        Args:
            rank: data-parallel rank, 0 … d - 1.
            number: index of the microbatch, 0 … rounds - 1.

        Raises:
            ValueError: no such data-parallel rank or microbatch.
        """
        if not (0 <= rank < self.data_parallel_size and 0 <= number < self.rounds):
            raise ValueError(
                f"microbatch {number} of data-parallel rank {rank}: impossible, a step has "
                f"{self.rounds} on {self.data_parallel_size} ranks"
            )
        start = (number * self.data_parallel_size + rank) * self.micro_batch_size
        stop = min(start + self.micro_batch_size, self.samples)
        return range(min(start, stop), stop)

    def largest(self, number: int) -> int:
        """Return the number of samples of the largest microbatch of a round over all ranks."""
        return len(self.sample_range(0, number))

    @property
    def wasted(self) -> float:
        """The fraction of computed samples that are padding."""
        computed = self.data_parallel_size * sum(
            self.largest(number) for number in range(self.rounds)
        )
        return 1.0 - self.samples / computed

    def consumed(self, rounds: int) -> int:
        """Return the number of samples that all ranks consume in the first rounds of a step."""
        return min(rounds * self.data_parallel_size * self.micro_batch_size, self.samples)
