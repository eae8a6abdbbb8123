# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation, with the residual addition that precedes it."""

from __future__ import annotations

import torch

from megatron.core.ops.dispatch import choose
from megatron.core.ops.rmsnorm import reference


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    zero_centered: bool = False,
    implementation: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Normalise the last dimension by its root mean square (Zhang & Sennrich, 2019).

    y = t / sqrt(mean(t^2) + eps) * w, with t = x (+ residual); statistics in fp32.
    Backward saves t and one fp32 number a row.

    Args:
        x: [..., h].
        weight: [h]; `w` is `1 + weight` when `zero_centered`.
        eps: added to the mean square.
        residual: [..., h], same shape and dtype as `x`, added to it first.
        zero_centered: store the weight as its distance from one.
        implementation: "reference", "triton" or None (by device).

    Returns:
        y [..., h] in x's dtype, or `(y, x + residual)` when `residual` is given.

    Raises:
        ValueError: shapes, dtypes or `eps` that do not fit.
    """
    check_norm("rms_norm", x, weight, residual, eps=eps)
    if choose(implementation, x, "rms_norm") == "triton":
        from megatron.core.ops.rmsnorm import triton as kernels

        pair = kernels.rms_norm_forward, kernels.rms_norm_backward
    else:
        pair = reference.rms_norm_forward, reference.rms_norm_backward
    if torch.is_grad_enabled():
        y, total = Normalise.apply(pair, x, residual, eps, zero_centered, weight)
    else:
        y, total, *_ = pair[0](x, residual, eps, zero_centered, weight)
    return y if residual is None else (y, total)


class Normalise(torch.autograd.Function):
    """y = norm(t), t = x + residual, by the two functions of an implementation.

    Forward and backward: those two. The gradient of t is given to x and residual alike. Saves t and
    whatever else forward returns after it.
    """

    @staticmethod
    def forward(ctx, pair, x, residual, eps, zero_centered, *weights):
        forward, ctx.differentiate = pair
        y, total, *kept = forward(x, residual, eps, zero_centered, *weights)
        ctx.save_for_backward(total, *kept)
        ctx.zero_centered, ctx.weight_dtype = zero_centered, weights[0].dtype
        ctx.set_materialize_grads(False)
        return y, None if residual is None else total

    @staticmethod
    def backward(ctx, grad_y, grad_total):
        _, _, needs_residual, _, _, *wanted = ctx.needs_input_grad
        grad, grads = grad_total, [None] * len(wanted)
        if grad_y is not None:
            grad, *grads = ctx.differentiate(
                grad_y, grad_total, ctx.saved_tensors, ctx.zero_centered, wanted
            )
        grads = [
            found.to(ctx.weight_dtype) if found is not None and want else None
            for found, want in zip(grads, wanted, strict=True)
        ]
        return None, grad, grad if needs_residual else None, None, None, *grads


def check_norm(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    *,
    eps: float,
) -> None:
    """Raise ValueError unless the arguments of a normalisation fit together."""
    if x.ndim == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: weight {tuple(weight.shape)} must have the shape of the last dimension of"
            f" x {tuple(x.shape)}"
        )
    if not x.is_floating_point():
        raise ValueError(f"{op}: x has dtype {x.dtype}; give a floating-point tensor")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"{op}: residual {tuple(residual.shape)} {residual.dtype} must match"
            f" x {tuple(x.shape)} {x.dtype}"
        )
    if eps < 0:
        raise ValueError(f"{op}: eps={eps} must not be negative")
