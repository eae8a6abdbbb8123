# SPDX-License-Identifier: Apache-2.0
"""The forward Triton kernel of attention."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.ops.attention.tile_kernels import (
    LOG2_E,
    LOG_2,
    add_product,
    key_bounds,
    load_rows,
    products,
    scaled,
    store_rows,
    stored_bounds,
    visible_pairs,
    zero_sums,
)


@triton.jit
def add_keys(
    maximum,
    total,
    result,
    q,
    k_base,
    v_base,
    k_stride_s,
    v_stride_s,
    start,
    positions,
    query_documents,
    documents_ptr,
    factor,
    keys,
    window,
    batch,
    features: tl.constexpr,
    FEATURES: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return (maximum, total, result) of a tile of queries after one more tile of keys.

    Logits and maximum are those of exp2: scale log2(e) q k.

    Args:
        maximum, total: [BLOCK_Q], the largest logit, and the sum of exp2(logit - maximum).
        result: [BLOCK_Q, FEATURES] and [BLOCK_Q, REST], the sum of exp2(logit - maximum) v.
        documents_ptr: the keys' documents of this sample.
        factor: scale log2(e), not negative.
        MASKED: whether some of the pairs may not be visible.
    """
    k = load_rows(k_base, start, keys, k_stride_s, features, FEATURES, REST, BLOCK_K, WIDE, MASKED)
    logits = products(q, k, REST)
    if MASKED:
        columns = start + tl.arange(0, BLOCK_K)
        key_documents = 0
        if HAS_DOCUMENTS:
            place = documents_ptr + columns.to(tl.int64) * batch
            key_documents = tl.load(place, mask=columns < keys, other=0)[None, :]
        seen = visible_pairs(
            positions[:, None],
            columns[None, :],
            query_documents,
            key_documents,
            keys,
            window,
            CAUSAL,
            HAS_WINDOW,
            HAS_DOCUMENTS,
        )
        logits = tl.where(seen, logits * factor, float("-inf"))
        larger = tl.maximum(maximum, tl.max(logits, 1))
        # A row that saw no key so far has -inf: shift by 0 there, so that no inf - inf arises.
        offset = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(logits - offset[:, None])
    else:
        larger = tl.maximum(maximum, tl.max(logits, 1) * factor)
        offset = larger
        weights = tl.exp2(logits * factor - offset[:, None])
    decay = tl.exp2(maximum - offset)
    total = total * decay + tl.sum(weights, 1)
    v = load_rows(v_base, start, keys, v_stride_s, features, FEATURES, REST, BLOCK_K, WIDE, MASKED)
    result = add_product(scaled(result, decay[:, None], REST), weights, v, REST)
    return larger, total, result


@triton.jit(do_not_specialize=["shift"])
def attention_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    query_documents_ptr,
    documents_ptr,
    bounds_ptr,
    scale,
    shift,
    queries,
    keys,
    batch,
    heads,
    groups,
    q_stride_s,
    q_stride_b,
    q_stride_n,
    k_stride_s,
    k_stride_b,
    k_stride_g,
    v_stride_s,
    v_stride_b,
    v_stride_g,
    out_stride_s,
    window,
    HAS_SINKS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    features: tl.constexpr,
    FEATURES: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Attend BLOCK_Q queries of one head to all keys they see, in one pass over the keys.

    Programs of one head follow one another, for its keys to stay in the cache; the last queries,
    which see the most keys, go first.
    """
    tiles = tl.cdiv(queries, BLOCK_Q)
    tile = tiles - 1 - tl.program_id(0) % tiles
    sample = (tl.program_id(0) // tiles // heads).to(tl.int64)
    head = (tl.program_id(0) // tiles % heads).to(tl.int64)
    group = head // (heads // groups)
    first = tile * BLOCK_Q
    rows = first + tl.arange(0, BLOCK_Q)
    row_mask = rows < queries
    q_base = q_ptr + sample * q_stride_b + head * q_stride_n
    k_base = k_ptr + sample * k_stride_b + group * k_stride_g
    v_base = v_ptr + sample * v_stride_b + group * v_stride_g
    q = load_rows(q_base, first, queries, q_stride_s, features, FEATURES, REST, BLOCK_Q, WIDE, True)
    query_documents = 0
    key_documents_ptr = documents_ptr + sample
    if HAS_DOCUMENTS:
        place = query_documents_ptr + rows.to(tl.int64) * batch + sample
        query_documents = tl.load(place, mask=row_mask, other=0)[:, None]
        low, full_low, full_high, high = stored_bounds(bounds_ptr, tile, sample, tiles)
    else:
        low, full_low, full_high, high = key_bounds(
            first, shift, keys, window, CAUSAL, HAS_WINDOW, BLOCK_Q, BLOCK_K
        )
    maximum = tl.full([BLOCK_Q], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_Q], dtype=tl.float32)
    if HAS_SINKS:  # the sink is a key seen first, whose value is zero
        maximum = tl.zeros([BLOCK_Q], dtype=tl.float32)
        maximum += tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        total += 1.0
    result = zero_sums(BLOCK_Q, FEATURES, REST, True)
    factor = scale * LOG2_E
    for start in range(full_low, full_high, BLOCK_K):
        maximum, total, result = add_keys(
            maximum,
            total,
            result,
            q,
            k_base,
            v_base,
            k_stride_s,
            v_stride_s,
            start,
            rows + shift,
            query_documents,
            key_documents_ptr,
            factor,
            keys,
            window,
            batch,
            features,
            FEATURES,
            REST,
            BLOCK_K,
            CAUSAL,
            HAS_WINDOW,
            HAS_DOCUMENTS,
            WIDE,
            False,
        )
    for step in range(0, full_low - low + high - full_high, BLOCK_K):
        start = low + step
        start = tl.where(start < full_low, start, start - full_low + full_high)
        maximum, total, result = add_keys(
            maximum,
            total,
            result,
            q,
            k_base,
            v_base,
            k_stride_s,
            v_stride_s,
            start,
            rows + shift,
            query_documents,
            key_documents_ptr,
            factor,
            keys,
            window,
            batch,
            features,
            FEATURES,
            REST,
            BLOCK_K,
            CAUSAL,
            HAS_WINDOW,
            HAS_DOCUMENTS,
            WIDE,
            True,
        )
    empty = total == 0.0  # a row that saw no key: output 0, lse -inf
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), (maximum + tl.log2(total)) * LOG_2)
    tl.store(lse_ptr + (sample * heads + head) * queries + rows, lse, mask=row_mask)
    out_base = out_ptr + (sample * heads + head) * features
    result = scaled(result, 1 / total[:, None], REST)
    store_rows(out_base, rows, queries, out_stride_s, result, features, FEATURES, REST)
