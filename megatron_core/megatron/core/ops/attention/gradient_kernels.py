# SPDX-License-Identifier: Apache-2.0
"""The backward Triton kernels of attention: gradients of queries, and of keys and values.

Both recompute logits tile by tile and sum in a fixed order, without atomic additions. Only loaded
operands are transposed, never an accumulator: some Triton releases miscompile that on Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron.core.ops.attention.tile_kernels import (
    LOG2_E,
    add_product,
    key_bounds,
    load_rows,
    products,
    query_bounds,
    scaled,
    store_rows,
    stored_bounds,
    visible_pairs,
    zero_sums,
)


@triton.jit
def load_statistics(lse_ptr, delta_ptr, rows, queries, MASKED: tl.constexpr):
    """Load log-sum-exps and rowsum(g out) of rows."""
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
    REST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return the gradient of a tile of queries, without its scale, after one more tile of keys.

    Args:
        lse: that of exp2.
        documents_ptr: the keys' documents of this sample.
        factor: scale log2(e).
        MASKED: whether some of the pairs may not be visible.
    """
    k = load_rows(k_base, start, keys, k_stride_s, features, FEATURES, REST, BLOCK_K, WIDE, MASKED)
    v = load_rows(v_base, start, keys, v_stride_s, features, FEATURES, REST, BLOCK_K, WIDE, MASKED)
    logits = products(q, k, REST)
    grad_weights = products(grad_out, v, REST)
    weights = tl.exp2(logits * factor - lse[:, None])
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
        weights = tl.where(seen, weights, 0.0)
    grad_logits = weights * (grad_weights - delta[:, None])
    return add_product(grad, grad_logits, k, REST)


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
    REST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Make dq of BLOCK_Q queries of one head: scale * ds k over the keys they see.

    The last queries, which see the most keys, go first.
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
    grad_out_base = grad_out_ptr + (sample * heads + head) * features
    q = load_rows(q_base, first, queries, q_stride_s, features, FEATURES, REST, BLOCK_Q, WIDE, True)
    grad_out = load_rows(
        grad_out_base,
        first,
        queries,
        grad_out_stride_s,
        features,
        FEATURES,
        REST,
        BLOCK_Q,
        WIDE,
        True,
    )
    statistics = (sample * heads + head) * queries
    lse, delta = load_statistics(lse_ptr + statistics, delta_ptr + statistics, rows, queries, True)
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
    grad = zero_sums(BLOCK_Q, FEATURES, REST, True)
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
            REST,
            BLOCK_K,
            CAUSAL,
            HAS_WINDOW,
            HAS_DOCUMENTS,
            WIDE,
            True,
        )
    base = grad_q_ptr + (sample * heads + head) * features
    grad = scaled(grad, scale, REST)
    store_rows(base, rows, queries, grad_out_stride_s, grad, features, FEATURES, REST)


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
    REST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return the gradients of a tile of keys (without its scale) and values after more queries.

    Logits are made transposed, [keys, queries], so that no accumulator is ever transposed.

    Args:
        documents_ptr: the queries' documents of this sample.
        factor: scale log2(e).
        MASKED: whether some of the pairs may not be visible.
    """
    rows = start + tl.arange(0, BLOCK_Q)
    q = load_rows(
        q_base, start, queries, q_stride_s, features, FEATURES, REST, BLOCK_Q, WIDE, MASKED
    )
    grad_out = load_rows(
        grad_out_base,
        start,
        queries,
        grad_out_stride_s,
        features,
        FEATURES,
        REST,
        BLOCK_Q,
        WIDE,
        MASKED,
    )
    lse, delta = load_statistics(lse_ptr, delta_ptr, rows, queries, MASKED)
    logits = products(k, q, REST)
    weights = tl.exp2(logits * factor - lse[None, :])
    if MASKED:
        query_documents = 0
        if HAS_DOCUMENTS:
            place = documents_ptr + rows.to(tl.int64) * batch
            query_documents = tl.load(place, mask=rows < queries, other=0)[None, :]
        seen = visible_pairs(
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
        weights = tl.where(seen & (rows < queries)[None, :], weights, 0.0)
    if OF_VALUES:
        grad_v = add_product(grad_v, weights, grad_out, REST)
    if OF_KEYS:
        grad_weights = products(v, grad_out, REST)
        grad_logits = weights * (grad_weights - delta[None, :])
        grad_k = add_product(grad_k, grad_logits, q, REST)
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
    REST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Make dk, dv or both of BLOCK_K keys of one key head, over all heads that share it.

    One program sums the whole group, so that no atomic addition is needed. The first keys, which
    most queries see, go first.
    """
    tiles = tl.cdiv(keys, BLOCK_K)
    tile = tl.program_id(0) % tiles
    sample = (tl.program_id(0) // tiles // groups).to(tl.int64)
    group = (tl.program_id(0) // tiles % groups).to(tl.int64)
    first = tile * BLOCK_K
    columns = first + tl.arange(0, BLOCK_K)
    k_base = k_ptr + sample * k_stride_b + group * k_stride_g
    k = load_rows(k_base, first, keys, k_stride_s, features, FEATURES, REST, BLOCK_K, WIDE, True)
    v = k
    if OF_KEYS:
        v_base = v_ptr + sample * v_stride_b + group * v_stride_g
        v = load_rows(
            v_base, first, keys, v_stride_s, features, FEATURES, REST, BLOCK_K, WIDE, True
        )
    grad_k = zero_sums(BLOCK_K, FEATURES, REST, OF_KEYS)
    grad_v = zero_sums(BLOCK_K, FEATURES, REST, OF_VALUES)
    key_documents = 0
    if HAS_DOCUMENTS:
        place = documents_ptr + columns.to(tl.int64) * batch + sample
        key_documents = tl.load(place, mask=columns < keys, other=0)[:, None]
        low, full_low, full_high, high = stored_bounds(bounds_ptr, tile, sample, tiles)
    else:
        low, full_low, full_high, high = query_bounds(
            first, shift, queries, window, CAUSAL, HAS_WINDOW, BLOCK_Q, BLOCK_K
        )
    factor = scale * LOG2_E
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
                factor,
                shift,
                queries,
                keys,
                window,
                batch,
                OF_KEYS,
                OF_VALUES,
                features,
                FEATURES,
                REST,
                BLOCK_Q,
                CAUSAL,
                HAS_WINDOW,
                HAS_DOCUMENTS,
                WIDE,
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
                factor,
                shift,
                queries,
                keys,
                window,
                batch,
                OF_KEYS,
                OF_VALUES,
                features,
                FEATURES,
                REST,
                BLOCK_Q,
                CAUSAL,
                HAS_WINDOW,
                HAS_DOCUMENTS,
                WIDE,
                True,
            )
    base = (sample * groups + group) * features
    stride = tl.cast(batch, tl.int64) * groups * features
    if OF_KEYS:
        grad_k = scaled(grad_k, scale, REST)
        store_rows(grad_k_ptr + base, columns, keys, stride, grad_k, features, FEATURES, REST)
    if OF_VALUES:
        store_rows(grad_v_ptr + base, columns, keys, stride, grad_v, features, FEATURES, REST)
