# SPDX-License-Identifier: Apache-2.0
"""Permutations of rows: copies of tokens to where they are wanted, and their weighted sums back.

    take_rows   y[i] = x[places[i] // k]                     [t, h] -> [r, h]
    sum_rows    out[t] = sum_j w[t, j] · y[slots[t, j]]      [r, h] -> [t, h]

They are each other's backward. `places` and `slots` say the same thing from either side: place
t · k + j has its copy in row slots[t, j], or none if that is -1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.ops.permutation import reference

__all__ = ["Permutation", "sum_rows", "take_rows"]


@dataclass(frozen=True, eq=False)
class Permutation:
    """Which row is a copy of which token.

    Args:
        places: int64 [r], each row's place t · k + j.
        slots: int64 [t, k], each place's row, or -1.
    """

    places: torch.Tensor
    slots: torch.Tensor

    @staticmethod
    def of(places: torch.Tensor, tokens: int, copies: int) -> Permutation:
        """Return the permutation with these places, int64 [r], among tokens · copies."""
        slots = places.new_full((tokens * copies,), -1)
        slots[places] = torch.arange(len(places), device=places.device)
        return Permutation(places, slots.view(tokens, copies))


def take_rows(x: torch.Tensor, permutation: Permutation) -> torch.Tensor:
    """Return [r, h], copies of the rows of x [t, h]."""
    return reference.Take.apply(x, permutation.places, permutation.slots)


def sum_rows(
    y: torch.Tensor, permutation: Permutation, *, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return [t, h] in y's dtype, the weighted sum of each token's rows of y [r, h].

    Args:
        weights: fp32 [t, k]; None is 1.
    """
    return reference.Total.apply(y, weights, permutation.places, permutation.slots)
