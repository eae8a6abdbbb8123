# SPDX-License-Identifier: Apache-2.0
"""What state-space duality has of its own in Triton: sums of decays over chunks, and D x.

out + D x in Triton, one pass over memory each way, a tile of tokens of one head a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.ops.chunked_recurrence.kernels import Tiles
from megatron.core.ops.launches import Launches, cdiv
from megatron.core.ops.recurrence import LOWEST_DECAY
from megatron.core.ops.strided_rows import row_tile


@triton.jit
def tile_of_tokens(
    heads,
    tokens,
    features,
    stride_t,
    stride_h,
    x_stride_t,
    x_stride_h,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Return this program's head, where its tile [ROWS, FEATURES] lies in three tensors, its mask.

    They are one with strides (token, head), x, and one of [t, H, V] without gaps. The head comes
    before the tokens, so that programs beside each other work on what lies together.
    """
    head = (tl.program_id(0) % heads).to(tl.int64)
    token = (tl.program_id(0) // heads).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    feature = tl.arange(0, FEATURES)
    mask = (token < tokens)[:, None] & (feature < features)[None, :]
    place = token[:, None] * stride_t + (head * stride_h + feature)[None, :]
    x_place = token[:, None] * x_stride_t + (head * x_stride_h + feature)[None, :]
    dense = token[:, None] * heads * features + (head * features + feature)[None, :]
    return head, place, x_place, dense, mask


@triton.jit(do_not_specialize=["tokens"])
def add_skip_kernel(
    out_ptr,
    x_ptr,
    skip_ptr,
    y_ptr,
    tokens,
    heads,
    features,
    out_stride_t,
    out_stride_h,
    x_stride_t,
    x_stride_h,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Store y [t, H, V] = out + D x."""
    head, place, x_place, dense, mask = tile_of_tokens(
        *(heads, tokens, features, out_stride_t, out_stride_h, x_stride_t, x_stride_h),
        *(ROWS, FEATURES),
    )
    out = tl.load(out_ptr + place, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + x_place, mask=mask, other=0.0).to(tl.float32)
    y = out + tl.load(skip_ptr + head).to(tl.float32) * x
    tl.store(y_ptr + dense, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def add_skip_backward_kernel(
    grad_ptr,
    x_ptr,
    skip_ptr,
    grad_x_ptr,
    partial_ptr,
    tokens,
    heads,
    features,
    grad_stride_t,
    grad_stride_h,
    x_stride_t,
    x_stride_h,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Store the gradient of x [t, H, V], D g, and the sum of g x over this program's tile."""
    head, place, x_place, dense, mask = tile_of_tokens(
        *(heads, tokens, features, grad_stride_t, grad_stride_h, x_stride_t, x_stride_h),
        *(ROWS, FEATURES),
    )
    grad = tl.load(grad_ptr + place, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + x_place, mask=mask, other=0.0).to(tl.float32)
    grad_x = tl.load(skip_ptr + head).to(tl.float32) * grad
    tl.store(grad_x_ptr + dense, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(grad * x))


SUMS = Launches("recurrence_sums", {"BLOCK_H": 16, "num_warps": 4, "num_stages": 1})
#: A program has ELEMENTS of one head at a time: features, padded to a power of two, of tokens.
SKIP = Launches(
    "add_skip_forward",
    {"ELEMENTS": 4096, "num_warps": 4, "num_stages": 1},
    alternatives=(
        {"ELEMENTS": 2048, "num_warps": 4, "num_stages": 1},
        {"ELEMENTS": 8192, "num_warps": 8, "num_stages": 1},
    ),
)
SKIP_BACKWARD = Launches(
    "add_skip_backward",
    {"ELEMENTS": 4096, "num_warps": 4, "num_stages": 1},
    alternatives=(
        {"ELEMENTS": 2048, "num_warps": 4, "num_stages": 1},
        {"ELEMENTS": 8192, "num_warps": 8, "num_stages": 1},
    ),
)


@triton.jit(do_not_specialize=["chunks"])
def decay_sums_kernel(
    decay_ptr,
    sums_ptr,
    first_ptr,
    end_ptr,
    chunks,
    heads,
    decay_stride_t,
    decay_stride_h,
    lowest,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sum the decays of BLOCK_H heads over one chunk in fp64; store them in two parts."""
    blocks = tl.cdiv(heads, BLOCK_H)
    chunk = (tl.program_id(0) // blocks).to(tl.int64)
    head = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    rows = tl.arange(0, CHUNK)
    place = tl.load(first_ptr + chunk) + rows
    inside = (place < tl.load(end_ptr + chunk))[:, None] & (head < heads)[None, :]
    decay = tl.load(
        decay_ptr + place[:, None] * decay_stride_t + head[None, :].to(tl.int64) * decay_stride_h,
        mask=inside,
        other=0.0,
    )
    # Not the maximum, in which one that is no number would be lost.
    decay = tl.where(decay < lowest, lowest, decay.to(tl.float64))
    sums = tl.cumsum(decay, 0)
    large = sums.to(tl.float32)
    target = sums_ptr + (chunk * heads + head[None, :]) * CHUNK + rows[:, None]
    tl.store(target, large, mask=(head < heads)[None, :])
    tl.store(
        target + chunks.to(tl.int64) * heads * CHUNK,
        (sums - large.to(tl.float64)).to(tl.float32),
        mask=(head < heads)[None, :],
    )


def sum_decays(decay: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """Return fp32 [2, n, H, C], the decays summed up within each chunk: rounded, and the rest.

    Args:
        decay: [t, H].
        tiles: the chunks of its tokens.
    """
    heads = decay.shape[1]
    sums = decay.new_empty((2, tiles.count, heads, tiles.size), dtype=torch.float32)
    launch = SUMS.pick(decay, f"C{tiles.size}")
    grid = (tiles.count * cdiv(heads, launch["BLOCK_H"]),)
    if sums.numel():
        decay_sums_kernel[grid](
            decay,
            sums,
            tiles.first,
            tiles.end,
            tiles.count,
            heads,
            *decay.stride(),
            LOWEST_DECAY,
            CHUNK=tiles.size,
            **launch,
        )
    return sums


class AddSkip(torch.autograd.Function):
    """Forward, dgrad and wgrad as in `skip.AddSkip`, of which each way is one pass. Saves x and D.

    Each program leaves its part of the gradient of D, which are added up in the same order always.
    """

    @staticmethod
    def forward(ctx, out, x, skip):
        x, skip = dense(x), skip.contiguous()
        ctx.save_for_backward(x, skip)
        y = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        launch = row_tile(SKIP, x, x.shape[2])
        blocks = cdiv(x.shape[0], launch["ROWS"])
        if y.numel():
            add_skip_kernel[(blocks * x.shape[1],)](*skipped(dense(out), x, skip, y), **launch)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, skip = ctx.saved_tensors
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        launch = row_tile(SKIP_BACKWARD, x, x.shape[2])
        blocks = cdiv(x.shape[0], launch["ROWS"]) if x.numel() else 0
        partial = torch.empty((blocks, x.shape[1]), dtype=torch.float32, device=x.device)
        if blocks:
            add_skip_backward_kernel[(partial.numel(),)](
                *skipped(dense(grad), x, skip, grad_x, partial), **launch
            )
        return grad, grad_x, partial.sum(0).to(skip.dtype)


def skipped(
    other: torch.Tensor, x: torch.Tensor, skip: torch.Tensor, *stored: torch.Tensor
) -> tuple:
    """Return what both kernels of D x are given: tensors, sizes and strides."""
    return other, x, skip, *stored, *x.shape, *other.stride()[:2], *x.stride()[:2]


def dense(x: torch.Tensor) -> torch.Tensor:
    """Return x with a contiguous last dimension; slices of a wider tensor stay views."""
    return x if x.stride(-1) == 1 else x.contiguous()
