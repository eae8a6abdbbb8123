# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation with a gate: of Gated DeltaNet behind it, of Mamba-2 before it."""

from __future__ import annotations

import torch

from megatron.core.ops.dispatch import choose
from megatron.core.ops.gated_rms_norm.reference import GatedRmsNorm

#: Whether the norm or the gate comes first.
NORM_FIRST, GATE_FIRST = "norm_first", "gate_first"


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    order: str = NORM_FIRST,
    group_size: int | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Normalise groups of the last dimension by their root mean square, and gate them.

    norm_first: y = rms(x) * w * silu(gate) (Yang et al. 2024, arXiv 2412.06464, section 3.4);
    gate_first: y = rms(x * silu(gate)) * w (Dao & Gu 2024, arXiv 2405.21060, section 7.2);
    rms(t) = t / sqrt(mean of t^2 over a group + eps), in fp32.
    Backward saves the inputs and one fp32 number a group.

    Args:
        x, gate: [..., n]; any strides.
        weight: [n].
        eps: added to the mean square.
        order: "norm_first" or "gate_first".
        group_size: features that are normalised together; None is n.
        implementation: "reference" or None.

    Returns:
        y [..., n] in x's dtype.

    Raises:
        ValueError: shapes, dtypes or options that do not fit.
    """
    op = "gated_rms_norm"
    if x.ndim < 2 or gate.shape != x.shape:
        raise ValueError(
            f"{op}: x {tuple(x.shape)} and gate {tuple(gate.shape)} must have one shape, of rows "
            "and features"
        )
    features = x.shape[-1]
    if weight.shape != (features,):
        raise ValueError(f"{op}: weight {tuple(weight.shape)} must be ({features},)")
    if not x.is_floating_point() or not gate.is_floating_point():
        raise ValueError(f"{op}: x is {x.dtype}, gate {gate.dtype}; give floating-point tensors")
    if eps < 0:
        raise ValueError(f"{op}: eps={eps} must not be negative")
    if order not in (NORM_FIRST, GATE_FIRST):
        raise ValueError(f"{op}: order={order!r}: use {NORM_FIRST} or {GATE_FIRST}")
    size = features if group_size is None else group_size
    if size < 1 or features % size:
        raise ValueError(f"{op}: group_size {size} must divide the {features} features")
    choose(implementation, x, op, has_triton=False)
    return GatedRmsNorm.apply(x, gate, weight, eps, order == GATE_FIRST, size)
