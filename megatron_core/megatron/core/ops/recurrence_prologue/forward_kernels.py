# SPDX-License-Identifier: Apache-2.0
"""The forward kernel of the prologue: tokens by units by sections, each written once."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.ops.recurrence_prologue.gate_kernels import write_gates
from megatron.core.ops.recurrence_prologue.row_kernels import (
    columns_inside,
    first_column,
    row_before,
    row_of,
    tap,
)


@triton.jit
def to_length_one(y, scaled, eps):
    """Return rows scaled to length one, if they are `scaled`."""
    if scaled:
        y *= tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
    return y


@triton.jit(do_not_specialize=["tokens", "units"])
def prologue_forward_kernel(
    source_ptr,
    taps_ptr,
    bias_ptr,
    rates_ptr,
    step_bias_ptr,
    initial_ptr,
    places_ptr,
    ages_ptr,
    numbers_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    decay_ptr,
    strength_ptr,
    tokens,
    units,
    row_stride,
    unit_stride,
    eps,
    low,
    high,
    QUERY: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    STRENGTHS: tl.constexpr,
    STEPS_COLUMN: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_STRENGTHS: tl.constexpr,
    NORMALISED: tl.constexpr,
    ALIGN: tl.constexpr,
    SECTIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GATE_T: tl.constexpr,
):
    """Write one section of a block of tokens of a unit."""
    program = tl.program_id(0).to(tl.int64)
    section = (program % SECTIONS).to(tl.int32)
    unit = program // SECTIONS % units
    start = program // SECTIONS // units * BLOCK_T
    source_ptr += unit * (unit_stride * ALIGN)
    stride = row_stride * ALIGN
    if section == SECTIONS - 1:
        write_gates(
            source_ptr,
            (rates_ptr, step_bias_ptr, places_ptr),
            (decay_ptr, strength_ptr),
            (start, unit, tokens, units, stride),
            (low, high),
            STRENGTHS,
            STEPS_COLUMN,
            HEADS,
            HAS_PLACES,
            HAS_STRENGTHS,
            BLOCK_T,
            BLOCK_H,
            GATE_T,
        )
    else:
        column = first_column(section, QUERY, KEY, VALUE, BLOCK)
        inside = columns_inside(section, tl.arange(0, BLOCK), KEYS, VALUES, BLOCK)
        channel = unit * (2 * KEYS + VALUES) + column  # of all units
        channels = units * (2 * KEYS + VALUES)
        token = start + tl.arange(0, BLOCK_T)
        real = token < tokens
        age = tl.load(ages_ptr + token, mask=real, other=0)
        pre = tl.zeros([BLOCK_T, BLOCK], dtype=tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + channel + tl.arange(0, BLOCK), mask=inside, other=0.0)
            pre += bias.to(tl.float32)[None, :]
        if HAS_INITIAL:
            number = tl.load(numbers_ptr + token, mask=real, other=0)
        for back in tl.static_range(WIDTH):
            # A token that is not wanted is one before all.
            above = tl.where(age >= back, token - back, -1)
            row = row_of(source_ptr + column, places_ptr, above, tokens, inside, stride, HAS_PLACES)
            if HAS_INITIAL and back > 0:
                row += row_before(
                    initial_ptr + channel,
                    number,
                    back - age,
                    real & (age < back),
                    inside,
                    channels,
                    WIDTH,
                )
            pre += tap(taps_ptr + channel, channels, inside, back, WIDTH)[None, :] * row
        y = pre * tl.sigmoid(pre)
        if NORMALISED:
            y = to_length_one(y, section < 2, eps)
        mask = real[:, None] & inside[None, :]
        y = y.to(query_ptr.dtype.element_ty)
        columns = tl.arange(0, BLOCK)[None, :]
        if section == 0:
            tl.store(query_ptr + (token * units + unit)[:, None] * KEYS + columns, y, mask=mask)
        elif section == 1:
            tl.store(key_ptr + (token * units + unit)[:, None] * KEYS + columns, y, mask=mask)
        else:
            out = (token * units + unit)[:, None] * VALUES + (section - 2) * BLOCK + columns
            tl.store(value_ptr + out, y, mask=mask)
