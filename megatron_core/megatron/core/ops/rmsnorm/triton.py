# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation in Triton: one program a row forward, rows shared out backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Programs of the backward pass: each owns a share of the rows and one partial weight gradient.
# Two for each multiprocessor of the largest current devices.
BACKWARD_PROGRAMS = 264


@triton.jit
def rms_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    rstd_ptr,
    features,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise one row; write x + residual too when there is a residual."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < features
    start = row * features
    total = tl.load(x_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + start + columns, rounded, mask=inside)
        total = rounded.to(tl.float32)  # normalise what backward will read
    rstd = 1.0 / tl.sqrt(tl.sum(total * total, 0) / features + eps)
    tl.store(rstd_ptr + row, rstd)
    scale = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32) + offset
    y = total * rstd * scale
    tl.store(y_ptr + start + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward_kernel(
    grad_y_ptr,
    grad_total_ptr,
    total_ptr,
    weight_ptr,
    rstd_ptr,
    grad_ptr,
    partial_ptr,
    rows,
    features,
    offset,
    HAS_GRAD_TOTAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Differentiate every rows-th row and sum this program's part of the weight gradient."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < features
    scale = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32) + offset
    partial = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(program, rows, tl.num_programs(0)):  # int64, as `program` is
        start = row * features
        grad_y = tl.load(grad_y_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
        total = tl.load(total_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normal = total * rstd
        partial += grad_y * normal
        scaled = grad_y * scale
        grad = rstd * (scaled - normal * (tl.sum(scaled * normal, 0) / features))
        if HAS_GRAD_TOTAL:
            grad += tl.load(grad_total_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_ptr + start + columns, grad.to(grad_ptr.dtype.element_ty), mask=inside)
    tl.store(partial_ptr + program * features + columns, partial, mask=inside)


def warps_for(block: int) -> int:
    """Give the warps for a row of `block` elements: about 16 elements a thread."""
    return min(max(block // 512, 1), 16)


class RmsNorm(torch.autograd.Function):
    """y = t * rstd * w, t = x + residual; forward, dgrad and wgrad as in `reference.RmsNorm`.

    Saves t, w and rstd [rows].
    """

    @staticmethod
    def forward(ctx, x, residual, weight, eps, zero_centered):
        features = x.shape[-1]
        rows = x.numel() // features if features else 0
        x, weight = x.contiguous(), weight.contiguous()
        y = torch.empty_like(x)
        total = x if residual is None else torch.empty_like(x)
        rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(features)
        if rows:
            rms_norm_forward_kernel[(rows,)](
                x,
                x if residual is None else residual.contiguous(),
                weight,
                y,
                total,
                rstd,
                features,
                eps,
                float(zero_centered),
                HAS_RESIDUAL=residual is not None,
                BLOCK=block,
                num_warps=warps_for(block),
            )
        ctx.save_for_backward(total, weight, rstd)
        ctx.zero_centered = zero_centered
        ctx.set_materialize_grads(False)
        return y, None if residual is None else total

    @staticmethod
    def backward(ctx, grad_y, grad_total):
        total, weight, rstd = ctx.saved_tensors
        if grad_y is None:
            return grad_total, grad_total, None, None, None
        features = total.shape[-1]
        rows = rstd.shape[0]
        programs = min(BACKWARD_PROGRAMS, max(rows, 1))
        grad = torch.empty_like(total)
        partial = torch.empty((programs, features), dtype=torch.float32, device=total.device)
        block = triton.next_power_of_2(features)
        rms_norm_backward_kernel[(programs,)](
            grad_y.contiguous(),
            total if grad_total is None else grad_total.contiguous(),
            total,
            weight,
            rstd,
            grad,
            partial,
            rows,
            features,
            float(ctx.zero_centered),
            HAS_GRAD_TOTAL=grad_total is not None,
            BLOCK=block,
            num_warps=warps_for(block),
        )
        grad_weight = partial.sum(0).to(weight.dtype)
        return grad, grad if ctx.needs_input_grad[1] else None, grad_weight, None, None
