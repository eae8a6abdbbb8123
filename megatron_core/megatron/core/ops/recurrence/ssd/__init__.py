# SPDX-License-Identifier: Apache-2.0
"""State-space duality (SSD) of Mamba-2: its engines, and the skip connection after it."""

from __future__ import annotations

import torch

from megatron.core.ops.backend_choice import accumulation_dtype, apply_function, choose

__all__ = ["add_skip"]


def add_skip(
    out: torch.Tensor, x: torch.Tensor, skip: torch.Tensor, *, implementation: str | None = None
) -> torch.Tensor:
    """Return out + D x, the skip connection of Mamba-2.

    Args:
        out, x: [t, H, V].
        skip: D [H].
        implementation: "reference", "triton" or None (by device).

    Returns:
        [t, H, V] in out's dtype.

    Raises:
        ValueError: incompatible shapes, or an implementation that is not available.
    """
    if x.ndim != 3 or out.shape != x.shape or skip.shape != x.shape[1:2]:
        raise ValueError(
            f"add_skip: out {tuple(out.shape)} and x {tuple(x.shape)} must be (tokens, heads, "
            f"features), skip {tuple(skip.shape)} a number for each head"
        )
    if choose(implementation, x, "add_skip") == "triton":
        from megatron.core.ops.recurrence.ssd import triton

        return apply_function(triton.AddSkip, out, x, skip)
    return apply_function(AddSkip, out, x, skip)


class AddSkip(torch.autograd.Function):
    """y = out + D x. dgrad: g to out, D g to x. wgrad: dD = sum of g x over tokens and channels.

    One pass forward; saves x and D.
    """

    @staticmethod
    def forward(ctx, out, x, skip):
        ctx.save_for_backward(x, skip)
        y = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        return torch.addcmul(out, x, skip[:, None], out=y)

    @staticmethod
    def backward(ctx, d_out):
        x, skip = ctx.saved_tensors
        d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.mul(d_out, skip[:, None], out=d_x)
        dtype = accumulation_dtype(d_out.dtype)
        d_skip = torch.linalg.vecdot(d_out.to(dtype), x.to(dtype)).sum(0)
        return d_out, d_x, d_skip.to(skip.dtype)
