# SPDX-License-Identifier: Apache-2.0
"""The gradients of a causal convolution in Triton, all in one pass over memory.

A program walks along its tokens, so that of each the slope of the activation is worked out once. It
holds the W-1 rows before the token, and the gradients of those rows as far as they are known.

Where a sequence begins, gradients that are held are those of rows that nothing reads any more. They
are written, and from there on what is held belongs to the rows before the sequence: `initial`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens", "share"])
def convolution_backward_kernel(
    x_ptr,
    taps_ptr,
    bias_ptr,
    initial_ptr,
    after_ptr,
    number_ptr,
    grad_ptr,
    grad_last_ptr,
    d_x_ptr,
    d_initial_ptr,
    partial_ptr,
    tokens,
    share,
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
    HAS_LAST: tl.constexpr,
    NEEDS_INITIAL: tl.constexpr,
    GROUP: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Differentiate `share` tokens of one block of channels.

    GROUP rows are loaded at a time, AHEAD - 1 such groups before they are worked on.

    `held[k-1]` is the row k before the token, `pulls[k-1]` its gradient so far. The tokens of a
    program end W-1 rows before the rows that it walks over: those add the rest to its last ones.
    """
    NEAR: tl.constexpr = WIDTH - 1
    blocks = tl.cdiv(channels, BLOCK_C)
    program = tl.program_id(0).to(tl.int64)
    part, tile = program % (units * blocks), program // (units * blocks)
    unit, block = part // blocks, part % blocks
    columns = block * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = columns < channels
    flat, width = unit * channels + columns, units * channels
    x_ptr += (x_offset + unit * x_step_u) * STEP + columns
    first = tile * share
    end = tl.minimum(first + share, tokens)
    kind = d_x_ptr.dtype.element_ty

    bias = tl.zeros([BLOCK_C], dtype=tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + flat, mask=inside, other=0.0).to(tl.float32)
    taps, sums, held, pulls = (), (), (), ()
    sum_bias = tl.zeros([BLOCK_C], dtype=tl.float32)
    after = tl.load(after_ptr + first)
    for k in tl.static_range(WIDTH):
        tap = tl.load(taps_ptr + (NEAR - k) * width + flat, mask=inside, other=0.0)
        taps = taps + (tap.to(tl.float32),)
        sums = sums + (tl.zeros([BLOCK_C], dtype=tl.float32),)
    for k in tl.static_range(1, WIDTH):
        source = x_ptr + (first - k) * x_step_t * STEP
        row = tl.load(source, mask=inside & (after >= k), other=0.0).to(tl.float32)
        if HAS_INITIAL:
            carried = tl.load(number_ptr + first).to(tl.int64) * NEAR + NEAR - k + after
            source = initial_ptr + carried * width + flat
            row += tl.load(source, mask=inside & (after < k), other=0.0).to(tl.float32)
        held = held + (row,)
        pulls = pulls + (tl.zeros([BLOCK_C], dtype=tl.float32),)

    length = after * 0  # of the sequence, up to the token before
    number = length.to(tl.int64)
    for step in tl.range(0, share + NEAR, GROUP, num_stages=AHEAD):
        rows, grads, afters, numbers = (), (), (), ()
        for g in tl.static_range(GROUP):
            t = first + step + g
            live = t < tokens
            source = x_ptr + t * x_step_t * STEP
            rows = rows + (tl.load(source, mask=inside & live, other=0.0),)
            source = grad_ptr + t * width + flat
            grads = grads + (tl.load(source, mask=inside & live, other=0.0),)
            afters = afters + (tl.load(after_ptr + t, mask=live, other=0),)
            if HAS_INITIAL or HAS_LAST or NEEDS_INITIAL:
                numbers = numbers + (tl.load(number_ptr + t, mask=live, other=0).to(tl.int64),)
        for g in tl.static_range(GROUP):
            t = first + step + g
            after = afters[g]
            if after == 0:  # behind the last token too
                fresh, zeros = (), ()
                for k in tl.static_range(1, WIDTH):
                    pull = pulls[k - 1]
                    # The row k before: a token of the sequence that ended, or one before it.
                    mine = (t - length >= first) & (t - length < end)
                    if HAS_LAST:
                        source = grad_last_ptr + (number * NEAR + NEAR - k) * width + flat
                        there = inside & (length > 0)
                        pull += tl.load(source, mask=there, other=0.0).to(tl.float32)
                    is_own = (k <= length) & (t - k >= first) & (t - k < end)
                    target = d_x_ptr + (t - k) * width + flat
                    tl.store(target, pull.to(kind), mask=inside & is_own)
                    if NEEDS_INITIAL:
                        place = number * NEAR + NEAR - k + length
                        is_own = (k > length) & (length > 0) & mine
                        target = d_initial_ptr + place * width + flat
                        rounded = pull.to(d_initial_ptr.dtype.element_ty)
                        tl.store(target, rounded, mask=inside & is_own)
                    row = tl.zeros([BLOCK_C], dtype=tl.float32)
                    zeros = zeros + (row,)
                    if HAS_INITIAL:
                        source = initial_ptr + (numbers[g] * NEAR + NEAR - k) * width + flat
                        there = inside & (t < tokens)
                        row = tl.load(source, mask=there, other=0.0).to(tl.float32)
                    fresh = fresh + (row,)
                held, pulls = fresh, zeros
            row = rows[g].to(tl.float32)
            d_pre = grads[g].to(tl.float32)
            if SILU:
                pre = bias + taps[0] * row
                for k in tl.static_range(1, WIDTH):
                    pre += taps[k] * held[k - 1]
                open_ = tl.sigmoid(pre)
                d_pre *= open_ * (1 + pre * (1 - open_))
            own = tl.where(t < end, d_pre, 0.0)
            sum_bias += own
            added = (sums[0] + own * row,)
            pulled = (taps[0] * d_pre,)
            for k in tl.static_range(1, WIDTH):
                added = added + (sums[k] + own * held[k - 1],)
                pulled = pulled + (pulls[k - 1] + taps[k] * d_pre,)
            sums = added
            # Of the row W-1 before, this was the last that read it.
            done = pulled[NEAR]
            is_own = (after >= NEAR) & (t - NEAR >= first) & (t - NEAR < end)
            target = d_x_ptr + (t - NEAR) * width + flat
            tl.store(target, done.to(kind), mask=inside & is_own)
            if NEEDS_INITIAL:
                begin = t - after
                is_own = (after < NEAR) & (begin >= first) & (begin < end) & (t < tokens)
                target = d_initial_ptr + (numbers[g] * NEAR + after) * width + flat
                tl.store(target, done.to(d_initial_ptr.dtype.element_ty), mask=inside & is_own)
            moved, next_pulls = (), ()
            for k in tl.static_range(NEAR):
                moved = moved + ((row,) if k == 0 else (held[k - 1],))
                next_pulls = next_pulls + (pulled[k],)
            held, pulls = moved, next_pulls
            length = after + 1
            if HAS_LAST or NEEDS_INITIAL:
                number = numbers[g]
    partial_ptr += tile * (WIDTH + 1) * width + flat
    for k in tl.static_range(WIDTH):
        tl.store(partial_ptr + (NEAR - k) * width, sums[k], mask=inside)
    tl.store(partial_ptr + WIDTH * width, sum_bias, mask=inside)
