# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation, optionally fused with the preceding residual addition.

The plain PyTorch version minimizes passes over memory on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron.core.ops.backend_choice import (
    StoredWeight,
    accumulation_dtype,
    choose,
    record_function,
)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    zero_centered: bool = False,
    implementation: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Normalise the last dimension by its root mean square (Zhang & Sennrich, 2019).

    y = t / sqrt(mean(t^2) + eps) * w, with t = x (+ residual); statistics in fp32.
    Backward saves t and one fp32 number per row.

    Args:
        x: [..., h].
        weight: [h]; `w` is `1 + weight` if `zero_centered`.
        eps: added to the mean square.
        residual: [..., h], same shape and dtype as `x`, added to x before the norm.
        zero_centered: whether the stored weight is the scale minus one.
        implementation: "reference", "triton" or None (by device).

    Returns:
        y [..., h] in x's dtype, or `(y, x + residual)` with a residual.

    Raises:
        ValueError: shapes, dtypes or `eps` that do not fit.
    """
    check_norm("rms_norm", x, weight, residual, eps=eps)
    return normalise(
        x,
        weight,
        residual=residual,
        eps=eps,
        zero_centered=zero_centered,
        implementation=implementation,
    )


def normalise(
    x: torch.Tensor,
    weight: torch.Tensor | StoredWeight,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    zero_centered: bool = False,
    implementation: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Like `rms_norm`, without checks of the arguments."""
    if (implementation or not x.is_cpu) and choose(implementation, x, "rms_norm") == "triton":
        from megatron.core.ops.rmsnorm import triton as kernels

        pair = kernels.rms_norm_forward, kernels.rms_norm_backward
    else:
        pair = _rms_norm_forward, _rms_norm_backward
    return run_norm(pair, x, weight, residual=residual, eps=eps, zero_centered=zero_centered)


def run_norm(
    pair: tuple[Callable, Callable],
    x: torch.Tensor,
    *weights: torch.Tensor | StoredWeight | None,
    residual: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return norm(x), or (norm(x + residual), x + residual).

    Args:
        pair: forward and backward of an implementation.
        weights: scale [h], and for layer norm the bias [h] or None.
    """
    stored = [weight if isinstance(weight, StoredWeight) else None for weight in weights]
    if torch.is_grad_enabled():
        leaves = [w.anchor if isinstance(w, StoredWeight) else w for w in weights]
        y, total = record_function(
            Normalise, pair, x, residual, eps, zero_centered, stored, *leaves
        )
    else:
        values = [w.value if isinstance(w, StoredWeight) else w for w in weights]
        y, total, *_ = pair[0](x, residual, eps, zero_centered, *values)
    return y if residual is None else (y, total)


class Normalise(torch.autograd.Function):
    """y = norm(t), t = x + residual, by the forward and backward of an implementation.

    The gradient of t is the gradient of both x and residual. Backward may return addends [n, h] of
    a weight's gradient [h]. Saves t and the further outputs of forward.
    """

    @staticmethod
    def forward(ctx, pair, x, residual, eps, zero_centered, stored, *weights):
        forward, ctx.differentiate = pair
        values = [w if s is None else s.value for s, w in zip(stored, weights, strict=True)]
        y, total, *statistics = forward(x, residual, eps, zero_centered, *values)
        ctx.save_for_backward(total, *statistics)
        ctx.zero_centered, ctx.stored, ctx.weight_dtype = zero_centered, stored, weights[0].dtype
        ctx.set_materialize_grads(False)
        return y, None if residual is None else total

    @staticmethod
    def backward(ctx, grad_y, grad_total):
        _, _, needs_residual, _, _, _, *needs_grad = ctx.needs_input_grad
        grad, grads = grad_total, [None] * len(needs_grad)
        if grad_y is not None:
            grad, *weight_grads = ctx.differentiate(
                grad_y, grad_total, ctx.saved_tensors, ctx.zero_centered, needs_grad
            )
            for i, (addends, stored) in enumerate(zip(weight_grads, ctx.stored, strict=False)):
                if addends is None or not needs_grad[i]:
                    continue
                if stored is not None:
                    stored.accumulate_grad(addends)
                else:
                    weight_grad = addends.sum(0) if addends.ndim > 1 else addends
                    grads[i] = weight_grad.to(ctx.weight_dtype)
        return None, grad, grad if needs_residual else None, None, None, None, *grads


def check_norm(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    *,
    eps: float,
) -> None:
    """Raise ValueError unless the arguments of a normalisation fit together."""
    if x.ndim == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{op}: weight {tuple(weight.shape)} must have the shape of the last dimension of"
            f" x {tuple(x.shape)}"
        )
    if not x.is_floating_point():
        raise ValueError(f"{op}: x has dtype {x.dtype}; give a floating-point tensor")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"{op}: residual {tuple(residual.shape)} {residual.dtype} must match"
            f" x {tuple(x.shape)} {x.dtype}"
        )
    if eps < 0:
        raise ValueError(f"{op}: eps={eps} must not be negative")


# --- reference: plain torch


def _rms_norm_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (y, x + residual, the factor w [h], rstd [rows]); see `ops.rmsnorm.rms_norm`."""
    total = x if residual is None else x + residual
    dtype = accumulation_dtype(x.dtype)
    scale = weight.to(dtype) + 1 if zero_centered else weight.to(dtype)
    values = total.to(dtype)
    rstd = torch.linalg.vector_norm(values, dim=-1, keepdim=True).square_()  # [..., 1]
    rstd = rstd.div_(values.shape[-1]).add_(eps).rsqrt_()
    # x must not be overwritten if `values` is x itself: then the product allocates the output.
    y = values * rstd if values is total else values.mul_(rstd)
    return y.mul_(scale).to(x.dtype), total, scale, rstd.view(-1)


def _rms_norm_backward(
    grad_y: torch.Tensor,
    grad_total: torch.Tensor | None,
    saved: Sequence[torch.Tensor],
    zero_centered: bool,
    needs_grad: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of x + residual and of the weight [h], in fp32 or fp64.

    dt = rstd * (g w - t rstd^2 mean(g w t)) + d(new residual); wgrad: sum over rows of g t rstd.
    torch's layer-norm backward with mean zero computes the input gradient minus rstd * mean(g w),
    and the weight gradient, in one pass over memory; one matrix-vector product gives the missing
    term. All sums are in the dtype of `scale` (fp32 or fp64).

    Args:
        grad_y: [..., h].
        grad_total: [..., h] or None, added to the input gradient.
        saved: x + residual [..., h], the factor w [h] and rstd [rows], from `_rms_norm_forward`.
        needs_grad: whether the weight needs a gradient.
    """
    total, scale, rstd = saved
    features = total.shape[-1]
    rows = total.reshape(-1, features)  # [t, h]
    grad_y = grad_y.reshape(-1, features).contiguous().to(scale.dtype)
    grad, grad_scale, _ = torch.ops.aten.native_layer_norm_backward(
        grad_y,
        rows.contiguous().to(scale.dtype),
        [features],
        torch.zeros_like(rstd)[:, None],
        rstd[:, None],
        scale,
        None,
        [True, needs_grad[0], False],
    )
    correction = torch.mv(grad_y, scale).mul_(rstd).div_(features)  # [t]
    grad.add_(correction[:, None])
    if grad_total is not None:
        grad.add_(grad_total.reshape(-1, features))
    return grad.to(rows.dtype).view(total.shape), grad_scale
