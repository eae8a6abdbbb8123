# SPDX-License-Identifier: Apache-2.0
"""The kernels of the prologue: forward, and backward over stretches of tokens from their ends.

The backward kernel of the prologue: stretches of tokens walked from their ends.

Each of LANES stretches of STEPS tokens is walked backwards: of each token pre and its gradient are
worked out once, and what that gives to the W-1 tokens before it is handed on in registers. The W-1
tokens behind a stretch are worked out again for this; so STEPS + 4 tokens are walked, four in each
round of a loop. Its loads do not wait for each other, and begin AHEAD - 1 rounds before their use.

What the kernels of the prologue share: the sections of a unit, and the rows that taps meet.

A section is the query of a unit, its key, or so many columns of its values; the last section is its
gates. All tiles are as wide as a key. Strides of rows arrive divided by ALIGN, so that the compiler
knows how far loads are aligned: units are rarely a multiple of 16 bytes apart.

The gates of the prologue: a token's decay and strength for each head of a unit.

The forward kernel of the prologue: tokens by units by sections, each written once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_column(
    section,
    QUERY: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the first column of a section in its unit."""
    key_or_value = tl.where(section == 1, KEY, VALUE + (section - 2) * BLOCK)
    return tl.where(section == 0, QUERY, key_or_value)


@triton.jit
def columns_inside(
    section,
    columns,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return which columns of a section there are; a constant where all are."""
    if KEYS == BLOCK and VALUES % BLOCK == 0:
        inside = columns < BLOCK
    else:
        inside = columns < tl.where(section < 2, KEYS, VALUES - (section - 2) * BLOCK)
    return inside


@triton.jit
def tap(taps_ptr, apart, inside, TAP: tl.constexpr, WIDTH: tl.constexpr):
    """Return the weights that meet the token TAP before, zero where there are none.

    Taps lie `apart` from each other, and the weights of one side by side.
    """
    columns = tl.arange(0, inside.shape[0])
    at = taps_ptr + (WIDTH - 1 - TAP) * apart + columns
    return tl.load(at, mask=inside & (TAP < WIDTH), other=0.0).to(tl.float32)


@triton.jit
def place_of(places_ptr, token, inside, HAS_PLACES: tl.constexpr):
    """Return the rows of tokens."""
    place = token
    if HAS_PLACES:
        place = tl.load(places_ptr + token, mask=inside, other=0)
    return place


@triton.jit
def row_of(source_ptr, places_ptr, token, tokens, inside, stride, HAS_PLACES: tl.constexpr):
    """Return the columns of tokens [tokens, BLOCK], zero of those that are not among `tokens`."""
    wanted = (token >= 0) & (token < tokens)
    place = place_of(places_ptr, token, wanted, HAS_PLACES)
    columns = tl.arange(0, inside.shape[0])
    at = source_ptr + (place * stride)[:, None] + columns[None, :]
    return tl.load(at, mask=wanted[:, None] & inside[None, :], other=0.0).to(tl.float32)


@triton.jit
def row_before(
    initial_ptr,
    number,
    back,
    wanted,
    inside,
    initial_stride,
    WIDTH: tl.constexpr,
):
    """Return the rows `back` before their sequences [tokens, BLOCK]."""
    columns = tl.arange(0, inside.shape[0])
    row = (number.to(tl.int64) * (WIDTH - 1) + (WIDTH - 1 - back)) * initial_stride
    at = initial_ptr + row[:, None] + columns[None, :]
    return tl.load(at, mask=wanted[:, None] & inside[None, :], other=0.0).to(tl.float32)


@triton.jit
def softplus(x):
    """Return log(1 + e^x), as precise for small results as for large ones."""
    share = tl.exp(-tl.abs(x))
    whole = 1.0 + share
    # What 1 + share rounds off is made good by the slope of the logarithm.
    log = tl.where(whole == 1.0, share, tl.log(whole) * (share / tl.maximum(whole - 1.0, 1e-30)))
    return tl.maximum(x, 0.0) + log


@triton.jit
def limited(x, low, high):
    """Return x, but at least `low` and at most `high`; what is no number stays none."""
    # Of a number and one that is none, `tl.maximum` returns the number on a GPU.
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def write_gates(
    source_ptr,
    weights,
    gates,
    numbers,
    limits,
    STRENGTHS: tl.constexpr,
    STEPS_COLUMN: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    HAS_STRENGTHS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GATE_T: tl.constexpr,
):
    """Write decay and strength of BLOCK_T tokens of a unit."""
    rates_ptr, step_bias_ptr, places_ptr = weights
    decay_ptr, strength_ptr = gates
    start, unit, tokens, units, stride = numbers
    low, high = limits
    heads = tl.arange(0, BLOCK_H)
    real = heads < HEADS
    rate = tl.exp(tl.load(rates_ptr + unit * HEADS + heads, mask=real, other=0.0))
    step_bias = tl.load(step_bias_ptr + unit * HEADS + heads, mask=real, other=0.0)
    for first in range(0, BLOCK_T, GATE_T):
        token = start + first + tl.arange(0, GATE_T)
        inside = token < tokens
        mask = inside[:, None] & real[None, :]
        place = place_of(places_ptr, token, inside, HAS_PLACES)
        at = source_ptr + (place * stride)[:, None] + heads[None, :]
        raw = tl.load(at + STEPS_COLUMN, mask=mask, other=0.0).to(tl.float32)
        steps = softplus(raw + step_bias[None, :])
        if HAS_STRENGTHS:
            opened = tl.load(at + STRENGTHS, mask=mask, other=0.0).to(tl.float32)
            strength = tl.sigmoid(opened)
        else:
            steps = limited(steps, low, high)
            strength = steps
        out = (token * units + unit)[:, None] * HEADS + heads[None, :]
        tl.store(decay_ptr + out, -rate[None, :] * steps, mask=mask)
        tl.store(strength_ptr + out, strength, mask=mask)


@triton.jit
def differentiate_gates(
    source_ptr,
    weights,
    grads,
    results,
    partial_ptr,
    numbers,
    limits,
    STRENGTHS: tl.constexpr,
    STEPS_COLUMN: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    HAS_STRENGTHS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GATE_T: tl.constexpr,
):
    """Write the gradients of a share of the tokens, and this share's part of those of weights."""
    rates_ptr, step_bias_ptr, places_ptr = weights
    d_decay_ptr, d_strength_ptr = grads
    d_source_ptr, d_stride = results
    share, shares, unit, tokens, units, stride = numbers
    low, high = limits
    heads = tl.arange(0, BLOCK_H)
    there = heads < HEADS
    rate = tl.exp(tl.load(rates_ptr + unit * HEADS + heads, mask=there, other=0.0))
    step_bias = tl.load(step_bias_ptr + unit * HEADS + heads, mask=there, other=0.0)
    sum_rates = tl.zeros([BLOCK_H], dtype=tl.float32)
    sum_steps = tl.zeros([BLOCK_H], dtype=tl.float32)
    for first in range(share * GATE_T, tokens, shares * GATE_T):  # int64, as `share` is
        token = first + tl.arange(0, GATE_T)
        inside = token < tokens
        mask = inside[:, None] & there[None, :]
        place = place_of(places_ptr, token, inside, HAS_PLACES)
        at = source_ptr + (place * stride)[:, None] + heads[None, :]
        out = d_source_ptr + (place * d_stride)[:, None] + heads[None, :]
        gate = (token * units + unit)[:, None] * HEADS + heads[None, :]
        d_decay = tl.load(d_decay_ptr + gate, mask=mask, other=0.0).to(tl.float32)
        d_strength = tl.load(d_strength_ptr + gate, mask=mask, other=0.0).to(tl.float32)
        raw = tl.load(at + STEPS_COLUMN, mask=mask, other=0.0).to(tl.float32)
        raw += step_bias[None, :]
        steps = softplus(raw)
        d_steps = -rate[None, :] * d_decay
        if HAS_STRENGTHS:
            opened = tl.load(at + STRENGTHS, mask=mask, other=0.0).to(tl.float32)
            strength = tl.sigmoid(opened)
            d_opened = d_strength * strength * (1.0 - strength)
            tl.store(out + STRENGTHS, d_opened.to(out.dtype.element_ty), mask=mask)
        else:
            beyond = (steps < low) | (steps > high)
            d_steps = tl.where(beyond, 0.0, d_steps + d_strength)
            steps = limited(steps, low, high)
        d_raw = d_steps * tl.sigmoid(raw)
        tl.store(out + STEPS_COLUMN, d_raw.to(out.dtype.element_ty), mask=mask)
        sum_rates += tl.sum(-rate[None, :] * steps * d_decay, 0)
        sum_steps += tl.sum(d_raw, 0)
    out = partial_ptr + share * 2 * units * HEADS + unit * HEADS + heads
    tl.store(out, sum_rates, mask=there)
    tl.store(out + units * HEADS, sum_steps, mask=there)


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


@triton.jit
def differentiated(rows, grad, taps, scaled, eps, NORMALISED: tl.constexpr):
    """Return the gradient of pre from that of what SiLU and, if `scaled`, the norm make of it."""
    pre = taps[4][None, :] + taps[0][None, :] * rows[0] + taps[1][None, :] * rows[1]
    pre += taps[2][None, :] * rows[2] + taps[3][None, :] * rows[3]
    share = tl.sigmoid(pre)
    if NORMALISED:
        grad = through_norm(pre * share, grad, scaled, eps)
    return grad * share * (1.0 + pre * (1.0 - share))


@triton.jit
def taps_and_bias(taps_ptr, bias_ptr, apart, inside, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return the weights of four taps, zero of those that are not, and the bias."""
    bias = tl.zeros(inside.shape, dtype=tl.float32)
    if HAS_BIAS:
        at = bias_ptr + tl.arange(0, inside.shape[0])
        bias = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return (
        tap(taps_ptr, apart, inside, 0, WIDTH),
        tap(taps_ptr, apart, inside, 1, WIDTH),
        tap(taps_ptr, apart, inside, 2, WIDTH),
        tap(taps_ptr, apart, inside, 3, WIDTH),
        bias,
    )


@triton.jit
def through_norm(y, grad, scaled, eps):
    """Return the gradient of y from that of y scaled to length one, if it is `scaled`."""
    if scaled:
        factor = tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
        y *= factor
        grad = factor * (grad - y * tl.sum(grad * y, 1)[:, None])
    return grad


@triton.jit
def lent(row, initials, number, age, inside, BACK: tl.constexpr, WIDTH: tl.constexpr):
    """Return the row BACK before each token, or the one before its sequence that is there."""
    if BACK < WIDTH:
        row += row_before(initials[0], number, BACK - age, age < BACK, inside, initials[2], WIDTH)
    return row


@triton.jit
def give_back(pulls, d_initial_ptr, number, starts, inside, stride, WIDTH: tl.constexpr):
    """Store the gradients of the rows before sequences that begin at these tokens."""
    columns = tl.arange(0, inside.shape[0])
    row = (number.to(tl.int64) * (WIDTH - 1) + (WIDTH - 1)) * stride
    at = d_initial_ptr + row[:, None] + columns[None, :]
    mask = starts[:, None] & inside[None, :]
    for back in tl.static_range(1, WIDTH):
        pull = pulls[back - 1].to(d_initial_ptr.dtype.element_ty)
        tl.store(at - back * stride, pull, mask=mask)


@triton.jit
def differentiate_token(
    token,
    end,
    tokens,
    rows,
    pulls,
    sums,
    taps,
    grads,
    results,
    initials,
    maps,
    inside,
    scaled,
    eps,
    WIDTH: tl.constexpr,
    HAS_PLACES: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    NORMALISED: tl.constexpr,
):
    """Differentiate one token of each lane; return what it hands on, and the sums so far.

    `rows` are that of the token and those before it, `pulls` what the tokens behind give to the row
    of the token and to those before it; `sums` the gradients of taps and of the bias. Others are
    pairs of a pointer and a stride, or pointers alone.
    """
    real = token < tokens
    age = tl.load(maps[1] + token, mask=real, other=WIDTH)
    x0 = rows[0]
    x1 = tl.where((age >= 1)[:, None], rows[1], 0.0)
    x2 = tl.where((age >= 2)[:, None], rows[2], 0.0)
    x3 = tl.where((age >= 3)[:, None], rows[3], 0.0)
    number = age
    if HAS_INITIAL:
        number = tl.load(maps[2] + token, mask=real, other=0)
        x1 = lent(x1, initials, number, age, inside, 1, WIDTH)
        x2 = lent(x2, initials, number, age, inside, 2, WIDTH)
        x3 = lent(x3, initials, number, age, inside, 3, WIDTH)
    columns = tl.arange(0, inside.shape[0])[None, :]
    mask = real[:, None] & inside[None, :]
    grad = tl.load(grads[0] + (token * grads[1])[:, None] + columns, mask=mask, other=0.0)
    seen = (x0, x1, x2, x3)
    d_pre = differentiated(seen, grad.to(tl.float32), taps, scaled, eps, NORMALISED)
    own = real & (token < end)
    held = tl.where(own[:, None], d_pre, 0.0)
    sums = (
        sums[0] + held * x0,
        sums[1] + held * x1,
        sums[2] + held * x2,
        sums[3] + held * x3,
        sums[4] + held,
    )
    place = place_of(maps[0], token, own, HAS_PLACES)
    d_x = (pulls[0] + taps[0][None, :] * d_pre).to(results[0].dtype.element_ty)
    at = results[0] + (place * results[1])[:, None] + columns
    tl.store(at, d_x, mask=own[:, None] & inside[None, :])
    pull1 = pulls[1] + taps[1][None, :] * d_pre
    pull2 = pulls[2] + taps[2][None, :] * d_pre
    pull3 = taps[3][None, :] * d_pre
    starts = age == 0
    if HAS_INITIAL:
        pulls = (pull1, pull2, pull3)
        give_back(pulls, initials[1], number, starts & own, inside, initials[2], WIDTH)
    goes_on = (age > 0)[:, None]
    pulls = (
        tl.where(goes_on, pull1, 0.0),
        tl.where(goes_on, pull2, 0.0),
        tl.where(goes_on, pull3, 0.0),
    )
    return pulls, sums


@triton.jit
def unit_columns(pointer, unit, units, strides, COLUMNS: tl.constexpr, JOINT: tl.constexpr):
    """Return where a unit's columns of the source's gradient begin and how far rows are apart: as
    in the source, in the joint gradient of a projection; else without gaps."""
    if JOINT:
        return pointer + unit * strides[0], strides[1]
    else:
        return pointer + unit * COLUMNS, units.to(tl.int64) * COLUMNS


@triton.jit(do_not_specialize=["tokens", "units", "shares"])
def prologue_backward_kernel(
    source_ptr,
    taps_ptr,
    bias_ptr,
    rates_ptr,
    step_bias_ptr,
    initial_ptr,
    places_ptr,
    ages_ptr,
    numbers_ptr,
    d_query_ptr,
    d_key_ptr,
    d_value_ptr,
    d_decay_ptr,
    d_strength_ptr,
    d_source_ptr,
    d_initial_ptr,
    tap_partial_ptr,
    gate_partial_ptr,
    tokens,
    units,
    shares,
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
    JOINT: tl.constexpr,
    SECTIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    STEPS: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GATE_T: tl.constexpr,
):
    """Write the gradient of one section of a unit, for one of `shares` shares of the tokens, and
    this share's part of the gradients of weights."""
    program = tl.program_id(0).to(tl.int64)
    section = (program % SECTIONS).to(tl.int32)
    unit = program // SECTIONS % units
    share = program // SECTIONS // units
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    COLUMNS: tl.constexpr = CHANNELS + (2 * HEADS if HAS_STRENGTHS else HEADS)
    stride = row_stride * ALIGN
    own = (unit_stride * ALIGN, stride)
    d_source_ptr, d_stride = unit_columns(d_source_ptr, unit, units, own, COLUMNS, JOINT)
    source_ptr += unit * (unit_stride * ALIGN)
    if section == SECTIONS - 1:
        differentiate_gates(
            source_ptr,
            (rates_ptr, step_bias_ptr, places_ptr),
            (d_decay_ptr, d_strength_ptr),
            (d_source_ptr, d_stride),
            gate_partial_ptr,
            (share, shares, unit, tokens, units, stride),
            (low, high),
            STRENGTHS,
            STEPS_COLUMN,
            HEADS,
            HAS_PLACES,
            HAS_STRENGTHS,
            BLOCK_H,
            GATE_T,
        )
    else:
        column = first_column(section, QUERY, KEY, VALUE, BLOCK)
        inside = columns_inside(section, tl.arange(0, BLOCK), KEYS, VALUES, BLOCK)
        channel = unit * CHANNELS + column  # of all units
        source_ptr += column
        d_source_ptr += column
        initial_ptr += channel
        d_initial_ptr += channel
        if section == 0:
            grad_ptr = d_query_ptr + unit * KEYS
            grad_stride = units.to(tl.int64) * KEYS
        elif section == 1:
            grad_ptr = d_key_ptr + unit * KEYS
            grad_stride = units.to(tl.int64) * KEYS
        else:
            grad_ptr = d_value_ptr + unit * VALUES + (section - 2) * BLOCK
            grad_stride = units.to(tl.int64) * VALUES
        channels = units * CHANNELS
        taps = taps_and_bias(
            taps_ptr + channel, bias_ptr + channel, channels, inside, WIDTH, HAS_BIAS
        )
        grads = (grad_ptr, grad_stride)
        results = (d_source_ptr, d_stride)
        initials = (initial_ptr, d_initial_ptr, channels)
        maps = (places_ptr, ages_ptr, numbers_ptr)
        none = tl.zeros([LANES, BLOCK], dtype=tl.float32)
        sums = (none, none, none, none, none)
        for first in range(share * (LANES * STEPS), tokens, shares * (LANES * STEPS)):
            end = first + (tl.arange(0, LANES) + 1) * STEPS  # behind each lane's tokens
            pulls = (none, none, none)
            x4 = row_of(source_ptr, maps[0], end + 1, tokens, inside, stride, HAS_PLACES)
            x5 = row_of(source_ptr, maps[0], end + 2, tokens, inside, stride, HAS_PLACES)
            x6 = row_of(source_ptr, maps[0], end + 3, tokens, inside, stride, HAS_PLACES)
            for step in tl.range(0, STEPS + 4, 4, num_stages=AHEAD):
                token = end - step
                # Of the rows token - 3 to token + 3 the last three are here already.
                x0 = row_of(source_ptr, maps[0], token - 3, tokens, inside, stride, HAS_PLACES)
                x1 = row_of(source_ptr, maps[0], token - 2, tokens, inside, stride, HAS_PLACES)
                x2 = row_of(source_ptr, maps[0], token - 1, tokens, inside, stride, HAS_PLACES)
                x3 = row_of(source_ptr, maps[0], token, tokens, inside, stride, HAS_PLACES)
                rows = (x0, x1, x2, x3, x4, x5, x6)
                for back in tl.static_range(4):
                    pulls, sums = differentiate_token(
                        token + 3 - back,
                        end,
                        tokens,
                        (rows[6 - back], rows[5 - back], rows[4 - back], rows[3 - back]),
                        pulls,
                        sums,
                        taps,
                        grads,
                        results,
                        initials,
                        maps,
                        inside,
                        section < 2,
                        eps,
                        WIDTH,
                        HAS_PLACES,
                        HAS_INITIAL,
                        NORMALISED,
                    )
                x4 = x0
                x5 = x1
                x6 = x2
        out = tap_partial_ptr + (share * units + unit) * (WIDTH + 1) * CHANNELS
        out += column + tl.arange(0, BLOCK)
        for back in tl.static_range(WIDTH):
            at = out + (WIDTH - 1 - back) * CHANNELS  # in the order of weights
            tl.store(at, tl.sum(sums[back], 0), mask=inside)
        if HAS_BIAS:
            tl.store(out + WIDTH * CHANNELS, tl.sum(sums[4], 0), mask=inside)
