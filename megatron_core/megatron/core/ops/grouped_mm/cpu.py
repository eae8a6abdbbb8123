# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls in plain PyTorch: a loop over the runs, whose lengths the host knows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.ops.backend_choice import add_product_
from megatron.core.ops.matmul.batch_invariant import tiled_matmul


def grouped_mm(
    x: torch.Tensor,
    matrices: torch.Tensor,
    counts: Sequence[int],
    dtype: torch.dtype,
    *,
    tiles: bool,
) -> torch.Tensor:
    """Return [r, n] from x [r, m] and matrices [runs, m, n], run by run.

    torch's grouped matmul on a CPU is this loop in C++; from a dozen rows on it takes the same time
    within a few percent.
    """
    out = torch.empty(len(x), matrices.shape[2], dtype=dtype, device=x.device)
    operand = x.to(dtype)
    start = 0
    for matrix, count in zip(matrices, counts, strict=True):
        if count:
            rows = slice(start, start + count)
            if tiles:
                out[rows] = tiled_matmul(operand[rows], matrix.to(dtype))
            else:
                torch.mm(operand[rows], matrix.to(dtype), out=out[rows])
            start += count
    return out.to(x.dtype)


def grouped_wgrad_(
    total: torch.Tensor,
    grad: torch.Tensor,
    x: torch.Tensor,
    counts: Sequence[int],
    *,
    overwrite: bool,
) -> None:
    """See `ops.grouped_mm.grouped_wgrad_`."""
    start = 0
    for matrix, count in zip(total, counts, strict=True):
        rows = slice(start, start + count)
        if count:
            add_product_(matrix, grad[rows].t(), x[rows], overwrite=overwrite)
        elif overwrite:
            matrix.zero_()
        start += count
