# SPDX-License-Identifier: Apache-2.0
"""Orthogonalisation of a matrix by Newton-Schulz iterations, and the scale of such an update.

With U = G / |G|_F (G transposed if it has more rows than columns), each step is

    A = U U^T,    U <- a U + (b A + c A^2) U,    (a, b, c) = (3.4445, -4.7750, 2.0315)

a quintic that takes every singular value s in (0, 1] to a s + b s^3 + c s^5 and so, after five
steps, to about 1 (0.68 to 1.21 for s above 0.002): G's singular vectors with all singular
values near 1. Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks".
"""

from __future__ import annotations

import math

import torch

#: a, b, c: the largest slope at 0 for which all singular values stay near 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
#: The least norm that is divided by, so that a gradient of zeros gives an update of zeros. A bound
#: and no addend: the scale of the gradient then does not matter at all.
LEAST_NORM = 1e-20
#: The root mean square of AdamW's updates, that mode "rms" matches (Liu et al. 2025, "Muon is
#: scalable for LLM training", arXiv 2502.16982, section 2.2).
ADAMW_RMS = 0.2


def orthogonalize(x: torch.Tensor, *, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the orthogonal matrix nearest to `x` [rows, cols], nearly, in `dtype`.

    Args:
        x: any dtype; its scale does not matter.
        dtype: of the products, bf16 as published or fp32.
    """
    a, b, c = COEFFICIENTS
    tall = x.shape[0] > x.shape[1]
    norm = torch.linalg.vector_norm(x, dtype=torch.float32).clamp(min=LEAST_NORM)
    u = (x / norm).to(dtype)
    u = u.mT if tall else u  # [m, n] with m <= n: the products of [m, m] are the small ones
    for _ in range(steps):
        gram = u @ u.mT  # [m, m]
        u = torch.addmm(u, torch.addmm(gram, gram, gram, beta=b, alpha=c), u, beta=a)
    return u.mT if tall else u


def update_scale(mode: str, rows: int, cols: int) -> float:
    """Return the factor of an orthogonal update of a weight [rows, cols] = [out, in].

    spectral        sqrt(max(rows, cols)): elements have root mean square 1
    shape_scaling   sqrt(max(1, rows / cols)): Jordan et al. 2024
    unit_rms_norm   sqrt(rows / cols): root mean squares of outputs move as those of inputs
    rms             0.2 sqrt(max(rows, cols)): elements have AdamW's root mean square, so that its
                    learning rates fit (arXiv 2502.16982, equation 4)

    Raises:
        ValueError: an unknown mode.
    """
    match mode:
        case "spectral":
            return math.sqrt(max(rows, cols))
        case "shape_scaling":
            return math.sqrt(max(1.0, rows / cols))
        case "unit_rms_norm":
            return math.sqrt(rows / cols)
        case "rms":
            return ADAMW_RMS * math.sqrt(max(rows, cols))
    raise ValueError(f"unknown scale mode {mode!r} of muon")
