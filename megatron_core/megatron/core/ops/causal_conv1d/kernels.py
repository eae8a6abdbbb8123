# SPDX-License-Identifier: Apache-2.0
"""Causal convolution in Triton: forward, the last rows, and a step.

Forward, a program has a tile of tokens and channels, and loads it once for each tap, shifted; all
but the first come from the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def convolution_forward_kernel(
    x_ptr,
    taps_ptr,
    bias_ptr,
    initial_ptr,
    after_ptr,
    number_ptr,
    out_ptr,
    tokens,
    units,
    channels,
    x_offset,
    x_step_t,
    x_step_u,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Convolve a tile of tokens and channels of one unit."""
    blocks = tl.cdiv(channels, BLOCK_C)
    program = tl.program_id(0).to(tl.int64)
    part = program % (units * blocks)
    unit, block = part // blocks, part % blocks
    x_ptr += (x_offset + unit * x_step_u) * STEP
    rows = program // (units * blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = block * BLOCK_C + tl.arange(0, BLOCK_C)
    inside, live = columns < channels, rows < tokens
    flat, width = unit * channels + columns, units * channels
    after = tl.load(after_ptr + rows, mask=live, other=0)
    if HAS_INITIAL:
        number = tl.load(number_ptr + rows, mask=live, other=0).to(tl.int64)
    source = x_ptr + (rows * x_step_t)[:, None] * STEP + columns[None, :]
    pre = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
    if HAS_BIAS:
        pre += tl.load(bias_ptr + flat, mask=inside, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(WIDTH):
        tap = tl.load(taps_ptr + (WIDTH - 1 - k) * width + flat, mask=inside, other=0.0)
        seen = (live & (after >= k))[:, None] & inside[None, :]
        row = tl.load(source - k * x_step_t * STEP, mask=seen, other=0.0).to(tl.float32)
        if HAS_INITIAL and k > 0:
            carried = number * (WIDTH - 1) + (WIDTH - 1 - k) + after
            there = (live & (after < k))[:, None] & inside[None, :]
            before = initial_ptr + carried[:, None] * width + flat[None, :]
            row += tl.load(before, mask=there, other=0.0).to(tl.float32)
        pre += tap.to(tl.float32)[None, :] * row
    if SILU:
        pre = pre * tl.sigmoid(pre)
    target = out_ptr + rows[:, None] * width + flat[None, :]
    tl.store(target, pre.to(out_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["count"])
def convolution_last_kernel(
    x_ptr,
    initial_ptr,
    bounds_ptr,
    last_ptr,
    count,
    units,
    channels,
    x_offset,
    x_step_t,
    x_step_u,
    STEP: tl.constexpr,
    NEAR: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Copy the last NEAR = W-1 rows of sequences, what was carried into short ones included."""
    blocks = tl.cdiv(channels, BLOCK_C)
    program = tl.program_id(0).to(tl.int64)
    part = program % (units * blocks)
    unit, block = part // blocks, part % blocks
    x_ptr += (x_offset + unit * x_step_u) * STEP
    places = program // (units * blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = block * BLOCK_C + tl.arange(0, BLOCK_C)
    inside, live = (columns < channels)[None, :], places < count * NEAR
    flat, width = unit * channels + columns, units * channels
    number = places // NEAR
    first = tl.load(bounds_ptr + number, mask=live, other=0)
    end = tl.load(bounds_ptr + number + 1, mask=live, other=0)
    token = end - NEAR + places % NEAR
    found = (live & (token >= first))[:, None] & inside
    source = x_ptr + (token * x_step_t)[:, None] * STEP + columns[None, :]
    row = tl.load(source, mask=found, other=0.0)
    if HAS_INITIAL:
        carried = places + end - first  # as far back, of the rows before
        source = initial_ptr + carried[:, None] * width + flat[None, :]
        there = (live & (token < first))[:, None] & inside
        before = tl.load(source, mask=there, other=0.0).to(row.dtype)
        row = tl.where(there, before, row)
    target = last_ptr + places[:, None] * width + flat[None, :]
    tl.store(target, row, mask=live[:, None] & inside)


@triton.jit
def convolution_step_kernel(
    x_ptr,
    taps_ptr,
    bias_ptr,
    state_ptr,
    slots_ptr,
    out_ptr,
    units,
    channels,
    x_offset,
    x_step_t,
    x_step_u,
    state_stride_s,
    state_stride_t,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Convolve one token of one row, a block of channels, and let its slot go on by it."""
    blocks = tl.cdiv(channels, BLOCK_C)
    program = tl.program_id(0).to(tl.int64)
    part, place = program % (units * blocks), program // (units * blocks)
    unit, block = part // blocks, part % blocks
    columns = block * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = columns < channels
    flat, width = unit * channels + columns, units * channels
    slot = tl.load(slots_ptr + place)
    live = inside & (slot >= 0)
    source = x_ptr + (x_offset + unit * x_step_u + place * x_step_t) * STEP + columns
    token = tl.load(source, mask=live, other=0.0)
    tap = tl.load(taps_ptr + (WIDTH - 1) * width + flat, mask=inside, other=0.0)
    pre = tap.to(tl.float32) * token.to(tl.float32)
    if HAS_BIAS:
        pre += tl.load(bias_ptr + flat, mask=inside, other=0.0).to(tl.float32)
    state = state_ptr + slot * state_stride_s + flat
    for k in tl.static_range(WIDTH - 1):
        row = tl.load(state + k * state_stride_t, mask=live, other=0.0)
        tap = tl.load(taps_ptr + k * width + flat, mask=inside, other=0.0)
        pre += tap.to(tl.float32) * row.to(tl.float32)
        if k > 0:
            tl.store(state + (k - 1) * state_stride_t, row, mask=live)
    if WIDTH > 1:
        kept = token.to(state_ptr.dtype.element_ty)
        tl.store(state + (WIDTH - 2) * state_stride_t, kept, mask=live)
    if SILU:
        pre = pre * tl.sigmoid(pre)
    pre = tl.where(slot >= 0, pre, 0.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place * width + flat, pre, mask=inside)
