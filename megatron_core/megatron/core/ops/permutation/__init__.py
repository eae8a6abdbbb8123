# SPDX-License-Identifier: Apache-2.0
"""Permutations of rows: copies of tokens to where they are wanted, and their weighted sums back.

    take_rows   y[i] = x[places[i] // k]                     [t, h] -> [r, h]
    sum_rows    out[t] = sum_j w[t, j] · y[slots[t, j]]      [r, h] -> [t, h]

They are each other's backward. `places` and `slots` say the same thing from either side: place
t · k + j has its copy in row slots[t, j], or none if that is -1. With padding there are rows that
no slot names: their copies, and their gradients, are of any token.

In plain torch, which a CPU uses, sums are `embedding_bag`s: rows are gathered, weighted and added
in one pass, in fp32, where an index, a product and a sum would each write [r, h] to memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from megatron.core.ops.backend_choice import accumulation_dtype, apply_function, choose

__all__ = ["Permutation", "sum_rows", "take_rows"]


@dataclass(frozen=True, eq=False)
class Permutation:
    """Which row is a copy of which token.

    Args:
        places: int64 [r], each row's place t · k + j; no place has two rows.
        slots: int64 [t, k], each place's row, or -1.
        padded: some rows may be padding, with any place.

    Raises:
        ValueError: other dtypes or shapes, or more rows than places without padding.
    """

    places: torch.Tensor
    slots: torch.Tensor
    padded: bool = False

    def __post_init__(self) -> None:
        places, slots = self.places, self.slots
        if places.dtype != torch.int64 or slots.dtype != torch.int64:
            raise ValueError(
                f"Permutation: places {places.dtype} and slots {slots.dtype} must be int64"
            )
        too_many = len(places) > slots.numel() and not self.padded
        if places.ndim != 1 or slots.ndim != 2 or too_many:
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

    @staticmethod
    def with_padding(
        places: torch.Tensor, present: torch.Tensor, *, tokens: int, copies: int
    ) -> Permutation:
        """Return the permutation with places int64 [r], of which those that are not present, bool
        [r], are padding."""
        spare = tokens * copies  # a slot that padding may write to
        slots = places.new_full((spare + 1,), -1)
        rows = torch.arange(len(places), device=places.device)
        slots[places.where(present, spare)] = rows
        return Permutation(places, slots[:-1].view(tokens, copies), padded=True)


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

        return apply_function(Take, x, places, slots, kernels.take, kernels.total)
    back = partial(total, missing=True) if permutation.padded else total
    return apply_function(Take, x, places, slots, take, back)


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
    return apply_function(Total, y, weights, places, slots, permutation.padded)


# --- reference: plain torch


def take(x: torch.Tensor, places: torch.Tensor, copies: int) -> torch.Tensor:
    """Return [r, h]: row i is row places[i] // copies of x [t, h]."""
    return x.index_select(0, places if copies == 1 else places // copies)


def total(
    y: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor | None,
    *,
    missing: bool = False,
) -> torch.Tensor:
    """Return [t, h]: row t is the sum over j of weights[t, j] · y[slots[t, j]], fp32 inside.

    Args:
        y: [r, h].
        slots: int64 [t, k]; -1 adds nothing.
        weights: fp32 [t, k]; None is 1.
        missing: slots may be -1 although there are as many rows as slots, or more.
    """
    if len(y) == 0 or slots.numel() == 0:
        return y.new_zeros(len(slots), y.shape[1])
    if not missing and len(y) >= slots.numel():
        return _bags(y, slots, weights)
    there = slots >= 0  # some places have no row
    weights = there.to(y.dtype) if weights is None else weights * there
    sums = _bags(y, slots.clamp(min=0), weights)
    # With no row at all the first one is padding, which may be NaN.
    return sums.masked_fill_(~there.any(1, keepdim=True), 0.0) if missing else sums


def _take_weighted(
    x: torch.Tensor, weights: torch.Tensor, places: torch.Tensor, copies: int
) -> torch.Tensor:
    """Return [r, h]: row i is row places[i] // copies of x [t, h] times weights[places[i]].

    Args:
        weights: fp32 [t · copies].
    """
    if len(places) == 0:
        return x.new_empty(0, x.shape[1])
    rows = places // copies
    return _bags(x, rows.unsqueeze(1), weights.index_select(0, places).unsqueeze(1))


def dots(grad: torch.Tensor, y: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return fp32 [t, k], grad[t] · y[slots[t, j]]; 0 where the slot is -1."""
    dtype = accumulation_dtype(y.dtype)
    if len(y) == 0 or slots.numel() == 0:
        return torch.zeros(slots.shape, dtype=dtype, device=y.device)
    tokens, copies = slots.shape
    bags = torch.arange(tokens, device=y.device)
    return torch.ops.aten._embedding_bag_per_sample_weights_backward(
        grad.to(dtype),
        y.to(dtype),
        slots.reshape(-1),
        bags * copies,
        bags.repeat_interleave(copies),
        0,  # sums
        padding_idx=-1,
    ).view(tokens, copies)


def _bags(rows: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Return [m, h], the sum over j of weights[m, j] · rows[indices[m, j]]."""
    if weights is not None and weights.dtype is not rows.dtype:
        # The weights must have the rows' dtype: two narrow numbers hold twice the bits of one.
        high = weights.to(rows.dtype)
        low = (weights - high.to(weights.dtype)).to(rows.dtype)
        indices, weights = torch.cat([indices, indices], 1), torch.cat([high, low], 1)
    return F.embedding_bag(indices, rows, mode="sum", per_sample_weights=weights)


class Take(torch.autograd.Function):
    """forward y[i] = x[places[i] // k]; dgrad the sum of dy over the slots of each row. Saves
    slots. `take` and `total` are those of this module or of `triton`."""

    @staticmethod
    def forward(ctx, x, places, slots, take, total):
        ctx.save_for_backward(slots)
        ctx.total = total
        return take(x, places, slots.shape[1])

    @staticmethod
    def backward(ctx, grad):
        (slots,) = ctx.saved_tensors
        return ctx.total(grad.contiguous(), slots, None), None, None, None, None


class Total(torch.autograd.Function):
    """forward out[t] = sum_j w[t, j] y[slots[t, j]]; dgrad dy[i] = w at places[i] · dout; the
    weights' dw[t, j] = dout[t] · y[slots[t, j]]. Saves y where there are weights."""

    @staticmethod
    def forward(ctx, y, weights, places, slots, padded):
        y = y.contiguous()
        ctx.save_for_backward(None if weights is None else y, weights, places, slots)
        return total(y, slots, weights, missing=padded)

    @staticmethod
    def backward(ctx, grad):
        y, weights, places, slots = ctx.saved_tensors
        if weights is None:
            return take(grad, places, slots.shape[1]), None, None, None, None
        grad = grad.contiguous()
        d_y = _take_weighted(grad, weights.reshape(-1), places, slots.shape[1])
        return d_y, dots(grad, y, slots), None, None, None
