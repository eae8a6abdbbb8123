# SPDX-License-Identifier: Apache-2.0
"""Gated activations in plain PyTorch, with as few buffers as possible."""

from __future__ import annotations

import torch
import torch.nn.functional as F

QUICK_GELU_FACTOR = 1.702


def gated_forward(
    gate_up: torch.Tensor, activation: str, clamp: float | None = None, offset: float = 0.0
) -> torch.Tensor:
    """Return activation(gate) * (up + offset) [..., f] of gate_up [..., 2f]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "quick_gelu" or clamp is not None or offset:  # not one operation of torch
        gate, up = _clamped(gate, up, clamp)
        active, _ = _activation_and_slope(gate, activation)
        return active.mul_(up.add_(offset)).to(gate_up.dtype)
    y = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return y.mul_(up)


def gated_backward(
    grad: torch.Tensor,
    gate_up: torch.Tensor,
    activation: str,
    clamp: float | None = None,
    offset: float = 0.0,
) -> torch.Tensor:
    """Return the gradient of gate_up [..., 2f] from the gradient of y [..., f]."""
    gate, up = gate_up.chunk(2, dim=-1)
    grad_gate_up = torch.empty_like(gate_up)
    grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
    if activation == "quick_gelu" or clamp is not None or offset:  # not one operation of torch
        clamped_gate, clamped_up = _clamped(gate, up, clamp)
        active, slope = _activation_and_slope(clamped_gate, activation)
        grad = grad.to(active.dtype)
        grad_gate.copy_(slope.mul_(clamped_up.add_(offset)).mul_(grad))
        grad_up.copy_(active.mul_(grad))
        if clamp is not None:
            # In fp32: a comparison with a 16-bit tensor would round the clamp.
            grad_gate.masked_fill_(gate.to(active.dtype) > clamp, 0.0)
            grad_up.masked_fill_(up.to(active.dtype).abs() > clamp, 0.0)
        return grad_gate_up
    # grad_up first serves as scratch for grad * up, which saves a buffer.
    torch.mul(grad, up, out=grad_up)
    if activation == "silu":
        torch.ops.aten.silu_backward.grad_input(grad_up, gate, grad_input=grad_gate)
        torch.ops.aten.silu.out(gate, out=grad_up)
    else:
        torch.ops.aten.gelu_backward.grad_input(
            grad_up, gate, approximate="tanh", grad_input=grad_gate
        )
        torch.ops.aten.gelu.out(gate, approximate="tanh", out=grad_up)
    grad_up.mul_(grad)
    return grad_gate_up


def _clamped(
    gate: torch.Tensor, up: torch.Tensor, clamp: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of both inputs, limited by the clamp; fp32 for 16-bit inputs."""
    dtype = torch.promote_types(gate.dtype, torch.float32)
    gate, up = gate.to(dtype, copy=True), up.to(dtype, copy=True)
    if clamp is not None:
        gate.clamp_(max=clamp)
        up.clamp_(-clamp, clamp)
    return gate, up


def _activation_and_slope(gate: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the activation and its derivative."""
    if activation == "gelu":
        active = F.gelu(gate, approximate="tanh")
        slope = torch.ops.aten.gelu_backward(torch.ones_like(gate), gate, approximate="tanh")
        return active, slope
    factor = QUICK_GELU_FACTOR if activation == "quick_gelu" else 1.0
    sigmoid = torch.sigmoid(gate * factor)
    return gate * sigmoid, sigmoid * (1.0 + factor * gate * (1.0 - sigmoid))
