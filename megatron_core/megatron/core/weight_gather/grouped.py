# SPDX-License-Identifier: Apache-2.0
"""grouped_linear: rows in runs, each run multiplied by a matrix of its own (the experts' linear).

forward  y[i] = W_e x[i]            for every row i of run e
dgrad    dx[i] = W_eᵀ dy[i]
wgrad    dW_e = sum over the rows of run e of dy[i] x[i]ᵀ, into the slot
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import torch
import torch.nn.functional as F

from megatron.core.ops.dispatch import add_product_, apply_function
from megatron.core.ops.row_tiles import tiled_product
from megatron.core.weight_gather.handle import WeightHandle


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
        known = sum(self.counts)
        return known <= rows if self.trailing else known == rows

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Rows of each run, on the host, which waits for the device."""
        ends = self.ends.tolist()
        return tuple(end - start for start, end in pairwise((0, *ends)))


def grouped_linear(handle: WeightHandle, x: torch.Tensor, runs: RowRuns) -> torch.Tensor:
    """Return [r, o] from rows x [r, h] in x's dtype; row i of run e is multiplied by matrix e.

    Args:
        handle: of a weight whose local tensor holds a matrix [o, h] for each run, one after the
            other: [runs · c, o/c, h] for any c. A fused one is that of several logical weights
            that interleave by experts.

    Raises:
        ValueError: runs of another number of rows, on a CPU (a GPU is not waited for), or a weight
            without a matrix [o, h] for each.
    """
    count, shape = len(runs.ends), handle.shape
    if x.ndim != 2 or (x.device.type == "cpu" and not runs.fit(len(x))):
        raise ValueError(
            f"{handle.name}: runs of {sum(runs.counts)} rows of x {tuple(x.shape)}: it must be "
            "[r, h] with as many"
        )
    if len(shape) != 3 or not count or shape[0] % count or shape[2] != x.shape[1]:
        raise ValueError(
            f"{handle.name} {list(shape)} must be [{count} · c, o/c, {x.shape[1]}], a matrix for "
            f"each of {count} runs"
        )
    return apply_function(_GroupedLinear, x, handle.anchor, handle, runs)


class _GroupedLinear(torch.autograd.Function):
    """See the module. Saves x."""

    @staticmethod
    def forward(ctx, x, anchor, handle, runs):
        ctx.handle, ctx.runs = handle, runs
        ctx.save_for_backward(x if anchor.requires_grad else None)
        weight = _matrices(handle.get(), runs)  # [runs, o, h]
        tiles = handle.row_tiles
        return _products(x, weight.transpose(1, 2), runs, handle.product_dtype, tiles=tiles)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        handle, runs = ctx.handle, ctx.runs
        grad = grad.contiguous()
        dx = None
        if ctx.needs_input_grad[0]:
            weight = _matrices(handle.get(backward=True), runs)
            dx = _products(grad, weight, runs, handle.product_dtype)
        if x is not None:
            put = partial(_wgrad_, grad.detach(), x.detach(), runs=runs, dtype=handle.product_dtype)
            handle.written_gradient(put)
        return dx, None, None, None


def _matrices(weight: torch.Tensor, runs: RowRuns) -> torch.Tensor:
    return weight.view(len(runs.ends), -1, weight.shape[-1])


def _products(
    x: torch.Tensor,
    matrices: torch.Tensor,
    runs: RowRuns,
    dtype: torch.dtype,
    *,
    tiles: bool = False,
) -> torch.Tensor:
    """Return [r, n] from x [r, m] and matrices [runs, m, n], if `tiles` in those of rows."""
    if not tiles and _is_one_kernel(x, matrices):
        return F.grouped_mm(x, matrices, offs=runs.ends)
    out = torch.empty(len(x), matrices.shape[2], dtype=dtype, device=x.device)
    wide = x.to(dtype)
    start = 0
    for matrix, count in zip(matrices, runs.counts, strict=True):
        if count:
            rows = slice(start, start + count)
            if tiles:
                out[rows] = tiled_product(wide[rows], matrix.to(dtype))
            else:
                torch.mm(wide[rows], matrix.to(dtype), out=out[rows])
            start += count
    return out.to(x.dtype)


def _is_one_kernel(x: torch.Tensor, matrices: torch.Tensor) -> bool:
    """Return whether torch's grouped product takes these: bf16 on a GPU, rows and addresses of
    whole 16 bytes.

    On a CPU it is this loop in C++, within a few percent of it from a dozen rows up.
    """
    if x.device.type != "cuda" or x.dtype is not torch.bfloat16 or not len(x):
        return False
    rows = (x.shape[1] * x.itemsize, matrices.shape[2] * x.itemsize)
    return not any(size % 16 for size in (*rows, x.data_ptr(), matrices.data_ptr()))


def _wgrad_(
    grad: torch.Tensor,
    x: torch.Tensor,
    slot: torch.Tensor,
    *,
    overwrite: bool,
    runs: RowRuns,
    dtype: torch.dtype,
) -> None:
    """Put dW into the slot [runs · c, o/c, h] fp32.

    A loop on every device: a grouped product rounds its sums to the operands' dtype, and cannot
    write to an output buffer.
    """
    grad, x = grad.to(dtype), x.to(dtype)
    start = 0
    for matrix, count in zip(_matrices(slot, runs), runs.counts, strict=True):
        rows = slice(start, start + count)
        if count:
            add_product_(matrix, grad[rows].t(), x[rows], overwrite=overwrite)
        elif overwrite:
            matrix.zero_()
        start += count
