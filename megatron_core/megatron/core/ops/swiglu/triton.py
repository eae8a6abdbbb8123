# SPDX-License-Identifier: Apache-2.0
"""Gated activations in Triton: one pass over memory each way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def activation_and_slope(gate, GELU: tl.constexpr):
    """Compute act(gate) and act'(gate) in fp32: silu, or gelu by its tanh approximation."""
    if GELU:
        # gelu(x) = x sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3), as tanh(u) = 2 sig(2u) - 1
        double_u = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        slope_u = 1.5957691216057308 * (1 + 0.134145 * gate * gate)
        share = tl.sigmoid(double_u)
        return gate * share, share + gate * share * (1 - share) * slope_u
    else:
        share = tl.sigmoid(gate)
        return gate * share, share * (1 + gate * (1 - share))


@triton.jit
def gated_forward_kernel(gate_up_ptr, y_ptr, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Compute one block of one row of act(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    source = gate_up_ptr + row * 2 * width + columns
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    active, _ = activation_and_slope(gate, GELU)
    y = (active * up).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * width + columns, y, mask=inside)


@triton.jit
def gated_backward_kernel(
    gate_up_ptr, grad_ptr, result_ptr, width, GELU: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute one block of one row of both gradients, the activation made again."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    start = row * 2 * width + columns
    gate = tl.load(gate_up_ptr + start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + start + width, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    active, slope = activation_and_slope(gate, GELU)
    dtype = result_ptr.dtype.element_ty
    tl.store(result_ptr + start, (grad * up * slope).to(dtype), mask=inside)
    tl.store(result_ptr + start + width, (grad * active).to(dtype), mask=inside)


class Gated(torch.autograd.Function):
    """y = act(gate) * up; forward and dgrad as in `reference.Gated`. Saves gate_up alone."""

    @staticmethod
    def forward(ctx, gate_up, activation):
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        ctx.is_gelu = activation == "gelu"
        width = gate_up.shape[-1] // 2
        shape = (*gate_up.shape[:-1], width)
        y = torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)
        if y.numel():
            grid = (y.numel() // width, triton.cdiv(width, BLOCK))
            gated_forward_kernel[grid](gate_up, y, width, GELU=ctx.is_gelu, BLOCK=BLOCK)
        return y

    @staticmethod
    def backward(ctx, grad):
        (gate_up,) = ctx.saved_tensors
        result = torch.empty_like(gate_up)
        width = grad.shape[-1]
        if grad.numel():
            grid = (grad.numel() // width, triton.cdiv(width, BLOCK))
            gated_backward_kernel[grid](
                gate_up, grad.contiguous(), result, width, GELU=ctx.is_gelu, BLOCK=BLOCK
            )
        return result, None
