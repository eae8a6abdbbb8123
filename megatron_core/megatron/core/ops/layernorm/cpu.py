# SPDX-License-Identifier: Apache-2.0
"""Layer normalisation in plain PyTorch; its backward converts 16-bit rows block by block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.ops.backend_choice import accumulation_dtype

#: Elements that a CPU converts at a time. Converting 8 million bf16 elements at once takes 2.2
#: times as long, a quarter of this block 1.3 times: larger temporaries leave the cache, smaller
#: blocks start threads more often (AMD EPYC, two threads).
BLOCK_ELEMENTS = 1 << 20


def layer_norm_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Return (y, x + residual, the factor w [h], the bias [h] or None, mean and rstd [rows])."""
    total = x if residual is None else x + residual
    rows = total.reshape(-1, total.shape[-1]).contiguous()  # [t, h]
    dtype = accumulation_dtype(x.dtype)
    scale = weight.to(dtype) + 1 if zero_centered else weight.to(dtype)
    shift = None if bias is None else bias.to(dtype)
    y, mean, rstd = torch.ops.aten.native_layer_norm(rows, [rows.shape[-1]], scale, shift, eps)
    return y.view(x.shape), total, scale, shift, mean, rstd


def layer_norm_backward(
    grad_y: torch.Tensor,
    grad_total: torch.Tensor | None,
    saved: Sequence[torch.Tensor | None],
    zero_centered: bool,
    needs_grad: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of t = x + residual, of the weight and of the bias, in fp32 or fp64.

    dt = rstd * (g w - mean(g w) - xhat mean(g w xhat)) + d(new residual); wgrad: sum over rows of
    g xhat, and of g. The passes are torch's own kernels.

    Args:
        grad_y: [..., h].
        grad_total: [..., h] or None, added to the gradient of t.
        saved: t [..., h], and the further outputs of `layer_norm_forward`.
        needs_grad: whether weight and bias need gradients.
    """
    total, *statistics = saved
    assert total is not None
    shape = (-1, total.shape[-1])
    grad, *grads = _accumulated_backward(
        grad_y.reshape(shape),
        total.reshape(shape),
        None if grad_total is None else grad_total.reshape(shape),
        statistics,
        mask=[True, *needs_grad],
    )
    return grad.view(total.shape), *grads


def _accumulated_backward(
    grad_y: torch.Tensor,
    rows: torch.Tensor,
    grad_total: torch.Tensor | None,
    statistics: Sequence[torch.Tensor | None],
    *,
    mask: list[bool],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Differentiate in the accumulation dtype; a CPU converts 16-bit rows block by block.

    torch accumulates the gradients of weight and bias in the dtype of the rows, which for bfloat16
    loses an eighth of them over 8,192 rows. The rows are therefore converted first.

    Args:
        grad_y, rows: [t, h].
        grad_total: [t, h] or None, added to the gradient of rows.
        statistics: scale and shift [h], mean and rstd [t, 1].
        mask: whether the gradients of rows, weight and bias are needed.

    Returns:
        (gradient of rows [t, h] in their dtype, gradients of weight and bias [h] in the
        accumulation dtype, or None).
    """
    scale, shift, mean, rstd = statistics
    assert scale is not None
    assert mean is not None
    assert rstd is not None
    dtype, shape = scale.dtype, [rows.shape[-1]]
    backward = torch.ops.aten.native_layer_norm_backward
    if rows.dtype == dtype or rows.device.type != "cpu" or rows.numel() <= BLOCK_ELEMENTS:
        grad_block, row_block = grad_y.contiguous().to(dtype), rows.contiguous().to(dtype)
        grad, *block_grads = backward(grad_block, row_block, shape, mean, rstd, scale, shift, mask)
        grad = grad.to(rows.dtype)
        return grad if grad_total is None else grad.add_(grad_total), *block_grads
    block_rows = max(1, BLOCK_ELEMENTS // rows.shape[-1])
    out = torch.empty(rows.shape, dtype=rows.dtype)
    scratch = torch.empty(2, block_rows, rows.shape[-1], dtype=dtype)
    totals = [torch.zeros_like(scale) if needed else None for needed in mask[1:]]
    for start in range(0, len(rows), block_rows):
        block = slice(start, start + block_rows)
        grad_block, row_block = scratch[:, : len(rows[block])]
        grad_block.copy_(grad_y[block])
        row_block.copy_(rows[block])
        grad, *block_grads = backward(
            grad_block, row_block, shape, mean[block], rstd[block], scale, shift, mask
        )
        if grad_total is None:
            out[block] = grad
        else:
            torch.add(grad, grad_total[block], out=out[block])
        for total, block_grad in zip(totals, block_grads, strict=True):
            if total is not None:
                total.add_(block_grad)
    return out, totals[0], totals[1]
