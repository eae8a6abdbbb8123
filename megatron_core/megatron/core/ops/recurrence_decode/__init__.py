# SPDX-License-Identifier: Apache-2.0
"""One more token of recurrent mixers: from its features to what is projected out, in place by slot.

Per unit, a group of r heads that share queries and keys, one after another: the convolution with
the rows before, SiLU, queries and keys to length one (delta rule), the gates, the recurrence, what
the token adds past the state (Mamba-2), norm and gate. `recurrence_prologue` has the formulas of
the first steps, `gated_delta_step` and `state_space_step` those of the recurrence, `gated_rms_norm`
those of the last.

On a GPU this is one kernel of b · H programs, which reads every state once and writes it once. That
is 128 KiB a head and row for K = V = 128 in fp32; rows, features and output are 4 KiB beside it.
A norm over one head is inside, and one over all heads of a unit, which the program does that ends
last. A norm over several units, or over some of a unit's heads, is a kernel behind it; one over
the heads of several ranks is the caller's, who gives no norm.
"""

from __future__ import annotations

import torch

from megatron.core.ops.backend_choice import choose
from megatron.core.ops.gated_rms_norm import GATE_FIRST, NORM_FIRST
from megatron.core.ops.recurrence_decode import reference
from megatron.core.ops.recurrence_decode.reference import DecodeMemory, OutputNorm
from megatron.core.ops.recurrence_prologue import PrologueWeights, UnitParts, check_features

__all__ = ["DecodeMemory", "OutputNorm", "counts_programs", "recurrence_decode"]

#: What a program of the kernel holds of a state in registers.
MOST_STATE = 1 << 15


@torch.no_grad()
def recurrence_decode(
    source: torch.Tensor,
    weights: PrologueWeights,
    *,
    parts: UnitParts,
    memory: DecodeMemory,
    skip: torch.Tensor | None = None,
    norm: OutputNorm | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Take each row on by one token; not differentiable.

    Nothing waits for the device, and `slots` is read there: a CUDA graph may hold this.

    Args:
        source: [b, u, w], features of one token a row; may be a slice of the last dimension.
        weights: of the convolution and of the gates.
        parts: what the w columns are. With strengths of their own they are of the delta rule, with
            queries times K^-0.5; without of SSD.
        memory: what is kept of sequences. A padding row, whatever it holds, touches none of it,
            and its output is zero.
        skip: D [H], of which times its values a token adds to its output; None is nothing.
        norm: norm and gate; None leaves both to the caller.
        implementation: "reference", "triton" or None (by device; the reference too where a state
            is larger than a program of the kernel can hold).

    Returns:
        y [b, H, V] in source's dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a forced implementation that cannot take
            them.
    """
    check_features("recurrence_decode", source, weights, parts, skip=skip)
    _check_memory(source, weights, parts, memory)
    if norm is not None:
        _check_norm(source, parts, norm)
    call = {"parts": parts, "memory": memory, "skip": skip, "norm": norm}
    if _chosen(implementation, source, parts) == "triton":
        from megatron.core.ops.recurrence_decode import triton

        return triton.decode(source, weights, **call)
    return reference.decode(source, weights, **call)


def counts_programs(source: torch.Tensor, parts: UnitParts) -> bool:
    """Say whether `DecodeMemory.arrived` is of use: a kernel runs, for units of several heads.

    Args:
        source: as of `recurrence_decode`; its device decides.
        parts: what its columns are.
    """
    return parts.heads > 1 and _chosen(None, source, parts) == "triton"


def _chosen(implementation: str | None, source: torch.Tensor, parts: UnitParts) -> str:
    """Return which implementation is used.

    Raises:
        ValueError: one that cannot be.
    """
    name = choose(implementation, source, "recurrence_decode")
    sizes = parts.key_channels, parts.value_channels
    held = 1
    for size in sizes:
        held *= 1 << (size - 1).bit_length()
    if name == "triton" and held > MOST_STATE:
        if implementation is not None:
            raise ValueError(
                f"recurrence_decode: a state of {sizes[0]} x {sizes[1]}: the Triton kernel takes "
                f"up to {MOST_STATE} numbers, each side rounded up to a power of two; use "
                "implementation='reference'"
            )
        return "reference"
    return name


def _check_memory(
    source: torch.Tensor, weights: PrologueWeights, parts: UnitParts, memory: DecodeMemory
) -> None:
    """Raise ValueError unless what is kept fits the features."""
    op, (rows, units, _) = "recurrence_decode", source.shape
    wanted = {
        "conv": (weights.weight.shape[2] - 1, units, parts.convolved),
        "state": (units * parts.heads, parts.key_channels, parts.value_channels),
        "arrived": (units,),
    }
    kept = {"conv": memory.conv, "state": memory.state, "arrived": memory.arrived}
    for name, tensor in kept.items():
        if tensor is None:
            continue
        if tensor.shape[1:] != wanted[name] or not tensor.is_contiguous():
            raise ValueError(
                f"{op}: {name} {tuple(tensor.shape)} must be contiguous (slots, "
                f"{str(wanted[name])[1:]}"
            )
    if memory.arrived is not None and memory.arrived.dtype != torch.int32:
        raise ValueError(f"{op}: arrived is {memory.arrived.dtype}; give int32 zeros, or None")
    if memory.slots.shape != (rows,) or memory.slots.dtype != torch.int64:
        raise ValueError(
            f"{op}: slots {tuple(memory.slots.shape)} {memory.slots.dtype} must be int64, one for "
            f"each of {rows} rows"
        )


def _check_norm(source: torch.Tensor, parts: UnitParts, norm: OutputNorm) -> None:
    """Raise ValueError unless norm and gate fit what comes out of the recurrence."""
    op, (rows, units, _) = "recurrence_decode", source.shape
    width = parts.heads * parts.value_channels
    if norm.gate.shape != (rows, units, width):
        raise ValueError(f"{op}: gate {tuple(norm.gate.shape)} must be {(rows, units, width)}")
    lengths = {(parts.value_channels,), (units * width,)}
    if norm.weight.shape not in lengths:
        raise ValueError(
            f"{op}: the norm's weight {tuple(norm.weight.shape)} must be one of {sorted(lengths)}"
        )
    features = len(norm.weight)
    size = features if norm.group_size is None else norm.group_size
    if size < 1 or features % size:
        raise ValueError(f"{op}: group_size {size} must divide the {features} features")
    if norm.eps < 0:
        raise ValueError(f"{op}: eps={norm.eps} must not be negative")
    if norm.order not in (NORM_FIRST, GATE_FIRST):
        raise ValueError(f"{op}: order={norm.order!r}: use {NORM_FIRST} or {GATE_FIRST}")
