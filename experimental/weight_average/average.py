# SPDX-License-Identifier: Apache-2.0
"""An exponential average of the weights, each rank keeping in fp32 what its optimizer updates.

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
        owned: the ranges [k], of `DataParallel.owned()`; the start of the average.
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
        self.ranges = [each.weights.detach().float().clone() for each in owned]

    def restart(self) -> None:
        """Let the average be the weights as they are."""
        for average, owned in zip(self.ranges, self._owned, strict=True):
            average.copy_(owned.weights.detach())

    def update(self, *, samples: int) -> None:
        """Move the average towards the weights after a step of `samples`; no communication."""
        kept = 0.5 ** (samples / self._half_life_samples)
        for average, owned in zip(self.ranges, self._owned, strict=True):
            average.lerp_(owned.weights.detach().float(), 1.0 - kept)

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Write the average over the owned weights, in their dtype; their bits are back after it.

        Other ranks see either only when the owned weights are gathered anew.
        """
        kept = [owned.weights.detach().clone() for owned in self._owned]
        self._write(self.ranges)
        try:
            yield
        finally:
            self._write(kept)

    @torch.no_grad()
    def _write(self, values: Sequence[torch.Tensor]) -> None:
        for owned, value in zip(self._owned, values, strict=True):
            owned.weights.copy_(value)
