# SPDX-License-Identifier: Apache-2.0
"""Layer normalisation in Triton: one program a row forward, rows shared out backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.ops.rmsnorm.triton import BACKWARD_PROGRAMS, warps_for


@triton.jit
def layer_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    total_ptr,
    statistics_ptr,
    features,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
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
    mean = tl.sum(total, 0) / features
    centred = tl.where(inside, total - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / features + eps)
    tl.store(statistics_ptr + row * 2, mean)
    tl.store(statistics_ptr + row * 2 + 1, rstd)
    scale = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32) + offset
    y = centred * rstd * scale
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + start + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def layer_norm_backward_kernel(
    grad_y_ptr,
    grad_total_ptr,
    total_ptr,
    weight_ptr,
    statistics_ptr,
    grad_ptr,
    partial_ptr,
    rows,
    features,
    offset,
    HAS_GRAD_TOTAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Differentiate a share of the rows; sum this program's part of the two weight gradients."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < features
    scale = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32) + offset
    partial_weight = tl.zeros([BLOCK], dtype=tl.float32)
    partial_bias = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(program, rows, tl.num_programs(0)):  # int64, as `program` is
        start = row * features
        grad_y = tl.load(grad_y_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
        total = tl.load(total_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(statistics_ptr + row * 2)
        rstd = tl.load(statistics_ptr + row * 2 + 1)
        normal = tl.where(inside, (total - mean) * rstd, 0.0)
        partial_weight += grad_y * normal
        partial_bias += grad_y
        scaled = grad_y * scale
        along = tl.sum(scaled * normal, 0) / features
        grad = rstd * (scaled - tl.sum(scaled, 0) / features - normal * along)
        if HAS_GRAD_TOTAL:
            grad += tl.load(grad_total_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_ptr + start + columns, grad.to(grad_ptr.dtype.element_ty), mask=inside)
    partial_ptr += program * 2 * features
    tl.store(partial_ptr + columns, partial_weight, mask=inside)
    tl.store(partial_ptr + features + columns, partial_bias, mask=inside)


class LayerNorm(torch.autograd.Function):
    """y = (t - mean) * rstd * w + bias; forward, dgrad and wgrad as in `reference.LayerNorm`.

    Saves t, w and (mean, rstd) [rows, 2].
    """

    @staticmethod
    def forward(ctx, x, residual, weight, bias, eps, zero_centered):
        features = x.shape[-1]
        rows = x.numel() // features if features else 0
        x, weight = x.contiguous(), weight.contiguous()
        y = torch.empty_like(x)
        total = x if residual is None else torch.empty_like(x)
        statistics = torch.empty((rows, 2), dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(features)
        if rows:
            layer_norm_forward_kernel[(rows,)](
                x,
                x if residual is None else residual.contiguous(),
                weight,
                weight if bias is None else bias.contiguous(),
                y,
                total,
                statistics,
                features,
                eps,
                float(zero_centered),
                HAS_RESIDUAL=residual is not None,
                HAS_BIAS=bias is not None,
                BLOCK=block,
                num_warps=warps_for(block),
            )
        ctx.save_for_backward(total, weight, statistics)
        ctx.zero_centered = zero_centered
        ctx.set_materialize_grads(False)
        return y, None if residual is None else total

    @staticmethod
    def backward(ctx, grad_y, grad_total):
        total, weight, statistics = ctx.saved_tensors
        if grad_y is None:
            return grad_total, grad_total, None, None, None, None
        features = total.shape[-1]
        rows = statistics.shape[0]
        programs = min(BACKWARD_PROGRAMS, max(rows, 1))
        grad = torch.empty_like(total)
        partial = torch.empty((programs, 2, features), dtype=torch.float32, device=total.device)
        block = triton.next_power_of_2(features)
        layer_norm_backward_kernel[(programs,)](
            grad_y.contiguous(),
            total if grad_total is None else grad_total.contiguous(),
            total,
            weight,
            statistics,
            grad,
            partial,
            rows,
            features,
            float(ctx.zero_centered),
            HAS_GRAD_TOTAL=grad_total is not None,
            BLOCK=block,
            num_warps=warps_for(block),
        )
        grad_weight, grad_bias = partial.sum(0).to(weight.dtype)
        return (
            grad,
            grad if ctx.needs_input_grad[1] else None,
            grad_weight,
            grad_bias if ctx.needs_input_grad[3] else None,
            None,
            None,
        )
