# SPDX-License-Identifier: Apache-2.0
"""Activations of an MLP, gated (SwiGLU, GeGLU) and plain."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.core.ops.backend_choice import apply_function, choose, direct_apply
from megatron.core.ops.swiglu import cpu

GATES = ("silu", "gelu", "quick_gelu")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "squared_relu", "silu")


def gated(
    gate_up: torch.Tensor,
    activation: str = "silu",
    *,
    clamp: float | None = None,
    offset: float = 0.0,
    implementation: str | None = None,
) -> torch.Tensor:
    """Compute activation(gate) * (up + offset) (Shazeer, 2020); backward saves only `gate_up`.

    Args:
        gate_up: [..., 2f], the gate in the first half.
        activation: "silu", "gelu" (its tanh approximation) or "quick_gelu", x sigmoid(1.702 x).
        clamp: limit L of both inputs: gate <= L and -L <= up <= L (as in gpt-oss); None for none.
        offset: added to up.
        implementation: "reference", "triton" or None (by device).

    Returns:
        [..., f] in the dtype of `gate_up`.

    Raises:
        ValueError: an odd last dimension or an unknown activation.
    """
    if gate_up.ndim == 0 or gate_up.shape[-1] % 2:
        raise ValueError(
            f"gated: the last dimension of gate_up {tuple(gate_up.shape)} must be even: gate and up"
        )
    if activation not in GATES:
        raise ValueError(f"gated: activation={activation!r} is unknown; use one of {GATES}")
    forward, backward = cpu.gated_forward, cpu.gated_backward
    by_device = implementation or not gate_up.is_cpu
    if by_device and choose(implementation, gate_up, "gated") == "triton":
        from megatron.core.ops.swiglu import triton as kernels

        forward, backward = kernels.gated_forward, kernels.gated_backward
    if torch.is_grad_enabled():
        return _apply_gated(gate_up, (activation, clamp, offset), forward, backward)
    return forward(gate_up, activation, clamp, offset)


def activate(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Apply a plain activation to every element.

    Args:
        x: any shape.
        kind: "gelu" (exact), "gelu_tanh", "relu", "squared_relu" or "silu".

    Returns:
        Same shape and dtype as `x`.

    Raises:
        ValueError: an unknown kind.
    """
    if kind not in ACTIVATIONS:
        raise ValueError(f"activate: kind={kind!r} is unknown; use one of {ACTIVATIONS}")
    if kind == "gelu":
        return F.gelu(x)
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if kind == "relu":
        return F.relu(x)
    if kind == "silu":
        return F.silu(x)
    return apply_function(SquaredRelu, x)


class Gated(torch.autograd.Function):
    """y = act(gate) * (up + offset), [..., 2f] -> [..., f].

    Forward: as above. dgrad: dgate = g (up + offset) act'(gate), dup = g act(gate), written into
    the two halves of one buffer; 0 where an input is clamped. No weights. Saves only gate_up:
    backward recomputes the activation. `forward` and `backward` are the functions of `cpu` or of
    `triton`, `function` the activation, the clamp and the offset.
    """

    @staticmethod
    def forward(ctx, gate_up, function, forward, backward):
        ctx.save_for_backward(gate_up)
        ctx.function, ctx.differentiate = function, backward
        return forward(gate_up, *function)

    @staticmethod
    def backward(ctx, grad):
        return ctx.differentiate(grad, *ctx.saved_tensors, *ctx.function), None, None, None


_apply_gated = direct_apply(Gated)


class SquaredRelu(torch.autograd.Function):
    """y = max(x, 0)^2. dgrad: 2 g max(x, 0). Saves x."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = x.clamp_min(0)
        return y.mul_(y)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return x.clamp_min(0).mul_(grad).mul_(2)
