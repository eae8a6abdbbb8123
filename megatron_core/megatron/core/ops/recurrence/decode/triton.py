# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of one decode step of a recurrent mixer, and its launch.

A program owns some heads of one unit of one row. It reads and writes each of their states once;
everything else is small. All programs of a unit read the convolution's state of the channels that
the heads of the unit share (queries and keys, or B and C). The last program to arrive shifts it by
one token: programs count their arrivals in `arrival_counts`, which is zero again when the kernel
ends. It does not matter which program is the last, for all have read the same rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from megatron.core.ops.launches import Launches, next_power_of_2
from megatron.core.ops.recurrence.decode.cpu import apply_output_norm
from megatron.core.ops.recurrence.gated_norm import GATE_FIRST
from megatron.core.ops.recurrence.prologue import PrologueWeights, UnitLayout
from megatron.core.ops.recurrence.prologue.kernels import limited, softplus

if TYPE_CHECKING:
    from megatron.core.ops.recurrence.decode.cpu import DecodeMemory, OutputNorm


@triton.jit
def load_conv(conv_ptr, row_stride, columns, column_mask, W: tl.constexpr, TAPS: tl.constexpr):
    """Load the W - 1 rows before the token, [TAPS, columns]; the padding is zero."""
    taps = tl.arange(0, TAPS)[:, None]
    mask = (taps < W - 1) & column_mask[None, :]
    return tl.load(conv_ptr + taps * row_stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def convolve(
    newest,
    history,
    weight_ptr,
    bias_ptr,
    columns,
    column_mask,
    HAS_BIAS: tl.constexpr,
    W: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Compute silu(bias + sum of weights times rows) in fp32, zero in padding columns."""
    newest_weight = tl.load(weight_ptr + columns * W + W - 1, mask=column_mask, other=0.0)
    pre = newest.to(tl.float32) * newest_weight.to(tl.float32)
    if HAS_BIAS:
        pre += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)
    if W > 1:
        taps = tl.arange(0, TAPS)[:, None]
        mask = (taps < W - 1) & column_mask[None, :]
        weights = tl.load(weight_ptr + columns[None, :] * W + taps, mask=mask, other=0.0)
        pre += tl.sum(history.to(tl.float32) * weights.to(tl.float32), 0)
    return pre * tl.sigmoid(pre)


@triton.jit
def shift_conv(
    conv_ptr, row_stride, newest, history, columns, column_mask, W: tl.constexpr, TAPS: tl.constexpr
):
    """Shift the convolution's state by one token: drop the oldest row, append the newest."""
    if W > 1:
        taps = tl.arange(0, TAPS)[:, None]
        mask = (taps >= 1) & (taps < W - 1) & column_mask[None, :]
        tl.store(conv_ptr + (taps - 1) * row_stride + columns[None, :], history, mask=mask)
        newest = newest.to(conv_ptr.dtype.element_ty)
        tl.store(conv_ptr + (W - 2) * row_stride + columns, newest, mask=column_mask)


@triton.jit
def count_arrival(arrival_counts_ptr, SPLITS: tl.constexpr):
    """Count this program after its reads and writes; return whether it is the unit's last."""
    tl.debug_barrier()  # all threads have read and written before one of them counts
    is_last = tl.full([], 1, tl.int32)
    if SPLITS > 1:
        is_last = (tl.atomic_add(arrival_counts_ptr, 1, sem="acq_rel") == SPLITS - 1).to(tl.int32)
        if is_last:
            tl.store(arrival_counts_ptr, 0)
    return is_last


@triton.jit
def gates(
    source_ptr,
    a_log_ptr,
    dt_bias_ptr,
    v_head,
    head,
    dt_min,
    dt_max,
    DT: tl.constexpr,
    BETA: tl.constexpr,
    DELTA_RULE: tl.constexpr,
):
    """Return the decay and the beta of a head."""
    rate = tl.exp(tl.load(a_log_ptr + v_head).to(tl.float32))
    raw_dt = tl.load(source_ptr + DT + head).to(tl.float32)
    dt = softplus(raw_dt + tl.load(dt_bias_ptr + v_head).to(tl.float32))
    if DELTA_RULE:
        beta = tl.sigmoid(tl.load(source_ptr + BETA + head).to(tl.float32))
    else:
        dt = limited(dt, dt_min, dt_max)
        beta = dt
    return tl.exp(-rate * dt), beta


@triton.jit
def norm_unit(
    y_ptr,
    gate_ptr,
    norm_ptr,
    eps,
    GATE_FIRST: tl.constexpr,
    UNIT_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise the outputs of all heads of a unit in place, including other programs' heads."""
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, UNIT_WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        # .cg bypasses L1, which may hold stale lines: other programs have written y.
        y = tl.load(y_ptr + columns, mask=columns < UNIT_WIDTH, other=0.0, cache_modifier=".cg")
        squares += y.to(tl.float32) * y.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / UNIT_WIDTH + eps)
    for start in range(0, UNIT_WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        in_unit = columns < UNIT_WIDTH
        y = tl.load(y_ptr + columns, mask=in_unit, other=0.0, cache_modifier=".cg")
        y = y.to(tl.float32) * factor
        y *= tl.load(norm_ptr + columns, mask=in_unit, other=0.0).to(tl.float32)
        if not GATE_FIRST:
            gate = tl.load(gate_ptr + columns, mask=in_unit, other=0.0).to(tl.float32)
            y *= gate * tl.sigmoid(gate)
        tl.store(y_ptr + columns, y.to(y_ptr.dtype.element_ty), mask=in_unit)


@triton.jit
def recurrence_decode_kernel(
    source_ptr,
    gate_ptr,
    weight_ptr,
    bias_ptr,
    a_log_ptr,
    dt_bias_ptr,
    skip_ptr,
    norm_ptr,
    conv_ptr,
    state_ptr,
    slots_ptr,
    arrival_counts_ptr,
    y_ptr,
    scale,
    dt_min,
    dt_max,
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
    DT: tl.constexpr,
    BETA: tl.constexpr,
    DELTA_RULE: tl.constexpr,
    QK_L2NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    UNIT_NORM: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    W: tl.constexpr,
    TAPS: tl.constexpr,
    UNIT_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_NORM: tl.constexpr,
):
    """Advance HEADS heads of one unit of one row by one token; see `recurrence_decode`."""
    SPLITS: tl.constexpr = UNIT_HEADS // HEADS
    UNIT_WIDTH: tl.constexpr = UNIT_HEADS * VALUES
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
    y_ptr += (row * units + unit) * UNIT_HEADS * VALUES
    if slot < 0:
        for i in range(HEADS):
            zeros = tl.zeros([BLOCK_V], dtype=y_ptr.dtype.element_ty)
            tl.store(y_ptr + (head + i) * VALUES + columns, zeros, mask=in_columns)
        return
    source_ptr += row * row_stride + unit * unit_stride
    gate_ptr += row * gate_row_stride + unit * gate_unit_stride
    weight_ptr += unit * channels * W
    bias_ptr += unit * channels
    conv_stride = units * channels
    conv_ptr += slot * (W - 1) * conv_stride + unit * channels
    state_ptr += (slot * units + unit) * UNIT_HEADS * KEYS * VALUES
    arrival_counts_ptr += slot * units + unit
    tile = rows[:, None] * VALUES + columns[None, :]
    in_tile = in_rows[:, None] & in_columns[None, :]
    if HEADS == 1:  # prefetched: it arrives during the convolutions of query and key
        state = tl.load(state_ptr + head * KEYS * VALUES + tile, mask=in_tile, other=0.0)
    new_q = tl.load(source_ptr + QUERY + rows, mask=in_rows, other=0.0)
    new_k = tl.load(source_ptr + KEY + rows, mask=in_rows, other=0.0)
    q_history = load_conv(conv_ptr, conv_stride, QUERY + rows, in_rows, W, TAPS)
    k_history = load_conv(conv_ptr, conv_stride, KEY + rows, in_rows, W, TAPS)
    query = convolve(
        new_q, q_history, weight_ptr, bias_ptr, QUERY + rows, in_rows, HAS_BIAS, W, TAPS
    )
    key = convolve(new_k, k_history, weight_ptr, bias_ptr, KEY + rows, in_rows, HAS_BIAS, W, TAPS)
    if QK_L2NORM:
        query = query / tl.sqrt(tl.sum(query * query, 0) + 1e-6)
        key = key / tl.sqrt(tl.sum(key * key, 0) + 1e-6)
    query = query * scale
    q_dot_k = tl.sum(query * key, 0)
    is_last = tl.full([], 0, tl.int32)
    for _ in range(HEADS):
        if HEADS > 1:
            state = tl.load(state_ptr + head * KEYS * VALUES + tile, mask=in_tile, other=0.0)
        v_columns = VALUE + head * VALUES + columns
        new_v = tl.load(source_ptr + v_columns, mask=in_columns, other=0.0)
        v_history = load_conv(conv_ptr, conv_stride, v_columns, in_columns, W, TAPS)
        value = convolve(
            new_v, v_history, weight_ptr, bias_ptr, v_columns, in_columns, HAS_BIAS, W, TAPS
        )
        v_head = unit * UNIT_HEADS + head
        decay, beta = gates(
            source_ptr, a_log_ptr, dt_bias_ptr, v_head, head, dt_min, dt_max, DT, BETA, DELTA_RULE
        )
        new_state = state.to(tl.float32) * decay
        state_read = tl.sum(new_state * query[:, None], 0)
        delta = value
        if DELTA_RULE:
            delta -= tl.sum(new_state * key[:, None], 0)
        delta *= beta
        out = state_read + q_dot_k * delta
        if HAS_SKIP:
            out += tl.load(skip_ptr + v_head).to(tl.float32) * value
        new_state += key[:, None] * delta[None, :]
        if HEAD_NORM or UNIT_NORM:
            gate = tl.load(gate_ptr + head * VALUES + columns, mask=in_columns, other=0.0)
            gate = gate.to(tl.float32)
            silu_gate = gate * tl.sigmoid(gate)
            if GATE_FIRST:
                out = out * silu_gate
            if HEAD_NORM:
                mean_square = tl.sum(out * out, 0) / VALUES
                weight = tl.load(
                    norm_ptr + v_head * norm_head_stride + columns, mask=in_columns, other=0.0
                )
                out = out / tl.sqrt(mean_square + eps) * weight.to(tl.float32)
                if not GATE_FIRST:
                    out = out * silu_gate
        # All threads have read the state and the history before any of them writes them below.
        if UNIT_NORM or HEADS > 1:
            tl.debug_barrier()
        else:
            is_last = count_arrival(arrival_counts_ptr, SPLITS)
        new_state = new_state.to(state_ptr.dtype.element_ty)
        tl.store(state_ptr + head * KEYS * VALUES + tile, new_state, mask=in_tile)
        shift_conv(conv_ptr, conv_stride, new_v, v_history, v_columns, in_columns, W, TAPS)
        out = out.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + head * VALUES + columns, out, mask=in_columns)
        head += 1
    if UNIT_NORM or HEADS > 1:
        is_last = count_arrival(arrival_counts_ptr, SPLITS)
    if is_last:
        shift_conv(conv_ptr, conv_stride, new_q, q_history, QUERY + rows, in_rows, W, TAPS)
        shift_conv(conv_ptr, conv_stride, new_k, k_history, KEY + rows, in_rows, W, TAPS)
        if UNIT_NORM:
            norm_ptr += unit * UNIT_HEADS * norm_head_stride
            norm_unit(y_ptr, gate_ptr, norm_ptr, eps, GATE_FIRST, UNIT_WIDTH, BLOCK_NORM)


#: HEADS: heads of a unit that one program processes sequentially. With one head each program
#: repeats the work on queries and keys, but that is 2 K of the 2 K V numbers it moves.
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
#: Elements of a block of the norm over all heads of a unit.
NORM_BLOCK = 1024


def decode(
    source: torch.Tensor,
    weights: PrologueWeights,
    *,
    unit: UnitLayout,
    memory: DecodeMemory,
    skip: torch.Tensor | None,
    norm: OutputNorm | None,
) -> torch.Tensor:
    """Return y [b, H, V], see `recurrence_decode`."""
    (rows, units, _), heads_per_unit = source.shape, unit.heads
    source = source if source.stride(-1) == 1 else source.contiguous()
    shape = (rows, units * heads_per_unit, unit.value_channels)
    y = torch.empty(shape, dtype=source.dtype, device=source.device)
    if not rows:
        return y
    norm_scope = None if norm is None else _fused_norm(norm, unit)
    gate = source if norm is None or norm_scope is None else norm.gate
    gate = gate if gate.stride(-1) == 1 else gate.contiguous()
    launch = launch_of(unit, memory)
    programs = rows * units * (heads_per_unit // launch["HEADS"])
    weight, bias, a_log, dt_bias = weights
    recurrence_decode_kernel[(programs,)](
        source,
        gate,
        weight.contiguous(),
        weight if bias is None else bias.contiguous(),
        a_log,
        dt_bias,
        a_log if skip is None else skip,
        a_log if norm is None else norm.weight,
        memory.conv,
        memory.state,
        memory.slots,
        memory.slots if memory.arrival_counts is None else memory.arrival_counts,
        y,
        1.0 if unit.beta is None else unit.key_channels**-0.5,
        *(float(limit) for limit in unit.dt_limit),
        0.0 if norm is None else norm.eps,
        units,
        unit.conv_channels,
        *source.stride()[:2],
        *gate.stride()[:2],
        0 if norm is None or len(norm.weight) == unit.value_channels else unit.value_channels,
        **constants_of(unit, weight.shape[2]),
        HAS_BIAS=bias is not None,
        HAS_SKIP=skip is not None,
        HEAD_NORM=norm_scope == "head",
        UNIT_NORM=norm_scope == "unit",
        GATE_FIRST=norm is not None and norm.order == GATE_FIRST,
        BLOCK_NORM=NORM_BLOCK,
        **launch,
    )
    return y if norm is None or norm_scope is not None else apply_output_norm(y, norm, memory.slots)


def launch_of(unit: UnitLayout, memory: DecodeMemory) -> dict[str, int]:
    """Return the launch options of the kernel; HEADS divides the heads of a unit."""
    block_sizes = (next_power_of_2(n) for n in (unit.key_channels, unit.value_channels))
    dtype = str(memory.state.dtype)[6:]
    launch = DECODE.pick(memory.state, "{} K{} V{} r{}".format(dtype, *block_sizes, unit.heads))
    heads = unit.heads if memory.arrival_counts is None else math.gcd(unit.heads, launch["HEADS"])
    return launch | {"HEADS": heads}


def _fused_norm(norm: OutputNorm, unit: UnitLayout) -> str | None:
    """Return the scope of a norm that the kernel can fuse, "head" or "unit", or None."""
    size = len(norm.weight) if norm.group_size is None else norm.group_size
    if size == unit.value_channels:
        return "head"
    return "unit" if size == unit.heads * unit.value_channels else None


def constants_of(unit: UnitLayout, conv_width: int) -> dict[str, int | bool]:
    """Return the compile-time constants that follow from the columns of a unit and W."""
    delta_rule = unit.beta is not None
    return {
        "QUERY": unit.query,
        "KEY": unit.key,
        "VALUE": unit.value,
        "DT": unit.dt,
        "BETA": unit.beta if delta_rule else unit.dt,
        "DELTA_RULE": delta_rule,
        "QK_L2NORM": unit.qk_l2norm,
        "W": conv_width,
        "TAPS": next_power_of_2(max(1, conv_width - 1)),
        "UNIT_HEADS": unit.heads,
        "KEYS": unit.key_channels,
        "VALUES": unit.value_channels,
        "BLOCK_K": next_power_of_2(unit.key_channels),
        "BLOCK_V": next_power_of_2(unit.value_channels),
    }
