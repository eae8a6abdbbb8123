# SPDX-License-Identifier: Apache-2.0
"""The sweep of a recurrence from its last chunk to its first, with the gradient of the state.

The formulas, and their letters, are those of `chunked_recurrence`. Columns of a state have nothing
to do with each other here either, so a program takes BLOCK_V of them through all chunks of a
sequence, and keeps their gradient in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.ops.chunked_recurrence.sweep_kernels import decays_between, within


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
    begin = tl.load(begin_ptr + sequence)
    behind = tl.load(begin_ptr + sequence + 1)
    count = (behind - begin).to(tl.int32)
    for step in range(count):
        chunk = behind - 1 - step
        token = tl.load(first_ptr + chunk) + rows
        alive = token < tl.load(end_ptr + chunk)
        along = alive[:, None] & is_value[None, :]
        read = alive[:, None] & is_key[None, :]
        place = query_ptr + group * query_stride_h + token[:, None] * query_stride_t
        query = tl.load(place + feature[None, :], mask=read, other=0.0)
        place = key_ptr + group * key_stride_h + token[:, None] * key_stride_t
        key = tl.load(place + feature[None, :], mask=read, other=0.0)
        grad_place = grad_ptr + head * grad_stride_h + token[:, None] * grad_stride_t
        grad = tl.load(grad_place + column[None, :], mask=along, other=0.0).to(key.dtype)
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
        seen_t = tl.dot(key, tl.trans(query), input_precision=PRECISION) * falls_t * scale
        x = tl.dot(key, total.to(key.dtype), input_precision=PRECISION) * left[:, None]
        x = tl.dot(seen_t.to(key.dtype), grad, acc=x, input_precision=PRECISION)
        if CORRECTS:
            solved_place = solved_ptr + number * CHUNK * CHUNK + rows[None, :] * CHUNK
            solved_t = tl.load(solved_place + rows[:, None])
            x = tl.dot(solved_t, x.to(key.dtype), input_precision=PRECISION)
        if STORES:
            x_place = x_ptr + (token[:, None] * heads + head) * values + column[None, :]
            tl.store(x_place, x.to(x_ptr.dtype.element_ty), mask=along)
        total = total * tl.exp(last + last_rest)
        pulled = (grad * (growth * scale)[:, None]).to(key.dtype)
        total = tl.dot(tl.trans(query), pulled, acc=total, input_precision=PRECISION)
        if CORRECTS:
            gate_place = strength_ptr + token * strength_stride_t + head * strength_stride_h
            strength = tl.load(gate_place, mask=alive, other=0.0).to(tl.float32)
            returned = (x * -(growth * strength)[:, None]).to(key.dtype)
            total = tl.dot(tl.trans(key), returned, acc=total, input_precision=PRECISION)
    tl.store(grad_initial_ptr + unit + state_place, total, mask=in_state)
