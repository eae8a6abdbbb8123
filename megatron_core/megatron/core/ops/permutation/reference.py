# SPDX-License-Identifier: Apache-2.0
"""Permutations of rows in plain torch: the definition and the CPU path."""

from __future__ import annotations

import torch


def take(x: torch.Tensor, places: torch.Tensor, copies: int) -> torch.Tensor:
    """Return [r, h]: row i is row places[i] // copies of x [t, h]."""
    return x.index_select(0, places if copies == 1 else places // copies)


def total(y: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Return [t, h]: row t is the sum over j of weights[t, j] · y[slots[t, j]], fp32 inside.

    Args:
        y: [r, h].
        slots: int64 [t, k]; -1 adds nothing.
        weights: fp32 [t, k]; None is 1.
    """
    sums = torch.zeros(len(slots), y.shape[1], dtype=torch.float32, device=y.device)
    if len(y) == 0:
        return sums.to(y.dtype)
    for j in range(slots.shape[1]):
        factor = (slots[:, j] >= 0).float()  # [t]
        if weights is not None:
            factor = factor * weights[:, j]
        sums.addcmul_(y.index_select(0, slots[:, j].clamp(min=0)).float(), factor.unsqueeze(1))
    return sums.to(y.dtype)


class Take(torch.autograd.Function):
    """forward y[i] = x[places[i] // k]; dgrad the sum of dy over the slots of each row. Saves
    slots."""

    @staticmethod
    def forward(ctx, x, places, slots):
        ctx.save_for_backward(slots)
        return take(x, places, slots.shape[1])

    @staticmethod
    def backward(ctx, grad):
        (slots,) = ctx.saved_tensors
        return total(grad, slots, None), None, None


class Total(torch.autograd.Function):
    """forward out[t] = sum_j w[t, j] y[slots[t, j]]; dgrad dy[i] = w at places[i] · dout; the
    weights' dw[t, j] = dout[t] · y[slots[t, j]]. Saves y where there are weights."""

    @staticmethod
    def forward(ctx, y, weights, places, slots):
        ctx.save_for_backward(None if weights is None else y, weights, places, slots)
        return total(y, slots, weights)

    @staticmethod
    def backward(ctx, grad):
        y, weights, places, slots = ctx.saved_tensors
        rows = take(grad, places, slots.shape[1])  # [r, h]
        if weights is None:
            return rows, None, None, None
        dots = (rows.float() * y.float()).sum(-1)  # [r]
        d_weights = torch.zeros_like(weights)
        d_weights.view(-1).index_copy_(0, places, dots)
        factor = weights.reshape(-1).index_select(0, places).unsqueeze(1)  # [r, 1]
        return (rows.float() * factor).to(y.dtype), d_weights, None, None
