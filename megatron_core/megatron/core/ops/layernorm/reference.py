# SPDX-License-Identifier: Apache-2.0
"""Layer normalisation in plain torch: the definition and the CPU path."""

from __future__ import annotations

import torch

from megatron.core.ops.dispatch import accumulation_dtype


class LayerNorm(torch.autograd.Function):
    """y = (t - mean) * rstd * w + bias, t = x + residual.

    Forward: as above. dgrad: dt = rstd * (g w - mean(g w) - xhat mean(g w xhat)) + d(new
    residual), given to x and residual alike. wgrad: sum over rows of g xhat, and of g.
    Saves t, w, mean and rstd [rows]. torch's own kernels do the passes.
    """

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, zero_centered):
        total = x if residual is None else x + residual
        rows = total.reshape(-1, total.shape[-1]).contiguous()  # [t, h]
        wide = accumulation_dtype(x.dtype)
        scale = weight.to(wide) + 1 if zero_centered else weight.to(wide)
        shift = None if bias is None else bias.to(wide)
        y, mean, rstd = torch.ops.aten.native_layer_norm(rows, [rows.shape[-1]], scale, shift, eps)
        ctx.save_for_backward(total, scale, shift, mean, rstd)
        ctx.weight_dtype = weight.dtype
        ctx.set_materialize_grads(False)
        y = y.view(x.shape)
        if residual is None:
            return y, None
        return y, total

    @staticmethod
    def backward(ctx, grad_y, grad_total):
        total, scale, shift, mean, rstd = ctx.saved_tensors
        if grad_y is None:
            return grad_total, grad_total, None, None, None, None
        # torch sums the gradients of weight and bias over the rows in the dtype of the rows, which
        # for bfloat16 loses an eighth of them over 8,192 rows: give it wide ones.
        rows = total.reshape(-1, total.shape[-1]).contiguous().to(scale.dtype)
        grad, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad_y.reshape(rows.shape).contiguous().to(scale.dtype),
            rows,
            [rows.shape[-1]],
            mean,
            rstd,
            scale,
            shift,
            [True, ctx.needs_input_grad[2], ctx.needs_input_grad[3]],
        )
        grad = grad.to(total.dtype).view(total.shape)
        if grad_total is not None:
            grad = grad.add_(grad_total)
        if grad_weight is not None:
            grad_weight = grad_weight.to(ctx.weight_dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(ctx.weight_dtype)
        grad_residual = grad if ctx.needs_input_grad[1] else None
        return grad, grad_residual, grad_weight, grad_bias, None, None
