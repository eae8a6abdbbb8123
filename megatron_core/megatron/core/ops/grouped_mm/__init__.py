# SPDX-License-Identifier: Apache-2.0
"""Grouped products: rows in runs, one after the other, each run with a matrix of its own.

    grouped_mm      y[i] = x[i] · M_e           for every row i of run e     [r, m] -> [r, n]
    grouped_wgrad_  T_e (+)= sum over the rows of run e of g[i]ᵀ x[i]        -> [runs, o, h]

Where runs end is known on the rows' device. On a GPU nothing waits for it, so that both can be part
of a CUDA graph and of other runs in every replay:

| product | of | by |
|---|---|---|
| grouped_mm | bf16 on Hopper and Blackwell, rows and addresses of whole 16 bytes | torch |
| grouped_mm | fp32, fp16, other widths, other GPUs | Triton |
| grouped_wgrad_ | all | Triton |

torch's kernel reads the ends on the host on other GPUs; of weight gradients it rounds the sums to
bf16, and cannot add them to a buffer.

In plain torch, which a CPU uses, they are loops over the runs, whose counts the host reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F

from megatron.core.ops.backend_choice import add_product_, choose
from megatron.core.ops.batch_invariant import tiled_matmul

__all__ = ["RowRuns", "grouped_mm", "grouped_wgrad_", "reads_counts"]

#: Compute capabilities of whose products torch has a grouped kernel; others loop on the host.
_GROUPED_KERNELS = (9, 10)


@dataclass(frozen=True, eq=False)
class RowRuns:
    """How [r, h] rows are divided into runs, one after the other.

    Args:
        ends: int32 [runs], where each ends, on the device of the rows.
        trailing: rows may follow the last run, how many only the device knows; they are multiplied
            by nothing. Their results may be anything, and so may the gradients of these rows.
    """

    ends: torch.Tensor
    trailing: bool = False

    @staticmethod
    def of(counts: torch.Tensor, *, trailing: bool = False) -> RowRuns:
        """Return the runs of int64 [runs] rows."""
        return RowRuns(counts.cumsum(0).int(), trailing)

    def fit(self, rows: int) -> bool:
        """Whether these are runs of so many rows; waits for the device."""
        total = sum(self.counts)
        return total <= rows if self.trailing else total == rows

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Rows of each run, on the host, which waits for the device."""
        ends = self.ends.tolist()
        return tuple(end - start for start, end in pairwise((0, *ends)))


def reads_counts(x: torch.Tensor) -> bool:
    """Whether products of rows like x read on the host how many rows each run has."""
    return choose(None, x, "grouped_mm") == "reference"


def grouped_mm(
    x: torch.Tensor,
    matrices: torch.Tensor,
    runs: RowRuns,
    *,
    transposed: bool = False,
    dtype: torch.dtype | None = None,
    tiles: bool = False,
    implementation: str | None = None,
) -> torch.Tensor:
    """Return [r, n] in x's dtype; rows after the last run hold anything.

    Args:
        x: [r, m].
        matrices: [runs, m, n], or [runs, n, m] if transposed, contiguous.
        transposed: multiply by the transposed matrices.
        dtype: what a CPU multiplies in; None is x's dtype.
        tiles: in tiles of rows, so that the bits of a row do not depend on the others; the host
            reads counts then.
        implementation: "reference", "triton" or None (by device, see the module).
    """
    if tiles or choose(implementation, x, "grouped_mm") == "reference":
        right = matrices.transpose(1, 2) if transposed else matrices
        return _by_run(x, right, runs, x.dtype if dtype is None else dtype, tiles=tiles)
    if implementation is None and _torch_takes(x, matrices):
        return F.grouped_mm(x, matrices.transpose(1, 2) if transposed else matrices, offs=runs.ends)
    from megatron.core.ops.grouped_mm import triton as kernels

    return kernels.grouped_mm(x, matrices, runs.ends, transposed=transposed)


def grouped_wgrad_(
    total: torch.Tensor,
    grad: torch.Tensor,
    x: torch.Tensor,
    runs: RowRuns,
    *,
    overwrite: bool,
    implementation: str | None = None,
) -> None:
    """Put each run's sum of products gᵀ x into `total`, written if `overwrite`, else added.

    Args:
        total: [runs, o, h] contiguous, fp32 or the operands' dtype; sums are rounded to it once.
        grad: g [r, o].
        x: [r, h], the dtype of `grad`.
        overwrite: what `total` held does not count; a run without rows writes zeros.
        implementation: "reference", "triton" or None (by device).
    """
    if choose(implementation, x, "grouped_wgrad") == "triton":
        from megatron.core.ops.grouped_mm import triton as kernels

        kernels.grouped_wgrad_(total, grad, x, runs.ends, overwrite=overwrite)
        return
    start = 0
    for matrix, count in zip(total, runs.counts, strict=True):
        rows = slice(start, start + count)
        if count:
            add_product_(matrix, grad[rows].t(), x[rows], overwrite=overwrite)
        elif overwrite:
            matrix.zero_()
        start += count


def _by_run(
    x: torch.Tensor, matrices: torch.Tensor, runs: RowRuns, dtype: torch.dtype, *, tiles: bool
) -> torch.Tensor:
    """Return [r, n] from x [r, m] and matrices [runs, m, n], one product after the other.

    torch's grouped product on a CPU is this loop in C++, within a few percent of it from a dozen
    rows up.
    """
    out = torch.empty(len(x), matrices.shape[2], dtype=dtype, device=x.device)
    wide = x.to(dtype)
    start = 0
    for matrix, count in zip(matrices, runs.counts, strict=True):
        if count:
            rows = slice(start, start + count)
            if tiles:
                out[rows] = tiled_matmul(wide[rows], matrix.to(dtype))
            else:
                torch.mm(wide[rows], matrix.to(dtype), out=out[rows])
            start += count
    return out.to(x.dtype)


@cache
def _has_grouped_kernel(index: int) -> bool:
    """Return whether torch has a grouped kernel for a CUDA device; asking CUDA takes microseconds
    at every product."""
    return torch.cuda.get_device_capability(index)[0] in _GROUPED_KERNELS


def _torch_takes(x: torch.Tensor, matrices: torch.Tensor) -> bool:
    """Return whether torch has a grouped kernel for these on a GPU."""
    if x.dtype is not torch.bfloat16 or not len(x):
        return False
    if not _has_grouped_kernel(x.device.index):
        return False
    sizes = (*matrices.shape[1:], x.shape[1])
    whole = not any(size * x.itemsize % 16 for size in sizes)
    return whole and not (x.data_ptr() % 16 or matrices.data_ptr() % 16)
