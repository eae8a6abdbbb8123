# SPDX-License-Identifier: Apache-2.0
"""grouped_linear: a grouped matrix product of experts, with contiguous rows for each expert.

forward  y[i] = W_e x[i]            for every row i of run e, the rows of expert e
dgrad    dx[i] = W_eᵀ dy[i]
wgrad    dW_e = sum over the rows of run e of dy[i] x[i]ᵀ, into `main_grad`
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
        handle: a weight whose local tensor holds a matrix [o, h] for each run, one after the other:
            [runs · c, o/c, h] for any c. A fused weight interleaves several logical weights by
            expert.
        x: the rows of all runs, in order.
        runs: the number of rows of each run.

    Raises:
        ValueError: the runs do not sum to the rows of x (checked on a CPU only, because a check on
            a GPU would synchronise), or the weight does not have a matrix [o, h] for each run.
    """
    count, shape = len(runs.ends), handle.shape
    if x.ndim != 2 or (reads_counts(x) and not runs.fit(len(x))):
        raise ValueError(
            f"{handle.name}: runs of {sum(runs.counts)} rows for x {tuple(x.shape)}: x must "
            "be [r, h] with as many rows"
        )
    if len(shape) != 3 or not count or shape[0] % count or shape[2] != x.shape[1]:
        raise ValueError(
            f"{handle.name} {list(shape)} must be [{count} · c, o/c, {x.shape[1]}], one "
            f"matrix for each of {count} runs"
        )
    return apply_function(_GroupedLinear, x, handle.anchor, handle, runs)


class _GroupedLinear(torch.autograd.Function):
    """See the module. Saves x."""

    @staticmethod
    def forward(ctx, x, anchor, handle, runs):
        ctx.handle, ctx.runs = handle, runs
        ctx.save_for_backward(x if anchor.requires_grad else None)
        weight = _matrices(handle.get(), runs)  # [runs, o, h]
        return grouped_mm(
            x, weight, runs, transposed=True, dtype=handle.product_dtype, tiles=handle.row_tiles
        )

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        handle, runs = ctx.handle, ctx.runs
        # A reduction after the experts passes expanded gradients, with stride 0.
        grad = grad.contiguous()
        dx = None
        if ctx.needs_input_grad[0]:
            weight = _matrices(handle.get(backward=True), runs)
            dx = grouped_mm(grad, weight, runs, dtype=handle.product_dtype)
        if x is not None:
            write = partial(
                _wgrad_, grad.detach(), x.detach(), runs=runs, dtype=handle.product_dtype
            )
            handle.accumulate_written_grad(write)
        return dx, None, None, None


def _matrices(weight: torch.Tensor, runs: RowRuns) -> torch.Tensor:
    return weight.view(len(runs.ends), -1, weight.shape[-1])


def _wgrad_(
    grad: torch.Tensor,
    x: torch.Tensor,
    main_grad: torch.Tensor,
    *,
    overwrite: bool,
    runs: RowRuns,
    dtype: torch.dtype,
) -> None:
    """Accumulate dW in main_grad [runs · c, o/c, h] fp32."""
    total = _matrices(main_grad, runs)
    grouped_wgrad_(total, grad.to(dtype), x.to(dtype), runs, overwrite=overwrite)
