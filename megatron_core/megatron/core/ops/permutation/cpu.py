# SPDX-License-Identifier: Apache-2.0
"""Permutations of rows in plain PyTorch.

The sums are computed with `embedding_bag`: it gathers, weights and adds rows in one pass, in fp32,
while an index, a product and a sum would each write [r, h] to memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.core.ops.backend_choice import accumulation_dtype


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


def take_weighted(
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
