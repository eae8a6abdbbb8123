# SPDX-License-Identifier: Apache-2.0
"""One more token of recurrent mixers in one Triton kernel: its launch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton

from megatron.core.ops.gated_rms_norm import GATE_FIRST
from megatron.core.ops.launches import Launches
from megatron.core.ops.recurrence_decode.kernels import recurrence_decode_kernel
from megatron.core.ops.recurrence_decode.reference import normed
from megatron.core.ops.recurrence_prologue import PrologueWeights, UnitParts

if TYPE_CHECKING:
    from megatron.core.ops.recurrence_decode import DecodeMemory, OutputNorm

#: HEADS of a unit that one program does, one after another. One: no other head waits for it, and
#: what is worked out again for each, queries and keys, is 2 K of the 2 K V numbers that move.
DECODE = Launches(
    "recurrence_decode",
    {"HEADS": 1, "num_warps": 8, "num_stages": 1},
    others=(
        {"HEADS": 1, "num_warps": 4, "num_stages": 1},
        {"HEADS": 1, "num_warps": 16, "num_stages": 1},
        {"HEADS": 2, "num_warps": 8, "num_stages": 1},
        {"HEADS": 4, "num_warps": 8, "num_stages": 1},
    ),
)
#: Numbers at once of a norm over all heads of a unit.
NORM_BLOCK = 1024


def decode(
    source: torch.Tensor,
    weights: PrologueWeights,
    *,
    parts: UnitParts,
    memory: DecodeMemory,
    skip: torch.Tensor | None,
    norm: OutputNorm | None,
) -> torch.Tensor:
    """Return y [b, H, V], as `recurrence_decode` does."""
    (rows, units, _), ratio = source.shape, parts.heads
    source = source if source.stride(-1) == 1 else source.contiguous()
    shape = (rows, units * ratio, parts.value_channels)
    y = torch.empty(shape, dtype=source.dtype, device=source.device)
    if not rows:
        return y
    over = None if norm is None else _normed_inside(norm, parts)
    gate = source if norm is None or over is None else norm.gate
    gate = gate if gate.stride(-1) == 1 else gate.contiguous()
    launch = launch_of(parts, memory)
    programs = rows * units * (ratio // launch["HEADS"])
    weight, bias, rates, step_bias = weights
    recurrence_decode_kernel[(programs,)](
        source,
        gate,
        weight.contiguous(),
        weight if bias is None else bias.contiguous(),
        rates,
        step_bias,
        rates if skip is None else skip,
        rates if norm is None else norm.weight,
        memory.conv,
        memory.state,
        memory.slots,
        memory.slots if memory.arrived is None else memory.arrived,
        y,
        1.0 if parts.strengths is None else parts.key_channels**-0.5,
        *(float(limit) for limit in parts.limits),
        0.0 if norm is None else norm.eps,
        units,
        parts.convolved,
        *source.stride()[:2],
        *gate.stride()[:2],
        0 if norm is None or len(norm.weight) == parts.value_channels else parts.value_channels,
        **constants_of(parts, weight.shape[2]),
        HAS_BIAS=bias is not None,
        HAS_SKIP=skip is not None,
        HEAD_NORM=over == "head",
        UNIT_NORM=over == "unit",
        GATE_FIRST=norm is not None and norm.order == GATE_FIRST,
        BLOCK_NORM=NORM_BLOCK,
        **launch,
    )
    return y if norm is None or over is not None else normed(y, norm, memory.slots)


def launch_of(parts: UnitParts, memory: DecodeMemory) -> dict[str, int]:
    """Return how to start the kernel: HEADS divides those of a unit."""
    sides = (triton.next_power_of_2(n) for n in (parts.key_channels, parts.value_channels))
    dtype = str(memory.state.dtype)[6:]
    launch = DECODE.pick(memory.state, "{} K{} V{} r{}".format(dtype, *sides, parts.heads))
    heads = parts.heads if memory.arrived is None else math.gcd(parts.heads, launch["HEADS"])
    return launch | {"HEADS": heads}


def _normed_inside(norm: OutputNorm, parts: UnitParts) -> str | None:
    """Return what of the kernel's the norm is over: a head, a unit, or None, neither."""
    size = len(norm.weight) if norm.group_size is None else norm.group_size
    if size == parts.value_channels:
        return "head"
    return "unit" if size == parts.heads * parts.value_channels else None


def constants_of(parts: UnitParts, width: int) -> dict[str, int | bool]:
    """Return the compile-time constants that the shape of a unit and of its convolution decide."""
    corrects = parts.strengths is not None
    return {
        "QUERY": parts.query,
        "KEY": parts.key,
        "VALUE": parts.value,
        "STEPS": parts.steps,
        "TAKES": parts.strengths if corrects else parts.steps,
        "CORRECTS": corrects,
        "NORMALISES": parts.normalised,
        "W": width,
        "TAPS": triton.next_power_of_2(max(1, width - 1)),
        "RATIO": parts.heads,
        "KEYS": parts.key_channels,
        "VALUES": parts.value_channels,
        "BLOCK_K": triton.next_power_of_2(parts.key_channels),
        "BLOCK_V": triton.next_power_of_2(parts.value_channels),
    }
