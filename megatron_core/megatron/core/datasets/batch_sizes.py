# SPDX-License-Identifier: Apache-2.0
"""BatchSizes: the global batch size as a step function of the samples consumed.

    g(n) = g_i for t_i ≤ n < t_{i+1},  t_0 = 0

A step that begins at sample n has g(n) samples, also where it goes beyond the next threshold. So
the sizes of all steps follow from the samples consumed alone, and a run that resumes from these
goes on as it would have.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class BatchSizes:
    """The size of every step of a run.

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
        if (least := min(size for _, size in self.stages)) < 1:
            raise ValueError(f"a batch size of {least}: impossible, use 1 or more")

    @staticmethod
    def constant(size: int) -> BatchSizes:
        """Return the same size for all steps."""
        return BatchSizes(((0, size),))

    @staticmethod
    def ramp(start: int, increment: int, *, samples: int, size: int) -> BatchSizes:
        """Return equal increments from `start` to `size`, evenly over the first `samples` samples.

        Raises:
            ValueError: `size` is no whole number of increments above `start`.
        """
        if increment < 1 or size < start or (size - start) % increment:
            raise ValueError(f"{size} is not {start} and a number of increments of {increment}")
        count = (size - start) // increment
        # Where increments are closer together than samples, the last of them counts.
        found = {-(-i * samples // max(count, 1)): start + i * increment for i in range(count + 1)}
        return BatchSizes(tuple(found.items()))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in the order in which they come."""
        return tuple(size for _, size in self.stages)

    def at(self, consumed_samples: int) -> int:
        """Return the size of the step that begins after so many samples."""
        return self.stages[bisect_right(self.stages, consumed_samples, key=lambda s: s[0]) - 1][1]

    def samples(self, steps: int) -> int:
        """Return the samples of a run's first steps."""
        consumed, left = 0, steps
        for (_, size), (threshold, _) in pairwise(self.stages):
            taken = min(left, max(0, -(-(threshold - consumed) // size)))
            consumed, left = consumed + taken * size, left - taken
        return consumed + left * self.stages[-1][1]

    def steps(self, samples: int) -> int:
        """Return how many whole steps a run's first samples are."""
        consumed = steps = 0
        for (_, size), (threshold, _) in pairwise(self.stages):
            wanted = max(0, -(-(threshold - consumed) // size))
            taken = min((samples - consumed) // size, wanted)
            consumed, steps = consumed + taken * size, steps + taken
            if taken < wanted:
                return steps
        return steps + (samples - consumed) // self.stages[-1][1]
