# SPDX-License-Identifier: Apache-2.0
"""The equations of gated activations (Shazeer 2020)."""

import torch
import torch.nn.functional as F


def gated(
    gate_up: torch.Tensor,
    activation: str = "silu",
    *,
    clamp: float | None = None,
    offset: float = 0.0,
) -> torch.Tensor:
    """Return act(gate) · (up + offset) [..., f] for gate and up, the halves of gate_up [..., 2f].

    With a clamp, gate is at most `clamp`, and up is in [-clamp, clamp] (as in gpt-oss).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    if activation == "quick_gelu":
        return gate * (1.702 * gate).sigmoid() * (up + offset)
    active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return active * (up + offset)
