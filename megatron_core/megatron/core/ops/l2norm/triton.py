# SPDX-License-Identifier: Apache-2.0
"""Scaling to length one in Triton: one pass over memory each way, several rows a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.ops.launches import Launches
from megatron.core.ops.row_steps import RowSteps, row_tile
from megatron.core.ops.row_steps_kernels import row_starts

#: A program has ELEMENTS of rows, which are padded to powers of two.
FORWARD = Launches(
    "l2norm_forward",
    {"ELEMENTS": 4096, "num_warps": 4, "num_stages": 1},
    others=(
        {"ELEMENTS": 2048, "num_warps": 4, "num_stages": 1},
        {"ELEMENTS": 8192, "num_warps": 8, "num_stages": 1},
    ),
)
BACKWARD = Launches(
    "l2norm_backward",
    {"ELEMENTS": 4096, "num_warps": 4, "num_stages": 1},
    others=(
        {"ELEMENTS": 2048, "num_warps": 4, "num_stages": 1},
        {"ELEMENTS": 8192, "num_warps": 8, "num_stages": 1},
    ),
)


@triton.jit(do_not_specialize=["rows"])
def l2norm_forward_kernel(
    x_ptr,
    y_ptr,
    scale_ptr,
    rows,
    features,
    inner,
    x_offset,
    x_outer,
    x_inner,
    eps,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Scale ROWS rows; write what each was multiplied by."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, FEATURES)
    live, inside = row < rows, (columns < features)[None, :]
    start = row_starts(row, inner, x_offset, x_outer, x_inner, STEP)
    source = x_ptr + start[:, None] + columns[None, :]
    x = tl.load(source, mask=live[:, None] & inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) + eps)
    tl.store(scale_ptr + row, scale, mask=live)
    target = y_ptr + row.to(tl.int64)[:, None] * features + columns[None, :]
    y = (x * scale[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(target, y, mask=live[:, None] & inside)


@triton.jit(do_not_specialize=["rows"])
def l2norm_backward_kernel(
    grad_ptr,
    y_ptr,
    scale_ptr,
    d_x_ptr,
    rows,
    features,
    inner,
    grad_offset,
    grad_outer,
    grad_inner,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Differentiate ROWS rows: dx = r (g - y sum(g y))."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, FEATURES)
    live, inside = row < rows, (columns < features)[None, :]
    there = live[:, None] & inside
    start = row_starts(row, inner, grad_offset, grad_outer, grad_inner, STEP)
    grad = tl.load(grad_ptr + start[:, None] + columns[None, :], mask=there, other=0.0)
    place = row.to(tl.int64)[:, None] * features + columns[None, :]
    y = tl.load(y_ptr + place, mask=there, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + row, mask=live, other=0.0)
    grad = grad.to(tl.float32)
    along = tl.sum(grad * y, axis=1)
    d_x = (grad - y * along[:, None]) * scale[:, None]
    tl.store(d_x_ptr + place, d_x.to(d_x_ptr.dtype.element_ty), mask=there)


class L2Norm(torch.autograd.Function):
    """Forward and dgrad as in `reference.L2Norm`. Saves y and r [...]."""

    @staticmethod
    def forward(ctx, x, eps):
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        scale = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        if y.numel():
            steps, tile = RowSteps.of(x), row_tile(FORWARD, x, x.shape[-1])
            l2norm_forward_kernel[(triton.cdiv(scale.numel(), tile["ROWS"]),)](
                steps.base,
                y,
                scale,
                scale.numel(),
                x.shape[-1],
                *steps.places,
                eps,
                STEP=steps.step,
                **tile,
            )
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, scale = ctx.saved_tensors
        d_x = torch.empty_like(y)
        if y.numel():
            steps, tile = RowSteps.of(grad), row_tile(BACKWARD, y, y.shape[-1])
            l2norm_backward_kernel[(triton.cdiv(scale.numel(), tile["ROWS"]),)](
                steps.base,
                y,
                scale,
                d_x,
                scale.numel(),
                y.shape[-1],
                *steps.places,
                STEP=steps.step,
                **tile,
            )
        return d_x, None
