# SPDX-License-Identifier: Apache-2.0
"""Permutations of rows: gather copies of tokens, and reduce them to weighted sums per token.

    take_rows   y[i] = x[sources[i] // k]                    [t, h] -> [r, h]
    sum_rows    out[t] = sum_j w[t, j] · y[slots[t, j]]      [r, h] -> [t, h]

Each is the other's backward. `sources` and `slots` are inverse index tables: copy t · k + j of
token t is in row slots[t, j]; -1 means that this copy has no row. With padding, some rows are
named by no slot; their contents and gradients are copies of an arbitrary token.

The plain PyTorch version computes the sums with `embedding_bag`: it gathers, weights and adds rows
in one pass, in fp32, while an index, a product and a sum would each write [r, h] to memory.
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
    """Index tables between rows and copies of tokens.

    Args:
        sources: int64 [r], each row's copy t · k + j; no copy has two rows.
        slots: int64 [t, k], each copy's row, or -1.
        padded: whether some rows may be padding, with arbitrary sources.

    Raises:
        ValueError: other dtypes or shapes, or more rows than copies without padding.
    """

    sources: torch.Tensor
    slots: torch.Tensor
    padded: bool = False

    def __post_init__(self) -> None:
        sources, slots = self.sources, self.slots
        if sources.dtype != torch.int64 or slots.dtype != torch.int64:
            raise ValueError(
                f"Permutation: sources {sources.dtype} and slots {slots.dtype} must be int64"
            )
        too_many = len(sources) > slots.numel() and not self.padded
        if sources.ndim != 1 or slots.ndim != 2 or too_many:
            raise ValueError(
                f"Permutation: sources {tuple(sources.shape)} must be [r] and slots"
                f" {tuple(slots.shape)} [t, k], with no more rows than copies"
            )

    @staticmethod
    def of(sources: torch.Tensor, tokens: int, copies: int) -> Permutation:
        """Return the permutation with these sources, int64 [r], among tokens · copies."""
        slots = sources.new_full((tokens * copies,), -1)
        slots[sources] = torch.arange(len(sources), device=sources.device)
        return Permutation(sources, slots.view(tokens, copies))

    @staticmethod
    def with_padding(
        sources: torch.Tensor, present: torch.Tensor, *, tokens: int, copies: int
    ) -> Permutation:
        """Return the permutation with sources int64 [r]; rows that are not present are padding.

        Args:
            present: bool [r].
        """
        padding_slot = tokens * copies  # a slot that padding may write to
        slots = sources.new_full((padding_slot + 1,), -1)
        rows = torch.arange(len(sources), device=sources.device)
        slots[sources.where(present, padding_slot)] = rows
        return Permutation(sources, slots[:-1].view(tokens, copies), padded=True)


def take_rows(
    x: torch.Tensor, permutation: Permutation, *, implementation: str | None = None
) -> torch.Tensor:
    """Return [r, h], a copy of a row of x for each row of the permutation.

    Args:
        x: [t, h].
        implementation: "reference", "triton" or None (by device).

    Raises:
        ValueError: number of rows differs from the permutation's number of tokens.
    """
    sources, slots = permutation.sources, permutation.slots
    if x.ndim != 2 or len(x) != len(slots):
        raise ValueError(
            f"take_rows: x {tuple(x.shape)} must be [{len(slots)}, h], one row per token"
        )
    if choose(implementation, x, "take_rows") == "triton":
        from megatron.core.ops.permutation import triton as kernels

        return apply_function(
            TakeRows, x, sources, slots, kernels.gather_copies, kernels.sum_copies
        )
    sum_fn = partial(sum_copies, has_missing=True) if permutation.padded else sum_copies
    return apply_function(TakeRows, x, sources, slots, gather_copies, sum_fn)


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
    sources, slots = permutation.sources, permutation.slots
    if y.ndim != 2 or len(y) != len(sources):
        raise ValueError(
            f"sum_rows: y {tuple(y.shape)} must be [{len(sources)}, h], one row per copy"
        )
    if weights is not None:
        dtype = accumulation_dtype(y.dtype)
        if weights.shape != slots.shape or weights.dtype != dtype:
            raise ValueError(
                f"sum_rows: weights {tuple(weights.shape)} {weights.dtype} must be "
                f"{tuple(slots.shape)} {dtype}, one per copy"
            )
    if choose(implementation, y, "sum_rows") == "triton":
        from megatron.core.ops.permutation import triton as kernels

        return apply_function(kernels.FusedSumRows, y, weights, sources, slots)
    return apply_function(SumRows, y, weights, sources, slots, permutation.padded)


# --- reference: plain torch


def gather_copies(x: torch.Tensor, sources: torch.Tensor, copies: int) -> torch.Tensor:
    """Return [r, h]: row i is row sources[i] // copies of x [t, h]."""
    return x.index_select(0, sources if copies == 1 else sources // copies)


def sum_copies(
    y: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor | None,
    *,
    has_missing: bool = False,
) -> torch.Tensor:
    """Return [t, h]: row t is the sum over j of weights[t, j] · y[slots[t, j]], fp32 inside.

    Args:
        y: [r, h].
        slots: int64 [t, k]; -1 adds nothing.
        weights: fp32 [t, k]; None is 1.
        has_missing: whether slots may be -1 although there are at least as many rows as slots.
    """
    if len(y) == 0 or slots.numel() == 0:
        return y.new_zeros(len(slots), y.shape[1])
    if not has_missing and len(y) >= slots.numel():
        return _bags(y, slots, weights)
    present = slots >= 0  # some copies have no row
    weights = present.to(y.dtype) if weights is None else weights * present
    out = _bags(y, slots.clamp(min=0), weights)
    # A token without rows summed row 0 (clamped) times 0, which is NaN if row 0 is NaN padding.
    return out.masked_fill_(~present.any(1, keepdim=True), 0.0) if has_missing else out


def _take_weighted(
    x: torch.Tensor, weights: torch.Tensor, sources: torch.Tensor, copies: int
) -> torch.Tensor:
    """Return [r, h]: row i is row sources[i] // copies of x [t, h] times weights[sources[i]].

    Args:
        weights: fp32 [t · copies].
    """
    if len(sources) == 0:
        return x.new_empty(0, x.shape[1])
    rows = sources // copies
    return _bags(x, rows.unsqueeze(1), weights.index_select(0, sources).unsqueeze(1))


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
        0,  # mode "sum"
        padding_idx=-1,
    ).view(tokens, copies)


def _bags(rows: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Return [m, h], the sum over j of weights[m, j] · rows[indices[m, j]]."""
    if weights is not None and weights.dtype is not rows.dtype:
        # embedding_bag needs weights of the rows' dtype: high + low has twice the significant bits.
        high = weights.to(rows.dtype)
        low = (weights - high.to(weights.dtype)).to(rows.dtype)
        indices, weights = torch.cat([indices, indices], 1), torch.cat([high, low], 1)
    return F.embedding_bag(indices, rows, mode="sum", per_sample_weights=weights)


class TakeRows(torch.autograd.Function):
    """forward y[i] = x[sources[i] // k]; dgrad dx[t] = sum_j dy[slots[t, j]]. Saves slots.

    `gather_fn` and `sum_fn` are `gather_copies` and `sum_copies` of this module or of `triton`.
    """

    @staticmethod
    def forward(ctx, x, sources, slots, gather_fn, sum_fn):
        ctx.save_for_backward(slots)
        ctx.sum_copies = sum_fn
        return gather_fn(x, sources, slots.shape[1])

    @staticmethod
    def backward(ctx, grad):
        (slots,) = ctx.saved_tensors
        return ctx.sum_copies(grad.contiguous(), slots, None), None, None, None, None


class SumRows(torch.autograd.Function):
    """forward out[t] = sum_j w[t, j] y[slots[t, j]]; dgrad dy[i] = w[sources[i]] · dout; weight
    gradient dw[t, j] = dout[t] · y[slots[t, j]]. Saves y if there are weights.
    """

    @staticmethod
    def forward(ctx, y, weights, sources, slots, padded):
        y = y.contiguous()
        ctx.save_for_backward(None if weights is None else y, weights, sources, slots)
        return sum_copies(y, slots, weights, has_missing=padded)

    @staticmethod
    def backward(ctx, grad):
        y, weights, sources, slots = ctx.saved_tensors
        if weights is None:
            return gather_copies(grad, sources, slots.shape[1]), None, None, None, None
        grad = grad.contiguous()
        d_y = _take_weighted(grad, weights.reshape(-1), sources, slots.shape[1])
        return d_y, dots(grad, y, slots), None, None, None
