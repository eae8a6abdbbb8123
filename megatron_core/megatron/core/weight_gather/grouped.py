# SPDX-License-Identifier: Apache-2.0
"""grouped_linear: rows in runs, each run multiplied by a matrix of its own (the experts' linear).

forward  y[i] = W_e x[i]            for every row i of run e
dgrad    dx[i] = W_eᵀ dy[i]
wgrad    dW_e = sum over the rows of run e of dy[i] x[i]ᵀ, into the slot
"""

from __future__ import annotations

from functools import partial

import torch

from megatron.core.ops.backend_choice import apply_function
from megatron.core.ops.grouped_mm import RowRuns, grouped_mm, grouped_wgrad_, reads_counts
from megatron.core.weight_gather.handle import WeightHandle


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
    if x.ndim != 2 or (reads_counts(x) and not runs.fit(len(x))):
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
        how = {"dtype": handle.product_dtype, "tiles": handle.row_tiles}
        return grouped_mm(x, weight, runs, transposed=True, **how)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        handle, runs = ctx.handle, ctx.runs
        grad = grad.contiguous()
        dx = None
        if ctx.needs_input_grad[0]:
            weight = _matrices(handle.get(backward=True), runs)
            dx = grouped_mm(grad, weight, runs, dtype=handle.product_dtype)
        if x is not None:
            put = partial(_wgrad_, grad.detach(), x.detach(), runs=runs, dtype=handle.product_dtype)
            handle.written_gradient(put)
        return dx, None, None, None


def _matrices(weight: torch.Tensor, runs: RowRuns) -> torch.Tensor:
    return weight.view(len(runs.ends), -1, weight.shape[-1])


def _wgrad_(
    grad: torch.Tensor,
    x: torch.Tensor,
    slot: torch.Tensor,
    *,
    overwrite: bool,
    runs: RowRuns,
    dtype: torch.dtype,
) -> None:
    """Put dW into the slot [runs · c, o/c, h] fp32."""
    total = _matrices(slot, runs)
    grouped_wgrad_(total, grad.to(dtype), x.to(dtype), runs, overwrite=overwrite)
