# SPDX-License-Identifier: Apache-2.0
"""An exponential average of flat weights, each rank keeping its own shard in fp32.

With half-life H samples and n samples in a step, d = 2^(-n/H):

    average ← d · average + (1 - d) · weights

Counting samples, not steps, makes the average independent of the batch size.
"""

from __future__ import annotations

import torch

from megatron.core.comm.collectives import Pending
from megatron.core.sharded_buffer import BufferPlacement, ShardedBuffer


class WeightAverage:
    """The average of one flat weight buffer, sharded over the buffer's group.

    Args:
        weights: REPLICATED or SHARDED weights [numel] or [numel/size]; the start of the average.
        half_life_samples: samples after which a weight's share in the average has halved.

    Raises:
        ValueError: a half-life that is not positive, or weights that are pending sums.
    """

    def __init__(self, weights: ShardedBuffer, *, half_life_samples: float) -> None:
        if not half_life_samples > 0:
            raise ValueError(f"half-life of {half_life_samples} samples: use a positive number")
        self._half_life_samples = half_life_samples
        self._shard = self._own(weights).float().clone()  # [numel/size]

    def update(self, weights: ShardedBuffer, *, samples: int) -> None:
        """Move the average towards `weights` after a step of `samples`; no communication."""
        kept = 0.5 ** (samples / self._half_life_samples)
        self._shard.lerp_(self._own(weights).float(), 1.0 - kept)

    def write_to(self, weights: ShardedBuffer) -> Pending:
        """Overwrite whole `weights` by the average, in their dtype; collective over their group.

        Returns the pending gather: the weights are whole once it has been waited for.
        """
        weights.shard().copy_(self._shard)
        weights.placement = BufferPlacement.SHARDED
        return weights.redistribute(BufferPlacement.REPLICATED)

    @staticmethod
    def _own(weights: ShardedBuffer) -> torch.Tensor:
        if weights.placement is BufferPlacement.PARTIAL:
            raise ValueError("weights are pending sums: reduce them before averaging")
        return weights.shard()
