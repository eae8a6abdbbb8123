# SPDX-License-Identifier: Apache-2.0
"""Activations of an MLP, gated (SwiGLU, GeGLU) and plain."""

from __future__ import annotations

import torch

from megatron.core.ops.dispatch import choose
from megatron.core.ops.swiglu import reference
from megatron.core.ops.swiglu.reference import ACTIVATIONS, GATES


def swiglu(gate_up: torch.Tensor, *, implementation: str | None = None) -> torch.Tensor:
    """Compute silu(gate) * up (Shazeer, 2020); `gated` with its usual activation.

    Args:
        gate_up: [..., 2f], the gate in the first half.
        implementation: "reference", "triton" or None (by device).

    Returns:
        [..., f] in the dtype of `gate_up`.

    Raises:
        ValueError: an odd last dimension.
    """
    return gated(gate_up, "silu", implementation=implementation)


def gated(
    gate_up: torch.Tensor, activation: str = "silu", *, implementation: str | None = None
) -> torch.Tensor:
    """Compute activation(gate) * up; backward saves only `gate_up`.

    Args:
        gate_up: [..., 2f], the gate in the first half.
        activation: "silu" or "gelu" (its tanh approximation).
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
    if choose(implementation, gate_up, "gated") == "triton":
        from megatron.core.ops.swiglu import triton as kernels

        forward, backward = kernels.gated_forward, kernels.gated_backward
    else:
        forward, backward = reference.gated_forward, reference.gated_backward
    if torch.is_grad_enabled():
        return reference.Gated.apply(gate_up, activation, forward, backward)
    return forward(gate_up, activation)


def gate_(gate: torch.Tensor, up: torch.Tensor, *, activation: str = "silu") -> torch.Tensor:
    """Write activation(gate) * up to `gate` and return it; `gated` where nothing is kept.

    Two operations, in plain torch: for generation on a CPU. Forward only.

    Args:
        gate, up: [..., f].
        activation: as of `gated`.

    Raises:
        ValueError: an unknown activation.
    """
    if activation not in GATES:
        raise ValueError(f"gate_: activation={activation!r} is unknown; use one of {GATES}")
    return reference.gate_(gate, up, activation)


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
    return reference.activate(x, kind)
