# SPDX-License-Identifier: Apache-2.0
"""The forward and backward kernels of the recurrence prologue.

A unit has several sections: its query, its key, blocks of columns of its values, and its gates
(decay and beta of each head). A program computes one section of some tokens of a unit. All tiles
have the width of a key. Row strides are passed divided by ALIGN, so that the compiler knows the
alignment of loads: the distance of units is rarely a multiple of 16 bytes.

The backward kernel processes SEGMENTS segments of STEPS tokens in parallel, each from its last
token to its first. It computes pre and its gradient once per token, and carries the contributions
to the gradients of the W-1 rows before the token in registers. For these it recomputes the W-1
tokens after a segment, so a loop runs over STEPS + 4 tokens, four per iteration. The loads of an
iteration are independent, and are issued AHEAD - 1 iterations before their use.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def section_start(
    section,
    QUERY: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the first column of a section within its unit."""
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
    """Return the mask of a section's valid columns; a constant if every tile is full."""
    if KEYS == BLOCK and VALUES % BLOCK == 0:
        inside = columns < BLOCK
    else:
        inside = columns < tl.where(section < 2, KEYS, VALUES - (section - 2) * BLOCK)
    return inside


@triton.jit
def tap(taps_ptr, stride, inside, TAP: tl.constexpr, WIDTH: tl.constexpr):
    """Return the weights of the token TAP before; zero if TAP >= WIDTH.

    `stride` separates taps; the weights of one tap are contiguous.
    """
    columns = tl.arange(0, inside.shape[0])
    pointers = taps_ptr + (WIDTH - 1 - TAP) * stride + columns
    return tl.load(pointers, mask=inside & (TAP < WIDTH), other=0.0).to(tl.float32)


@triton.jit
def row_of_token(rows_ptr, token, inside, HAS_INDEX: tl.constexpr):
    """Return the row of each token in the source."""
    row = token
    if HAS_INDEX:
        row = tl.load(rows_ptr + token, mask=inside, other=0)
    return row


@triton.jit
def load_rows(source_ptr, rows_ptr, token, tokens, inside, stride, HAS_INDEX: tl.constexpr):
    """Load the columns of tokens [n, BLOCK]; zero for tokens outside 0 ... `tokens` - 1."""
    in_range = (token >= 0) & (token < tokens)
    row = row_of_token(rows_ptr, token, in_range, HAS_INDEX)
    columns = tl.arange(0, inside.shape[0])
    pointers = source_ptr + (row * stride)[:, None] + columns[None, :]
    return tl.load(pointers, mask=in_range[:, None] & inside[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_initial_rows(
    initial_ptr,
    sequence_id,
    lag,
    mask,
    inside,
    initial_stride,
    WIDTH: tl.constexpr,
):
    """Load the initial rows [n, BLOCK] that are `lag` before the start of their sequences."""
    columns = tl.arange(0, inside.shape[0])
    row = (sequence_id.to(tl.int64) * (WIDTH - 1) + (WIDTH - 1 - lag)) * initial_stride
    pointers = initial_ptr + row[:, None] + columns[None, :]
    return tl.load(pointers, mask=mask[:, None] & inside[None, :], other=0.0).to(tl.float32)


@triton.jit
def softplus(x):
    """Return log(1 + e^x), with a small relative error for small results too."""
    exp_neg = tl.exp(-tl.abs(x))
    shifted = 1.0 + exp_neg
    # Corrects the rounding of 1 + exp_neg to first order, as log1p does.
    log1p = tl.where(
        shifted == 1.0, exp_neg, tl.log(shifted) * (exp_neg / tl.maximum(shifted - 1.0, 1e-30))
    )
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def limited(x, low, high):
    """Return x clamped to [low, high]; NaN stays NaN."""
    # tl.maximum(NaN, low) is `low` on a GPU.
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def write_gates(
    source_ptr,
    inputs,
    gates,
    sizes,
    dt_limit,
    BETA_COLUMN: tl.constexpr,
    DT_COLUMN: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_BETA: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GATE_T: tl.constexpr,
):
    """Write decay and beta of BLOCK_T tokens of a unit."""
    a_log_ptr, dt_bias_ptr, rows_ptr = inputs
    decay_ptr, beta_ptr = gates
    start, unit, tokens, units, stride = sizes
    low, high = dt_limit
    heads = tl.arange(0, BLOCK_H)
    is_head = heads < HEADS
    rate = tl.exp(tl.load(a_log_ptr + unit * HEADS + heads, mask=is_head, other=0.0))
    dt_bias = tl.load(dt_bias_ptr + unit * HEADS + heads, mask=is_head, other=0.0)
    for offset in range(0, BLOCK_T, GATE_T):
        token = start + offset + tl.arange(0, GATE_T)
        inside = token < tokens
        mask = inside[:, None] & is_head[None, :]
        row = row_of_token(rows_ptr, token, inside, HAS_INDEX)
        pointers = source_ptr + (row * stride)[:, None] + heads[None, :]
        raw = tl.load(pointers + DT_COLUMN, mask=mask, other=0.0).to(tl.float32)
        dt = softplus(raw + dt_bias[None, :])
        if HAS_BETA:
            raw_beta = tl.load(pointers + BETA_COLUMN, mask=mask, other=0.0).to(tl.float32)
            beta = tl.sigmoid(raw_beta)
        else:
            dt = limited(dt, low, high)
            beta = dt
        out_offsets = (token * units + unit)[:, None] * HEADS + heads[None, :]
        tl.store(decay_ptr + out_offsets, -rate[None, :] * dt, mask=mask)
        tl.store(beta_ptr + out_offsets, beta, mask=mask)


@triton.jit
def differentiate_gates(
    source_ptr,
    inputs,
    grads,
    outputs,
    partial_ptr,
    sizes,
    dt_limit,
    BETA_COLUMN: tl.constexpr,
    DT_COLUMN: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_BETA: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GATE_T: tl.constexpr,
):
    """Write the gradients of the gate columns for a share of the tokens, and the share's partial
    gradients of A_log and dt_bias."""
    a_log_ptr, dt_bias_ptr, rows_ptr = inputs
    d_decay_ptr, d_beta_ptr = grads
    d_source_ptr, d_stride = outputs
    share, shares, unit, tokens, units, stride = sizes
    low, high = dt_limit
    heads = tl.arange(0, BLOCK_H)
    is_head = heads < HEADS
    rate = tl.exp(tl.load(a_log_ptr + unit * HEADS + heads, mask=is_head, other=0.0))
    dt_bias = tl.load(dt_bias_ptr + unit * HEADS + heads, mask=is_head, other=0.0)
    d_a_log = tl.zeros([BLOCK_H], dtype=tl.float32)
    d_dt_bias = tl.zeros([BLOCK_H], dtype=tl.float32)
    for start in range(share * GATE_T, tokens, shares * GATE_T):  # int64, like `share`
        token = start + tl.arange(0, GATE_T)
        inside = token < tokens
        mask = inside[:, None] & is_head[None, :]
        row = row_of_token(rows_ptr, token, inside, HAS_INDEX)
        pointers = source_ptr + (row * stride)[:, None] + heads[None, :]
        out = d_source_ptr + (row * d_stride)[:, None] + heads[None, :]
        gate_offsets = (token * units + unit)[:, None] * HEADS + heads[None, :]
        d_decay = tl.load(d_decay_ptr + gate_offsets, mask=mask, other=0.0).to(tl.float32)
        d_beta = tl.load(d_beta_ptr + gate_offsets, mask=mask, other=0.0).to(tl.float32)
        raw = tl.load(pointers + DT_COLUMN, mask=mask, other=0.0).to(tl.float32)
        raw += dt_bias[None, :]
        dt = softplus(raw)
        d_dt = -rate[None, :] * d_decay
        if HAS_BETA:
            raw_beta = tl.load(pointers + BETA_COLUMN, mask=mask, other=0.0).to(tl.float32)
            beta = tl.sigmoid(raw_beta)
            d_raw_beta = d_beta * beta * (1.0 - beta)
            tl.store(out + BETA_COLUMN, d_raw_beta.to(out.dtype.element_ty), mask=mask)
        else:
            clamped = (dt < low) | (dt > high)
            d_dt = tl.where(clamped, 0.0, d_dt + d_beta)
            dt = limited(dt, low, high)
        d_raw = d_dt * tl.sigmoid(raw)
        tl.store(out + DT_COLUMN, d_raw.to(out.dtype.element_ty), mask=mask)
        d_a_log += tl.sum(-rate[None, :] * dt * d_decay, 0)
        d_dt_bias += tl.sum(d_raw, 0)
    out = partial_ptr + share * 2 * units * HEADS + unit * HEADS + heads
    tl.store(out, d_a_log, mask=is_head)
    tl.store(out + units * HEADS, d_dt_bias, mask=is_head)


@triton.jit
def l2_normalize(y, normalize, eps):
    """Return rows divided by their length if `normalize`, else y."""
    if normalize:
        y *= tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
    return y


@triton.jit(do_not_specialize=["tokens", "units"])
def prologue_forward_kernel(
    source_ptr,
    taps_ptr,
    bias_ptr,
    a_log_ptr,
    dt_bias_ptr,
    initial_ptr,
    rows_ptr,
    positions_ptr,
    sequence_ids_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    decay_ptr,
    beta_ptr,
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
    BETA_COLUMN: tl.constexpr,
    DT_COLUMN: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_BETA: tl.constexpr,
    QK_L2NORM: tl.constexpr,
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
            (a_log_ptr, dt_bias_ptr, rows_ptr),
            (decay_ptr, beta_ptr),
            (start, unit, tokens, units, stride),
            (low, high),
            BETA_COLUMN,
            DT_COLUMN,
            HEADS,
            HAS_INDEX,
            HAS_BETA,
            BLOCK_T,
            BLOCK_H,
            GATE_T,
        )
    else:
        column = section_start(section, QUERY, KEY, VALUE, BLOCK)
        inside = columns_inside(section, tl.arange(0, BLOCK), KEYS, VALUES, BLOCK)
        channel = unit * (2 * KEYS + VALUES) + column  # of all units
        channels = units * (2 * KEYS + VALUES)
        token = start + tl.arange(0, BLOCK_T)
        in_range = token < tokens
        position = tl.load(positions_ptr + token, mask=in_range, other=0)
        pre = tl.zeros([BLOCK_T, BLOCK], dtype=tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + channel + tl.arange(0, BLOCK), mask=inside, other=0.0)
            pre += bias.to(tl.float32)[None, :]
        if HAS_INITIAL:
            sequence_id = tl.load(sequence_ids_ptr + token, mask=in_range, other=0)
        for lag in tl.static_range(WIDTH):
            # -1 masks the load of a token of another sequence.
            source_token = tl.where(position >= lag, token - lag, -1)
            row = load_rows(
                source_ptr + column, rows_ptr, source_token, tokens, inside, stride, HAS_INDEX
            )
            if HAS_INITIAL and lag > 0:
                row += load_initial_rows(
                    initial_ptr + channel,
                    sequence_id,
                    lag - position,
                    in_range & (position < lag),
                    inside,
                    channels,
                    WIDTH,
                )
            pre += tap(taps_ptr + channel, channels, inside, lag, WIDTH)[None, :] * row
        y = pre * tl.sigmoid(pre)
        if QK_L2NORM:
            y = l2_normalize(y, section < 2, eps)
        mask = in_range[:, None] & inside[None, :]
        y = y.to(query_ptr.dtype.element_ty)
        columns = tl.arange(0, BLOCK)[None, :]
        if section == 0:
            tl.store(query_ptr + (token * units + unit)[:, None] * KEYS + columns, y, mask=mask)
        elif section == 1:
            tl.store(key_ptr + (token * units + unit)[:, None] * KEYS + columns, y, mask=mask)
        else:
            out_offsets = (token * units + unit)[:, None] * VALUES + (section - 2) * BLOCK + columns
            tl.store(value_ptr + out_offsets, y, mask=mask)


@triton.jit
def differentiate_activation(rows, grad, taps, normalize, eps, QK_L2NORM: tl.constexpr):
    """Return the gradient of pre from the gradient of l2norm(SiLU(pre)), or SiLU(pre)."""
    pre = taps[4][None, :] + taps[0][None, :] * rows[0] + taps[1][None, :] * rows[1]
    pre += taps[2][None, :] * rows[2] + taps[3][None, :] * rows[3]
    sigmoid = tl.sigmoid(pre)
    if QK_L2NORM:
        grad = differentiate_norm(pre * sigmoid, grad, normalize, eps)
    return grad * sigmoid * (1.0 + pre * (1.0 - sigmoid))


@triton.jit
def taps_and_bias(taps_ptr, bias_ptr, stride, inside, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return the weights of four taps, zero for taps from WIDTH on, and the bias."""
    bias = tl.zeros(inside.shape, dtype=tl.float32)
    if HAS_BIAS:
        pointers = bias_ptr + tl.arange(0, inside.shape[0])
        bias = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    return (
        tap(taps_ptr, stride, inside, 0, WIDTH),
        tap(taps_ptr, stride, inside, 1, WIDTH),
        tap(taps_ptr, stride, inside, 2, WIDTH),
        tap(taps_ptr, stride, inside, 3, WIDTH),
        bias,
    )


@triton.jit
def differentiate_norm(y, grad, normalize, eps):
    """Return the gradient of y from the gradient of y / |y|, or `grad` unless `normalize`."""
    if normalize:
        factor = tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
        y *= factor
        grad = factor * (grad - y * tl.sum(grad * y, 1)[:, None])
    return grad


@triton.jit
def add_initial_rows(
    row, initials, sequence_id, position, inside, LAG: tl.constexpr, WIDTH: tl.constexpr
):
    """Return the row LAG before each token, taken from the initial rows before its sequence."""
    if LAG < WIDTH:
        row += load_initial_rows(
            initials[0], sequence_id, LAG - position, position < LAG, inside, initials[2], WIDTH
        )
    return row


@triton.jit
def store_d_initial(
    d_rows, d_initial_ptr, sequence_id, starts, inside, stride, WIDTH: tl.constexpr
):
    """Store the gradients of the initial rows of sequences that start at these tokens."""
    columns = tl.arange(0, inside.shape[0])
    row = (sequence_id.to(tl.int64) * (WIDTH - 1) + (WIDTH - 1)) * stride
    pointers = d_initial_ptr + row[:, None] + columns[None, :]
    mask = starts[:, None] & inside[None, :]
    for lag in tl.static_range(1, WIDTH):
        d_row = d_rows[lag - 1].to(d_initial_ptr.dtype.element_ty)
        tl.store(pointers - lag * stride, d_row, mask=mask)


@triton.jit
def differentiate_token(
    token,
    end,
    tokens,
    rows,
    d_rows,
    d_weights,
    taps,
    grads,
    outputs,
    initials,
    indices,
    inside,
    normalize,
    eps,
    WIDTH: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    QK_L2NORM: tl.constexpr,
):
    """Differentiate one token of each segment; return the new `d_rows` and `d_weights`.

    `rows` are the rows of the token and of the three tokens before it, `d_rows` the
    contributions of later tokens to their gradients, `d_weights` the gradients of taps
    and bias so far. The other tuples hold pointers and strides.
    """
    in_range = token < tokens
    position = tl.load(indices[1] + token, mask=in_range, other=WIDTH)
    x0 = rows[0]
    x1 = tl.where((position >= 1)[:, None], rows[1], 0.0)
    x2 = tl.where((position >= 2)[:, None], rows[2], 0.0)
    x3 = tl.where((position >= 3)[:, None], rows[3], 0.0)
    sequence_id = position
    if HAS_INITIAL:
        sequence_id = tl.load(indices[2] + token, mask=in_range, other=0)
        x1 = add_initial_rows(x1, initials, sequence_id, position, inside, 1, WIDTH)
        x2 = add_initial_rows(x2, initials, sequence_id, position, inside, 2, WIDTH)
        x3 = add_initial_rows(x3, initials, sequence_id, position, inside, 3, WIDTH)
    columns = tl.arange(0, inside.shape[0])[None, :]
    mask = in_range[:, None] & inside[None, :]
    grad = tl.load(grads[0] + (token * grads[1])[:, None] + columns, mask=mask, other=0.0)
    taps_rows = (x0, x1, x2, x3)
    d_pre = differentiate_activation(
        taps_rows, grad.to(tl.float32), taps, normalize, eps, QK_L2NORM
    )
    in_segment = in_range & (token < end)
    d_pre_masked = tl.where(in_segment[:, None], d_pre, 0.0)
    d_weights = (
        d_weights[0] + d_pre_masked * x0,
        d_weights[1] + d_pre_masked * x1,
        d_weights[2] + d_pre_masked * x2,
        d_weights[3] + d_pre_masked * x3,
        d_weights[4] + d_pre_masked,
    )
    row_index = row_of_token(indices[0], token, in_segment, HAS_INDEX)
    d_x = (d_rows[0] + taps[0][None, :] * d_pre).to(outputs[0].dtype.element_ty)
    pointers = outputs[0] + (row_index * outputs[1])[:, None] + columns
    tl.store(pointers, d_x, mask=in_segment[:, None] & inside[None, :])
    d_row1 = d_rows[1] + taps[1][None, :] * d_pre
    d_row2 = d_rows[2] + taps[2][None, :] * d_pre
    d_row3 = taps[3][None, :] * d_pre
    starts = position == 0
    if HAS_INITIAL:
        d_rows = (d_row1, d_row2, d_row3)
        store_d_initial(
            d_rows, initials[1], sequence_id, starts & in_segment, inside, initials[2], WIDTH
        )
    has_previous = (position > 0)[:, None]
    d_rows = (
        tl.where(has_previous, d_row1, 0.0),
        tl.where(has_previous, d_row2, 0.0),
        tl.where(has_previous, d_row3, 0.0),
    )
    return d_rows, d_weights


@triton.jit
def unit_columns(pointer, unit, units, strides, COLUMNS: tl.constexpr, JOINT: tl.constexpr):
    """Return the pointer to a unit's columns of the source's gradient, and its row stride: the
    source's stride in the joint gradient of a projection, else contiguous."""
    if JOINT:
        return pointer + unit * strides[0], strides[1]
    else:
        return pointer + unit * COLUMNS, units.to(tl.int64) * COLUMNS


@triton.jit(do_not_specialize=["tokens", "units", "shares"])
def prologue_backward_kernel(
    source_ptr,
    taps_ptr,
    bias_ptr,
    a_log_ptr,
    dt_bias_ptr,
    initial_ptr,
    rows_ptr,
    positions_ptr,
    sequence_ids_ptr,
    d_query_ptr,
    d_key_ptr,
    d_value_ptr,
    d_decay_ptr,
    d_beta_ptr,
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
    BETA_COLUMN: tl.constexpr,
    DT_COLUMN: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_BETA: tl.constexpr,
    QK_L2NORM: tl.constexpr,
    ALIGN: tl.constexpr,
    JOINT: tl.constexpr,
    SECTIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    STEPS: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GATE_T: tl.constexpr,
):
    """Write the gradient of one section of a unit for one of `shares` shares of the tokens, and the
    share's partial gradients of the weights."""
    program = tl.program_id(0).to(tl.int64)
    section = (program % SECTIONS).to(tl.int32)
    unit = program // SECTIONS % units
    share = program // SECTIONS // units
    CHANNELS: tl.constexpr = 2 * KEYS + VALUES
    COLUMNS: tl.constexpr = CHANNELS + (2 * HEADS if HAS_BETA else HEADS)
    stride = row_stride * ALIGN
    source_strides = (unit_stride * ALIGN, stride)
    d_source_ptr, d_stride = unit_columns(d_source_ptr, unit, units, source_strides, COLUMNS, JOINT)
    source_ptr += unit * (unit_stride * ALIGN)
    if section == SECTIONS - 1:
        differentiate_gates(
            source_ptr,
            (a_log_ptr, dt_bias_ptr, rows_ptr),
            (d_decay_ptr, d_beta_ptr),
            (d_source_ptr, d_stride),
            gate_partial_ptr,
            (share, shares, unit, tokens, units, stride),
            (low, high),
            BETA_COLUMN,
            DT_COLUMN,
            HEADS,
            HAS_INDEX,
            HAS_BETA,
            BLOCK_H,
            GATE_T,
        )
    else:
        column = section_start(section, QUERY, KEY, VALUE, BLOCK)
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
        outputs = (d_source_ptr, d_stride)
        initials = (initial_ptr, d_initial_ptr, channels)
        indices = (rows_ptr, positions_ptr, sequence_ids_ptr)
        zeros = tl.zeros([SEGMENTS, BLOCK], dtype=tl.float32)
        d_weights = (zeros, zeros, zeros, zeros, zeros)
        for first_token in range(share * (SEGMENTS * STEPS), tokens, shares * (SEGMENTS * STEPS)):
            ends = first_token + (tl.arange(0, SEGMENTS) + 1) * STEPS  # one past each segment
            d_rows = (zeros, zeros, zeros)
            x4 = load_rows(source_ptr, rows_ptr, ends + 1, tokens, inside, stride, HAS_INDEX)
            x5 = load_rows(source_ptr, rows_ptr, ends + 2, tokens, inside, stride, HAS_INDEX)
            x6 = load_rows(source_ptr, rows_ptr, ends + 3, tokens, inside, stride, HAS_INDEX)
            for step in tl.range(0, STEPS + 4, 4, num_stages=AHEAD):
                token = ends - step
                # Of the rows token - 3 to token + 3 the last three are in registers already.
                x0 = load_rows(source_ptr, rows_ptr, token - 3, tokens, inside, stride, HAS_INDEX)
                x1 = load_rows(source_ptr, rows_ptr, token - 2, tokens, inside, stride, HAS_INDEX)
                x2 = load_rows(source_ptr, rows_ptr, token - 1, tokens, inside, stride, HAS_INDEX)
                x3 = load_rows(source_ptr, rows_ptr, token, tokens, inside, stride, HAS_INDEX)
                rows = (x0, x1, x2, x3, x4, x5, x6)
                for lag in tl.static_range(4):
                    d_rows, d_weights = differentiate_token(
                        token + 3 - lag,
                        ends,
                        tokens,
                        (rows[6 - lag], rows[5 - lag], rows[4 - lag], rows[3 - lag]),
                        d_rows,
                        d_weights,
                        taps,
                        grads,
                        outputs,
                        initials,
                        indices,
                        inside,
                        section < 2,
                        eps,
                        WIDTH,
                        HAS_INDEX,
                        HAS_INITIAL,
                        QK_L2NORM,
                    )
                x4 = x0
                x5 = x1
                x6 = x2
        partial_ptrs = tap_partial_ptr + (share * units + unit) * (WIDTH + 1) * CHANNELS
        partial_ptrs += column + tl.arange(0, BLOCK)
        for lag in tl.static_range(WIDTH):
            pointers = partial_ptrs + (WIDTH - 1 - lag) * CHANNELS  # in the order of the weight
            tl.store(pointers, tl.sum(d_weights[lag], 0), mask=inside)
        if HAS_BIAS:
            tl.store(partial_ptrs + WIDTH * CHANNELS, tl.sum(d_weights[4], 0), mask=inside)
