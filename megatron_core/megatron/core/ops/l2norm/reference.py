# SPDX-License-Identifier: Apache-2.0
"""Scaling to length one in plain torch: the definition."""

from __future__ import annotations

import torch

from megatron.core.ops.dispatch import accumulation_dtype


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
