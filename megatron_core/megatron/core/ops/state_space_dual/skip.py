# SPDX-License-Identifier: Apache-2.0
"""What a token adds to its own output beside the state: out + D x, one number D a head."""

from __future__ import annotations

import torch

from megatron.core.ops.dispatch import accumulation_dtype


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
    def backward(ctx, grad):
        x, skip = ctx.saved_tensors
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.mul(grad, skip[:, None], out=grad_x)
        wide = accumulation_dtype(grad.dtype)
        grad_skip = torch.linalg.vecdot(grad.to(wide), x.to(wide)).sum(0)
        return grad, grad_x, grad_skip.to(skip.dtype)
