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

from megatron.core.ops.dispatch import accumulation_dtype, apply_function, choose
from megatron.core.ops.permutation import reference

__all__ = ["Permutation", "sum_rows", "take_rows"]


@dataclass(frozen=True, eq=False)
class Permutation:
    """Which row is a copy of which token.

    Args:
        places: int64 [r], each row's place t · k + j; no place has two rows.
        slots: int64 [t, k], each place's row, or -1.

    Raises:
        ValueError: other dtypes or shapes, or more rows than places.
    """

    places: torch.Tensor
    slots: torch.Tensor

    def __post_init__(self) -> None:
        places, slots = self.places, self.slots
        if places.dtype != torch.int64 or slots.dtype != torch.int64:
            raise ValueError(
                f"Permutation: places {places.dtype} and slots {slots.dtype} must be int64"
            )
        if places.ndim != 1 or slots.ndim != 2 or len(places) > slots.numel():
            raise ValueError(
                f"Permutation: places {tuple(places.shape)} must be [r] and slots"
                f" {tuple(slots.shape)} [t, k], with no more rows than places"
            )

    @staticmethod
    def of(places: torch.Tensor, tokens: int, copies: int) -> Permutation:
        """Return the permutation with these places, int64 [r], among tokens · copies."""
        slots = places.new_full((tokens * copies,), -1)
        slots[places] = torch.arange(len(places), device=places.device)
        return Permutation(places, slots.view(tokens, copies))


def take_rows(
    x: torch.Tensor, permutation: Permutation, *, implementation: str | None = None
) -> torch.Tensor:
    """Return [r, h], copies of the rows of x.

    Args:
        x: [t, h].
        implementation: "reference", "triton" or None (by device).

    Raises:
        ValueError: another number of rows than the permutation has tokens.
    """
    places, slots = permutation.places, permutation.slots
    if x.ndim != 2 or len(x) != len(slots):
        raise ValueError(
            f"take_rows: x {tuple(x.shape)} must be [{len(slots)}, h], one row a token"
        )
    if choose(implementation, x, "take_rows") == "triton":
        from megatron.core.ops.permutation import triton as kernels

        return apply_function(reference.Take, x, places, slots, kernels.take, kernels.total)
    return apply_function(reference.Take, x, places, slots, reference.take, reference.total)


def sum_rows(
    y: torch.Tensor,
    permutation: Permutation,
    *,
    weights: torch.Tensor | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Return [t, h] in y's dtype, the weighted sum of each token's rows, summed in fp32.

    Args:
        y: [r, h].
        weights: fp32 [t, k] (fp64 for fp64 rows); None is 1.
        implementation: "reference", "triton" or None (by device).

    Raises:
        ValueError: rows or weights that do not fit the permutation.
    """
    places, slots = permutation.places, permutation.slots
    if y.ndim != 2 or len(y) != len(places):
        raise ValueError(
            f"sum_rows: y {tuple(y.shape)} must be [{len(places)}, h], one row a place"
        )
    if weights is not None:
        dtype = accumulation_dtype(y.dtype)
        if weights.shape != slots.shape or weights.dtype != dtype:
            raise ValueError(
                f"sum_rows: weights {tuple(weights.shape)} {weights.dtype} must be"
                f" {tuple(slots.shape)} {dtype}, one for each place"
            )
    if choose(implementation, y, "sum_rows") == "triton":
        from megatron.core.ops.permutation import triton as kernels

        return apply_function(kernels.Total, y, weights, places, slots)
    return apply_function(reference.Total, y, weights, places, slots)
