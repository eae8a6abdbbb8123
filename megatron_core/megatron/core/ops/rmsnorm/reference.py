# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation in plain torch: the definition, and few passes over memory on a CPU."""

from __future__ import annotations

import torch

from megatron.core.ops.dispatch import accumulation_dtype


class RmsNorm(torch.autograd.Function):
    """y = t * rstd * w, t = x + residual, rstd = 1 / sqrt(mean(t^2) + eps).

    Forward: as above. dgrad: dt = rstd * (g w - t rstd^2 mean(g w t)) + d(new residual), given to
    x and residual alike. wgrad: sum over rows of g t rstd. Saves t, w and rstd [rows].
    """

    @staticmethod
    def forward(ctx, x, residual, weight, eps, zero_centered):
        y, total, scale, rstd = rms_norm_forward(x, residual, weight, eps, zero_centered)
        ctx.save_for_backward(total, scale, rstd)
        ctx.weight_dtype = weight.dtype
        ctx.set_materialize_grads(False)
        if residual is None:
            return y, None
        return y, total

    @staticmethod
    def backward(ctx, grad_y, grad_total):
        total, scale, rstd = ctx.saved_tensors
        if grad_y is None:
            return grad_total, grad_total, None, None, None
        shape = total.shape
        needs_weight = ctx.needs_input_grad[2]
        grad_x, grad_weight = rms_norm_backward(
            grad_y.reshape(-1, shape[-1]),
            total.reshape(-1, shape[-1]),
            scale,
            rstd,
            needs_weight=needs_weight,
            grad_total=None if grad_total is None else grad_total.reshape(-1, shape[-1]),
        )
        grad_x = grad_x.view(shape)
        if grad_weight is not None:
            grad_weight = grad_weight.to(ctx.weight_dtype)
        return grad_x, grad_x if ctx.needs_input_grad[1] else None, grad_weight, None, None


def rms_norm_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    zero_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (y, x + residual, the factor w [h], rstd [rows]); see `ops.rmsnorm.rms_norm`."""
    total = x if residual is None else x + residual
    wide = accumulation_dtype(x.dtype)
    scale = weight.to(wide) + 1 if zero_centered else weight.to(wide)
    values = total.to(wide)
    rstd = torch.linalg.vector_norm(values, dim=-1, keepdim=True).square_()  # [..., 1]
    rstd = rstd.div_(values.shape[-1]).add_(eps).rsqrt_()
    # Keep the input: the first product makes the output then.
    y = values * rstd if values is total else values.mul_(rstd)
    return y.mul_(scale).to(x.dtype), total, scale, rstd.view(-1)


def rms_norm_backward(
    grad_y: torch.Tensor,
    rows: torch.Tensor,
    scale: torch.Tensor,
    rstd: torch.Tensor,
    *,
    needs_weight: bool = True,
    grad_total: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Differentiate y = rows * rstd * scale, rstd being a function of rows.

    torch's layer-norm backward with the mean set to zero makes the input gradient less
    rstd * mean(g w) and the weight gradient in one pass over memory; one matrix-vector product
    gives the missing term. All sums are taken in the dtype of `scale` (fp32 or fp64).

    Args:
        grad_y: [t, h].
        rows: [t, h], what was normalised.
        scale: [h], in the accumulation dtype.
        rstd: [t], in the accumulation dtype.
        needs_weight: also make the weight gradient.
        grad_total: [t, h] or None, added to the input gradient.

    Returns:
        (gradient of rows [t, h] in its dtype, gradient of scale [h] or None).
    """
    grad_y = grad_y.contiguous().to(scale.dtype)
    features = rows.shape[-1]
    grad, grad_scale, _ = torch.ops.aten.native_layer_norm_backward(
        grad_y,
        rows.contiguous().to(scale.dtype),
        [features],
        torch.zeros_like(rstd)[:, None],
        rstd[:, None],
        scale,
        None,
        [True, needs_weight, False],
    )
    missing = torch.mv(grad_y, scale).mul_(rstd).div_(features)  # [t]
    grad.add_(missing[:, None])
    if grad_total is not None:
        grad.add_(grad_total)
    return grad.to(rows.dtype), grad_scale
