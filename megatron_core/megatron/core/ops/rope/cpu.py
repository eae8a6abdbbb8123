# SPDX-License-Identifier: Apache-2.0
"""Rotation of heads in plain PyTorch, in place on the halves of one buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.ops.backend_choice import accumulation_dtype


def join_heads(
    grads: Sequence[torch.Tensor],
    joint: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
) -> None:
    """Write gradients [s, b, n, d] into the projection's gradient, rotating the first two back."""
    targets = joint.split([grad.shape[2] for grad in grads], dim=2)
    for index, (grad, target) in enumerate(zip(grads, targets, strict=True)):
        if cos is not None and sin is not None and index < 2:
            rotate(grad, cos, sin, interleaved, sign=-1, out=target)
        else:
            target.copy_(grad)


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    *,
    sign: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate x [s, b, n, d] by `sign` times the table's angles [s, (b,) r/2]; see `apply_rope`.

    The result is written to `out` if it is not None.
    """
    dtype = accumulation_dtype(x.dtype)
    values, target = x.to(dtype), out
    if out is None or out.dtype != dtype:
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
    # [s, (b,) r/2] -> [s, b or 1, 1, r/2]
    shape = (*cos.shape[:-1], 1, cos.shape[-1]) if cos.ndim == 3 else (-1, 1, 1, cos.shape[-1])
    cos = cos.to(dtype).view(shape)
    sin = sin.to(dtype).view(shape)
    half = cos.shape[-1]
    rotated = 2 * half
    rotates_all = rotated == x.shape[-1]
    split, dim = ((half, 2), -1) if interleaved else ((2, half), -2)
    pairs = (*x.shape[:-1], *split)  # [s, b, n, r/2, 2] or [s, b, n, 2, r/2]
    # [s, b, n, r/2] each
    x1, x2 = (values if rotates_all else values[..., :rotated]).view(pairs).unbind(dim)
    y1, y2 = (out if rotates_all else out[..., :rotated]).view(pairs).unbind(dim)
    torch.mul(x1, cos, out=y1)
    y1.addcmul_(x2, sin, value=-sign)
    torch.mul(x2, cos, out=y2)
    y2.addcmul_(x1, sin, value=sign)
    if not rotates_all:
        out[..., rotated:] = values[..., rotated:]
    if target is None:
        return out.to(x.dtype)
    return out if target is out else target.copy_(out)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    """Rotate x [t, n, d] in place, in four operations.

    Args:
        cos, sin: [t, 1, r/2, 1] if `interleaved`, else [t, 1, 1, r/2].
    """
    rotated = 2 * cos.shape[1:].numel()
    split, dim = ((-1, 2), -1) if interleaved else ((2, -1), -2)
    features = x if rotated == x.shape[-1] else x[..., :rotated]
    values = features.to(accumulation_dtype(x.dtype))
    pairs = values.view(*x.shape[:-1], *split)  # [t, n, r/2, 2] or [t, n, 2, r/2]
    # The sine products must be complete before the pairs are scaled in place.
    products = pairs * sin
    pairs.mul_(cos)
    (x1, x2), (product1, product2) = pairs.unbind(dim), products.unbind(dim)
    x1.sub_(product2)
    x2.add_(product1)
    if values is not features:
        features.copy_(values)
