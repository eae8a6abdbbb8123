# SPDX-License-Identifier: Apache-2.0
"""The gradients of what a recurrence reads, of all chunks at once.

The formulas, and their letters, are those of `chunked_recurrence`. Both states of a chunk are
known here, the one before it and the gradient of the one behind it, so no chunk waits for another.
A program takes a chunk and a group, and sums up the gradients of its query and key over the heads
that share them. These sums, and all products that go into them, lie transposed, [K, C]: so
what is multiplied from the left was loaded, never computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.ops.chunked_recurrence.sweep_kernels import decays_between


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
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Make the gradients of one chunk of one group and of its heads.

    The gradients of query, key [t, G, K], value [t, H, V], strength and decay [t, H] are written
    without gaps.
    """
    groups = heads // shared
    group = (tl.program_id(0) % groups).to(tl.int64)
    chunk = (tl.program_id(0) // groups).to(tl.int64)
    rows = tl.arange(0, CHUNK)
    feature = tl.arange(0, KEYS)
    is_key = feature < keys
    token = tl.load(first_ptr + chunk) + rows
    alive = token < tl.load(end_ptr + chunk)
    across = is_key[:, None] & alive[None, :]
    query_place = query_ptr + group * query_stride_h + token * query_stride_t
    query_t = tl.load(query_place[None, :] + feature[:, None], mask=across, other=0.0)
    key_place = key_ptr + group * key_stride_h + token * key_stride_t
    key_t = tl.load(key_place[None, :] + feature[:, None], mask=across, other=0.0)
    key = tl.load(
        key_place[:, None] + feature[None, :], mask=alive[:, None] & is_key[None, :], other=0.0
    )
    grad_query_t = tl.zeros([KEYS, CHUNK], dtype=tl.float32)
    grad_key_t = tl.zeros([KEYS, CHUNK], dtype=tl.float32)
    behind = rows[None, :] > rows[:, None]  # column i is behind row j
    upto = (rows[None, :] <= rows[:, None]).to(tl.float32)  # row i is not before column t
    for index in range(shared):
        head = group * shared + index
        number = chunk * heads + head
        sums_place = sums_ptr + number * CHUNK
        rest_place = sums_place + chunks.to(tl.int64) * heads * CHUNK
        large, rest = tl.load(sums_place + rows), tl.load(rest_place + rows)
        last, last_rest = tl.load(sums_place + CHUNK - 1), tl.load(rest_place + CHUNK - 1)
        growth = tl.exp(large + rest)
        left = tl.exp((last - large) + (last_rest - rest))
        gate_place = strength_ptr + token * strength_stride_t + head * strength_stride_h
        strength = tl.load(gate_place, mask=alive, other=0.0).to(tl.float32)
        if CORRECTS:
            falls = decays_between(
                large[:, None],
                large[None, :],
                rest[:, None],
                rest[None, :],
                rows[:, None] >= rows[None, :],
            )
            solved_place = solved_ptr + number * CHUNK * CHUNK + rows[:, None] * CHUNK
            solved = tl.load(solved_place + rows[None, :]).to(tl.float32)
            solved = (solved * falls).to(key.dtype)
        weights_t = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)  # change dOᵀ
        errors_t = tl.zeros([CHUNK, CHUNK], dtype=tl.float32)  # change xᵀ
        along_query = tl.zeros([CHUNK], dtype=tl.float32)
        along_key = tl.zeros([CHUNK], dtype=tl.float32)
        along_end = tl.zeros([CHUNK], dtype=tl.float32)
        grad_strength = tl.zeros([CHUNK], dtype=tl.float32)
        kept = tl.zeros([KEYS], dtype=tl.float32)
        for block in range(0, values, BLOCK_V):
            column = block + tl.arange(0, BLOCK_V)
            is_value = column < values
            along = alive[:, None] & is_value[None, :]
            in_state = is_key[:, None] & is_value[None, :]
            state_place = number * keys * values + feature.to(tl.int64)[:, None] * values
            state_place = state_place + column[None, :]
            dense = (token[:, None] * heads + head) * values + column[None, :]
            start = tl.load(starts_ptr + state_place, mask=in_state, other=0.0)
            end = tl.load(ends_ptr + state_place, mask=in_state, other=0.0)
            x = tl.load(x_ptr + dense, mask=along, other=0.0)
            value_place = value_ptr + head * value_stride_h + token[:, None] * value_stride_t
            value = tl.load(value_place + column[None, :], mask=along, other=0.0)
            grad_place = grad_ptr + head * grad_stride_h + token[:, None] * grad_stride_t
            grad = tl.load(grad_place + column[None, :], mask=along, other=0.0).to(key.dtype)
            kept += tl.sum(start.to(tl.float32) * end.to(tl.float32), 1)
            grad_strength += tl.sum(x.to(tl.float32) * value.to(tl.float32), 1)
            tl.store(
                grad_value_ptr + dense,
                (x.to(tl.float32) * strength[:, None]).to(grad_value_ptr.dtype.element_ty),
                mask=along,
            )
            change = value.to(tl.float32)
            if CORRECTS:
                change -= tl.dot(key, start, input_precision="ieee") * growth[:, None]
            change = (change * strength[:, None]).to(key.dtype)
            if CORRECTS:
                change = tl.dot(solved, change, input_precision="ieee").to(key.dtype)
            weights_t = tl.dot(change, tl.trans(grad), acc=weights_t, input_precision="ieee")
            part = tl.dot(start, tl.trans(grad), input_precision="ieee")
            part = part * (growth * scale)[None, :]
            along_query += tl.sum(part * query_t.to(tl.float32), 0)
            grad_query_t += part
            if CORRECTS:
                errors_t = tl.dot(change, tl.trans(x), acc=errors_t, input_precision="ieee")
                part = tl.dot(start, tl.trans(x), input_precision="ieee") * growth[None, :]
                along_key += tl.sum(part * key_t.to(tl.float32), 0)
                grad_key_t -= part * strength[None, :]
            part = tl.dot(end, tl.trans(change), input_precision="ieee") * left[None, :]
            along_end += tl.sum(part * key_t.to(tl.float32), 0)
            grad_key_t += part
        falls_t = decays_between(
            large[None, :],
            large[:, None],
            rest[None, :],
            rest[:, None],
            rows[None, :] >= rows[:, None],
        )
        weights_t = weights_t * falls_t * scale  # Zᵀ
        pairs_t = weights_t * tl.dot(key, query_t, input_precision="ieee")
        weights = weights_t.to(key.dtype)
        grad_query_t = tl.dot(key_t, weights, acc=grad_query_t, input_precision="ieee")
        grad_key_t = tl.dot(query_t, tl.trans(weights), acc=grad_key_t, input_precision="ieee")
        if CORRECTS:
            errors_t = tl.where(behind, errors_t * falls_t, 0.0)  # Nᵀ
            products = errors_t * tl.dot(key, key_t, input_precision="ieee")
            grad_strength -= along_key + tl.sum(products, 0)
            pairs_t -= products * strength[None, :]
            errors = (errors_t * -strength[None, :]).to(key.dtype)
            grad_key_t = tl.dot(key_t, errors, acc=grad_key_t, input_precision="ieee")
            grad_key_t = tl.dot(key_t, tl.trans(errors), acc=grad_key_t, input_precision="ieee")
        # Of what a decay acts on only, each term once: row j, behind which a decay t is, of all
        # that is read from t on or left at the end; and of t and later ones, what they read of the
        # state. A difference of larger sums would leave their rounding.
        over_t = tl.dot(pairs_t, upto, input_precision=PRECISION) + along_end[:, None]
        reads = along_query - strength * along_key
        grad_decay = tl.sum(tl.where(behind, over_t, reads[:, None]), 0)
        grad_decay += tl.exp(last + last_rest) * tl.sum(kept, 0)
        decay_place = decay_ptr + token * decay_stride_t + head * decay_stride_h
        decay = tl.load(decay_place, mask=alive, other=0.0)
        grad_decay = tl.where(decay > lowest_decay, grad_decay, 0.0)
        gate = token * heads + head
        tl.store(grad_decay_ptr + gate, grad_decay.to(grad_decay_ptr.dtype.element_ty), mask=alive)
        tl.store(
            grad_strength_ptr + gate,
            grad_strength.to(grad_strength_ptr.dtype.element_ty),
            mask=alive,
        )
    place = (token[None, :] * groups + group) * keys + feature[:, None]
    tl.store(grad_query_ptr + place, grad_query_t.to(grad_query_ptr.dtype.element_ty), mask=across)
    tl.store(grad_key_ptr + place, grad_key_t.to(grad_key_ptr.dtype.element_ty), mask=across)
