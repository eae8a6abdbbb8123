# SPDX-License-Identifier: Apache-2.0
"""One more token of recurrent mixers in one Triton kernel: its launch.

The Triton kernel of one token of a recurrent mixer.

A program owns some heads of one unit of one row. It reads each of their states once and writes it
once; everything else is small. The rows before the convolution of the channels that the heads of a
unit share (queries and keys, or B and C) are read by all programs of the unit, and go on by one
token when the last of them has read them: programs count themselves in `arrived`, integers that are
zero again when the kernel ends. Which is the last does not matter, for all hold the same rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from megatron.core.ops.gated_rms_norm import GATE_FIRST
from megatron.core.ops.launches import Launches, next_power_of_2
from megatron.core.ops.recurrence_decode.reference import normed
from megatron.core.ops.recurrence_prologue import PrologueWeights, UnitParts
from megatron.core.ops.recurrence_prologue.kernels import limited, softplus

if TYPE_CHECKING:
    from megatron.core.ops.recurrence_decode.reference import DecodeMemory, OutputNorm


@triton.jit
def rows_before(conv_ptr, row_stride, columns, inside, W: tl.constexpr, TAPS: tl.constexpr):
    """Load the W - 1 rows before the token, [TAPS, columns]; zero in those beyond."""
    taps = tl.arange(0, TAPS)[:, None]
    mask = (taps < W - 1) & inside[None, :]
    return tl.load(conv_ptr + taps * row_stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def convolved(
    new,
    before,
    weight_ptr,
    bias_ptr,
    columns,
    inside,
    HAS_BIAS: tl.constexpr,
    W: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Compute silu(bias + sum of weights times rows) in fp32, zero in columns beyond."""
    last = tl.load(weight_ptr + columns * W + W - 1, mask=inside, other=0.0)
    total = new.to(tl.float32) * last.to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if W > 1:
        taps = tl.arange(0, TAPS)[:, None]
        mask = (taps < W - 1) & inside[None, :]
        weights = tl.load(weight_ptr + columns[None, :] * W + taps, mask=mask, other=0.0)
        total += tl.sum(before.to(tl.float32) * weights.to(tl.float32), 0)
    return total * tl.sigmoid(total)


@triton.jit
def go_on(conv_ptr, row_stride, new, before, columns, inside, W: tl.constexpr, TAPS: tl.constexpr):
    """Write the rows before the next token: all but the first of these, and the token's own."""
    if W > 1:
        taps = tl.arange(0, TAPS)[:, None]
        mask = (taps >= 1) & (taps < W - 1) & inside[None, :]
        tl.store(conv_ptr + (taps - 1) * row_stride + columns[None, :], before, mask=mask)
        new = new.to(conv_ptr.dtype.element_ty)
        tl.store(conv_ptr + (W - 2) * row_stride + columns, new, mask=inside)


@triton.jit
def arrive(arrived_ptr, SPLITS: tl.constexpr):
    """Count this program behind all it has read and written; say whether it is the last."""
    tl.debug_barrier()  # of all threads, before one of them counts
    last = tl.full([], 1, tl.int32)
    if SPLITS > 1:
        last = (tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == SPLITS - 1).to(tl.int32)
        if last:
            tl.store(arrived_ptr, 0)
    return last


@triton.jit
def gates(
    source_ptr,
    rates_ptr,
    step_bias_ptr,
    number,
    head,
    least,
    most,
    STEPS: tl.constexpr,
    TAKES: tl.constexpr,
    CORRECTS: tl.constexpr,
):
    """Compute by what a head's state fades, and how much of the token it takes."""
    rate = tl.exp(tl.load(rates_ptr + number).to(tl.float32))
    raw = tl.load(source_ptr + STEPS + head).to(tl.float32)
    step = softplus(raw + tl.load(step_bias_ptr + number).to(tl.float32))
    if CORRECTS:
        strength = tl.sigmoid(tl.load(source_ptr + TAKES + head).to(tl.float32))
    else:
        step = limited(step, least, most)
        strength = step
    return tl.exp(-rate * step), strength


@triton.jit
def norm_unit(
    y_ptr,
    gate_ptr,
    norm_ptr,
    eps,
    GATE_FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise what the heads of a unit have put out, other programs' too, in place."""
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        places = start + tl.arange(0, BLOCK)
        # Not from this multiprocessor's own cache: other programs have written it.
        out = tl.load(y_ptr + places, mask=places < WIDTH, other=0.0, cache_modifier=".cg")
        squares += out.to(tl.float32) * out.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / WIDTH + eps)
    for start in range(0, WIDTH, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < WIDTH
        out = tl.load(y_ptr + places, mask=inside, other=0.0, cache_modifier=".cg")
        out = out.to(tl.float32) * factor
        out *= tl.load(norm_ptr + places, mask=inside, other=0.0).to(tl.float32)
        if not GATE_FIRST:
            gate = tl.load(gate_ptr + places, mask=inside, other=0.0).to(tl.float32)
            out *= gate * tl.sigmoid(gate)
        tl.store(y_ptr + places, out.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def recurrence_decode_kernel(
    source_ptr,
    gate_ptr,
    weight_ptr,
    bias_ptr,
    rates_ptr,
    step_bias_ptr,
    skip_ptr,
    norm_ptr,
    conv_ptr,
    state_ptr,
    slots_ptr,
    arrived_ptr,
    y_ptr,
    scale,
    least,
    most,
    eps,
    units,
    channels,
    row_stride,
    unit_stride,
    gate_row_stride,
    gate_unit_stride,
    norm_head_stride,
    QUERY: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    STEPS: tl.constexpr,
    TAKES: tl.constexpr,
    CORRECTS: tl.constexpr,
    NORMALISES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    UNIT_NORM: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    W: tl.constexpr,
    TAPS: tl.constexpr,
    RATIO: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_NORM: tl.constexpr,
):
    """Take some heads of one unit of one row on by one token; see `recurrence_decode`."""
    SPLITS: tl.constexpr = RATIO // HEADS
    WIDTH: tl.constexpr = RATIO * VALUES
    program = tl.program_id(0).to(tl.int64)
    split = program % SPLITS
    unit = program // SPLITS % units
    row = program // SPLITS // units
    slot = tl.load(slots_ptr + row)
    rows = tl.arange(0, BLOCK_K)
    columns = tl.arange(0, BLOCK_V)
    in_rows = rows < KEYS if BLOCK_K != KEYS else tl.full([BLOCK_K], 1, tl.int1)
    in_columns = columns < VALUES if BLOCK_V != VALUES else tl.full([BLOCK_V], 1, tl.int1)
    head = split * HEADS  # within the unit
    y_ptr += (row * units + unit) * RATIO * VALUES
    if slot < 0:
        for i in range(HEADS):
            nothing = tl.zeros([BLOCK_V], dtype=y_ptr.dtype.element_ty)
            tl.store(y_ptr + (head + i) * VALUES + columns, nothing, mask=in_columns)
        return
    source_ptr += row * row_stride + unit * unit_stride
    gate_ptr += row * gate_row_stride + unit * gate_unit_stride
    weight_ptr += unit * channels * W
    bias_ptr += unit * channels
    conv_stride = units * channels
    conv_ptr += slot * (W - 1) * conv_stride + unit * channels
    state_ptr += (slot * units + unit) * RATIO * KEYS * VALUES
    arrived_ptr += slot * units + unit
    tile = rows[:, None] * VALUES + columns[None, :]
    in_tile = in_rows[:, None] & in_columns[None, :]
    if HEADS == 1:  # it is on its way while the convolutions of query and key are worked out
        state = tl.load(state_ptr + head * KEYS * VALUES + tile, mask=in_tile, other=0.0)
    new_query = tl.load(source_ptr + QUERY + rows, mask=in_rows, other=0.0)
    new_key = tl.load(source_ptr + KEY + rows, mask=in_rows, other=0.0)
    before_query = rows_before(conv_ptr, conv_stride, QUERY + rows, in_rows, W, TAPS)
    before_key = rows_before(conv_ptr, conv_stride, KEY + rows, in_rows, W, TAPS)
    query = convolved(
        new_query, before_query, weight_ptr, bias_ptr, QUERY + rows, in_rows, HAS_BIAS, W, TAPS
    )
    key = convolved(
        new_key, before_key, weight_ptr, bias_ptr, KEY + rows, in_rows, HAS_BIAS, W, TAPS
    )
    if NORMALISES:
        query = query / tl.sqrt(tl.sum(query * query, 0) + 1e-6)
        key = key / tl.sqrt(tl.sum(key * key, 0) + 1e-6)
    query = query * scale
    match = tl.sum(query * key, 0)
    last = tl.full([], 0, tl.int32)
    for _ in range(HEADS):
        if HEADS > 1:
            state = tl.load(state_ptr + head * KEYS * VALUES + tile, mask=in_tile, other=0.0)
        place = VALUE + head * VALUES + columns
        new = tl.load(source_ptr + place, mask=in_columns, other=0.0)
        before = rows_before(conv_ptr, conv_stride, place, in_columns, W, TAPS)
        value = convolved(new, before, weight_ptr, bias_ptr, place, in_columns, HAS_BIAS, W, TAPS)
        number = unit * RATIO + head
        fade, strength = gates(
            source_ptr, rates_ptr, step_bias_ptr, number, head, least, most, STEPS, TAKES, CORRECTS
        )
        kept = state.to(tl.float32) * fade
        read = tl.sum(kept * query[:, None], 0)
        change = value
        if CORRECTS:
            change -= tl.sum(kept * key[:, None], 0)
        change *= strength
        out = read + match * change
        if HAS_SKIP:
            out += tl.load(skip_ptr + number).to(tl.float32) * value
        kept += key[:, None] * change[None, :]
        if HEAD_NORM or UNIT_NORM:
            gate = tl.load(gate_ptr + head * VALUES + columns, mask=in_columns, other=0.0)
            gate = gate.to(tl.float32)
            opened = gate * tl.sigmoid(gate)
            if GATE_FIRST:
                out = out * opened
            if HEAD_NORM:
                mean = tl.sum(out * out, 0) / VALUES
                weight = tl.load(
                    norm_ptr + number * norm_head_stride + columns, mask=in_columns, other=0.0
                )
                out = out / tl.sqrt(mean + eps) * weight.to(tl.float32)
                if not GATE_FIRST:
                    out = out * opened
        # What is written below has been read, by all threads.
        if UNIT_NORM or HEADS > 1:
            tl.debug_barrier()
        else:
            last = arrive(arrived_ptr, SPLITS)
        kept = kept.to(state_ptr.dtype.element_ty)
        tl.store(state_ptr + head * KEYS * VALUES + tile, kept, mask=in_tile)
        go_on(conv_ptr, conv_stride, new, before, place, in_columns, W, TAPS)
        out = out.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + head * VALUES + columns, out, mask=in_columns)
        head += 1
    if UNIT_NORM or HEADS > 1:
        last = arrive(arrived_ptr, SPLITS)
    if last:
        go_on(conv_ptr, conv_stride, new_query, before_query, QUERY + rows, in_rows, W, TAPS)
        go_on(conv_ptr, conv_stride, new_key, before_key, KEY + rows, in_rows, W, TAPS)
        if UNIT_NORM:
            norm_ptr += unit * RATIO * norm_head_stride
            norm_unit(y_ptr, gate_ptr, norm_ptr, eps, GATE_FIRST, WIDTH, BLOCK_NORM)


#: HEADS of a unit that one program does, one after another. One: no other head waits for it, and
#: what is worked out again for each, queries and keys, is 2 K of the 2 K V numbers that move.
DECODE = Launches(
    "recurrence_decode",
    {"HEADS": 1, "num_warps": 8, "num_stages": 1},
    alternatives=(
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
    sides = (next_power_of_2(n) for n in (parts.key_channels, parts.value_channels))
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
        "TAPS": next_power_of_2(max(1, width - 1)),
        "RATIO": parts.heads,
        "KEYS": parts.key_channels,
        "VALUES": parts.value_channels,
        "BLOCK_K": next_power_of_2(parts.key_channels),
        "BLOCK_V": next_power_of_2(parts.value_channels),
    }
