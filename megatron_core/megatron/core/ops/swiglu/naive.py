# SPDX-License-Identifier: Apache-2.0
"""The equations of gated activations (Shazeer 2020)."""

import torch
import torch.nn.functional as F


def gated(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """Return act(gate) · up [..., f] for gate and up, the halves of gate_up [..., 2f]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
