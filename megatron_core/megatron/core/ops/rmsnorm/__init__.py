# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation, optionally fused with the preceding residual addition.

`normalise` and its autograd Function serve layer normalisation too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron.core.ops.backend_choice import StoredWeight, choose, direct_apply
from megatron.core.ops.rmsnorm import cpu


class NormOp(NamedTuple):
    """A normalisation and its implementations.

    Args:
        name: of the op, for error messages.
        plain: forward and backward in plain PyTorch.
        kernels: returns forward and backward in Triton.
    """

    name: str
    plain: tuple[Callable, Callable]
    kernels: Callable[[], tuple[Callable, Callable]]


def _rms_norm_kernels() -> tuple[Callable, Callable]:
    from megatron.core.ops.rmsnorm import triton as kernels

    return kernels.rms_norm_forward, kernels.rms_norm_backward


RMS_NORM = NormOp("rms_norm", (cpu.rms_norm_forward, cpu.rms_norm_backward), _rms_norm_kernels)


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
        RMS_NORM,
        x,
        weight,
        residual=residual,
        eps=eps,
        zero_centered=zero_centered,
        implementation=implementation,
    )


def normalise(
    op: NormOp,
    x: torch.Tensor,
    *weights: torch.Tensor | StoredWeight | None,
    eps: float,
    residual: torch.Tensor | None = None,
    zero_centered: bool = False,
    implementation: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return norm(x), or (norm(x + residual), x + residual), without checks of the arguments.

    Args:
        op: the normalisation.
        weights: scale [h], and for layer norm the bias [h] or None.
        eps, residual, zero_centered, implementation: as for `rms_norm`.
    """
    pair = op.plain
    if (implementation or not x.is_cpu) and choose(implementation, x, op.name) == "triton":
        pair = op.kernels()
    if torch.is_grad_enabled():
        stored = [weight if isinstance(weight, StoredWeight) else None for weight in weights]
        leaves = [w.anchor if isinstance(w, StoredWeight) else w for w in weights]
        y, total = _apply_normalise(pair, x, residual, eps, zero_centered, stored, *leaves)
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


_apply_normalise = direct_apply(Normalise)


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
