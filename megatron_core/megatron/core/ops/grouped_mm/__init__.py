# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls: contiguous runs of rows, each multiplied by its own matrix.

    grouped_mm      y[i] = x[i] · M_e           for every row i of run e     [r, m] -> [r, n]
    grouped_wgrad_  T_e (+)= sum over the rows of run e of g[i]ᵀ x[i]        -> [runs, o, h]
    add_run_biases  y[i] = x[i] + b_e           for every row i of run e     [r, n] -> [r, n]

The ends of the runs are on the rows' device. On a GPU the host does not wait for them, so both ops
can be captured in a CUDA graph and replayed with other runs:

| product | operands | implementation |
|---|---|---|
| grouped_mm | bf16 on Hopper and Blackwell, rows and addresses multiples of 16 bytes | torch |
| grouped_mm | fp32, fp16, other widths, other GPUs | Triton |
| grouped_wgrad_ | all | Triton |

On other GPUs torch's kernel reads the ends on the host. Its weight gradients are rounded to bf16
and cannot be added to a buffer.

On a CPU a loop over the runs reads their lengths on the host (`cpu`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F

from megatron.core.ops.backend_choice import apply_function, choose, device_capability
from megatron.core.ops.grouped_mm import cpu

__all__ = ["RowRuns", "add_run_biases", "grouped_mm", "grouped_wgrad_", "reads_counts"]

#: Major compute capabilities with a grouped kernel in torch; on others torch loops on the host.
_GROUPED_KERNELS = (9, 10)


@dataclass(frozen=True, eq=False)
class RowRuns:
    """Division of rows [r, h] into contiguous runs.

    Args:
        ends: int32 [runs], end of each run, on the device of the rows.
        trailing: whether rows may follow the last run, whose number only the device knows. No
            matrix multiplies them: their outputs and gradients are undefined.
    """

    ends: torch.Tensor
    trailing: bool = False

    @staticmethod
    def of(counts: torch.Tensor, *, trailing: bool = False) -> RowRuns:
        """Return the runs with int64 [runs] row counts."""
        return RowRuns(counts.cumsum(0).int(), trailing)

    def fit(self, rows: int) -> bool:
        """Return whether the runs cover `rows` rows; waits for the device."""
        total = sum(self.counts)
        return total <= rows if self.trailing else total == rows

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Rows of each run, on the host; waits for the device."""
        ends = self.ends.tolist()
        return tuple(end - start for start, end in pairwise((0, *ends)))


def reads_counts(x: torch.Tensor) -> bool:
    """Return whether grouped matmuls of rows like x read the run lengths on the host."""
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
    """Return [r, n] in x's dtype; rows after the last run are undefined.

    Args:
        x: [r, m].
        matrices: [runs, m, n], or [runs, n, m] if transposed, contiguous.
        transposed: multiply by the transposed matrices.
        dtype: in which a CPU multiplies; None is x's dtype.
        tiles: multiply in tiles of rows, so that a row's bits are independent of all other rows;
            the host then reads the counts.
        implementation: "reference", "triton" or None (by device, see the module).
    """
    if tiles or choose(implementation, x, "grouped_mm") == "reference":
        right = matrices.transpose(1, 2) if transposed else matrices
        dtype = x.dtype if dtype is None else dtype
        return cpu.grouped_mm(x, right, runs.counts, dtype, tiles=tiles)
    if implementation is None and _is_torch_supported(x, matrices):
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
    """Add each run's gᵀ x to `total`, or write it to `total` if `overwrite`.

    Args:
        total: [runs, o, h] contiguous, fp32 or the operands' dtype; each sum is rounded once.
        grad: g [r, o].
        x: [r, h], the dtype of `grad`.
        overwrite: ignore the contents of `total`; a run without rows writes zeros.
        implementation: "reference", "triton" or None (by device).
    """
    if choose(implementation, x, "grouped_wgrad") == "triton":
        from megatron.core.ops.grouped_mm import triton as kernels

        kernels.grouped_wgrad_(total, grad, x, runs.ends, overwrite=overwrite)
        return
    cpu.grouped_wgrad_(total, grad, x, runs.counts, overwrite=overwrite)


def add_run_biases(x: torch.Tensor, biases: torch.Tensor, runs: RowRuns) -> torch.Tensor:
    """Return rows x [r, n] plus the bias of their run, in x's dtype; rows after the last run are
    undefined.

    Args:
        biases: fp32 [runs, n].
    """
    return apply_function(_AddRunBiases, x, biases, runs)


class _AddRunBiases(torch.autograd.Function):
    """y[i] = x[i] + b_e. dgrad: g; wgrad: the sum of g over the rows of run e, in fp32 and in the
    order of the rows. Saves nothing."""

    @staticmethod
    def forward(ctx, x, biases, runs):
        ctx.runs = runs
        rows = torch.arange(len(x), dtype=runs.ends.dtype, device=x.device)
        run_of_row = torch.searchsorted(runs.ends, rows, right=True).clamp_(max=len(biases) - 1)
        return x + biases.to(x.dtype).index_select(0, run_of_row)

    @staticmethod
    def backward(ctx, grad):
        ends = ctx.runs.ends.long()
        total = ends.new_full((1,), len(grad))  # the last segment has the rows after all runs
        lengths = torch.diff(torch.cat([ends, total]), prepend=ends.new_zeros(1))
        sums = torch.segment_reduce(grad.float(), "sum", lengths=lengths, axis=0, unsafe=True)
        return grad, sums[:-1], None


def _is_torch_supported(x: torch.Tensor, matrices: torch.Tensor) -> bool:
    """Return whether torch has a grouped kernel for these operands on a GPU."""
    if x.dtype is not torch.bfloat16 or not len(x):
        return False
    if device_capability(x.device)[0] not in _GROUPED_KERNELS:
        return False
    sizes = (*matrices.shape[1:], x.shape[1])
    aligned = not any(size * x.itemsize % 16 for size in sizes)
    return aligned and not (x.data_ptr() % 16 or matrices.data_ptr() % 16)
