# SPDX-License-Identifier: Apache-2.0
"""Parts: what the columns of a unit are, and the weights they meet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch


class PrologueWeights(NamedTuple):
    """What the prologue multiplies and adds, of u units and H heads.

    Args:
        weight: [u, c, W], of the convolution; the last column meets the token itself.
        bias: [u, c] or None.
        rates: [H], A_log.
        step_bias: [H], dt_bias.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    rates: torch.Tensor
    step_bias: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class UnitParts:
    """The columns of one unit, a group and its r heads; those that are convolved come first.

    Args:
        heads: r.
        key_channels: K.
        value_channels: V, of each head.
        query, key, value: the first column of each.
        steps: the first of r columns, from which a token's step, so its decay, is worked out.
        strengths: the first of r columns, from which a token's strength is; None: it is its step.
        normalised: whether queries and keys are scaled to length one.
        limits: least and most step, where it is the strength.
    """

    heads: int
    key_channels: int
    value_channels: int
    query: int
    key: int
    value: int
    steps: int
    strengths: int | None
    normalised: bool
    limits: tuple[float, float] = (0.0, math.inf)

    @staticmethod
    def delta(heads: int, key_channels: int, value_channels: int) -> UnitParts:
        """Return those of a gated delta net: query, key, r values, r betas, r alphas."""
        convolved = 2 * key_channels + heads * value_channels
        return UnitParts(
            heads=heads,
            key_channels=key_channels,
            value_channels=value_channels,
            query=0,
            key=key_channels,
            value=2 * key_channels,
            strengths=convolved,
            steps=convolved + heads,
            normalised=True,
        )

    @staticmethod
    def state_space(
        heads: int, key_channels: int, value_channels: int, limits: tuple[float, float]
    ) -> UnitParts:
        """Return those of Mamba-2: the channels x of r heads, B, C, r steps dt."""
        values = heads * value_channels
        return UnitParts(
            heads=heads,
            key_channels=key_channels,
            value_channels=value_channels,
            value=0,
            key=values,
            query=values + key_channels,
            strengths=None,
            steps=values + 2 * key_channels,
            normalised=False,
            limits=limits,
        )

    def with_heads(self, heads: int) -> UnitParts:
        """Return those of a unit of so many heads."""
        if heads == self.heads:
            return self
        sizes = heads, self.key_channels, self.value_channels
        if self.strengths is None:
            return UnitParts.state_space(*sizes, self.limits)
        return UnitParts.delta(*sizes)

    @property
    def convolved(self) -> int:
        """c, the columns that are convolved."""
        return 2 * self.key_channels + self.heads * self.value_channels

    @property
    def width(self) -> int:
        """w, all columns."""
        return self.convolved + self.heads * (1 if self.strengths is None else 2)
