# SPDX-License-Identifier: Apache-2.0
"""The forward Triton kernel of attention."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.ops.attention.tile_kernels import (
    LOG2_E,
    LOG_2,
    add_dot,
    dot_transposed,
    key_bounds,
    load_rows,
    scaled,
    store_rows,
    stored_bounds,
    visible_pairs,
    zero_accumulators,
)


@triton.jit
def add_keys(
    maximum,
    denominator,
    acc,
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
    TAIL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    I64: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Update the online softmax (maximum, denominator, acc) of a query tile with one key tile.

    Logits and their maximum are in base 2: scale log2(e) q k.

    Args:
        maximum, denominator: [BLOCK_Q], the largest logit, and the sum of exp2(logit - maximum).
        acc: [BLOCK_Q, FEATURES] and [BLOCK_Q, TAIL], the sum of exp2(logit - maximum) v.
        documents_ptr: the keys' documents of this sample.
        factor: scale log2(e), not negative.
        MASKED: whether some pairs of the tile may be invisible.
    """
    k = load_rows(k_base, start, keys, k_stride_s, features, FEATURES, TAIL, BLOCK_K, I64, MASKED)
    logits = dot_transposed(q, k, TAIL)
    if MASKED:
        columns = start + tl.arange(0, BLOCK_K)
        key_documents = 0
        if HAS_DOCUMENTS:
            pointer = documents_ptr + columns.to(tl.int64) * batch
            key_documents = tl.load(pointer, mask=columns < keys, other=0)[None, :]
        visible = visible_pairs(
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
        logits = tl.where(visible, logits * factor, float("-inf"))
        larger = tl.maximum(maximum, tl.max(logits, 1))
        # A row without a visible key so far has maximum -inf: subtract 0, since -inf - -inf = NaN.
        offset = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(logits - offset[:, None])
    else:
        larger = tl.maximum(maximum, tl.max(logits, 1) * factor)
        offset = larger
        weights = tl.exp2(logits * factor - offset[:, None])
    decay = tl.exp2(maximum - offset)
    denominator = denominator * decay + tl.sum(weights, 1)
    v = load_rows(v_base, start, keys, v_stride_s, features, FEATURES, TAIL, BLOCK_K, I64, MASKED)
    acc = add_dot(scaled(acc, decay[:, None], TAIL), weights, v, TAIL)
    return larger, denominator, acc


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
    TAIL: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    I64: tl.constexpr,
):
    """Compute attention of BLOCK_Q queries of one head in one pass over their visible keys.

    Programs of one head are adjacent, so that its keys stay in the L2 cache. The last queries,
    which have the most visible keys, are launched first.
    """
    tiles = tl.cdiv(queries, BLOCK_Q)
    tile = tiles - 1 - tl.program_id(0) % tiles
    sample = (tl.program_id(0) // tiles // heads).to(tl.int64)
    head = (tl.program_id(0) // tiles % heads).to(tl.int64)
    group = head // (heads // groups)
    begin = tile * BLOCK_Q
    rows = begin + tl.arange(0, BLOCK_Q)
    row_mask = rows < queries
    q_base = q_ptr + sample * q_stride_b + head * q_stride_n
    k_base = k_ptr + sample * k_stride_b + group * k_stride_g
    v_base = v_ptr + sample * v_stride_b + group * v_stride_g
    q = load_rows(q_base, begin, queries, q_stride_s, features, FEATURES, TAIL, BLOCK_Q, I64, True)
    query_documents = 0
    key_documents_ptr = documents_ptr + sample
    if HAS_DOCUMENTS:
        pointer = query_documents_ptr + rows.to(tl.int64) * batch + sample
        query_documents = tl.load(pointer, mask=row_mask, other=0)[:, None]
        low, full_low, full_high, high = stored_bounds(bounds_ptr, tile, sample, tiles)
    else:
        low, full_low, full_high, high = key_bounds(
            begin, shift, keys, window, CAUSAL, HAS_WINDOW, BLOCK_Q, BLOCK_K
        )
    maximum = tl.full([BLOCK_Q], float("-inf"), dtype=tl.float32)
    denominator = tl.zeros([BLOCK_Q], dtype=tl.float32)
    if HAS_SINKS:  # the sink is an initial key whose value is zero
        maximum = tl.zeros([BLOCK_Q], dtype=tl.float32)
        maximum += tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        denominator += 1.0
    acc = zero_accumulators(BLOCK_Q, FEATURES, TAIL, True)
    factor = scale * LOG2_E
    for start in range(full_low, full_high, BLOCK_K):
        maximum, denominator, acc = add_keys(
            maximum,
            denominator,
            acc,
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
            TAIL,
            BLOCK_K,
            CAUSAL,
            HAS_WINDOW,
            HAS_DOCUMENTS,
            I64,
            False,
        )
    for step in range(0, full_low - low + high - full_high, BLOCK_K):
        start = low + step
        start = tl.where(start < full_low, start, start - full_low + full_high)
        maximum, denominator, acc = add_keys(
            maximum,
            denominator,
            acc,
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
            TAIL,
            BLOCK_K,
            CAUSAL,
            HAS_WINDOW,
            HAS_DOCUMENTS,
            I64,
            True,
        )
    empty = denominator == 0.0  # no visible key: output 0, lse -inf
    denominator = tl.where(empty, 1.0, denominator)
    lse = tl.where(empty, float("-inf"), (maximum + tl.log2(denominator)) * LOG_2)
    tl.store(lse_ptr + (sample * heads + head) * queries + rows, lse, mask=row_mask)
    out_base = out_ptr + (sample * heads + head) * features
    acc = scaled(acc, 1 / denominator[:, None], TAIL)
    store_rows(out_base, rows, queries, out_stride_s, acc, features, FEATURES, TAIL)
