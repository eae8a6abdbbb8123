# SPDX-License-Identifier: Apache-2.0
"""Layer normalisation, with the residual addition that precedes it: the op, and its definition in
plain torch, which a CPU uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.ops.backend_choice import StoredWeight, accumulation_dtype, choose
from megatron.core.ops.rmsnorm import check_norm, run_norm


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | StoredWeight,
    bias: torch.Tensor | StoredWeight | None,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    zero_centered: bool = False,
    implementation: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Normalise the last dimension to mean 0 and variance 1 (Ba et al., 2016).

    y = (t - mean(t)) / sqrt(var(t) + eps) * w + bias, with t = x (+ residual); statistics in
    fp32. Backward saves t and two fp32 numbers a row.

    Args:
        x: [..., h].
        weight: [h]; `w` is `1 + weight` when `zero_centered`.
        bias: [h] or None.
        eps: added to the variance.
        residual: [..., h], same shape and dtype as `x`, added to it first.
        zero_centered: store the weight as its distance from one.
        implementation: "reference", "triton" or None (by device).

    Returns:
        y [..., h] in x's dtype, or `(y, x + residual)` when `residual` is given.

    Raises:
        ValueError: shapes, dtypes or `eps` that do not fit.
    """
    scale, shift = (w.value if isinstance(w, StoredWeight) else w for w in (weight, bias))
    check_norm("layer_norm", x, scale, residual, eps=eps)
    if shift is not None and (shift.shape != scale.shape or shift.dtype != scale.dtype):
        raise ValueError(
            f"layer_norm: bias {tuple(shift.shape)} {shift.dtype} must match"
            f" weight {tuple(scale.shape)} {scale.dtype}"
        )
    if (implementation or not x.is_cpu) and choose(implementation, x, "layer_norm") == "triton":
        from megatron.core.ops.layernorm import triton as kernels

        pair = kernels.layer_norm_forward, kernels.layer_norm_backward
    else:
        pair = _layer_norm_forward, _layer_norm_backward
    return run_norm(pair, x, weight, bias, residual=residual, eps=eps, zero_centered=zero_centered)


# --- reference: plain torch

#: Elements widened at once on a CPU. All of 8 million bf16 elements at once take 2.2 times as long,
#: a quarter of this 1.3 times: larger temporaries leave the cache, smaller ones start more threads
#: (AMD EPYC, two threads).
ELEMENTS_IN_CACHE = 1 << 20


def _layer_norm_forward(
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
    wide = accumulation_dtype(x.dtype)
    scale = weight.to(wide) + 1 if zero_centered else weight.to(wide)
    shift = None if bias is None else bias.to(wide)
    y, mean, rstd = torch.ops.aten.native_layer_norm(rows, [rows.shape[-1]], scale, shift, eps)
    return y.view(x.shape), total, scale, shift, mean, rstd


def _layer_norm_backward(
    grad_y: torch.Tensor,
    grad_total: torch.Tensor | None,
    saved: Sequence[torch.Tensor | None],
    zero_centered: bool,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of t = x + residual, of the weight and of the bias, in fp32 or fp64.

    dt = rstd * (g w - mean(g w) - xhat mean(g w xhat)) + d(new residual); wgrad: sum over rows of
    g xhat, and of g. torch's own kernels do the passes.

    Args:
        grad_y: [..., h].
        grad_total: [..., h] or None, added to the gradient of t.
        saved: t [..., h], and what else `_layer_norm_forward` returns.
        wanted: whether the gradients of weight and bias are needed.
    """
    total, *kept = saved
    assert total is not None
    shape = (-1, total.shape[-1])
    grad, *grads = _wide_backward(
        grad_y.reshape(shape),
        total.reshape(shape),
        None if grad_total is None else grad_total.reshape(shape),
        kept,
        mask=[True, *wanted],
    )
    return grad.view(total.shape), *grads


def _wide_backward(
    grad_y: torch.Tensor,
    rows: torch.Tensor,
    grad_total: torch.Tensor | None,
    kept: Sequence[torch.Tensor | None],
    *,
    mask: list[bool],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Differentiate in the accumulation dtype; narrow rows are widened, on a CPU a block at a time.

    torch sums the gradients of weight and bias over the rows in the dtype of the rows, which for
    bfloat16 loses an eighth of them over 8,192 rows: it is given wide ones.

    Args:
        grad_y, rows: [t, h].
        grad_total: [t, h] or None, added to the gradient of rows.
        kept: scale and shift [h], mean and rstd [t, 1].
        mask: whether the gradients of rows, weight and bias are needed.

    Returns:
        (gradient of rows [t, h] in their dtype, wide gradients of weight and bias [h] or None).
    """
    scale, shift, mean, rstd = kept
    wide, shape = scale.dtype, [rows.shape[-1]]
    backward = torch.ops.aten.native_layer_norm_backward
    if rows.dtype == wide or rows.device.type != "cpu" or rows.numel() <= ELEMENTS_IN_CACHE:
        wide_y, wide_rows = grad_y.contiguous().to(wide), rows.contiguous().to(wide)
        grad, *sums = backward(wide_y, wide_rows, shape, mean, rstd, scale, shift, mask)
        grad = grad.to(rows.dtype)
        return grad if grad_total is None else grad.add_(grad_total), *sums
    count = max(1, ELEMENTS_IN_CACHE // rows.shape[-1])
    out = torch.empty(rows.shape, dtype=rows.dtype)
    scratch = torch.empty(2, count, rows.shape[-1], dtype=wide)
    totals = [torch.zeros_like(scale) if wanted else None for wanted in mask[1:]]
    for start in range(0, len(rows), count):
        part = slice(start, start + count)
        wide_y, wide_rows = scratch[:, : len(rows[part])]
        wide_y.copy_(grad_y[part])
        wide_rows.copy_(rows[part])
        grad, *sums = backward(wide_y, wide_rows, shape, mean[part], rstd[part], scale, shift, mask)
        if grad_total is None:
            out[part] = grad
        else:
            torch.add(grad, grad_total[part], out=out[part])
        for total, found in zip(totals, sums, strict=True):
            if total is not None:
                total.add_(found)
    return out, *totals
