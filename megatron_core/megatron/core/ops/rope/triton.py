# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding in Triton: one program a token, all its heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    batch,
    heads,
    features,
    pairs,
    x_stride_s,
    x_stride_b,
    x_stride_n,
    sign,
    PER_SAMPLE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    """Rotate the pairs of every head of one token and copy the features behind them."""
    token = tl.program_id(0).to(tl.int64)
    position, sample = token // batch, token % batch
    table_row = token if PER_SAMPLE else position
    pair = tl.arange(0, PAIRS)
    in_table = pair < pairs
    cos = tl.load(cos_ptr + table_row * pairs + pair, mask=in_table, other=0.0)[None, :]
    sin = tl.load(sin_ptr + table_row * pairs + pair, mask=in_table, other=0.0)[None, :] * sign
    head = tl.arange(0, HEADS).to(tl.int64)[:, None]
    inside = (head < heads) & in_table[None, :]
    source = x_ptr + position * x_stride_s + sample * x_stride_b + head * x_stride_n
    target = out_ptr + (token * heads + head) * features
    if INTERLEAVED:
        first, second = 2 * pair[None, :], 2 * pair[None, :] + 1
    else:
        first, second = pair[None, :], pair[None, :] + pairs
    x1 = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(source + second, mask=inside, other=0.0).to(tl.float32)
    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin
    tl.store(target + first, y1.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(target + second, y2.to(out_ptr.dtype.element_ty), mask=inside)
    if REST > 0:
        rest = 2 * pairs + tl.arange(0, REST)[None, :]
        behind = (head < heads) & (rest < features)
        tl.store(target + rest, tl.load(source + rest, mask=behind, other=0.0), mask=behind)


class Rope(torch.autograd.Function):
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin); dgrad the same with -sin. Saves the table."""

    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return rotate(x, cos, sin, interleaved, 1.0)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return rotate(grad, cos, sin, ctx.interleaved, -1.0), None, None, None


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, sign: float
) -> torch.Tensor:
    """Rotate x [s, b, n, d], last dimension dense, by `sign` times the table's angles."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    sequence, batch, heads, features = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    pairs = cos.shape[-1]
    rest = features - 2 * pairs
    rope_kernel[(sequence * batch,)](
        x,
        cos,
        sin,
        out,
        batch,
        heads,
        features,
        pairs,
        x.stride(0),
        x.stride(1),
        x.stride(2),
        sign,
        PER_SAMPLE=cos.ndim == 3,
        INTERLEAVED=interleaved,
        HEADS=triton.next_power_of_2(heads),
        PAIRS=triton.next_power_of_2(pairs),
        REST=triton.next_power_of_2(rest) if rest else 0,
        num_warps=4,
    )
    return out
