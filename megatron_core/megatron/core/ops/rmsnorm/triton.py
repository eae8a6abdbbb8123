# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation in Triton: tiles of rows forward; backward distributes rows over programs.

A tile has as many rows as needed for enough bytes in flight: one of a large hidden size, 32 of a
query head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

from megatron.core.ops.launches import Launches, cdiv, next_power_of_2
from megatron.core.ops.strided_rows import StridedRows

# TILE: elements of every tensor per program and iteration. 16 per thread are two loads of 16 bytes,
# and the eight programs of an SM have 64 KB in flight.
FORWARD = Launches(
    "rms_norm_forward",
    {"TILE": 4096, "num_warps": 8},
    alternatives=(
        {"TILE": 2048, "num_warps": 4},
        {"TILE": 4096, "num_warps": 4},
        {"TILE": 8192, "num_warps": 8},
    ),
)
# PROGRAMS: each has its rows and one partial weight gradient. Four per SM of a Hopper GPU, as many
# as its registers hold with rows of 2,048.
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
    group_size,
    x_stride_group,
    x_stride_row,
    features,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise ROWS rows; with a residual also write x + residual."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # int32, because 64-bit division is slow
    columns = tl.arange(0, BLOCK)
    exists = row < rows
    inside = exists[:, None] & (columns < features)[None, :]
    row_starts = (row // group_size).to(tl.int64) * x_stride_group
    row_starts += (row % group_size).to(tl.int64) * x_stride_row
    offsets = row.to(tl.int64)[:, None] * features + columns[None, :]
    total = tl.load(x_ptr + row_starts[:, None] + columns[None, :], mask=inside, other=0.0)
    total = total.to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + offsets, rounded, mask=inside)
        total = rounded.to(tl.float32)  # normalise the rounded value, which backward reads
    rstd = 1.0 / tl.sqrt(tl.sum(total * total, 1) / features + eps)
    tl.store(rstd_ptr + row, rstd, mask=exists)
    scale = tl.load(weight_ptr + columns, mask=columns < features, other=0.0)
    scale = scale.to(tl.float32) + offset
    y = total * rstd[:, None] * scale[None, :]
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


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
    group_size,
    total_stride_group,
    total_stride_row,
    features,
    offset,
    HAS_GRAD_TOTAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Differentiate every n-th tile of rows and write this program's partial weight gradient."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    in_row = columns < features
    scale = tl.load(weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32) + offset
    partial = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        exists = row < rows
        inside = exists[:, None] & in_row[None, :]
        offsets = row.to(tl.int64)[:, None] * features + columns[None, :]
        row_starts = (row // group_size).to(tl.int64) * total_stride_group
        row_starts += (row % group_size).to(tl.int64) * total_stride_row
        grad_y = tl.load(grad_y_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        total = tl.load(total_ptr + row_starts[:, None] + columns[None, :], mask=inside, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=exists, other=0.0)[:, None]
        normal = total.to(tl.float32) * rstd
        partial += grad_y * normal
        scaled = grad_y * scale[None, :]
        projection = tl.sum(scaled * normal, 1) / features
        grad = rstd * (scaled - normal * projection[:, None])
        if HAS_GRAD_TOTAL:
            grad += tl.load(grad_total_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_ptr + offsets, grad.to(grad_ptr.dtype.element_ty), mask=inside)
    tl.store(
        partial_ptr + program.to(tl.int64) * features + columns, tl.sum(partial, 0), mask=in_row
    )


def row_tile(launch: Mapping[str, int], features: int) -> dict[str, int]:
    """Return the rows, columns and warps of a tile, which always has whole rows.

    Args:
        launch: TILE elements and `num_warps`; rows longer than the tile get more warps.
        features: elements of a row.
    """
    block = next_power_of_2(features)
    rows = max(1, launch["TILE"] // block)
    warps = min(32, launch["num_warps"] * max(1, block // launch["TILE"]))
    return {"ROWS": rows, "BLOCK": block, "num_warps": warps}


def programs_for(launch: Mapping[str, int], rows: int, tile: Mapping[str, int]) -> int:
    """Return how many programs share the rows, at most one per tile.

    Short rows have small partial gradients and need few registers, so they get twice as many.

    Args:
        launch: PROGRAMS.
        rows: number of rows.
        tile: from `row_tile`.
    """
    max_programs = launch["PROGRAMS"] * (2 if tile["BLOCK"] <= 1024 else 1)
    return max(1, min(max_programs, cdiv(rows, tile["ROWS"])))


def launch_key(x: torch.Tensor) -> str:
    """Return the key of the launch table: size of a row and dtype."""
    return f"h{next_power_of_2(x.shape[-1])} {str(x.dtype).removeprefix('torch.')}"


def rms_norm_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (y, x + residual, the contiguous weight, rstd fp32 [rows])."""
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
    needs_grad: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of x + residual and addends [programs, h] of the weight gradient.

    See `rmsnorm.cpu.rms_norm_backward`.
    """
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
