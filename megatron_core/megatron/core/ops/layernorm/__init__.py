# SPDX-License-Identifier: Apache-2.0
"""Layer normalisation, optionally fused with the preceding residual addition."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.core.ops.backend_choice import StoredWeight
from megatron.core.ops.layernorm import cpu
from megatron.core.ops.rmsnorm import NormOp, check_norm, normalise


def _layer_norm_kernels() -> tuple[Callable, Callable]:
    from megatron.core.ops.layernorm import triton as kernels

    return kernels.layer_norm_forward, kernels.layer_norm_backward


LAYER_NORM = NormOp(
    "layer_norm", (cpu.layer_norm_forward, cpu.layer_norm_backward), _layer_norm_kernels
)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | StoredWeight,
    bias: torch.Tensor | StoredWeight | None,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    zero_centered: bool = False,
    implementation: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Normalise the last dimension to mean 0 and variance 1 (Ba et al., 2016).

    y = (t - mean(t)) / sqrt(var(t) + eps) * w + bias, with t = x (+ residual); statistics in
    fp32. Backward saves t and two fp32 numbers per row.

    Args:
        x: [..., h].
        weight: [h]; `w` is `1 + weight` if `zero_centered`.
        bias: [h] or None.
        eps: added to the variance.
        residual: [..., h], same shape and dtype as `x`, added to x before the norm.
        zero_centered: whether the stored weight is the scale minus one.
        implementation: "reference", "triton" or None (by device).

    Returns:
        y [..., h] in x's dtype, or `(y, x + residual)` with a residual.

    Raises:
        ValueError: shapes, dtypes or `eps` that do not fit.
    """
    scale = weight.value if isinstance(weight, StoredWeight) else weight
    shift = bias.value if isinstance(bias, StoredWeight) else bias
    check_norm("layer_norm", x, scale, residual, eps=eps)
    if shift is not None and (shift.shape != scale.shape or shift.dtype != scale.dtype):
        raise ValueError(
            f"layer_norm: bias {tuple(shift.shape)} {shift.dtype} must match"
            f" weight {tuple(scale.shape)} {scale.dtype}"
        )
    return normalise(
        LAYER_NORM,
        x,
        weight,
        bias,
        residual=residual,
        eps=eps,
        zero_centered=zero_centered,
        implementation=implementation,
    )
