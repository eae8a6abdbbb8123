# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding in plain torch: the definition, and four half passes on a CPU."""

from __future__ import annotations

import torch

from megatron.core.ops.dispatch import accumulation_dtype


class Rope(torch.autograd.Function):
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) for each feature pair.

    Forward: as above. dgrad: the same with -sin. No weights. Saves the table.
    """

    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return rotate(x, cos, sin, interleaved=interleaved)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return rotate(grad, cos, sin, interleaved=ctx.interleaved, sign=-1), None, None, None


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    sign: int = 1,
) -> torch.Tensor:
    """Rotate x [s, b, n, d] by `sign` times the table's angles [s, (b,) r/2]; see `apply_rope`."""
    wide = accumulation_dtype(x.dtype)
    values = x.to(wide)
    out = torch.empty(x.shape, dtype=wide, device=x.device)
    # [s, (b,) r/2] -> [s, b or 1, 1, r/2]
    shape = (*cos.shape[:-1], 1, cos.shape[-1]) if cos.ndim == 3 else (-1, 1, 1, cos.shape[-1])
    cos = cos.to(wide).view(shape)
    sin = sin.to(wide).view(shape)
    rotated = 2 * cos.shape[-1]
    first, second = _pairs(values[..., :rotated], interleaved)  # [s, b, n, r/2] each
    out_first, out_second = _pairs(out[..., :rotated], interleaved)
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin, value=sign)
    if rotated < x.shape[-1]:
        out[..., rotated:] = values[..., rotated:]
    return out.to(x.dtype)


def _pairs(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """View [..., r] as the first and second features of each pair, [..., r/2]."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second
