# SPDX-License-Identifier: Apache-2.0
"""The equation of rotary position embeddings (Su et al. 2021)."""

import torch


def apply_rope(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Multiply the complex pairs of x [s, b, n, d] by exp(i · angle), angles [s, 1, 1, r/2]."""
    rotated = 2 * angles.shape[-1]
    to_rotate = x[..., :rotated]
    pairs = to_rotate.unflatten(-1, (-1, 2)) if interleaved else to_rotate.unflatten(-1, (2, -1)).mT
    rotated_pairs = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    )
    rotated_pairs = rotated_pairs.flatten(-2) if interleaved else rotated_pairs.mT.flatten(-2)
    return torch.cat([rotated_pairs, x[..., rotated:]], -1)
