# SPDX-License-Identifier: Apache-2.0
"""Scaling of vectors to length one, as gated delta nets do with queries and keys.

Plain torch on every device: on a GPU it is a part of the kernels of `recurrence_prologue`.
"""

from __future__ import annotations

import torch

from megatron.core.ops.l2norm import reference


def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Divide the last dimension by its length: y = x / sqrt(sum(x^2) + eps).

    Sums are taken in fp32. Backward saves y and one number a row.

    Args:
        x: [..., K]; may be strided.
        eps: added to the sum of squares, so that zeros stay zeros.

    Returns:
        y [..., K] in x's dtype.

    Raises:
        ValueError: x without a dimension, not of floats, or a negative `eps`.
    """
    if x.ndim == 0 or not x.is_floating_point():
        raise ValueError(f"l2norm: x {tuple(x.shape)} {x.dtype}: give vectors of floats")
    if eps < 0:
        raise ValueError(f"l2norm: eps={eps} must not be negative")
    return reference.L2Norm.apply(x, eps)
