# SPDX-License-Identifier: Apache-2.0
"""One decode step of recurrent mixers, from features to the input of the output projection.

The steps per unit, a group of r heads that share queries and keys, are: the convolution with its
state, SiLU, queries and keys to length one (delta rule), the gates, the recurrence, the skip
connection (Mamba-2), norm and gate. `ops.recurrence.naive` gives the equations. States are updated
in place by slot.

On a GPU this is one kernel of b · H programs, which reads and writes every state once: 128 KiB per
head and row for K = V = 128 in fp32, where all other inputs and the output have 4 KiB. The kernel
fuses a norm over one head, and a norm over all heads of a unit, which the unit's last program
computes. Any other norm group takes a second kernel. A norm over the heads of several ranks is left
to the caller, who passes no norm.
"""

from __future__ import annotations

import torch

from megatron.core.ops.backend_choice import choose
from megatron.core.ops.recurrence.decode import cpu as reference
from megatron.core.ops.recurrence.decode.cpu import DecodeMemory, OutputNorm
from megatron.core.ops.recurrence.gated_norm import GATE_FIRST, NORM_FIRST
from megatron.core.ops.recurrence.prologue import PrologueWeights, UnitLayout, check_features

__all__ = [
    "DecodeMemory",
    "OutputNorm",
    "causal_conv1d_decode",
    "needs_arrival_counts",
    "recurrence_decode",
]

#: Maximum elements of a state that a program of the kernel holds in registers.
MAX_STATE_SIZE = 1 << 15


@torch.no_grad()
def recurrence_decode(
    source: torch.Tensor,
    weights: PrologueWeights,
    *,
    unit: UnitLayout,
    memory: DecodeMemory,
    skip: torch.Tensor | None = None,
    norm: OutputNorm | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Advance each row by one token; not differentiable.

    The host never waits, and `slots` is read on the device, so a CUDA graph can capture this.

    Args:
        source: [b, u, w], features of one token per row; may be a slice of the last dimension.
        weights: weights of the convolution and of the gates.
        unit: the meaning of the w columns. If it has beta columns this is the delta rule, whose
            queries are scaled by K^-0.5, else SSD.
        memory: the states. The output of a padding row is zero; it touches no state, and its
            inputs may be NaN.
        skip: D [H] of the skip connection D x; None is no skip.
        norm: norm and gate; None leaves both to the caller.
        implementation: "reference", "triton" or None (by device; the reference too if a state
            does not fit in the registers of a program).

    Returns:
        y [b, H, V] in source's dtype.

    Raises:
        ValueError: incompatible shapes or dtypes, or a forced implementation that does not support
            them.
    """
    check_features("recurrence_decode", source, weights, unit, skip=skip)
    _check_memory(source, weights, unit, memory)
    if norm is not None:
        _check_norm(source, unit, norm)
    call = {"unit": unit, "memory": memory, "skip": skip, "norm": norm}
    if _implementation(implementation, source, unit) == "triton":
        from megatron.core.ops.recurrence.decode import triton

        return triton.decode(source, weights, **call)
    return reference.decode(source, weights, **call)


@torch.no_grad()
def causal_conv1d_decode(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    state: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Convolve one token per row and append it to the row's state: `causal_conv1d` of one token
    without an activation. Not differentiable; plain torch on every device.

    Args:
        x: [b, u, c].
        weight: [u, c, W]; the last column multiplies the token itself.
        bias: [u, c] or None.
        state: [slots, W-1, u, c], the last inputs of each slot; updated in place.
        slots: int64 [b], slot of each row, without duplicates. -1 is a padding row: its output is
            zero, it touches no state, and its input may be NaN.

    Returns:
        [b, u, c] in x's dtype.
    """
    if not x.shape[0]:
        return x
    rows = reference.ActiveRows(slots)
    return reference.convolve(x, weight, bias, state=state, rows=rows, silu=False)


def needs_arrival_counts(source: torch.Tensor, unit: UnitLayout) -> bool:
    """Return whether the kernel uses `DecodeMemory.arrival_counts`: a unit has several heads.

    Args:
        source: as in `recurrence_decode`; its device selects the implementation.
        unit: the meaning of its columns.
    """
    return unit.heads > 1 and _implementation(None, source, unit) == "triton"


def _implementation(implementation: str | None, source: torch.Tensor, unit: UnitLayout) -> str:
    """Return the implementation to use.

    Raises:
        ValueError: the requested implementation does not support these sizes.
    """
    name = choose(implementation, source, "recurrence_decode")
    sizes = unit.key_channels, unit.value_channels
    state_size = 1
    for size in sizes:
        state_size *= 1 << (size - 1).bit_length()
    if name == "triton" and state_size > MAX_STATE_SIZE:
        if implementation is not None:
            raise ValueError(
                f"recurrence_decode: a state of {sizes[0]} x {sizes[1]}: the Triton kernel takes "
                f"up to {MAX_STATE_SIZE} numbers, each side rounded up to a power of two; use "
                "implementation='reference'"
            )
        return "reference"
    return name


def _check_memory(
    source: torch.Tensor, weights: PrologueWeights, unit: UnitLayout, memory: DecodeMemory
) -> None:
    """Raise ValueError unless the states match the features."""
    op, (rows, units, _) = "recurrence_decode", source.shape
    expected = {
        "conv": (weights.weight.shape[2] - 1, units, unit.conv_channels),
        "state": (units * unit.heads, unit.key_channels, unit.value_channels),
        "arrival_counts": (units,),
    }
    buffers = {"conv": memory.conv, "state": memory.state, "arrival_counts": memory.arrival_counts}
    for name, tensor in buffers.items():
        if tensor is None:
            continue
        if tensor.shape[1:] != expected[name] or not tensor.is_contiguous():
            raise ValueError(
                f"{op}: {name} {tuple(tensor.shape)} must be contiguous (slots, "
                f"{str(expected[name])[1:]}"
            )
    if memory.arrival_counts is not None and memory.arrival_counts.dtype != torch.int32:
        raise ValueError(
            f"{op}: arrival_counts is {memory.arrival_counts.dtype}; give int32 zeros, or None"
        )
    if memory.slots.shape != (rows,) or memory.slots.dtype != torch.int64:
        raise ValueError(
            f"{op}: slots {tuple(memory.slots.shape)} {memory.slots.dtype} must be int64, one for "
            f"each of {rows} rows"
        )


def _check_norm(source: torch.Tensor, unit: UnitLayout, norm: OutputNorm) -> None:
    """Raise ValueError unless norm and gate match the output of the recurrence."""
    op, (rows, units, _) = "recurrence_decode", source.shape
    width = unit.heads * unit.value_channels
    if norm.gate.shape != (rows, units, width):
        raise ValueError(f"{op}: gate {tuple(norm.gate.shape)} must be {(rows, units, width)}")
    valid_shapes = {(unit.value_channels,), (units * width,)}
    if norm.weight.shape not in valid_shapes:
        raise ValueError(
            f"{op}: the norm's weight {tuple(norm.weight.shape)} must be one of "
            f"{sorted(valid_shapes)}"
        )
    features = len(norm.weight)
    size = features if norm.group_size is None else norm.group_size
    if size < 1 or features % size:
        raise ValueError(f"{op}: group_size {size} must divide the {features} features")
    if norm.eps < 0:
        raise ValueError(f"{op}: eps={norm.eps} must not be negative")
    if norm.order not in (NORM_FIRST, GATE_FIRST):
        raise ValueError(f"{op}: order={norm.order!r}: use {NORM_FIRST} or {GATE_FIRST}")
