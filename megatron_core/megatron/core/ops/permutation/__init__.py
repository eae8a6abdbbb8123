# SPDX-License-Identifier: Apache-2.0
"""Permutations of rows: gather copies of tokens, and reduce them to weighted sums per token.

    take_rows   y[i] = x[sources[i] // k]                    [t, h] -> [r, h]
    sum_rows    out[t] = sum_j w[t, j] · y[slots[t, j]]      [r, h] -> [t, h]

Each is the other's backward. `sources` and `slots` are inverse index tables: copy t · k + j of
token t is in row slots[t, j]; -1 means that this copy has no row. With padding, some rows are
named by no slot; their contents and gradients are copies of an arbitrary token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from megatron.core.ops.backend_choice import accumulation_dtype, apply_function, choose
from megatron.core.ops.permutation import cpu

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
    sum_fn = partial(cpu.sum_copies, has_missing=True) if permutation.padded else cpu.sum_copies
    return apply_function(TakeRows, x, sources, slots, cpu.gather_copies, sum_fn)


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


class TakeRows(torch.autograd.Function):
    """forward y[i] = x[sources[i] // k]; dgrad dx[t] = sum_j dy[slots[t, j]]. Saves slots.

    `gather_fn` and `sum_fn` are `gather_copies` and `sum_copies` of `cpu` or of `triton`.
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
        return cpu.sum_copies(y, slots, weights, has_missing=padded)

    @staticmethod
    def backward(ctx, grad):
        y, weights, sources, slots = ctx.saved_tensors
        if weights is None:
            return cpu.gather_copies(grad, sources, slots.shape[1]), None, None, None, None
        grad = grad.contiguous()
        d_y = cpu.take_weighted(grad, weights.reshape(-1), sources, slots.shape[1])
        return d_y, cpu.dots(grad, y, slots), None, None, None
