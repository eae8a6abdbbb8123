# SPDX-License-Identifier: Apache-2.0
"""The gradients of what a recurrence reads, of all chunks at once.

The formulas, and their letters, are those of `chunked_recurrence`. Both states of a chunk are
known here, the one before it and the gradient of the one behind it, so no chunk waits for another.
A program takes a chunk and heads of a group, and sums up the gradients of the query and key that
they share.

Queries and keys make one matrix [2C, K], as do dO and x [2C, V]: what both read of states and of
tokens is differentiated in one product of 128 rows, which fill two warp groups, and Z and N [2C, C]
have the one form that all later products take. Without a correction keys read nothing, and their
half is left out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.ops.chunked_recurrence.sweep_kernels import decays_between, within


@triton.jit
def summed_halves(x, WIDTH: tl.constexpr, CORRECTS: tl.constexpr, CHUNK: tl.constexpr):
    """Return what belongs to queries plus what belongs to keys [C, WIDTH], of x [2C, WIDTH].

    Eight rows of the one follow eight of the other, so that a thread of a product has both. Where
    nothing is corrected there is nothing of keys.
    """
    if CORRECTS:
        return tl.reshape(tl.sum(tl.reshape(x, [CHUNK // 8, 2, 8, WIDTH]), 1), [CHUNK, WIDTH])
    else:
        return x


@triton.jit
def rows_of_pairs(CHUNK: tl.constexpr, CORRECTS: tl.constexpr):
    """Return the token of each row [2C] within the chunk, and whether it is of keys."""
    if CORRECTS:
        rows = tl.arange(0, 2 * CHUNK)
        return rows // 16 * 8 + rows % 8, rows // 8 % 2 == 1
    else:
        return tl.arange(0, CHUNK), tl.full([CHUNK], 0, tl.int1)


@triton.jit
def rows_of_both(query_ptr, key_ptr, is_key_row, column, mask):
    """Load [2C, n], rows of queries and of keys, from places of rows [2C]."""
    place = tl.where(is_key_row, key_ptr, query_ptr)[:, None] + column[None, :]
    return tl.load(place, mask=mask, other=0.0)


@triton.jit
def factors(strength_ptr, is_key_row, scale, mask):
    """Return what a row [2C] that was read is multiplied by: the scale, of keys minus strength."""
    strength = tl.load(strength_ptr, mask=mask, other=0.0).to(tl.float32)
    return tl.where(is_key_row, -strength, scale)


@triton.jit
def changes(
    value, state, key, growth, strength, solved_t, CORRECTS: tl.constexpr, PRECISION: tl.constexpr
):
    """Return what tokens change the state by, transposed [V, C]; `solved_t` is (T ∘ D)ᵀ."""
    found = tl.trans(value).to(tl.float32)
    if CORRECTS:
        returned = tl.dot(tl.trans(state), tl.trans(key), input_precision=PRECISION)
        found -= returned * growth[None, :]
    found = (found * strength[None, :]).to(key.dtype)
    if CORRECTS:
        found = tl.dot(found, solved_t, input_precision=PRECISION).to(key.dtype)
    return found


@triton.jit
def faded(large_ptr, small_ptr, both, is_key_row, order, CHUNK: tl.constexpr):
    """Return D [2C, C] for queries, and below its diagonal for keys, which read what was before."""
    row = tl.arange(0, CHUNK)
    return decays_between(
        tl.load(large_ptr + both)[:, None],
        tl.load(large_ptr + row)[None, :],
        tl.load(small_ptr + both)[:, None],
        tl.load(small_ptr + row)[None, :],
        (order + both - is_key_row.to(tl.int32))[:, None] >= (order + row)[None, :],
    )


@triton.jit
def left_behind(large_ptr, small_ptr, CHUNK: tl.constexpr):
    """Return how much of each token [C] is left behind a chunk, and of the state before it."""
    row = tl.arange(0, CHUNK)
    last, last_small = tl.load(large_ptr + CHUNK - 1), tl.load(small_ptr + CHUNK - 1)
    left = (last - tl.load(large_ptr + row)) + (last_small - tl.load(small_ptr + row))
    return tl.exp(left), tl.exp(last + last_small)


@triton.jit
def store_as(place, found, mask):
    """Store what was found in the dtype of its place."""
    tl.store(place, found.to(place.dtype.element_ty), mask=mask)


@triton.jit
def store_pair(
    grad_query_ptr,
    grad_key_ptr,
    grad_reads,
    grad_writes,
    first_ptr,
    end_ptr,
    unit,
    units: tl.constexpr,
    keys: tl.constexpr,
    CORRECTS: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Store the gradients of query and key [C, K] from grad_reads [2C, K], grad_writes [K, C]."""
    token = tl.load(first_ptr) + tl.arange(0, CHUNK)
    feature = tl.arange(0, KEYS)
    mask = (token < tl.load(end_ptr))[:, None] & within(feature, keys, KEYS)[None, :]
    place = (token[:, None] * units + unit) * keys + feature[None, :]
    grad_key = tl.trans(grad_writes)
    if CORRECTS:
        is_key_row = rows_of_pairs(CHUNK, CORRECTS)[1][:, None]
        read = tl.where(is_key_row, grad_reads, 0.0)
        grad_key += summed_halves(read, KEYS, CORRECTS, CHUNK)
        grad_reads = tl.where(is_key_row, 0.0, grad_reads)
    grad_query = summed_halves(grad_reads, KEYS, CORRECTS, CHUNK)
    store_as(grad_query_ptr + place, grad_query, mask)
    store_as(grad_key_ptr + place, grad_key, mask)


@triton.jit
def decay_gradient(pairs, written, reads, order):
    """Return the gradient of decays [C], but for what they let through from state to state.

    Only what a decay acts on is added up, each term once: a difference of larger sums would leave
    their rounding, which is more than the gradient of a strong decay. Decay t acts on what tokens
    j < t wrote, where it is read from t on or left at the end; and on the first state, where it is
    read from t on.

    Args:
        pairs: [i, j], of i reading what j wrote; zero for i < j.
        written: [j], of what j wrote and is left at the end.
        reads: [i], of i reading the first state.
        order: [C], rising.
    """
    over = tl.cumsum(pairs, 0, reverse=True) + written[None, :]  # [t, j]
    return tl.sum(tl.where(order[:, None] > order[None, :], over, reads[None, :]), 1)


@triton.jit(do_not_specialize=["chunks"])
def recurrence_gradients_kernel(
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
    grad_ptr,
    grad_stride_t: tl.constexpr,
    grad_stride_h: tl.constexpr,
    starts_ptr,
    ends_ptr,
    x_ptr,
    grad_query_ptr,
    grad_key_ptr,
    grad_value_ptr,
    grad_decay_ptr,
    grad_strength_ptr,
    CORRECTS: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Make the gradients of one chunk of HEADS heads of one group, a unit.

    Those of query and key are [t, units, K], of value [t, H, V], of decay and strength [t, H].
    ROWS is 2C, or C where nothing is corrected; VALUES at least V, worked on BLOCK_V at a time.
    """
    units: tl.constexpr = heads // HEADS
    unit = (tl.program_id(0) % units).to(tl.int64)
    chunk = (tl.program_id(0) // units).to(tl.int64)
    group = unit * HEADS // shared
    feature = tl.arange(0, KEYS)
    is_key = within(feature, keys, KEYS)
    grad_reads = tl.zeros([ROWS, KEYS], dtype=tl.float32)  # of queries; of keys that read
    grad_writes = tl.zeros([KEYS, CHUNK], dtype=tl.float32)  # of keys that write, transposed
    for index in tl.range(0, HEADS, disable_licm=True):
        head = unit * HEADS + index
        number = chunk * heads + head
        # Asked again for each head: masks and places that are kept would fill registers.
        first, end = tl.load(first_ptr + chunk), tl.load(end_ptr + chunk)
        row = tl.arange(0, CHUNK)
        token = first + row
        order = first.to(tl.int32) + row
        alive = token < end
        both, is_key_row = rows_of_pairs(CHUNK, CORRECTS)
        both_token = first + both
        both_alive = both_token < end
        query_place = query_ptr + group * query_stride_h + both_token * query_stride_t
        key_place = key_ptr + group * key_stride_h + both_token * key_stride_t
        key_tile = key_ptr + group * key_stride_h + token[:, None] * key_stride_t + feature[None, :]
        is_in_pair = both_alive[:, None] & is_key[None, :]
        is_in_key = alive[:, None] & is_key[None, :]
        key = tl.load(key_tile, mask=is_in_key, other=0.0)
        large_place = sums_ptr + number * CHUNK
        small_place = large_place + chunks.to(tl.int64) * heads * CHUNK
        growth = tl.exp(tl.load(large_place + row) + tl.load(small_place + row))
        gate_place = strength_ptr + head * strength_stride_h
        both_growth = tl.exp(tl.load(large_place + both) + tl.load(small_place + both))
        solved_t = key
        if CORRECTS:
            solved_place = solved_ptr + number * CHUNK * CHUNK + row[None, :] * CHUNK
            solved_t = tl.load(solved_place + row[:, None])
        inner = tl.zeros([ROWS, CHUNK], dtype=tl.float32)  # [dO ; x] changeᵀ
        along = tl.zeros([ROWS], dtype=tl.float32)
        along_end = tl.zeros([CHUNK], dtype=tl.float32)
        grad_strength = tl.zeros([CHUNK], dtype=tl.float32)
        kept = 0.0
        whole = 0.0
        for block in tl.range(0, VALUES, BLOCK_V, disable_licm=True):
            column = block + tl.arange(0, BLOCK_V)
            is_value = within(column, values, BLOCK_V)
            tile = alive[:, None] & is_value[None, :]
            in_state = is_key[:, None] & is_value[None, :]
            state_place = number * keys * values + feature[:, None] * values + column[None, :]
            state = tl.load(starts_ptr + state_place, mask=in_state, other=0.0)
            grad_state = tl.load(ends_ptr + state_place, mask=in_state, other=0.0)
            kept += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32))
            grad_place = grad_ptr + head * grad_stride_h + both_token * grad_stride_t
            x_place = x_ptr + (both_token * heads + head) * values
            both_tile = both_alive[:, None] & is_value[None, :]
            pulls = rows_of_both(grad_place, x_place, is_key_row, column, both_tile)
            dense = (token[:, None] * heads + head) * values + column[None, :]
            x = tl.load(x_ptr + dense, mask=tile, other=0.0).to(tl.float32)
            strength = tl.load(gate_place + token * strength_stride_t, alive, 0.0).to(tl.float32)
            value_place = value_ptr + head * value_stride_h + token[:, None] * value_stride_t
            value = tl.load(value_place + column[None, :], mask=tile, other=0.0)
            grad_strength += tl.sum(x * value.to(tl.float32), 1)
            store_as(grad_value_ptr + dense, x * strength[:, None], tile)
            change_t = changes(
                *(value, state, key, growth, strength, solved_t, CORRECTS, PRECISION)
            )
            inner = tl.dot(pulls, change_t, acc=inner, input_precision=PRECISION)
            pair = rows_of_both(query_place, key_place, is_key_row, feature, is_in_pair)
            part = tl.dot(pulls, tl.trans(state), input_precision=PRECISION) * both_growth[:, None]
            along += tl.sum(part * pair.to(tl.float32), 1)
            both_gate = gate_place + both_token * strength_stride_t
            factor = factors(both_gate, is_key_row, scale, both_alive)
            grad_reads += part * factor[:, None]
            left, whole = left_behind(large_place, small_place, CHUNK)
            key_t = tl.trans(tl.load(key_tile, mask=is_in_key, other=0.0)).to(tl.float32)
            part_t = tl.dot(grad_state, change_t, input_precision=PRECISION) * left[None, :]
            along_end += tl.sum(part_t * key_t, 0)
            grad_writes += part_t
        # Again, since it was not kept in registers. Then Z, N.
        pair = rows_of_both(query_place, key_place, is_key_row, feature, is_in_pair)
        inner *= faded(large_place, small_place, both, is_key_row, first.to(tl.int32), CHUNK)
        pairs = inner * tl.dot(pair, tl.trans(key), input_precision=PRECISION)
        if CORRECTS:
            lower = tl.where(is_key_row, along + tl.sum(pairs, 1), 0.0)
            grad_strength -= tl.reshape(summed_halves(lower[:, None], 1, CORRECTS, CHUNK), [CHUNK])
        both_gate = gate_place + both_token * strength_stride_t
        factor = factors(both_gate, is_key_row, scale, both_alive)
        reads = summed_halves((along * factor)[:, None], 1, CORRECTS, CHUNK)
        pairs = summed_halves(pairs * factor[:, None], CHUNK, CORRECTS, CHUNK)
        inner = (inner * factor[:, None]).to(key.dtype)
        grad_reads = tl.dot(inner, key, acc=grad_reads, input_precision=PRECISION)
        grad_writes = tl.dot(tl.trans(pair), inner, acc=grad_writes, input_precision=PRECISION)
        grad_decay = decay_gradient(pairs, along_end, tl.reshape(reads, [CHUNK]), order)
        grad_decay += whole * kept
        # Of a decay that nothing outlives every term is 0: each has its exponential in it.
        store_as(grad_decay_ptr + token * heads + head, grad_decay, alive)
        store_as(grad_strength_ptr + token * heads + head, grad_strength, alive)
    store_pair(
        *(grad_query_ptr, grad_key_ptr, grad_reads, grad_writes),
        *(first_ptr + chunk, end_ptr + chunk, unit, units, keys),
        *(CORRECTS, CHUNK, KEYS),
    )


@triton.jit
def sum_units_kernel(parts_ptr, sums_ptr, width, units, UNITS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum up units [rows, units, width] of one row, in fp32; UNITS is `units` at least."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    unit = tl.arange(0, UNITS)
    parts = tl.load(
        parts_ptr + (row * units + unit[:, None]) * width + column[None, :],
        mask=(unit < units)[:, None] & (column < width)[None, :],
        other=0.0,
    )
    found = tl.sum(parts.to(tl.float32), 0)
    store_as(sums_ptr + row * width + column, found, column < width)
