# SPDX-License-Identifier: Apache-2.0
"""Attention's forward Triton kernel, and the tiles that it shares with the gradient kernels.

A program owns one tile of queries (or keys) and loops over the visible tiles of keys (or queries).
Four bounds [low, full_low, full_high, high) describe them. Every pair of the tiles from full_low to
full_high is visible, so these tiles need no mask; the tiles from low to full_low and from full_high
to high are masked pair by pair.

A head dimension is not always a power of two, so rows are loaded as two blocks of FEATURES and TAIL
columns, both powers of two; TAIL may be 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LOG_2: tl.constexpr = tl.constexpr(0.6931471805599453)
#: Neutral elements of the maximum and of the minimum of document ids.
INT32_MIN, INT32_MAX = tl.constexpr(-(1 << 31)), tl.constexpr((1 << 31) - 1)


@triton.jit
def load_columns(
    base,
    start,
    limit,
    stride,
    features: tl.constexpr,
    BEGIN: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    I64: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load COLUMNS columns from BEGIN on; see `load_rows`."""
    row = tl.arange(0, BLOCK)
    feature = BEGIN + tl.arange(0, COLUMNS)
    if I64:
        offsets = row.to(tl.int64)[:, None] * stride
    else:
        offsets = row[:, None] * stride
    pointers = base + tl.cast(start, tl.int64) * stride + (offsets + feature[None, :])
    if MASKED:
        inside = (start + row < limit)[:, None] & (feature < features)[None, :]
        x = tl.load(pointers, mask=inside, other=0.0)
    elif features < BEGIN + COLUMNS:
        x = tl.load(pointers, mask=(feature < features)[None, :], other=0.0)
    else:
        x = tl.load(pointers)
    return x


@triton.jit
def load_rows(
    base,
    start,
    limit,
    stride,
    features: tl.constexpr,
    FEATURES: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
    I64: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load BLOCK rows of a matrix with dense rows, from row `start` on; 0 beyond `features`.

    Args:
        stride: elements between rows.
        FEATURES, TAIL: columns of the two blocks, powers of two; TAIL may be 0.
        I64: whether offsets inside the tile have 64 bits. They stay in registers during
            a loop over `start`, so 32 bits keep the key gradient from spilling.
        MASKED: whether rows from `limit` on are loaded as 0; without it no row may reach `limit`.

    Returns:
        [BLOCK, FEATURES] and [BLOCK, TAIL]; without a tail the first block twice.
    """
    x = load_columns(base, start, limit, stride, features, 0, FEATURES, BLOCK, I64, MASKED)
    tail = x
    if TAIL > 0:
        tail = load_columns(
            base, start, limit, stride, features, FEATURES, TAIL, BLOCK, I64, MASKED
        )
    return x, tail


@triton.jit
def store_rows(
    base, rows, limit, stride, x, features: tl.constexpr, FEATURES: tl.constexpr, TAIL: tl.constexpr
):
    """Store the two column blocks of rows, as `load_rows` returns them."""
    pointers = base + rows.to(tl.int64)[:, None] * stride
    inside = (rows < limit)[:, None]
    feature = tl.arange(0, FEATURES)[None, :]
    y = x[0].to(base.dtype.element_ty)
    tl.store(pointers + feature, y, mask=inside & (feature < features))
    if TAIL > 0:
        feature = FEATURES + tl.arange(0, TAIL)[None, :]
        y = x[1].to(base.dtype.element_ty)
        tl.store(pointers + feature, y, mask=inside & (feature < features))


@triton.jit
def zero_accumulators(
    BLOCK: tl.constexpr, FEATURES: tl.constexpr, TAIL: tl.constexpr, NEEDED: tl.constexpr
):
    """Return fp32 zeros [BLOCK, FEATURES] and [BLOCK, TAIL]; [1] for an unused block."""
    x = tl.zeros([BLOCK, FEATURES] if NEEDED else [1], dtype=tl.float32)
    tail = tl.zeros([BLOCK, TAIL] if NEEDED and TAIL > 0 else [1], dtype=tl.float32)
    return x, tail


@triton.jit
def scaled(acc, factor, TAIL: tl.constexpr):
    """Return both blocks of acc times a factor that broadcasts."""
    x = acc[0] * factor
    tail = acc[1]
    if TAIL > 0:
        tail = tail * factor
    return x, tail


@triton.jit
def dot_transposed(x, y, TAIL: tl.constexpr):
    """Return x y^T, fp32, of rows in two column blocks."""
    z = tl.dot(x[0], tl.trans(y[0]), input_precision="ieee")
    if TAIL > 0:
        z = tl.dot(x[1], tl.trans(y[1]), z, input_precision="ieee")
    return z


@triton.jit
def add_dot(acc, x, y, TAIL: tl.constexpr):
    """Return acc + x y for rows y in two column blocks; x is rounded to the dtype of y."""
    x = x.to(y[0].dtype)
    z = tl.dot(x, y[0], acc[0], input_precision="ieee")
    tail = acc[1]
    if TAIL > 0:
        tail = tl.dot(x, y[1], tail, input_precision="ieee")
    return z, tail


@triton.jit
def visible_pairs(
    positions,
    columns,
    query_documents,
    key_documents,
    keys,
    window,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
):
    """Return whether each (query position, key) pair is visible; all arguments broadcast."""
    # The first term is always true; it gives the mask the broadcast shape of both operands.
    visible = (positions > -(1 << 30)) & (columns < keys)
    if CAUSAL:
        visible = visible & (columns <= positions)
    if HAS_WINDOW:
        visible = visible & (positions - columns < window)
    if HAS_DOCUMENTS:
        visible = visible & (query_documents == key_documents)
    return visible


@triton.jit
def bounded(products, factor, SOFTCAP: tl.constexpr):
    """Return tanh(scale q k / SOFTCAP) from products q k and factor = scale log2(e)."""
    return 1.0 - 2.0 / (tl.exp2(products * (factor * (2.0 / SOFTCAP))) + 1.0)


@triton.jit
def capped(products, factor, SOFTCAP: tl.constexpr):
    """Return (x, f) whose product is the logits times log2(e): the products and the factor, or
    tanh(scale q k / SOFTCAP) and SOFTCAP log2(e)."""
    if SOFTCAP > 0.0:
        products = bounded(products, factor, SOFTCAP)
        factor = SOFTCAP * LOG2_E
    return products, factor


@triton.jit
def ordered_bounds(low, full_low, full_high, high):
    """Return low <= full_low <= full_high <= high; without full tiles, full_* both equal low."""
    full_high = tl.where(full_high > full_low, full_high, low)
    full_low = tl.maximum(tl.minimum(full_low, full_high), low)
    return low, full_low, full_high, tl.maximum(high, low)


@triton.jit
def key_bounds(
    begin,
    shift,
    keys,
    window,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Bound the keys visible to BLOCK_Q queries by causality and window; see the module."""
    low = 0
    high = keys
    full_low = 0
    full_high = keys // BLOCK_K * BLOCK_K
    if CAUSAL:
        high = tl.minimum(high, tl.maximum(begin + BLOCK_Q + shift, 0))
        visible_to_all = tl.maximum(begin + shift + 1, 0)
        full_high = tl.minimum(full_high, visible_to_all // BLOCK_K * BLOCK_K)
    if HAS_WINDOW:
        low = tl.maximum(begin + shift - window + 1, 0) // BLOCK_K * BLOCK_K
        full_low = tl.cdiv(tl.maximum(begin + BLOCK_Q + shift - window, 0), BLOCK_K) * BLOCK_K
    return ordered_bounds(low, full_low, full_high, high)


@triton.jit
def query_bounds(
    begin,
    shift,
    queries,
    window,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Bound the queries to which BLOCK_K keys are visible by causality and window."""
    low = 0
    high = queries
    full_low = 0
    full_high = queries // BLOCK_Q * BLOCK_Q
    if CAUSAL:
        low = tl.maximum(begin - shift, 0) // BLOCK_Q * BLOCK_Q
        full_low = tl.cdiv(tl.maximum(begin + BLOCK_K - 1 - shift, 0), BLOCK_Q) * BLOCK_Q
    if HAS_WINDOW:
        high = tl.minimum(high, tl.maximum(begin + BLOCK_K - 1 + window - shift, 0))
        attending_to_all = tl.maximum(begin + window - shift, 0)
        full_high = tl.minimum(full_high, attending_to_all // BLOCK_Q * BLOCK_Q)
    return ordered_bounds(low, full_low, full_high, high)


@triton.jit(do_not_specialize=["shift"])
def document_bounds_kernel(
    documents_ptr,
    other_documents_ptr,
    bounds_ptr,
    shift,
    queries,
    keys,
    batch,
    window,
    OF_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
):
    """Bound the visible tiles by causality, window and documents; store bounds [b, tiles, 4].

    Tiles are compared by their smallest and largest document id, so the bounds never exclude a
    pair of one document. If documents are contiguous, they exclude every tile without such a pair.

    Args:
        documents_ptr: [s_q, b], or [s_k, b] if OF_KEYS.
        other_documents_ptr: [s_k, b], or [s_q, b] if OF_KEYS.
    """
    if OF_KEYS:
        BLOCK: tl.constexpr = BLOCK_K
        OTHER_BLOCK: tl.constexpr = BLOCK_Q
        length, other_length = keys, queries
    else:
        BLOCK: tl.constexpr = BLOCK_Q
        OTHER_BLOCK: tl.constexpr = BLOCK_K
        length, other_length = queries, keys
    tiles = tl.cdiv(length, BLOCK)
    begin = tl.program_id(0) % tiles * BLOCK
    sample = tl.program_id(0) // tiles
    if OF_KEYS:
        low, full_low, full_high, high = query_bounds(
            begin, shift, queries, window, CAUSAL, HAS_WINDOW, BLOCK_Q, BLOCK_K
        )
    else:
        low, full_low, full_high, high = key_bounds(
            begin, shift, keys, window, CAUSAL, HAS_WINDOW, BLOCK_Q, BLOCK_K
        )
    row = begin + tl.arange(0, BLOCK)
    ids = tl.load(documents_ptr + row.to(tl.int64) * batch + sample, mask=row < length, other=0)
    min_id = tl.min(tl.where(row < length, ids, INT32_MAX), 0)
    max_id = tl.max(tl.where(row < length, ids, INT32_MIN), 0)
    visible_low = high
    visible_high = low
    same_low = high
    same_high = high // OTHER_BLOCK * OTHER_BLOCK + OTHER_BLOCK
    for start in range(low, high, TILES * OTHER_BLOCK):
        starts = start + tl.arange(0, TILES) * OTHER_BLOCK
        other_rows = starts[:, None] + tl.arange(0, OTHER_BLOCK)[None, :]
        inside = other_rows < tl.minimum(high, other_length)
        other_ids = tl.load(
            other_documents_ptr + other_rows.to(tl.int64) * batch + sample, mask=inside, other=0
        )
        other_min = tl.min(tl.where(inside, other_ids, INT32_MAX), 1)
        other_max = tl.max(tl.where(inside, other_ids, INT32_MIN), 1)
        overlap = (other_min <= max_id) & (other_max >= min_id)
        visible_low = tl.minimum(visible_low, tl.min(tl.where(overlap, starts, high), 0))
        visible_high = tl.maximum(
            visible_high, tl.max(tl.where(overlap, starts + OTHER_BLOCK, low), 0)
        )
        same_document = overlap & (min_id == max_id)
        same_document = same_document & (other_min == min_id) & (other_max == min_id)
        same_low = tl.minimum(same_low, tl.min(tl.where(same_document, starts, high), 0))
        after = (starts > same_low) & (starts < high) & (same_document == 0)
        same_high = tl.minimum(same_high, tl.min(tl.where(after, starts, same_high), 0))
    low, full_low, full_high, high = ordered_bounds(
        visible_low,
        tl.maximum(full_low, same_low),
        tl.minimum(full_high, same_high),
        tl.minimum(high, visible_high),
    )
    pointer = bounds_ptr + tl.program_id(0).to(tl.int64) * 4
    tl.store(pointer, low)
    tl.store(pointer + 1, full_low)
    tl.store(pointer + 2, full_high)
    tl.store(pointer + 3, high)


@triton.jit
def stored_bounds(bounds_ptr, tile, sample, tiles):
    """Load the bounds that `document_bounds_kernel` stored for one tile."""
    pointer = bounds_ptr + (sample * tiles + tile) * 4
    return tl.load(pointer), tl.load(pointer + 1), tl.load(pointer + 2), tl.load(pointer + 3)


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
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Update the online softmax (maximum, denominator, acc) of a query tile with one key tile.

    Logits and their maximum are in base 2: scale log2(e) q k.

    Args:
        maximum, denominator: [BLOCK_Q], the largest logit, and the sum of exp2(logit - maximum).
        acc: [BLOCK_Q, FEATURES] and [BLOCK_Q, TAIL], the sum of exp2(logit - maximum) v.
        documents_ptr: the keys' documents of this sample.
        factor: scale log2(e), not negative.
        SOFTCAP: bound of the logits before the mask; 0 for none.
        MASKED: whether some pairs of the tile may be invisible.
    """
    k = load_rows(k_base, start, keys, k_stride_s, features, FEATURES, TAIL, BLOCK_K, I64, MASKED)
    logits = dot_transposed(q, k, TAIL)
    logits, factor = capped(logits, factor, SOFTCAP)
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
    SOFTCAP: tl.constexpr,
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
            SOFTCAP,
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
            SOFTCAP,
            True,
        )
    empty = denominator == 0.0  # no visible key: output 0, lse -inf
    denominator = tl.where(empty, 1.0, denominator)
    lse = tl.where(empty, float("-inf"), (maximum + tl.log2(denominator)) * LOG_2)
    tl.store(lse_ptr + (sample * heads + head) * queries + rows, lse, mask=row_mask)
    out_base = out_ptr + (sample * heads + head) * features
    acc = scaled(acc, 1 / denominator[:, None], TAIL)
    store_rows(out_base, rows, queries, out_stride_s, acc, features, FEATURES, TAIL)
