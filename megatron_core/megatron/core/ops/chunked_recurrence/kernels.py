# SPDX-License-Identifier: Apache-2.0
"""Linear recurrences in Triton, chunk by chunk: forward sweep, reverse sweep, gradients.

The gradients of what a recurrence reads, of all chunks at once.

The formulas, and their letters, are those of `chunked_recurrence`. Both states of a chunk are
known here, the one before it and the gradient of the one behind it, so no chunk waits for another.
A program takes a chunk and heads of a group, and sums up the gradients of the query and key that
they share.

Queries and keys make one matrix [2C, K], as do dO and x [2C, V]: what both read of states and of
tokens is differentiated in one product of 128 rows, which fill two warp groups, and Z and N [2C, C]
have the one form that all later products take. Without a correction keys read nothing, and their
half is left out.

Tiles: where the chunks of sequences begin and end, as the kernels of recurrences read it.

The forward sweep of a recurrence: states through chunks in fp32, outputs on the way.

The sweep of a recurrence from its last chunk to its first, with the gradient of the state.

The formulas, and their letters, are those of `chunked_recurrence`. Columns of a state have nothing
to do with each other here either, so a program takes BLOCK_V of them through all chunks of a
sequence, and keeps their gradient in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from megatron.core.ops.sequences import Sequences


@dataclass(frozen=True, eq=False)
class Tiles:
    """Chunks of C tokens that never cross a sequence, numbered sequence after sequence.

    An empty sequence has no chunk.

    Args:
        size: C.
        count: n, of all sequences.
        sequence_count: N.
        tokens: t.
        first: int64 [n] on the device, the first token of each chunk.
        end: int64 [n], the token behind its last.
        begin: int64 [N + 1], the first chunk of each sequence, and n.
    """

    size: int
    count: int
    sequence_count: int
    tokens: int
    first: torch.Tensor
    end: torch.Tensor
    begin: torch.Tensor

    @classmethod
    def of(cls, sequences: Sequences, size: int) -> Tiles:
        """Return the tiles of `size` tokens, made once; the host does not wait.

        Raises:
            ValueError: an empty chunk.
        """
        if size < 1:
            raise ValueError(f"chunks of {size} tokens: use at least 1")
        return sequences.cached(("tiles", size), lambda: cls._made(sequences, size))

    @classmethod
    def _made(cls, sequences: Sequences, size: int) -> Tiles:
        bounds = np.asarray(sequences.bounds, dtype=np.int64)
        counts = -(-np.diff(bounds) // size)  # chunks of each sequence
        begin = np.concatenate([[0], np.cumsum(counts)])
        number = np.arange(begin[-1]) - np.repeat(begin[:-1], counts)  # within its sequence
        first = np.repeat(bounds[:-1], counts) + number * size
        end = np.minimum(first + size, np.repeat(bounds[1:], counts))
        return cls(
            size=size,
            count=int(begin[-1]),
            sequence_count=sequences.count,
            tokens=sequences.tokens,
            first=sequences.to_device(first),
            end=sequences.to_device(end),
            begin=sequences.to_device(begin),
        )


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
def seen_by_queries(query, key, large, small, rows, scale, PRECISION: tl.constexpr):
    """Return scale (Q Kᵀ) ∘ D [C, C] in the dtype of keys."""
    falls = decays_between(
        large[:, None],
        large[None, :],
        small[:, None],
        small[None, :],
        rows[:, None] >= rows[None, :],
    )
    seen = tl.dot(query, tl.trans(key), input_precision=PRECISION) * falls
    return (seen * scale).to(key.dtype)


@triton.jit(do_not_specialize=["chunks"])
def seen_kernel(
    query_ptr,
    key_ptr,
    sums_ptr,
    seen_ptr,
    first_ptr,
    end_ptr,
    scale,
    chunks,
    heads: tl.constexpr,
    shared: tl.constexpr,
    keys: tl.constexpr,
    query_stride_t: tl.constexpr,
    query_stride_h: tl.constexpr,
    key_stride_t: tl.constexpr,
    key_stride_h: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Store scale (Q Kᵀ) ∘ D of one chunk and head, off the path from chunk to chunk."""
    chunk = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    group = head // shared
    rows = tl.arange(0, CHUNK)
    feature = tl.arange(0, KEYS)
    start = tl.load(first_ptr + chunk)
    inside = rows < (tl.load(end_ptr + chunk) - start).to(tl.int32)
    tile = inside[:, None] & within(feature, keys, KEYS)[None, :]
    query_ptr += start * query_stride_t + group * query_stride_h
    key_ptr += start * key_stride_t + group * key_stride_h
    query = tl.load(
        query_ptr + rows[:, None] * query_stride_t + feature[None, :], mask=tile, other=0.0
    )
    key = tl.load(key_ptr + rows[:, None] * key_stride_t + feature[None, :], mask=tile, other=0.0)
    number = chunk * heads + head
    large = tl.load(sums_ptr + number * CHUNK + rows)
    small = tl.load(sums_ptr + (chunks.to(tl.int64) * heads + number) * CHUNK + rows)
    square = number * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :]
    seen = seen_by_queries(query, key, large, small, rows, scale, PRECISION)
    tl.store(seen_ptr + square, seen)


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
    PRECISION: tl.constexpr,
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
        narrow = state.to(key.dtype)
        if HAS_STARTS:
            tl.store(starts_ptr + number * state_size + state_place, narrow, mask=state_mask)
        if HAS_VALUE:
            value = tl.load(
                value_ptr + value_tile, mask=inside[:, None] & has_column[None, :], other=0.0
            ).to(tl.float32)
        if CORRECTS:
            solved = tl.load(solved_ptr + number * CHUNK * CHUNK + square_tile)
            reads = tl.dot(key, narrow, input_precision=PRECISION) * growth[:, None]
            if HAS_VALUE:
                wanted = (value - reads) * gate[:, None]
            else:
                wanted = -reads * gate[:, None]
            change = tl.dot(solved, wanted.to(key.dtype), input_precision=PRECISION)
        else:
            change = value * gate[:, None]
        moved = (change * left[:, None]).to(key.dtype)
        change = change.to(key.dtype)
        state = tl.dot(tl.trans(key), moved, acc=state * whole, input_precision=PRECISION)
        if HAS_OUT:
            query = tl.load(
                query_ptr + query_tile, mask=inside[:, None] & has_feature[None, :], other=0.0
            )
            if HAS_SEEN:
                seen = tl.load(seen_ptr + number * CHUNK * CHUNK + square_tile)
            else:
                seen = seen_by_queries(query, key, large, small, rows, scale, PRECISION)
            out = tl.dot(query, narrow, input_precision=PRECISION) * (growth * scale)[:, None]
            out = tl.dot(seen, change, acc=out, input_precision=PRECISION)
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


@triton.jit(do_not_specialize=["chunks"])
def reverse_sweep_kernel(
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
    seen_ptr,
    grad_last_ptr,
    ends_ptr,
    x_ptr,
    grad_initial_ptr,
    CORRECTS: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    HAS_GRAD_LAST: tl.constexpr,
    STORES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Carry the gradient of BLOCK_V columns of one head's state from behind a sequence before it.

    Per chunk it stores the gradient dS of the state behind it, and x [t, H, V], that of what the
    tokens write (delta rule: before their strength). HAS_SEEN: as in the forward sweep.
    """
    blocks = tl.cdiv(values, BLOCK_V)
    block = tl.program_id(0) % blocks
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    sequence = (tl.program_id(0) // blocks // heads).to(tl.int64)
    group = head // shared
    rows = tl.arange(0, CHUNK)
    feature = tl.arange(0, KEYS)
    column = block * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key = within(feature, keys, KEYS)
    is_value = within(column, values, BLOCK_V)
    in_state = is_key[:, None] & is_value[None, :]
    state_place = feature.to(tl.int64)[:, None] * values + column[None, :]
    # Of one head of one sequence; 64 bits wide, and also where a size of 1 is compiled in.
    unit = (sequence * heads + head) * keys * values
    total = tl.zeros([KEYS, BLOCK_V], dtype=tl.float32)
    if HAS_GRAD_LAST:
        total += tl.load(grad_last_ptr + unit + state_place, mask=in_state, other=0.0)
    begin, count, start, tokens = chunks_of(sequence, first_ptr, end_ptr, begin_ptr)
    # Places walk down from the last chunk: nothing that is loaded says where to load from.
    start += (count - 1) * CHUNK
    left_over = tokens - (count - 1) * CHUNK
    query_tile = rows[:, None] * query_stride_t + feature[None, :]
    key_tile = rows[:, None] * key_stride_t + feature[None, :]
    grad_tile = rows[:, None] * grad_stride_t + column[None, :]
    x_tile = rows[:, None] * (heads * values) + column[None, :]
    query_ptr += start * query_stride_t + group * query_stride_h
    key_ptr += start * key_stride_t + group * key_stride_h
    grad_ptr += start * grad_stride_t + head * grad_stride_h
    x_ptr += (start * heads + head) * values
    if CORRECTS:
        strength_ptr += start * strength_stride_t + head * strength_stride_h
        has_strength = (rows < left_over) & (count > 0)
        strength = tl.load(strength_ptr + rows * strength_stride_t, mask=has_strength, other=0.0)
    for step in range(count):
        chunk = begin + count - 1 - step
        alive = rows < left_over
        along = alive[:, None] & is_value[None, :]
        read = alive[:, None] & is_key[None, :]
        query = tl.load(query_ptr + query_tile, mask=read, other=0.0)
        key = tl.load(key_ptr + key_tile, mask=read, other=0.0)
        grad = tl.load(grad_ptr + grad_tile, mask=along, other=0.0).to(key.dtype)
        if CORRECTS:
            gate = strength.to(tl.float32)
            # Of the chunk before: nothing else would ask for it before it is waited for.
            strength_ptr -= CHUNK * strength_stride_t
            has_strength = (rows < CHUNK) & (step + 1 < count)
            strength = tl.load(
                strength_ptr + rows * strength_stride_t, mask=has_strength, other=0.0
            )
        number = chunk * heads + head  # of this head's part of the chunk
        sums_place = sums_ptr + number * CHUNK
        rest_place = sums_place + chunks.to(tl.int64) * heads * CHUNK
        large, rest = tl.load(sums_place + rows), tl.load(rest_place + rows)
        last, last_rest = tl.load(sums_place + CHUNK - 1), tl.load(rest_place + CHUNK - 1)
        growth = tl.exp(large + rest)
        left = tl.exp((last - large) + (last_rest - rest))
        if STORES:
            tl.store(
                ends_ptr + number * keys * values + state_place,
                total.to(ends_ptr.dtype.element_ty),
                mask=in_state,
            )
        # Now, so that no factor of it is kept in registers until it is read.
        pulled = (grad * (growth * scale)[:, None]).to(key.dtype)
        transposed = number * CHUNK * CHUNK + rows[None, :] * CHUNK + rows[:, None]
        if HAS_SEEN:
            seen_t = tl.load(seen_ptr + transposed)
        else:
            falls_t = decays_between(
                large[None, :],
                large[:, None],
                rest[None, :],
                rest[:, None],
                rows[None, :] >= rows[:, None],
            )
            seen_t = tl.dot(key, tl.trans(query), input_precision=PRECISION) * falls_t * scale
        x = tl.dot(key, total.to(key.dtype), input_precision=PRECISION) * left[:, None]
        x = tl.dot(seen_t.to(key.dtype), grad, acc=x, input_precision=PRECISION)
        if CORRECTS:
            solved_t = tl.load(solved_ptr + transposed)
            x = tl.dot(solved_t, x.to(key.dtype), input_precision=PRECISION)
        if STORES:
            tl.store(x_ptr + x_tile, x.to(x_ptr.dtype.element_ty), mask=along)
        # A sum of its own: Triton up to 3.7.1 reads `total` too early on Blackwell if two products
        # of a step are added to it (Triton issue 10821).
        change = tl.dot(tl.trans(query), pulled, input_precision=PRECISION)
        if CORRECTS:
            returned = (x * -(growth * gate)[:, None]).to(key.dtype)
            change = tl.dot(tl.trans(key), returned, acc=change, input_precision=PRECISION)
        total = total * tl.exp(last + last_rest) + change
        query_ptr -= CHUNK * query_stride_t
        key_ptr -= CHUNK * key_stride_t
        grad_ptr -= CHUNK * grad_stride_t
        x_ptr -= CHUNK * heads * values
        left_over = CHUNK
    tl.store(grad_initial_ptr + unit + state_place, total, mask=in_state)


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
    value_t, state, key, growth, strength, solved_t, CORRECTS: tl.constexpr, PRECISION: tl.constexpr
):
    """Return what tokens change the state by, transposed [V, C]; `solved_t` is (T ∘ D)ᵀ."""
    found = value_t.to(tl.float32)
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
    earlier,
    units: tl.constexpr,
    keys: tl.constexpr,
    CORRECTS: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Store the gradients of query and key [C, K] from grad_reads [2C, K], grad_writes [K, C].

    With a correction they are added to those of `earlier` heads, which this program has stored.
    """
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
    if CORRECTS:
        tl.debug_barrier()  # other threads may have stored what is added to
        stored = mask & (earlier > 0)
        grad_query += tl.load(grad_query_ptr + place, mask=stored, other=0.0).to(tl.float32)
        grad_key += tl.load(grad_key_ptr + place, mask=stored, other=0.0).to(tl.float32)
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
        if CORRECTS:  # kept from head to head they would not fit into registers
            grad_reads = tl.zeros([ROWS, KEYS], dtype=tl.float32)
            grad_writes = tl.zeros([KEYS, CHUNK], dtype=tl.float32)
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
        both_gate = gate_place + both_token * strength_stride_t
        solved_t = key
        if CORRECTS:
            solved_place = solved_ptr + number * CHUNK * CHUNK + row[None, :] * CHUNK
            solved_t = tl.load(solved_place + row[:, None])
        inner = tl.zeros([ROWS, CHUNK], dtype=tl.float32)  # [dO ; x] changeᵀ
        along = tl.zeros([ROWS], dtype=tl.float32)
        along_end = tl.zeros([CHUNK], dtype=tl.float32)
        grad_strength = tl.zeros([CHUNK], dtype=tl.float32)
        kept, whole = 0.0, 0.0
        for block in tl.range(0, VALUES, BLOCK_V, disable_licm=True):
            column = block + tl.arange(0, BLOCK_V)
            is_value = within(column, values, BLOCK_V)
            in_state = is_key[:, None] & is_value[None, :]
            state_place = number * keys * values + feature[:, None] * values + column[None, :]
            state = tl.load(starts_ptr + state_place, mask=in_state, other=0.0)
            grad_state = tl.load(ends_ptr + state_place, mask=in_state, other=0.0)
            kept += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32))
            grad_place = grad_ptr + head * grad_stride_h + both_token * grad_stride_t
            x_place = x_ptr + (both_token * heads + head) * values
            both_tile = both_alive[:, None] & is_value[None, :]
            pulls = rows_of_both(grad_place, x_place, is_key_row, column, both_tile)
            # Transposed where they lie: a product must not wait for accumulators that are.
            tile_t = is_value[:, None] & alive[None, :]
            dense_t = column[:, None] + (token[None, :] * heads + head) * values
            x_t = tl.load(x_ptr + dense_t, mask=tile_t, other=0.0).to(tl.float32)
            strength = tl.load(gate_place + token * strength_stride_t, alive, 0.0).to(tl.float32)
            value_place = value_ptr + head * value_stride_h + token[None, :] * value_stride_t
            value_t = tl.load(value_place + column[:, None], mask=tile_t, other=0.0)
            grad_strength += tl.sum(x_t * value_t.to(tl.float32), 0)
            store_as(grad_value_ptr + dense_t, x_t * strength[None, :], tile_t)
            change_t = changes(value_t, state, key, growth, strength, solved_t, CORRECTS, PRECISION)
            inner = tl.dot(pulls, change_t, acc=inner, input_precision=PRECISION)
            left, whole = left_behind(large_place, small_place, CHUNK)
            key_t = tl.trans(tl.load(key_tile, mask=is_in_key, other=0.0)).to(tl.float32)
            part_t = tl.dot(grad_state, change_t, input_precision=PRECISION) * left[None, :]
            along_end += tl.sum(part_t * key_t, 0)
            grad_writes += part_t
            pair = rows_of_both(query_place, key_place, is_key_row, feature, is_in_pair)
            part = tl.dot(pulls, tl.trans(state), input_precision=PRECISION)
            part *= tl.exp(tl.load(large_place + both) + tl.load(small_place + both))[:, None]
            along += tl.sum(part * pair.to(tl.float32), 1)
            factor = factors(both_gate, is_key_row, scale, both_alive)
            grad_reads += part * factor[:, None]
        # Again, since it was not kept in registers. Then Z, N.
        pair = rows_of_both(query_place, key_place, is_key_row, feature, is_in_pair)
        inner *= faded(large_place, small_place, both, is_key_row, first.to(tl.int32), CHUNK)
        pairs = inner * tl.dot(pair, tl.trans(key), input_precision=PRECISION)
        if CORRECTS:
            lower = tl.where(is_key_row, along + tl.sum(pairs, 1), 0.0)
            grad_strength -= tl.reshape(summed_halves(lower[:, None], 1, CORRECTS, CHUNK), [CHUNK])
        factor = factors(both_gate, is_key_row, scale, both_alive)
        reads = summed_halves((along * factor)[:, None], 1, CORRECTS, CHUNK)
        pairs = summed_halves(pairs * factor[:, None], CHUNK, CORRECTS, CHUNK)
        inner = (inner * factor[:, None]).to(key.dtype)
        grad_reads = tl.dot(inner, key, acc=grad_reads, input_precision=PRECISION)
        grad_writes = tl.dot(tl.trans(pair), inner, acc=grad_writes, input_precision=PRECISION)
        grad_decay = decay_gradient(pairs, along_end, tl.reshape(reads, [CHUNK]), order)
        # Of a decay that nothing outlives every term is 0: each has its exponential in it.
        store_as(grad_decay_ptr + token * heads + head, grad_decay + whole * kept, alive)
        store_as(grad_strength_ptr + token * heads + head, grad_strength, alive)
        if CORRECTS:
            store_pair(
                *(grad_query_ptr, grad_key_ptr, grad_reads, grad_writes),
                *(first_ptr + chunk, end_ptr + chunk, unit, index, units, keys),
                *(CORRECTS, CHUNK, KEYS),
            )
    if not CORRECTS:
        store_pair(
            *(grad_query_ptr, grad_key_ptr, grad_reads, grad_writes),
            *(first_ptr + chunk, end_ptr + chunk, unit, 0, units, keys),
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
