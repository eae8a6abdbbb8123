# SPDX-License-Identifier: Apache-2.0
"""Gated activations in plain PyTorch, with as few buffers as possible."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gated_forward(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) * up [..., f] of gate_up [..., 2f]."""
    gate, up = gate_up.chunk(2, dim=-1)
    y = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return y.mul_(up)


def gated_backward(grad: torch.Tensor, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the gradient of gate_up [..., 2f] from the gradient of y [..., f]."""
    gate, up = gate_up.chunk(2, dim=-1)
    grad_gate_up = torch.empty_like(gate_up)
    grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
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
