# SPDX-License-Identifier: Apache-2.0
"""Layer normalisation, with the residual addition that precedes it."""

from __future__ import annotations

import torch

from megatron.core.ops.dispatch import choose
from megatron.core.ops.layernorm import reference
from megatron.core.ops.rmsnorm import Normalise, check_norm


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    zero_centered: bool = False,
    implementation: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Normalise the last dimension to mean 0 and variance 1 (Ba et al., 2016).

    y = (t - mean(t)) / sqrt(var(t) + eps) * w + bias, with t = x (+ residual); statistics in
    fp32. Backward saves t and two fp32 numbers a row.

    Args:
        x: [..., h].
        weight: [h]; `w` is `1 + weight` when `zero_centered`.
        bias: [h] or None.
        eps: added to the variance.
        residual: [..., h], same shape and dtype as `x`, added to it first.
        zero_centered: store the weight as its distance from one.
        implementation: "reference", "triton" or None (by device).

    Returns:
        y [..., h] in x's dtype, or `(y, x + residual)` when `residual` is given.

    Raises:
        ValueError: shapes, dtypes or `eps` that do not fit.
    """
    check_norm("layer_norm", x, weight, residual, eps=eps)
    if bias is not None and (bias.shape != weight.shape or bias.dtype != weight.dtype):
        raise ValueError(
            f"layer_norm: bias {tuple(bias.shape)} {bias.dtype} must match"
            f" weight {tuple(weight.shape)} {weight.dtype}"
        )
    if choose(implementation, x, "layer_norm") == "triton":
        from megatron.core.ops.layernorm import triton as kernels

        pair = kernels.layer_norm_forward, kernels.layer_norm_backward
    else:
        pair = reference.layer_norm_forward, reference.layer_norm_backward
    if torch.is_grad_enabled():
        y, total = Normalise.apply(pair, x, residual, eps, zero_centered, weight, bias)
    else:
        y, total, *_ = pair[0](x, residual, eps, zero_centered, weight, bias)
    return y if residual is None else (y, total)
