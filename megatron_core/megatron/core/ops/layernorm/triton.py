# SPDX-License-Identifier: Apache-2.0
"""Layer normalisation in Triton, with the tiles and programs of `ops.rmsnorm.triton`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from megatron.core.ops.launches import Launches, cdiv
from megatron.core.ops.rmsnorm.triton import launch_key, programs_for, row_tile

FORWARD = Launches(
    "layer_norm_forward",
    {"TILE": 4096, "num_warps": 8},
    alternatives=({"TILE": 2048, "num_warps": 4}, {"TILE": 8192, "num_warps": 8}),
)
# As in ops/rmsnorm/triton.py, but a program has two partial gradients in registers.
BACKWARD = Launches(
    "layer_norm_backward",
    {"TILE": 2048, "PROGRAMS": 528, "num_warps": 4},
    alternatives=(
        {"TILE": 4096, "PROGRAMS": 264, "num_warps": 8},
        {"TILE": 4096, "PROGRAMS": 528, "num_warps": 8},
        {"TILE": 4096, "PROGRAMS": 264, "num_warps": 16},
    ),
)


@triton.jit(do_not_specialize=["rows"])
def layer_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    total_ptr,
    statistics_ptr,
    rows,
    features,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise ROWS rows; with a residual also write x + residual."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    exists, in_row = row < rows, columns < features
    inside = exists[:, None] & in_row[None, :]
    offsets = row[:, None] * features + columns[None, :]
    total = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + offsets, rounded, mask=inside)
        total = rounded.to(tl.float32)  # normalise the rounded value, which backward reads
    mean = tl.sum(total, 1) / features
    centred = tl.where(inside, total - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / features + eps)
    tl.store(statistics_ptr + row * 2, mean, mask=exists)
    tl.store(statistics_ptr + row * 2 + 1, rstd, mask=exists)
    scale = tl.load(weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32) + offset
    y = centred * rstd[:, None] * scale[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=in_row, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Differentiate every n-th tile of rows and write this program's partial weight gradients."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    in_row = columns < features
    scale = tl.load(weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32) + offset
    partial_weight = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    partial_bias = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in range(program * ROWS, rows, tl.num_programs(0) * ROWS):  # int64 like `program`
        row = start + tl.arange(0, ROWS)
        exists = row < rows
        inside = exists[:, None] & in_row[None, :]
        offsets = row[:, None] * features + columns[None, :]
        grad_y = tl.load(grad_y_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        total = tl.load(total_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(statistics_ptr + row * 2, mask=exists, other=0.0)[:, None]
        rstd = tl.load(statistics_ptr + row * 2 + 1, mask=exists, other=0.0)[:, None]
        normal = tl.where(inside, (total - mean) * rstd, 0.0)
        partial_weight += grad_y * normal
        partial_bias += grad_y
        scaled = grad_y * scale[None, :]
        projection = tl.sum(scaled * normal, 1)[:, None] / features
        grad = rstd * (scaled - tl.sum(scaled, 1)[:, None] / features - normal * projection)
        if HAS_GRAD_TOTAL:
            grad += tl.load(grad_total_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_ptr + offsets, grad.to(grad_ptr.dtype.element_ty), mask=inside)
    partial_ptr += program * 2 * features
    tl.store(partial_ptr + columns, tl.sum(partial_weight, 0), mask=in_row)
    tl.store(partial_ptr + features + columns, tl.sum(partial_bias, 0), mask=in_row)


def layer_norm_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (y, x + residual, the contiguous weight, (mean, rstd) fp32 [rows, 2])."""
    features = x.shape[-1]
    rows = x.numel() // features if features else 0
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    statistics = torch.empty((rows, 2), dtype=torch.float32, device=x.device)
    if rows:
        tile = row_tile(FORWARD.pick(x, launch_key(x)), features)
        layer_norm_forward_kernel[(cdiv(rows, tile["ROWS"]),)](
            x,
            x if residual is None else residual.contiguous(),
            weight,
            weight if bias is None else bias.contiguous(),
            y,
            total,
            statistics,
            rows,
            features,
            eps,
            float(zero_centered),
            HAS_RESIDUAL=residual is not None,
            HAS_BIAS=bias is not None,
            **tile,
        )
    return y, total, weight, statistics


def layer_norm_backward(
    grad_y: torch.Tensor,
    grad_total: torch.Tensor | None,
    saved: Sequence[torch.Tensor],
    zero_centered: bool,
    needs_grad: Sequence[bool],
) -> tuple[torch.Tensor, ...]:
    """Return the gradient of x + residual and addends [programs, h] of weight and bias gradients.

    See `layernorm.cpu.layer_norm_backward`.
    """
    total, weight, statistics = saved
    features, rows = total.shape[-1], statistics.shape[0]
    launch = BACKWARD.pick(total, launch_key(total))
    tile = row_tile(launch, features)
    programs = programs_for(launch, rows, tile)
    grad = torch.empty_like(total)
    partial = torch.empty((programs, 2, features), dtype=torch.float32, device=total.device)
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
        float(zero_centered),
        HAS_GRAD_TOTAL=grad_total is not None,
        **tile,
    )
    return grad, *partial.unbind(1)
