# SPDX-License-Identifier: Apache-2.0
"""An exponential average of the weights; each rank averages its owned ranges in fp32.

With half-life H samples and n samples in a step, d = 2^(-n/H):

    average ← d · average + (1 - d) · weights

Counting samples, not steps, makes the average independent of the batch size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron.core.weight_gather import OwnedRange


class WeightAverage:
    """The average of the ranges of weights that a rank owns.

    Args:
        owned: the ranges [k] of `DataParallel.owned()`; the initial average.
        half_life_samples: samples after which a weight's share in the average has halved.

    Attributes:
        ranges: the average of each range, fp32 [k].

    Raises:
        ValueError: a half-life that is not positive.
    """

    def __init__(self, owned: Sequence[OwnedRange], *, half_life_samples: float) -> None:
        if not half_life_samples > 0:
            raise ValueError(f"half-life of {half_life_samples} samples: use a positive number")
        self._half_life_samples, self._owned = half_life_samples, owned
        self.ranges = [owned_range.weights.detach().float().clone() for owned_range in owned]

    def restart(self) -> None:
        """Reset the average to the current weights."""
        for average, owned in zip(self.ranges, self._owned, strict=True):
            average.copy_(owned.weights.detach())

    def update(self, *, samples: int) -> None:
        """Move the average towards the weights after a step of `samples`; no communication."""
        decay = 0.5 ** (samples / self._half_life_samples)
        for average, owned in zip(self.ranges, self._owned, strict=True):
            average.lerp_(owned.weights.detach().float(), 1.0 - decay)

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Replace the owned weights by the average, in their dtype; restore them bitwise on exit.

        Other ranks see a change only after the next gather of the owned weights.
        """
        saved_weights = [owned.weights.detach().clone() for owned in self._owned]
        self._write(self.ranges)
        try:
            yield
        finally:
            self._write(saved_weights)

    @torch.no_grad()
    def _write(self, values: Sequence[torch.Tensor]) -> None:
        for owned, value in zip(self._owned, values, strict=True):
            owned.weights.copy_(value)
