# SPDX-License-Identifier: Apache-2.0
"""The equation of RMS normalisation (Zhang & Sennrich 2019)."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x²) + eps) · w for x [..., h] and w [h]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
