# SPDX-License-Identifier: Apache-2.0
"""Scaling of vectors to length one, as gated delta nets do with queries and keys.

Plain torch on every device: on a GPU it is a part of the kernels of `recurrence_prologue`.

Scaling to length one in plain torch: the definition.
"""

from __future__ import annotations

import torch

from megatron.core.ops.dispatch import accumulation_dtype, apply_function


class L2Norm(torch.autograd.Function):
    """y = x * r, r = 1 / sqrt(sum(x^2) + eps).

    Forward: as above. dgrad: dx = r * (g - y sum(g y)). Saves y and r [...]; y is what the next op
    saves too.
    """

    @staticmethod
    def forward(ctx, x, eps):
        wide = x.to(accumulation_dtype(x.dtype))
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = scale.square_().add_(eps).rsqrt_()  # [..., 1]
        y = (wide * scale).to(x.dtype)
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, scale = ctx.saved_tensors
        y, wide = y.to(scale.dtype), grad.to(scale.dtype)
        along = (wide * y).sum(-1, keepdim=True)
        return torch.addcmul(wide, y, along, value=-1).mul_(scale).to(grad.dtype), None


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Divide the last dimension by its length: y = x / sqrt(sum(x^2) + eps).

    Sums are taken in fp32. Backward saves y and one number a row.

    Args:
        x: [..., K]; may be strided.
        eps: added to the sum of squares, so that zeros stay zeros.

    Returns:
        y [..., K] in x's dtype.

    Raises:
        ValueError: x without a dimension, not of floats, or a negative `eps`.
    """
    if x.ndim == 0 or not x.is_floating_point():
        raise ValueError(f"l2norm: x {tuple(x.shape)} {x.dtype}: give vectors of floats")
    if eps < 0:
        raise ValueError(f"l2norm: eps={eps} must not be negative")
    return apply_function(L2Norm, x, eps)
