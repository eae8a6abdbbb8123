# SPDX-License-Identifier: Apache-2.0
"""The equation of layer normalisation (Ba et al. 2016)."""

import torch


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, eps: float
) -> torch.Tensor:
    """Return (x - mean(x)) / sqrt(var(x) + eps) · w + bias for x [..., h], w and bias [h]."""
    centered = x - x.mean(-1, keepdim=True)
    y = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps) * weight
    return y if bias is None else y + bias
