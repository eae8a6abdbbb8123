# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation in plain PyTorch, with few passes over memory on a CPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from megatron.core.ops.backend_choice import accumulation_dtype


def rms_norm_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (y, x + residual, the factor w [h], rstd [rows]); see `ops.rmsnorm.rms_norm`."""
    total = x if residual is None else x + residual
    dtype = accumulation_dtype(x.dtype)
    scale = weight.to(dtype) + 1 if zero_centered else weight.to(dtype)
    values = total.to(dtype)
    rstd = torch.linalg.vector_norm(values, dim=-1, keepdim=True).square_()  # [..., 1]
    rstd = rstd.div_(values.shape[-1]).add_(eps).rsqrt_()
    # x must not be overwritten if `values` is x itself: then the product allocates the output.
    y = values * rstd if values is total else values.mul_(rstd)
    return y.mul_(scale).to(x.dtype), total, scale, rstd.view(-1)


def rms_norm_inference(
    x: torch.Tensor, eps: float, zero_centered: bool, weight: torch.Tensor
) -> torch.Tensor:
    """Return the RMSNorm of x [t, h], fp32 or fp64: x w sqrt(h) / sqrt(|x|^2 + h eps).

    Only four operations: while weights stream through the cache of a CPU, each operation of a
    decode step costs microseconds, independent of its size.
    """
    size = x.shape[-1]
    length = torch.linalg.vector_norm(x, 2, -1, True).hypot_(_root(size * eps, x.dtype))  # [t, 1]
    y = torch.addcdiv(_root(0.0, x.dtype), x, length, value=math.sqrt(size))
    return y.addcmul_(y, weight) if zero_centered else y.mul_(weight)


@functools.cache
def _root(square: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the square root as a 0-dimensional tensor, cached by value and dtype."""
    return torch.tensor(math.sqrt(square), dtype=dtype)


def rms_norm_backward(
    grad_y: torch.Tensor,
    grad_total: torch.Tensor | None,
    saved: Sequence[torch.Tensor],
    zero_centered: bool,
    needs_grad: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of x + residual and of the weight [h], in fp32 or fp64.

    dt = rstd * (g w - t rstd^2 mean(g w t)) + d(new residual); wgrad: sum over rows of g t rstd.
    torch's layer-norm backward with mean zero computes the input gradient minus rstd * mean(g w),
    and the weight gradient, in one pass over memory; one matrix-vector product gives the missing
    term. All sums are in the dtype of `scale` (fp32 or fp64).

    Args:
        grad_y: [..., h].
        grad_total: [..., h] or None, added to the input gradient.
        saved: x + residual [..., h], the factor w [h] and rstd [rows], from `rms_norm_forward`.
        needs_grad: whether the weight needs a gradient.
    """
    total, scale, rstd = saved
    features = total.shape[-1]
    rows = total.reshape(-1, features)  # [t, h]
    grad_y = grad_y.reshape(-1, features).contiguous().to(scale.dtype)
    grad, grad_scale, _ = torch.ops.aten.native_layer_norm_backward(
        grad_y,
        rows.contiguous().to(scale.dtype),
        [features],
        torch.zeros_like(rstd)[:, None],
        rstd[:, None],
        scale,
        None,
        [True, needs_grad[0], False],
    )
    correction = torch.mv(grad_y, scale).mul_(rstd).div_(features)  # [t]
    grad.add_(correction[:, None])
    if grad_total is not None:
        grad.add_(grad_total.reshape(-1, features))
    return grad.to(rows.dtype).view(total.shape), grad_scale
