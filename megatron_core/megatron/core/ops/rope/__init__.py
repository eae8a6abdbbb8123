# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: frequencies once a model, a table of cosines and sines once a step, a
rotation of queries and keys per layer."""

from __future__ import annotations

import torch

from megatron.core.ops.dispatch import choose
from megatron.core.ops.rope import reference
from megatron.core.ops.rope.reference import (
    RopeScaling,
    inverse_frequencies,
    rotary_table,
    tabulate,
)

__all__ = ["RopeScaling", "apply_rope", "inverse_frequencies", "rotary_table", "tabulate"]


def apply_rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    implementation: str | None = None,
) -> torch.Tensor:
    """Rotate the first features of every head by its position's angle (Su et al., 2021).

    Pair i is features (i, i + r/2) of the first r = 2 cos.shape[-1], or (2i, 2i + 1) when
    `interleaved`; the features from r on pass through. Backward is the rotation by the negative
    angle and saves only the table.

    Args:
        x: [s, b, n, d].
        cos: fp32 [s, r/2] or [s, b, r/2], from `rotary_table`.
        sin: same shape.
        interleaved: pair neighbouring features instead of halves.
        implementation: "reference", "triton" or None (by device).

    Returns:
        [s, b, n, d] in x's dtype; the arithmetic is fp32.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check(x, cos, sin)
    if choose(implementation, x, "apply_rope") == "triton":
        from megatron.core.ops.rope import triton as kernels

        rotate = kernels.rotate
    else:
        rotate = reference.rotate
    if torch.is_grad_enabled():
        return reference.Rope.apply(x, cos, sin, interleaved, rotate)
    return rotate(x, cos, sin, interleaved)


def _check(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Raise ValueError unless the table fits x."""
    if x.ndim != 4:
        raise ValueError(f"apply_rope: x {tuple(x.shape)} must be [s, b, n, d]")
    if cos.shape != sin.shape or cos.shape[:-1] not in (x.shape[:1], x.shape[:2]):
        raise ValueError(
            f"apply_rope: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must both be"
            f" [s, r/2] or [s, b, r/2] for x {tuple(x.shape)}"
        )
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"apply_rope: the table rotates {2 * cos.shape[-1]} features but heads have"
            f" {x.shape[-1]}; make rotary_table with a smaller dim"
        )
