# SPDX-License-Identifier: Apache-2.0
"""Gated and plain activations in plain torch: the definition and the CPU path."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.core.ops.dispatch import apply_function

GATES = ("silu", "gelu")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "squared_relu", "silu")


class Gated(torch.autograd.Function):
    """y = act(gate) * up, [..., 2f] -> [..., f].

    Forward: as above. dgrad: dgate = g up act'(gate), dup = g act(gate), written into the two
    halves of one buffer. No weights. Saves gate_up alone: the activation is computed again.
    `forward` and `backward` are those of this module or of `triton`.
    """

    @staticmethod
    def forward(ctx, gate_up, activation, forward, backward):
        ctx.save_for_backward(gate_up)
        ctx.activation, ctx.differentiate = activation, backward
        return forward(gate_up, activation)

    @staticmethod
    def backward(ctx, grad):
        return ctx.differentiate(grad, *ctx.saved_tensors, ctx.activation), None, None, None


def gated_forward(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) * up [..., f] of gate_up [..., 2f]."""
    gate, up = gate_up.chunk(2, dim=-1)
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    return _activate_into(gate, activation, y).mul_(up)


def gate_(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Write activation(gate) * up [..., f] to `gate`."""
    if activation == "silu":
        return F.silu(gate, inplace=True).mul_(up)
    return torch.ops.aten.gelu_(gate, approximate="tanh").mul_(up)


def gated_backward(grad: torch.Tensor, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the gradient of gate_up [..., 2f] from that of the result [..., f]."""
    gate, up = gate_up.chunk(2, dim=-1)
    result = torch.empty_like(gate_up)
    grad_gate, grad_up = result.chunk(2, dim=-1)
    # grad_up is the scratch for grad * up before it gets its own value: one buffer less.
    torch.mul(grad, up, out=grad_up)
    if activation == "silu":
        torch.ops.aten.silu_backward.grad_input(grad_up, gate, grad_input=grad_gate)
    else:
        torch.ops.aten.gelu_backward.grad_input(
            grad_up, gate, approximate="tanh", grad_input=grad_gate
        )
    _activate_into(gate, activation, grad_up).mul_(grad)
    return result


def _activate_into(gate: torch.Tensor, activation: str, out: torch.Tensor) -> torch.Tensor:
    """Write activation(gate) into `out` and return it."""
    if activation == "silu":
        return torch.ops.aten.silu.out(gate, out=out)
    return torch.ops.aten.gelu.out(gate, approximate="tanh", out=out)


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


def activate(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Apply activation `kind` to x, any shape; see `ops.swiglu.activate`."""
    if kind == "gelu":
        return F.gelu(x)
    if kind == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if kind == "relu":
        return F.relu(x)
    if kind == "silu":
        return F.silu(x)
    return apply_function(SquaredRelu, x)
