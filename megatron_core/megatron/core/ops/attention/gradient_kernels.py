# SPDX-License-Identifier: Apache-2.0
"""The backward Triton kernels of attention: gradients of queries, and of keys and values.

Both recompute logits tile by tile and accumulate in a fixed order, without atomic additions. Only
loaded operands are transposed, never an accumulator, because some Triton releases miscompile a
transposed accumulator on Hopper (`ops.backend_choice`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.ops.attention.kernels import (
    LOG2_E,
    add_dot,
    capped,
    dot_transposed,
    key_bounds,
    load_rows,
    query_bounds,
    scaled,
    store_rows,
    stored_bounds,
    visible_pairs,
    zero_accumulators,
)


@triton.jit
def load_statistics(lse_ptr, delta_ptr, rows, queries, MASKED: tl.constexpr):
    """Load the log-sum-exp and rowsum(g out) of rows."""
    if MASKED:
        lse = tl.load(lse_ptr + rows, mask=rows < queries, other=0.0)
        delta = tl.load(delta_ptr + rows, mask=rows < queries, other=0.0)
    else:
        lse = tl.load(lse_ptr + rows)
        delta = tl.load(delta_ptr + rows)
    return lse, delta


@triton.jit
def add_query_gradient(
    grad,
    q,
    grad_out,
    lse,
    delta,
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
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add one key tile's terms to the unscaled gradient of a query tile.

    Args:
        lse: log-sum-exp in base 2, lse log2(e).
        documents_ptr: the keys' documents of this sample.
        factor: scale log2(e).
        SOFTCAP: bound of the logits before the mask; 0 for none.
        MASKED: whether some pairs of the tile may be invisible.
    """
    k = load_rows(k_base, start, keys, k_stride_s, features, FEATURES, TAIL, BLOCK_K, I64, MASKED)
    v = load_rows(v_base, start, keys, v_stride_s, features, FEATURES, TAIL, BLOCK_K, I64, MASKED)
    logits = dot_transposed(q, k, TAIL)
    grad_weights = dot_transposed(grad_out, v, TAIL)
    logits, cap_factor = capped(logits, factor, SOFTCAP)
    weights = tl.exp2(logits * cap_factor - lse[:, None])
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
        weights = tl.where(visible, weights, 0.0)
    grad_logits = weights * (grad_weights - delta[:, None])
    if SOFTCAP > 0.0:
        grad_logits = grad_logits * (1.0 - logits * logits)
    return add_dot(grad, grad_logits, k, TAIL)


@triton.jit(do_not_specialize=["shift"])
def query_gradient_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    grad_q_ptr,
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
    grad_out_stride_s,
    window,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    features: tl.constexpr,
    FEATURES: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    I64: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Compute dq = scale ds k of BLOCK_Q queries of one head over their visible keys.

    The last queries, which have the most visible keys, are launched first.
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
    grad_out_base = grad_out_ptr + (sample * heads + head) * features
    q = load_rows(q_base, begin, queries, q_stride_s, features, FEATURES, TAIL, BLOCK_Q, I64, True)
    grad_out = load_rows(
        grad_out_base,
        begin,
        queries,
        grad_out_stride_s,
        features,
        FEATURES,
        TAIL,
        BLOCK_Q,
        I64,
        True,
    )
    statistics = (sample * heads + head) * queries
    lse, delta = load_statistics(lse_ptr + statistics, delta_ptr + statistics, rows, queries, True)
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
    grad = zero_accumulators(BLOCK_Q, FEATURES, TAIL, True)
    factor = scale * LOG2_E
    for start in range(full_low, full_high, BLOCK_K):
        grad = add_query_gradient(
            grad,
            q,
            grad_out,
            lse,
            delta,
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
            SOFTCAP,
            False,
        )
    for step in range(0, full_low - low + high - full_high, BLOCK_K):
        start = low + step
        start = tl.where(start < full_low, start, start - full_low + full_high)
        grad = add_query_gradient(
            grad,
            q,
            grad_out,
            lse,
            delta,
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
            SOFTCAP,
            True,
        )
    base = grad_q_ptr + (sample * heads + head) * features
    grad = scaled(grad, scale, TAIL)
    store_rows(base, rows, queries, grad_out_stride_s, grad, features, FEATURES, TAIL)


@triton.jit
def add_key_gradients(
    grad_k,
    grad_v,
    k,
    v,
    q_base,
    grad_out_base,
    q_stride_s,
    grad_out_stride_s,
    lse_ptr,
    delta_ptr,
    start,
    columns,
    key_documents,
    documents_ptr,
    factor,
    shift,
    queries,
    keys,
    window,
    batch,
    OF_KEYS: tl.constexpr,
    OF_VALUES: tl.constexpr,
    features: tl.constexpr,
    FEATURES: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    I64: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add one query tile's terms to the gradients of a tile of keys (unscaled) and values.

    Logits are computed as [keys, queries], so that no accumulator needs a transpose.

    Args:
        documents_ptr: the queries' documents of this sample.
        factor: scale log2(e).
        SOFTCAP: bound of the logits before the mask; 0 for none.
        MASKED: whether some pairs of the tile may be invisible.
    """
    rows = start + tl.arange(0, BLOCK_Q)
    q = load_rows(
        q_base, start, queries, q_stride_s, features, FEATURES, TAIL, BLOCK_Q, I64, MASKED
    )
    grad_out = load_rows(
        grad_out_base,
        start,
        queries,
        grad_out_stride_s,
        features,
        FEATURES,
        TAIL,
        BLOCK_Q,
        I64,
        MASKED,
    )
    lse, delta = load_statistics(lse_ptr, delta_ptr, rows, queries, MASKED)
    logits = dot_transposed(k, q, TAIL)
    logits, cap_factor = capped(logits, factor, SOFTCAP)
    weights = tl.exp2(logits * cap_factor - lse[None, :])
    if MASKED:
        query_documents = 0
        if HAS_DOCUMENTS:
            pointer = documents_ptr + rows.to(tl.int64) * batch
            query_documents = tl.load(pointer, mask=rows < queries, other=0)[None, :]
        visible = visible_pairs(
            (rows + shift)[None, :],
            columns[:, None],
            query_documents,
            key_documents,
            keys,
            window,
            CAUSAL,
            HAS_WINDOW,
            HAS_DOCUMENTS,
        )
        weights = tl.where(visible & (rows < queries)[None, :], weights, 0.0)
    if OF_VALUES:
        grad_v = add_dot(grad_v, weights, grad_out, TAIL)
    if OF_KEYS:
        grad_weights = dot_transposed(v, grad_out, TAIL)
        grad_logits = weights * (grad_weights - delta[None, :])
        if SOFTCAP > 0.0:
            grad_logits = grad_logits * (1.0 - logits * logits)
        grad_k = add_dot(grad_k, grad_logits, q, TAIL)
    return grad_k, grad_v


@triton.jit(do_not_specialize=["shift"])
def key_gradient_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    lse_ptr,
    delta_ptr,
    grad_k_ptr,
    grad_v_ptr,
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
    grad_out_stride_s,
    window,
    OF_KEYS: tl.constexpr,
    OF_VALUES: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    features: tl.constexpr,
    FEATURES: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    I64: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Compute dk, dv or both of BLOCK_K keys of one key head, over the query heads that share it.

    One program accumulates the whole group, so that no atomic addition is needed. The first keys,
    which are visible to the most queries, are launched first.
    """
    tiles = tl.cdiv(keys, BLOCK_K)
    tile = tl.program_id(0) % tiles
    sample = (tl.program_id(0) // tiles // groups).to(tl.int64)
    group = (tl.program_id(0) // tiles % groups).to(tl.int64)
    begin = tile * BLOCK_K
    columns = begin + tl.arange(0, BLOCK_K)
    k_base = k_ptr + sample * k_stride_b + group * k_stride_g
    k = load_rows(k_base, begin, keys, k_stride_s, features, FEATURES, TAIL, BLOCK_K, I64, True)
    v = k
    if OF_KEYS:
        v_base = v_ptr + sample * v_stride_b + group * v_stride_g
        v = load_rows(v_base, begin, keys, v_stride_s, features, FEATURES, TAIL, BLOCK_K, I64, True)
    grad_k = zero_accumulators(BLOCK_K, FEATURES, TAIL, OF_KEYS)
    grad_v = zero_accumulators(BLOCK_K, FEATURES, TAIL, OF_VALUES)
    key_documents = 0
    if HAS_DOCUMENTS:
        pointer = documents_ptr + columns.to(tl.int64) * batch + sample
        key_documents = tl.load(pointer, mask=columns < keys, other=0)[:, None]
        low, full_low, full_high, high = stored_bounds(bounds_ptr, tile, sample, tiles)
    else:
        low, full_low, full_high, high = query_bounds(
            begin, shift, queries, window, CAUSAL, HAS_WINDOW, BLOCK_Q, BLOCK_K
        )
    for index in range(heads // groups):
        head = group * (heads // groups) + index
        q_base = q_ptr + sample * q_stride_b + head * q_stride_n
        grad_out_base = grad_out_ptr + (sample * heads + head) * features
        statistics = (sample * heads + head) * queries
        for start in range(full_low, full_high, BLOCK_Q):
            grad_k, grad_v = add_key_gradients(
                grad_k,
                grad_v,
                k,
                v,
                q_base,
                grad_out_base,
                q_stride_s,
                grad_out_stride_s,
                lse_ptr + statistics,
                delta_ptr + statistics,
                start,
                columns,
                key_documents,
                query_documents_ptr + sample,
                scale * LOG2_E,
                shift,
                queries,
                keys,
                window,
                batch,
                OF_KEYS,
                OF_VALUES,
                features,
                FEATURES,
                TAIL,
                BLOCK_Q,
                CAUSAL,
                HAS_WINDOW,
                HAS_DOCUMENTS,
                I64,
                SOFTCAP,
                False,
            )
        for step in range(0, full_low - low + high - full_high, BLOCK_Q):
            start = low + step
            start = tl.where(start < full_low, start, start - full_low + full_high)
            grad_k, grad_v = add_key_gradients(
                grad_k,
                grad_v,
                k,
                v,
                q_base,
                grad_out_base,
                q_stride_s,
                grad_out_stride_s,
                lse_ptr + statistics,
                delta_ptr + statistics,
                start,
                columns,
                key_documents,
                query_documents_ptr + sample,
                scale * LOG2_E,
                shift,
                queries,
                keys,
                window,
                batch,
                OF_KEYS,
                OF_VALUES,
                features,
                FEATURES,
                TAIL,
                BLOCK_Q,
                CAUSAL,
                HAS_WINDOW,
                HAS_DOCUMENTS,
                I64,
                SOFTCAP,
                True,
            )
    base = (sample * groups + group) * features
    stride = tl.cast(batch, tl.int64) * groups * features
    if OF_KEYS:
        grad_k = scaled(grad_k, scale, TAIL)
        store_rows(grad_k_ptr + base, columns, keys, stride, grad_k, features, FEATURES, TAIL)
    if OF_VALUES:
        store_rows(grad_v_ptr + base, columns, keys, stride, grad_v, features, FEATURES, TAIL)
