# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls in Triton: programs find their run by the ends on the device.

The grid depends only on sizes that the host knows. `grouped_mm` has a program for every possible
tile of rows: r / ROWS and one more for each run, because every run may end inside a tile; programs
after the last run's tiles return at once. Weight gradients have a program for each tile of each
matrix, which loops over the rows of its run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.ops.launches import Launches, cdiv, next_power_of_2

# For bf16 without torch's kernel. ROWS, COLUMNS: of a program's output tile; INNER: elements of the
# reduction per iteration.
PRODUCT = Launches(
    "grouped_mm",
    {"ROWS": 64, "COLUMNS": 128, "INNER": 64, "num_warps": 4, "num_stages": 4},
    alternatives=(
        {"ROWS": 128, "COLUMNS": 128, "INNER": 64, "num_warps": 8, "num_stages": 3},
        {"ROWS": 128, "COLUMNS": 256, "INNER": 64, "num_warps": 8, "num_stages": 3},
    ),
)
# ROWS, COLUMNS: of a weight's tile; INNER: rows of the run per iteration.
WGRAD = Launches(
    "grouped_wgrad",
    {"ROWS": 128, "COLUMNS": 128, "INNER": 64, "num_warps": 8, "num_stages": 4},
    alternatives=(
        {"ROWS": 128, "COLUMNS": 128, "INNER": 128, "num_warps": 8, "num_stages": 3},
        {"ROWS": 128, "COLUMNS": 256, "INNER": 64, "num_warps": 8, "num_stages": 3},
        {"ROWS": 256, "COLUMNS": 128, "INNER": 64, "num_warps": 8, "num_stages": 3},
    ),
)
# fp32 is multiplied without tensor cores: a thread's accumulators and operands must fit registers.
PRODUCT_FP32 = Launches(
    "grouped_mm_fp32",
    {"ROWS": 64, "COLUMNS": 64, "INNER": 16, "num_warps": 4, "num_stages": 2},
)
WGRAD_FP32 = Launches("grouped_wgrad_fp32", PRODUCT_FP32.default)


@triton.jit
def grouped_mm_kernel(
    x_ptr,
    matrices_ptr,
    ends_ptr,
    out_ptr,
    runs,
    inner,
    columns,
    row_tiles,
    TRANSPOSED: tl.constexpr,
    RUNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Multiply one tile of a run's rows by one tile of its matrix's columns.

    RUNS is `runs` rounded up to a power of two.
    """
    tile = tl.program_id(0) % row_tiles
    run = tl.arange(0, RUNS)
    ends = tl.load(ends_ptr + run, mask=run < runs, other=0)
    starts = tl.load(ends_ptr + run - 1, mask=(run > 0) & (run < runs), other=0)
    tiles = tl.where(run < runs, (ends - starts + ROWS - 1) // ROWS, 0)
    run_index = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32))
    if run_index >= runs:
        return
    end = tl.sum(tl.where(run == run_index, ends, 0))
    start = tl.sum(tl.where(run == run_index, starts, 0))
    start += (tile - tl.sum(tl.where(run < run_index, tiles, 0))) * ROWS
    rows = (start + tl.arange(0, ROWS)).to(tl.int64)
    row_mask = rows < end
    column = tl.program_id(0) // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = column < columns
    matrix_ptr = matrices_ptr + run_index.to(tl.int64) * inner * columns
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k_start in range(0, inner, INNER):
        k = k_start + tl.arange(0, INNER)
        k_mask = k < inner
        left = tl.load(
            x_ptr + rows[:, None] * inner + k[None, :],
            mask=row_mask[:, None] & k_mask[None, :],
            other=0.0,
        )
        if TRANSPOSED:  # a matrix is [columns, inner]
            offsets = column[None, :].to(tl.int64) * inner + k[:, None]
        else:
            offsets = k[:, None].to(tl.int64) * columns + column[None, :]
        right = tl.load(
            matrix_ptr + offsets, mask=k_mask[:, None] & column_mask[None, :], other=0.0
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    out = out_ptr + rows[:, None] * columns + column[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit
def grouped_wgrad_kernel(
    grad_ptr,
    x_ptr,
    ends_ptr,
    total_ptr,
    outputs,
    features,
    row_tiles,
    column_tiles,
    overwrite,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Accumulate one tile of a run's gᵀ x, and write it or add it to `total`."""
    tiles = row_tiles * column_tiles
    run, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    start = tl.load(ends_ptr + run - 1, mask=run > 0, other=0)
    end = tl.load(ends_ptr + run)
    if (end == start) & (overwrite == 0):
        return
    row = tile // column_tiles * ROWS + tl.arange(0, ROWS)
    column = tile % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_columns = row < outputs, column < features
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row_start in range(start, end, INNER):
        i = (row_start + tl.arange(0, INNER)).to(tl.int64)
        run_mask = i < end
        left = tl.load(
            grad_ptr + i[None, :] * outputs + row[:, None],
            mask=in_rows[:, None] & run_mask[None, :],
            other=0.0,
        )
        right = tl.load(
            x_ptr + i[:, None] * features + column[None, :],
            mask=run_mask[:, None] & in_columns[None, :],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    offsets = (run.to(tl.int64) * outputs + row[:, None]) * features + column[None, :]
    inside = in_rows[:, None] & in_columns[None, :]
    before = tl.load(total_ptr + offsets, mask=inside & (overwrite == 0), other=0.0)
    total += before.to(tl.float32)
    tl.store(total_ptr + offsets, total.to(total_ptr.dtype.element_ty), mask=inside)


def _key(x: torch.Tensor, width: int) -> str:
    """Return the key of the launch table: sizes of the matrices and dtype."""
    sizes = f"h{next_power_of_2(x.shape[1])} o{next_power_of_2(width)}"
    return f"{sizes} {str(x.dtype).removeprefix('torch.')}"


def grouped_mm(
    x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor, *, transposed: bool
) -> torch.Tensor:
    """See `ops.grouped_mm.grouped_mm`."""
    x, matrices, (rows, inner) = x.contiguous(), matrices.contiguous(), x.shape
    runs, columns = len(ends), matrices.shape[1 if transposed else 2]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if out.numel():
        launches = PRODUCT_FP32 if x.dtype is torch.float32 else PRODUCT
        launch = launches.pick(x, _key(x, columns))
        row_tiles = cdiv(rows, launch["ROWS"]) + runs
        grouped_mm_kernel[(row_tiles * cdiv(columns, launch["COLUMNS"]),)](
            x,
            matrices,
            ends,
            out,
            runs,
            inner,
            columns,
            row_tiles,
            TRANSPOSED=transposed,
            RUNS=next_power_of_2(runs),
            **launch,
        )
    return out


def grouped_wgrad_(
    total: torch.Tensor,
    grad: torch.Tensor,
    x: torch.Tensor,
    ends: torch.Tensor,
    *,
    overwrite: bool,
) -> None:
    """See `ops.grouped_mm.grouped_wgrad_`."""
    runs, outputs, features = total.shape
    launches = WGRAD_FP32 if x.dtype is torch.float32 else WGRAD
    launch = launches.pick(x, _key(x, outputs))
    row_tiles = cdiv(outputs, launch["ROWS"])
    column_tiles = cdiv(features, launch["COLUMNS"])
    grouped_wgrad_kernel[(runs * row_tiles * column_tiles,)](
        grad.contiguous(),
        x.contiguous(),
        ends,
        total,
        outputs,
        features,
        row_tiles,
        column_tiles,
        int(overwrite),
        **launch,
    )
