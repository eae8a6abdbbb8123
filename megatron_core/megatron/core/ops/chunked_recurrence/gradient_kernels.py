# SPDX-License-Identifier: Apache-2.0
"""The gradients of what a recurrence reads, of all chunks at once.

The formulas, and their letters, are those of `chunked_recurrence`. Both states of a chunk are
known here, the one before it and the gradient of the one behind it, so no chunk waits for another.
A program takes a chunk and a group, and sums up the gradients of its query and key over the heads
that share them. Z and N are needed with rows of readers and with rows of writers; each comes from
a product of its own, since some Triton releases miscompile the product of a transposed accumulator.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.ops.chunked_recurrence.sweep_kernels import decays_between


@triton.jit
def decay_gradient(pairs_t, written, reads, order):
    """Return the gradient of decays [C] but for what the state before the chunk leaves behind it.

    Only what a decay acts on is added up, each term once: a difference of larger sums would leave
    their rounding, which is more than the gradient of a strong decay. Decay t acts on what tokens
    j < t wrote, where it is read from t on or left at the end; and on the first state, where it is
    read from t on.

    Args:
        pairs_t: [j, i], of i reading what j wrote; zero for i < j.
        written: [j], of what j wrote and is left at the end.
        reads: [i], of i reading the first state.
    """
    over = tl.cumsum(pairs_t, 1, reverse=True) + written[:, None]  # [j, t]
    return tl.sum(tl.where(order[:, None] < order[None, :], over, reads[:, None]), 0)


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
    heads,
    shared,
    keys,
    values,
    query_stride_t,
    query_stride_h,
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    strength_stride_t,
    strength_stride_h,
    decay_ptr,
    decay_stride_t,
    decay_stride_h,
    grad_ptr,
    grad_stride_t,
    grad_stride_h,
    starts_ptr,
    ends_ptr,
    x_ptr,
    grad_query_ptr,
    grad_key_ptr,
    grad_value_ptr,
    grad_decay_ptr,
    grad_strength_ptr,
    lowest_decay,
    CORRECTS: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Make the gradients of one chunk of one group and of its heads.

    The gradients of query, key [t, G, K], value [t, H, V], decay and strength [t, H] are written
    without gaps. VALUES is at least V, BLOCK_V columns of which are worked on at a time.
    """
    groups = heads // shared
    group = (tl.program_id(0) % groups).to(tl.int64)
    chunk = (tl.program_id(0) // groups).to(tl.int64)
    rows = tl.arange(0, CHUNK)
    feature = tl.arange(0, KEYS)
    is_key = feature < keys
    grad_query = tl.zeros([CHUNK, KEYS], dtype=tl.float32)
    grad_key = tl.zeros([CHUNK, KEYS], dtype=tl.float32)
    for index in range(shared):
        head = group * shared + index
        number = chunk * heads + head
        # Where tokens are is asked again for each head, and what follows from it made again: masks
        # and places that are kept from one head to the next fill registers.
        first = tl.load(first_ptr + chunk)
        token = first + rows
        order = first.to(tl.int32) + rows
        alive = token < tl.load(end_ptr + chunk)
        tile = alive[:, None] & is_key[None, :]
        query_place = query_ptr + group * query_stride_h + token[:, None] * query_stride_t
        key_place = key_ptr + group * key_stride_h + token[:, None] * key_stride_t
        query = tl.load(query_place + feature[None, :], mask=tile, other=0.0)
        key = tl.load(key_place + feature[None, :], mask=tile, other=0.0)
        large_place = sums_ptr + number * CHUNK
        small_place = large_place + chunks.to(tl.int64) * heads * CHUNK
        large, small = tl.load(large_place + rows), tl.load(small_place + rows)
        last, last_small = tl.load(large_place + CHUNK - 1), tl.load(small_place + CHUNK - 1)
        growth = tl.exp(large + small)
        left = tl.exp((last - large) + (last_small - small))
        gate_place = strength_ptr + token * strength_stride_t + head * strength_stride_h
        strength = tl.load(gate_place, mask=alive, other=0.0).to(tl.float32)
        if CORRECTS:
            solved_place = solved_ptr + number * CHUNK * CHUNK + rows[:, None] * CHUNK
            solved = tl.load(solved_place + rows[None, :])
        seen = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)  # dO changeᵀ
        seen_t = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
        errors = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)  # x changeᵀ
        errors_t = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)
        along_query = tl.zeros([CHUNK], dtype=tl.float32)
        along_key = tl.zeros([CHUNK], dtype=tl.float32)
        along_end = tl.zeros([CHUNK], dtype=tl.float32)
        grad_strength = tl.zeros([CHUNK], dtype=tl.float32)
        kept = tl.zeros([KEYS], dtype=tl.float32)
        for block in range(0, VALUES, BLOCK_V):
            column = block + tl.arange(0, BLOCK_V)
            along = alive[:, None] & (column < values)[None, :]
            in_state = is_key[:, None] & (column < values)[None, :]
            state_place = number * keys * values + feature.to(tl.int64)[:, None] * values
            state_place = state_place + column[None, :]
            start = tl.load(starts_ptr + state_place, mask=in_state, other=0.0)
            end = tl.load(ends_ptr + state_place, mask=in_state, other=0.0)
            kept += tl.sum(start.to(tl.float32) * end.to(tl.float32), 1)
            dense = (token[:, None] * heads + head) * values + column[None, :]
            x = tl.load(x_ptr + dense, mask=along, other=0.0)
            value_place = value_ptr + head * value_stride_h + token[:, None] * value_stride_t
            value = tl.load(value_place + column[None, :], mask=along, other=0.0).to(tl.float32)
            grad_place = grad_ptr + head * grad_stride_h + token[:, None] * grad_stride_t
            grad = tl.load(grad_place + column[None, :], mask=along, other=0.0)
            grad_strength += tl.sum(x.to(tl.float32) * value, 1)
            grad_value = x.to(tl.float32) * strength[:, None]
            tl.store(
                grad_value_ptr + dense, grad_value.to(grad_value_ptr.dtype.element_ty), mask=along
            )
            change = value
            if CORRECTS:
                change -= tl.dot(key, start, input_precision="ieee") * growth[:, None]
            change = (change * strength[:, None]).to(key.dtype)
            if CORRECTS:
                change = tl.dot(solved, change, input_precision="ieee").to(key.dtype)
            seen = tl.dot(grad, tl.trans(change), acc=seen, input_precision="ieee")
            seen_t = tl.dot(change, tl.trans(grad), acc=seen_t, input_precision="ieee")
            part = tl.dot(change, tl.trans(end), input_precision="ieee") * left[:, None]
            along_end += tl.sum(part * key.to(tl.float32), 1)
            grad_key += part
            part = tl.dot(grad, tl.trans(start), input_precision="ieee")
            part = part * (growth * scale)[:, None]
            along_query += tl.sum(part * query.to(tl.float32), 1)
            grad_query += part
            if CORRECTS:
                errors = tl.dot(x, tl.trans(change), acc=errors, input_precision="ieee")
                errors_t = tl.dot(change, tl.trans(x), acc=errors_t, input_precision="ieee")
                part = tl.dot(x, tl.trans(start), input_precision="ieee") * growth[:, None]
                along_key += tl.sum(part * key.to(tl.float32), 1)
                grad_key -= part * strength[:, None]
        behind = order[:, None] > order[None, :]
        falls = decays_between(
            large[:, None],
            large[None, :],
            small[:, None],
            small[None, :],
            order[:, None] >= order[None, :],
        )
        falls_t = decays_between(
            large[None, :],
            large[:, None],
            small[None, :],
            small[:, None],
            order[None, :] >= order[:, None],
        )
        seen = (seen * falls * scale).to(key.dtype)  # Z
        grad_query = tl.dot(seen, key, acc=grad_query, input_precision="ieee")
        seen_t = seen_t * falls_t * scale
        pairs_t = seen_t * tl.dot(key, tl.trans(query), input_precision="ieee")
        grad_key = tl.dot(seen_t.to(key.dtype), query, acc=grad_key, input_precision="ieee")
        if CORRECTS:
            products = tl.dot(key, tl.trans(key), input_precision="ieee")
            errors = tl.where(behind, errors * falls, 0.0)  # N
            grad_strength -= along_key + tl.sum(errors * products, 1)
            errors_t = tl.where(order[:, None] < order[None, :], errors_t * falls_t, 0.0)
            errors_t = errors_t * strength[None, :]
            pairs_t -= errors_t * products
            both = -(errors * strength[:, None] + errors_t).to(key.dtype)
            grad_key = tl.dot(both, key, acc=grad_key, input_precision="ieee")
        reads = along_query - strength * along_key
        grad_decay = decay_gradient(pairs_t, along_end, reads, order)
        grad_decay += tl.exp(last + last_small) * tl.sum(kept, 0)
        decay_place = decay_ptr + token * decay_stride_t + head * decay_stride_h
        decay = tl.load(decay_place, mask=alive, other=0.0)
        grad_decay = tl.where(decay > lowest_decay, grad_decay, 0.0)
        gate = token * heads + head
        kind = grad_decay_ptr.dtype.element_ty
        tl.store(grad_decay_ptr + gate, grad_decay.to(kind), mask=alive)
        kind = grad_strength_ptr.dtype.element_ty
        tl.store(grad_strength_ptr + gate, grad_strength.to(kind), mask=alive)
    token = tl.load(first_ptr + chunk) + rows
    tile = (token < tl.load(end_ptr + chunk))[:, None] & is_key[None, :]
    place = (token[:, None] * groups + group) * keys + feature[None, :]
    tl.store(grad_query_ptr + place, grad_query.to(grad_query_ptr.dtype.element_ty), mask=tile)
    tl.store(grad_key_ptr + place, grad_key.to(grad_key_ptr.dtype.element_ty), mask=tile)
