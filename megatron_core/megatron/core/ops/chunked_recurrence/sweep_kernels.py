# SPDX-License-Identifier: Apache-2.0
"""The forward sweep of a recurrence: states through chunks in fp32, outputs on the way."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decays_between(up_to_rows, up_to_columns, rest_of_rows, rest_of_columns, seen):
    """Return exp(a_i - a_j) where `seen`, else 0, from the two parts of a.

    Masked before the exponential, which would be infinite elsewhere.
    """
    between = (up_to_rows - up_to_columns) + (rest_of_rows - rest_of_columns)
    return tl.exp(tl.where(seen, between, float("-inf")))


@triton.jit
def within(index, size: tl.constexpr, BLOCK: tl.constexpr):
    """Return index < size, which is always so where blocks fill the size."""
    if size % BLOCK == 0:
        return tl.full(index.shape, 1, tl.int1)
    return index < size


@triton.jit
def chunks_of(sequence, first_ptr, end_ptr, begin_ptr):
    """Return a sequence's first chunk, how many it has, its first token and how many it has."""
    begin = tl.load(begin_ptr + sequence)
    count = (tl.load(begin_ptr + sequence + 1) - begin).to(tl.int32)
    # A sequence without tokens has no chunk to ask.
    start = tl.load(first_ptr + begin, mask=count > 0, other=0)
    limit = tl.load(end_ptr + begin + count - 1, mask=count > 0, other=0)
    return begin, count, start, (limit - start).to(tl.int32)


@triton.jit
def seen_by_queries(query, key, large, small, rows, scale):
    """Return scale (Q Kᵀ) ∘ D [C, C] in the dtype of keys."""
    falls = decays_between(
        large[:, None],
        large[None, :],
        small[:, None],
        small[None, :],
        rows[:, None] >= rows[None, :],
    )
    seen = tl.dot(query, tl.trans(key), input_precision="ieee") * falls
    return (seen * scale).to(key.dtype)


@triton.jit(do_not_specialize=["chunks"])
def sweep_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    strength_ptr,
    sums_ptr,
    solved_ptr,
    first_ptr,
    end_ptr,
    begin_ptr,
    scale,
    chunks,
    heads: tl.constexpr,
    shared: tl.constexpr,
    keys: tl.constexpr,
    values: tl.constexpr,
    query_stride_t: tl.constexpr,
    query_stride_h: tl.constexpr,
    key_stride_t: tl.constexpr,
    key_stride_h: tl.constexpr,
    value_stride_t: tl.constexpr,
    value_stride_h: tl.constexpr,
    strength_stride_t: tl.constexpr,
    strength_stride_h: tl.constexpr,
    seen_ptr,
    initial_ptr,
    out_ptr,
    starts_ptr,
    last_ptr,
    total_ptr,
    CORRECTS: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_OUT: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_LAST: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Sweep BLOCK_V columns of the state of one head through the chunks of one sequence.

    Without values the first state is the identity, so that the last one is M. HAS_TOTAL stores
    exp of all decays of the sequence, M of a recurrence that does not correct. HAS_SEEN: how much a
    token sees of others, scale (Q Kᵀ) ∘ D, was made before, off the path from chunk to chunk.

    What a model fixes is known when this is compiled: masks go, and addresses cost no registers.
    """
    blocks = tl.cdiv(values, BLOCK_V)
    unit = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    head = (unit % heads).to(tl.int64)
    sequence = (unit // heads).to(tl.int64)
    group = head // shared
    begin, count, start, left_over = chunks_of(sequence, first_ptr, end_ptr, begin_ptr)
    rows = tl.arange(0, CHUNK)
    feature = tl.arange(0, KEYS)
    column = block * BLOCK_V + tl.arange(0, BLOCK_V)
    has_feature = within(feature, keys, KEYS)
    has_column = within(column, values, BLOCK_V)
    state_mask = has_feature[:, None] & has_column[None, :]
    state_place = feature[:, None] * values + column[None, :]
    state_size: tl.constexpr = keys * values
    if HAS_INITIAL:
        state = tl.load(
            initial_ptr + (sequence * heads + head) * state_size + state_place,
            mask=state_mask,
            other=0.0,
        )
    elif HAS_VALUE:
        state = tl.zeros([KEYS, BLOCK_V], dtype=tl.float32)
    else:
        state = tl.where(feature[:, None] == column[None, :], 1.0, 0.0)
    # A place is that of a chunk, 64 bits wide, and one within it: the latter stays the same.
    query_tile = rows[:, None] * query_stride_t + feature[None, :]
    key_tile = rows[:, None] * key_stride_t + feature[None, :]
    value_tile = rows[:, None] * value_stride_t + column[None, :]
    out_tile = rows[:, None] * (heads * values) + column[None, :]
    square_tile = rows[:, None] * CHUNK + rows[None, :]
    query_ptr += start * query_stride_t + group * query_stride_h
    key_ptr += start * key_stride_t + group * key_stride_h
    value_ptr += start * value_stride_t + head * value_stride_h
    strength_ptr += start * strength_stride_t + head * strength_stride_h
    out_ptr += (start * heads + head) * values
    rest = chunks.to(tl.int64) * heads * CHUNK  # from a sum to what its rounding took off
    total = (start * 0).to(tl.float64)
    strength = tl.load(strength_ptr + rows * strength_stride_t, mask=rows < left_over, other=0.0)
    for step in range(count):
        inside = rows < left_over
        number = (begin + step) * heads + head
        sums = sums_ptr + number * CHUNK
        key = tl.load(key_ptr + key_tile, mask=inside[:, None] & has_feature[None, :], other=0.0)
        large = tl.load(sums + rows)
        small = tl.load(sums + rest + rows)
        last_large = tl.load(sums + CHUNK - 1)
        last_small = tl.load(sums + rest + CHUNK - 1)
        gate = strength.to(tl.float32)
        # Of the next chunk: nothing else would ask for it before it is waited for.
        strength_ptr += CHUNK * strength_stride_t
        strength = tl.load(
            strength_ptr + rows * strength_stride_t, mask=rows < left_over - CHUNK, other=0.0
        )
        growth = tl.exp(large + small)
        left = tl.exp((last_large - large) + (last_small - small))
        whole = tl.exp(last_large + last_small)
        if HAS_OUT:
            query = tl.load(
                query_ptr + query_tile, mask=inside[:, None] & has_feature[None, :], other=0.0
            )
            if HAS_SEEN:
                seen = tl.load(seen_ptr + number * CHUNK * CHUNK + square_tile)
            else:
                seen = seen_by_queries(query, key, large, small, rows, scale)
        narrow = state.to(key.dtype)
        if HAS_STARTS:
            tl.store(starts_ptr + number * state_size + state_place, narrow, mask=state_mask)
        if HAS_VALUE:
            value = tl.load(
                value_ptr + value_tile, mask=inside[:, None] & has_column[None, :], other=0.0
            ).to(tl.float32)
        if CORRECTS:
            solved = tl.load(solved_ptr + number * CHUNK * CHUNK + square_tile)
            reads = tl.dot(key, narrow, input_precision="ieee") * growth[:, None]
            if HAS_VALUE:
                wanted = (value - reads) * gate[:, None]
            else:
                wanted = -reads * gate[:, None]
            change = tl.dot(solved, wanted.to(key.dtype), input_precision="ieee")
        else:
            change = value * gate[:, None]
        moved = (change * left[:, None]).to(key.dtype)
        change = change.to(key.dtype)
        state = tl.dot(tl.trans(key), moved, acc=state * whole, input_precision="ieee")
        if HAS_OUT:
            out = tl.dot(query, narrow, input_precision="ieee") * (growth * scale)[:, None]
            out = tl.dot(seen, change, acc=out, input_precision="ieee")
            tl.store(
                out_ptr + out_tile,
                out.to(out_ptr.dtype.element_ty),
                mask=inside[:, None] & has_column[None, :],
            )
        if HAS_TOTAL:
            total += last_large.to(tl.float64) + last_small.to(tl.float64)
        query_ptr += CHUNK * query_stride_t
        key_ptr += CHUNK * key_stride_t
        value_ptr += CHUNK * value_stride_t
        out_ptr += CHUNK * heads * values
        left_over -= CHUNK
    unit = sequence * heads + head
    if HAS_LAST:
        tl.store(last_ptr + unit * state_size + state_place, state, mask=state_mask)
    if HAS_TOTAL:
        tl.store(total_ptr + unit, tl.exp(total.to(tl.float32)), mask=block == 0)
