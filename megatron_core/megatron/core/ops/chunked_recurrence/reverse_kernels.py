# SPDX-License-Identifier: Apache-2.0
"""The sweep of a recurrence from its last chunk to its first, with the gradient of the state.

The formulas, and their letters, are those of `chunked_recurrence`. Columns of a state have nothing
to do with each other here either, so a program takes BLOCK_V of them through all chunks of a
sequence, and keeps their gradient in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.ops.chunked_recurrence.sweep_kernels import chunks_of, decays_between, within


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
    grad_last_ptr,
    ends_ptr,
    x_ptr,
    grad_initial_ptr,
    CORRECTS: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_GRAD_LAST: tl.constexpr,
    STORES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Carry the gradient of BLOCK_V columns of one head's state from behind a sequence before it.

    Per chunk it stores the gradient dS of the state behind it, and x [t, H, V], that of what the
    tokens write (delta rule: before their strength).
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
        falls_t = decays_between(
            large[None, :],
            large[:, None],
            rest[None, :],
            rest[:, None],
            rows[None, :] >= rows[:, None],
        )
        if STORES:
            tl.store(
                ends_ptr + number * keys * values + state_place,
                total.to(ends_ptr.dtype.element_ty),
                mask=in_state,
            )
        # Now, so that no factor of it is kept in registers until it is read.
        pulled = (grad * (growth * scale)[:, None]).to(key.dtype)
        seen_t = tl.dot(key, tl.trans(query), input_precision=PRECISION) * falls_t * scale
        x = tl.dot(key, total.to(key.dtype), input_precision=PRECISION) * left[:, None]
        x = tl.dot(seen_t.to(key.dtype), grad, acc=x, input_precision=PRECISION)
        if CORRECTS:
            solved_place = solved_ptr + number * CHUNK * CHUNK + rows[None, :] * CHUNK
            solved_t = tl.load(solved_place + rows[:, None])
            x = tl.dot(solved_t, x.to(key.dtype), input_precision=PRECISION)
        if STORES:
            tl.store(x_ptr + x_tile, x.to(x_ptr.dtype.element_ty), mask=along)
        total = total * tl.exp(last + last_rest)
        total = tl.dot(tl.trans(query), pulled, acc=total, input_precision=PRECISION)
        if CORRECTS:
            returned = (x * -(growth * gate)[:, None]).to(key.dtype)
            total = tl.dot(tl.trans(key), returned, acc=total, input_precision=PRECISION)
        query_ptr -= CHUNK * query_stride_t
        key_ptr -= CHUNK * key_stride_t
        grad_ptr -= CHUNK * grad_stride_t
        x_ptr -= CHUNK * heads * values
        left_over = CHUNK
    tl.store(grad_initial_ptr + unit + state_place, total, mask=in_state)
