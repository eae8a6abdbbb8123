# SPDX-License-Identifier: Apache-2.0
"""RopeTable: the cosines and sines of a microbatch's positions, shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.ops.rope import RopeScaling, rotary_table


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021).

    Args:
        base: the longest wavelength is about 2π·base tokens.
        percent: share of each head's features that rotate (partial rotary).
        interleaved: pair neighbouring features instead of halves.
        scaling: stretch of the wavelengths for longer contexts; None leaves them.
    """

    base: float = 10000.0
    percent: float = 1.0
    interleaved: bool = False
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if not (self.base > 1.0 and 0.0 < self.percent <= 1.0):
            raise ValueError(
                f"rotary base {self.base} must be above 1 and rotary percent "
                f"{self.percent} in (0, 1]"
            )

    def rotary_features(self, head_size: int) -> int:
        """Return how many of a head's features rotate. Raises ValueError if that is odd."""
        features = int(head_size * self.percent)
        if features < 2 or features % 2:
            raise ValueError(
                f"{self.percent} of {head_size} features per head is {features}: rotary position "
                "embedding needs an even number of them"
            )
        return features


@dataclass(frozen=True, eq=False)
class RopeTable:
    """cos and sin, fp32 [s, r/2] or [s, b, r/2]."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool

    @staticmethod
    def of(config: RopeConfig, positions: torch.Tensor, head_size: int) -> RopeTable:
        """Make the table for positions int64 [s] or [s, b]."""
        cos, sin = rotary_table(
            positions,
            dim=config.rotary_features(head_size),
            base=config.base,
            scaling=config.scaling,
        )
        return RopeTable(cos, sin, config.interleaved)
