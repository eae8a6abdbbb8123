# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation in Triton: tiles of rows forward, rows shared out among programs backward.

A tile holds as many rows as make enough bytes in flight: one of a wide model, 32 of a query head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

from megatron.core.ops.launches import Launches, cdiv, next_power_of_2
from megatron.core.ops.strided_rows import StridedRows

# TILE: elements that a program holds of every tensor at a time. At 16 a thread, each is two loads
# of 16 bytes, and eight programs of a multiprocessor have 64 KB under way.
FORWARD = Launches(
    "rms_norm_forward",
    {"TILE": 4096, "num_warps": 8},
    alternatives=(
        {"TILE": 2048, "num_warps": 4},
        {"TILE": 4096, "num_warps": 4},
        {"TILE": 8192, "num_warps": 8},
    ),
)
# PROGRAMS: each owns a share of the rows and one partial weight gradient. Four for each
# multiprocessor of a Hopper device: as many as its registers hold at rows of 2,048.
BACKWARD = Launches(
    "rms_norm_backward",
    {"TILE": 2048, "PROGRAMS": 528, "num_warps": 4},
    alternatives=(
        {"TILE": 2048, "PROGRAMS": 1056, "num_warps": 4},
        {"TILE": 4096, "PROGRAMS": 264, "num_warps": 8},
        {"TILE": 4096, "PROGRAMS": 528, "num_warps": 8},
        {"TILE": 4096, "PROGRAMS": 264, "num_warps": 16},
    ),
)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    rstd_ptr,
    rows,
    inner,
    x_stride_outer,
    x_stride_inner,
    features,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise ROWS rows; write x + residual too when there is a residual."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # a division of 64 bits is slow
    columns = tl.arange(0, BLOCK)
    exists = row < rows
    inside = exists[:, None] & (columns < features)[None, :]
    source = (row // inner).to(tl.int64) * x_stride_outer
    source += (row % inner).to(tl.int64) * x_stride_inner
    place = row.to(tl.int64)[:, None] * features + columns[None, :]
    total = tl.load(x_ptr + source[:, None] + columns[None, :], mask=inside, other=0.0)
    total = total.to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + place, rounded, mask=inside)
        total = rounded.to(tl.float32)  # normalise what backward will read
    rstd = 1.0 / tl.sqrt(tl.sum(total * total, 1) / features + eps)
    tl.store(rstd_ptr + row, rstd, mask=exists)
    scale = tl.load(weight_ptr + columns, mask=columns < features, other=0.0)
    scale = scale.to(tl.float32) + offset
    y = total * rstd[:, None] * scale[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_backward_kernel(
    grad_y_ptr,
    grad_total_ptr,
    total_ptr,
    weight_ptr,
    rstd_ptr,
    grad_ptr,
    partial_ptr,
    rows,
    inner,
    total_stride_outer,
    total_stride_inner,
    features,
    offset,
    HAS_GRAD_TOTAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Differentiate a share of the rows and sum this program's part of the weight gradient."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    in_row = columns < features
    scale = tl.load(weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32) + offset
    partial = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for first in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        exists = row < rows
        inside = exists[:, None] & in_row[None, :]
        place = row.to(tl.int64)[:, None] * features + columns[None, :]
        source = (row // inner).to(tl.int64) * total_stride_outer
        source += (row % inner).to(tl.int64) * total_stride_inner
        grad_y = tl.load(grad_y_ptr + place, mask=inside, other=0.0).to(tl.float32)
        total = tl.load(total_ptr + source[:, None] + columns[None, :], mask=inside, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=exists, other=0.0)[:, None]
        normal = total.to(tl.float32) * rstd
        partial += grad_y * normal
        scaled = grad_y * scale[None, :]
        along = tl.sum(scaled * normal, 1) / features
        grad = rstd * (scaled - normal * along[:, None])
        if HAS_GRAD_TOTAL:
            grad += tl.load(grad_total_ptr + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_ptr + place, grad.to(grad_ptr.dtype.element_ty), mask=inside)
    tl.store(
        partial_ptr + program.to(tl.int64) * features + columns, tl.sum(partial, 0), mask=in_row
    )


def row_tile(launch: Mapping[str, int], features: int) -> dict[str, int]:
    """Return the rows, columns and warps of a tile: whole rows, however wide they are.

    Args:
        launch: TILE elements and `num_warps`, which a row wider than the tile gets more of.
        features: of a row.
    """
    block = next_power_of_2(features)
    rows = max(1, launch["TILE"] // block)
    warps = min(32, launch["num_warps"] * max(1, block // launch["TILE"]))
    return {"ROWS": rows, "BLOCK": block, "num_warps": warps}


def programs_for(launch: Mapping[str, int], rows: int, tile: Mapping[str, int]) -> int:
    """Return how many programs share the rows: no more than there are tiles.

    Narrow rows have small partial gradients, and their tiles few registers: twice as many.

    Args:
        launch: PROGRAMS.
        rows: to be shared.
        tile: from `row_tile`.
    """
    most = launch["PROGRAMS"] * (2 if tile["BLOCK"] <= 1024 else 1)
    return max(1, min(most, cdiv(rows, tile["ROWS"])))


def launch_key(x: torch.Tensor) -> str:
    """Name what decides how the kernels of a norm are best started."""
    return f"h{next_power_of_2(x.shape[-1])} {str(x.dtype).removeprefix('torch.')}"


def rms_norm_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (y, x + residual, the weight as the kernels read it, rstd fp32 [rows])."""
    weight = weight.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(y)
    rstd = torch.empty(x.shape[:-1].numel(), dtype=torch.float32, device=x.device)
    if y.numel():
        rows = StridedRows.from_tensor(x)
        tile = row_tile(FORWARD.pick(x, launch_key(x)), x.shape[-1])
        total = rows.tensor if residual is None else total
        rms_norm_forward_kernel[(cdiv(rows.num_rows, tile["ROWS"]),)](
            rows.tensor,
            x if residual is None else residual.contiguous(),
            weight,
            y,
            total,
            rstd,
            rows.num_rows,
            rows.group_size,
            rows.group_stride,
            rows.row_stride,
            x.shape[-1],
            eps,
            float(zero_centered),
            HAS_RESIDUAL=residual is not None,
            **tile,
        )
    return y, total, weight, rstd


def rms_norm_backward(
    grad_y: torch.Tensor,
    grad_total: torch.Tensor | None,
    saved: Sequence[torch.Tensor],
    zero_centered: bool,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of x + residual and addends [programs, h] of the weight's; see
    `rmsnorm._rms_norm_backward`."""
    total, weight, rstd = saved
    features = total.shape[-1]
    grad = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    if not grad.numel():
        return grad, torch.zeros_like(weight)
    rows = StridedRows.from_tensor(total)
    launch = BACKWARD.pick(total, launch_key(total))
    tile = row_tile(launch, features)
    programs = programs_for(launch, rows.num_rows, tile)
    partial = torch.empty((programs, features), dtype=torch.float32, device=total.device)
    rms_norm_backward_kernel[(programs,)](
        grad_y.contiguous(),
        total if grad_total is None else grad_total.contiguous(),
        rows.tensor,
        weight,
        rstd,
        grad,
        partial,
        rows.num_rows,
        rows.group_size,
        rows.group_stride,
        rows.row_stride,
        features,
        float(zero_centered),
        HAS_GRAD_TOTAL=grad_total is not None,
        **tile,
    )
    return grad, partial
