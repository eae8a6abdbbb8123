# SPDX-License-Identifier: Apache-2.0
"""Gated RMS normalisation in plain torch: the definition, and the CPU's path.

A block of rows is worked out at once, so that its passes find each other's results in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.core.ops.dispatch import accumulation_dtype

# Elements of a block on a CPU: a half megabyte of fp32 for each of four or five buffers.
ELEMENTS_IN_CACHE = 1 << 17


class GatedRmsNorm(torch.autograd.Function):
    """y = rms(x) w silu(gate), or y = rms(x silu(gate)) w where the gate comes first.

    Forward: as above, with rms(t) = t r and r = 1 / sqrt(mean(t^2) + eps), one a group.
    dgrad: with s = silu(gate) and d the gradient behind the norm's weight (g s or g),
    dt = r (d w - rms(t) mean(d w rms(t))), and dx = dt, dgate = g w rms(x) s', or dx = dt s,
    dgate = dt x s'. wgrad: sum over rows of d rms(t). Saves x, gate, w and r.
    """

    @staticmethod
    def forward(ctx, x, gate, weight, eps, gate_first, size):
        dtype = accumulation_dtype(x.dtype)
        scale = weight.to(dtype)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rstd = torch.empty((*x.shape[:-1], x.shape[-1] // size), dtype=dtype, device=x.device)
        for values, gates, out, factor in _blocks(x, gate, y, rstd):
            values, opened = values.to(dtype), torch.nn.functional.silu(gates.to(dtype))
            inner = opened.mul_(values) if gate_first else values
            torch.linalg.vector_norm(_groups(inner, size), dim=-1, out=factor)
            factor.square_().div_(size).add_(eps).rsqrt_()
            opened.mul_(scale) if gate_first else opened.mul_(values).mul_(scale)
            torch.mul(_groups(opened, size), factor[..., None], out=_groups(out, size))
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.gate_first, ctx.size = gate_first, size
        return y

    @staticmethod
    def backward(ctx, grad):
        x, gate, weight, rstd = ctx.saved_tensors
        grads = [
            torch.empty(given.shape, dtype=given.dtype, device=x.device) for given in (x, gate)
        ]
        scale = weight.to(rstd.dtype)
        grad_scale = torch.zeros_like(scale)
        differentiate = _differentiate_gate_first if ctx.gate_first else _differentiate_norm_first
        for block in _blocks(x, gate, grad, rstd, *grads):
            differentiate(*block, scale=scale, grad_scale=grad_scale)
        return *grads, grad_scale.to(weight.dtype), None, None, None


def _blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the parts of tensors [t, ...] that are worked out at once."""
    first = tensors[0]
    rows = max(1, first.shape[0])
    if first.device.type == "cpu":
        rows = max(1, ELEMENTS_IN_CACHE // max(1, first[:1].numel()))
    yield from zip(*(x.split(rows) for x in tensors), strict=True)


def _groups(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return [..., n / size, size] from x [..., n]."""
    return x.unflatten(-1, (-1, size))


def _differentiate_norm_first(x, gate, grad, rstd, grad_x, grad_gate, *, scale, grad_scale):
    """Write the gradients of a block of y = rms(x) w silu(gate)."""
    gate, grad = gate.to(scale.dtype), grad.to(scale.dtype)
    normal = _normal(x.to(scale.dtype), rstd)
    behind = torch.mul(grad, normal).mul_(scale)
    grad_gate.copy_(torch.ops.aten.silu_backward(behind, gate))
    opened = torch.ops.aten.silu.out(gate, out=behind).mul_(grad)
    grad_x.copy_(_differentiate_norm(opened, normal, rstd, scale=scale, grad_scale=grad_scale))


def _differentiate_gate_first(x, gate, grad, rstd, grad_x, grad_gate, *, scale, grad_scale):
    """Write the gradients of a block of y = rms(x silu(gate)) w."""
    x, gate = x.to(scale.dtype), gate.to(scale.dtype)
    opened = torch.nn.functional.silu(gate)
    normal = _normal(opened * x, rstd)
    inner = grad.to(scale.dtype, copy=True)
    inner = _differentiate_norm(inner, normal, rstd, scale=scale, grad_scale=grad_scale)
    torch.mul(inner, opened, out=grad_x)
    grad_gate.copy_(torch.ops.aten.silu_backward(inner.mul_(x), gate))


def _normal(x: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """Return x [..., n] times rstd [..., n / size], the norm of x; new memory."""
    size = x.shape[-1] // rstd.shape[-1]
    normal = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.mul(_groups(x, size), rstd[..., None], out=_groups(normal, size))
    return normal


def _differentiate_norm(grad, normal, rstd, *, scale, grad_scale):
    """Return the gradient of t from `grad`, that of rms(t) w; add that of w to `grad_scale`.

    Both `grad` and `normal`, rms(t), are written over.
    """
    size = grad.shape[-1] // rstd.shape[-1]
    product = grad * normal
    grad_scale += product.flatten(0, -2).sum(0)
    mean = _groups(product.mul_(scale), size).sum(-1, keepdim=True).div_(size)
    groups = _groups(grad.mul_(scale), size)
    groups.addcmul_(_groups(normal, size), mean, value=-1).mul_(rstd[..., None])
    return grad
