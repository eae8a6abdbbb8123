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

        function, forward = kernels.RmsNorm, kernels.rms_norm_forward
    else:
        function, forward = reference.RmsNorm, reference.rms_norm_forward
    if torch.is_grad_enabled():
        forward = function.apply
    y, total, *_ = forward(x, residual, weight, eps, zero_centered)
    return y if residual is None else (y, total)


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
