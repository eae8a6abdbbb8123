# SPDX-License-Identifier: Apache-2.0
"""out + D x in Triton, one pass over memory each way, a tile of tokens of one head a program."""

from __future__ import annotations

import triton
import triton.language as tl


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
