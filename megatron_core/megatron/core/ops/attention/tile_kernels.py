# SPDX-License-Identifier: Apache-2.0
"""Tiles of attention's Triton kernels: loads, and which tiles of pairs are visible.

A program holds one tile of queries (or keys) and walks over the tiles of keys (or queries) that it
sees, as four bounds [low, full_low, full_high, high) say: every pair of the tiles from full_low to
full_high is visible, so they need no mask; tiles from low to full_low and from full_high to high
are masked pair by pair.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LOG_2: tl.constexpr = tl.constexpr(0.6931471805599453)
#: Of documents.
LEAST, MOST = tl.constexpr(-(1 << 31)), tl.constexpr((1 << 31) - 1)


@triton.jit
def load_columns(
    base,
    first,
    limit,
    stride,
    features: tl.constexpr,
    BEGIN: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load COLUMNS columns from BEGIN on; see `load_rows`."""
    row = tl.arange(0, BLOCK)
    feature = BEGIN + tl.arange(0, COLUMNS)
    if WIDE:
        offsets = row.to(tl.int64)[:, None] * stride
    else:
        offsets = row[:, None] * stride
    places = base + tl.cast(first, tl.int64) * stride + (offsets + feature[None, :])
    if MASKED:
        inside = (first + row < limit)[:, None] & (feature < features)[None, :]
        x = tl.load(places, mask=inside, other=0.0)
    elif features < BEGIN + COLUMNS:
        x = tl.load(places, mask=(feature < features)[None, :], other=0.0)
    else:
        x = tl.load(places)
    return x


@triton.jit
def load_rows(
    base,
    first,
    limit,
    stride,
    features: tl.constexpr,
    FEATURES: tl.constexpr,
    REST: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load BLOCK rows of a matrix with dense rows, from row `first` on; 0 beyond `features`.

    Args:
        stride: between rows.
        FEATURES, REST: columns of the result's two parts, powers of two; REST may be 0.
        WIDE: whether offsets inside the tile take 64 bits. They stay in registers all along a loop
            over `first`, so 32 bits keep the key gradient from spilling.
        MASKED: whether rows from `limit` on are 0; they must not be reached elsewhere.

    Returns:
        [BLOCK, FEATURES] and [BLOCK, REST], the first one twice without a rest.
    """
    x = load_columns(base, first, limit, stride, features, 0, FEATURES, BLOCK, WIDE, MASKED)
    rest = x
    if REST > 0:
        rest = load_columns(
            base, first, limit, stride, features, FEATURES, REST, BLOCK, WIDE, MASKED
        )
    return x, rest


@triton.jit
def store_rows(
    base, rows, limit, stride, x, features: tl.constexpr, FEATURES: tl.constexpr, REST: tl.constexpr
):
    """Store the two parts of rows as `load_rows` returns them."""
    places = base + rows.to(tl.int64)[:, None] * stride
    inside = (rows < limit)[:, None]
    feature = tl.arange(0, FEATURES)[None, :]
    y = x[0].to(base.dtype.element_ty)
    tl.store(places + feature, y, mask=inside & (feature < features))
    if REST > 0:
        feature = FEATURES + tl.arange(0, REST)[None, :]
        y = x[1].to(base.dtype.element_ty)
        tl.store(places + feature, y, mask=inside & (feature < features))


@triton.jit
def zero_sums(
    BLOCK: tl.constexpr, FEATURES: tl.constexpr, REST: tl.constexpr, SUMMED: tl.constexpr
):
    """Return fp32 zeros [BLOCK, FEATURES] and [BLOCK, REST]; a number instead of what has none."""
    x = tl.zeros([BLOCK, FEATURES] if SUMMED else [1], dtype=tl.float32)
    rest = tl.zeros([BLOCK, REST] if SUMMED and REST > 0 else [1], dtype=tl.float32)
    return x, rest


@triton.jit
def scaled(sums, factor, REST: tl.constexpr):
    """Return the parts of sums times a factor that broadcasts."""
    x = sums[0] * factor
    rest = sums[1]
    if REST > 0:
        rest = rest * factor
    return x, rest


@triton.jit
def products(x, y, REST: tl.constexpr):
    """Return x y^T, fp32, of rows in parts."""
    z = tl.dot(x[0], tl.trans(y[0]), input_precision="ieee")
    if REST > 0:
        z = tl.dot(x[1], tl.trans(y[1]), z, input_precision="ieee")
    return z


@triton.jit
def add_product(sums, x, y, REST: tl.constexpr):
    """Return sums + x y of rows y in parts; x is rounded to their type."""
    x = x.to(y[0].dtype)
    z = tl.dot(x, y[0], sums[0], input_precision="ieee")
    rest = sums[1]
    if REST > 0:
        rest = tl.dot(x, y[1], rest, input_precision="ieee")
    return z, rest


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
    """Say which (position, column) pairs see each other; all arguments broadcast."""
    # The first term is true; it gives the result the broadcast shape of both.
    visible = (positions > -(1 << 30)) & (columns < keys)
    if CAUSAL:
        visible = visible & (columns <= positions)
    if HAS_WINDOW:
        visible = visible & (positions - columns < window)
    if HAS_DOCUMENTS:
        visible = visible & (query_documents == key_documents)
    return visible


@triton.jit
def ordered(low, full_low, full_high, high):
    """Return low <= full_low <= full_high <= high; without full tiles, both of theirs are low."""
    full_high = tl.where(full_high > full_low, full_high, low)
    full_low = tl.maximum(tl.minimum(full_low, full_high), low)
    return low, full_low, full_high, tl.maximum(high, low)


@triton.jit
def key_bounds(
    first,
    shift,
    keys,
    window,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Bound the keys that BLOCK_Q queries see by order and window; see the module."""
    low = 0
    high = keys
    full_low = 0
    full_high = keys // BLOCK_K * BLOCK_K
    if CAUSAL:
        high = tl.minimum(high, tl.maximum(first + BLOCK_Q + shift, 0))
        seen_by_all = tl.maximum(first + shift + 1, 0)
        full_high = tl.minimum(full_high, seen_by_all // BLOCK_K * BLOCK_K)
    if HAS_WINDOW:
        low = tl.maximum(first + shift - window + 1, 0) // BLOCK_K * BLOCK_K
        full_low = tl.cdiv(tl.maximum(first + BLOCK_Q + shift - window, 0), BLOCK_K) * BLOCK_K
    return ordered(low, full_low, full_high, high)


@triton.jit
def query_bounds(
    first,
    shift,
    queries,
    window,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Bound the queries that see BLOCK_K keys by order and window; see the module."""
    low = 0
    high = queries
    full_low = 0
    full_high = queries // BLOCK_Q * BLOCK_Q
    if CAUSAL:
        low = tl.maximum(first - shift, 0) // BLOCK_Q * BLOCK_Q
        full_low = tl.cdiv(tl.maximum(first + BLOCK_K - 1 - shift, 0), BLOCK_Q) * BLOCK_Q
    if HAS_WINDOW:
        high = tl.minimum(high, tl.maximum(first + BLOCK_K - 1 + window - shift, 0))
        seeing_all = tl.maximum(first + window - shift, 0)
        full_high = tl.minimum(full_high, seeing_all // BLOCK_Q * BLOCK_Q)
    return ordered(low, full_low, full_high, high)


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
    """Bound the tiles that one tile sees by order, window and documents, into [b, tiles, 4].

    Tiles are compared by their least and their greatest document, so no pair of one document is
    ever left out; where documents lie one after the other, no tile without such a pair is left.

    Args:
        documents_ptr: [s_q, b], or [s_k, b] if OF_KEYS.
        other_documents_ptr: [s_k, b], or [s_q, b] if OF_KEYS.
    """
    if OF_KEYS:
        BLOCK: tl.constexpr = BLOCK_K
        OTHER: tl.constexpr = BLOCK_Q
        length, other_length = keys, queries
    else:
        BLOCK: tl.constexpr = BLOCK_Q
        OTHER: tl.constexpr = BLOCK_K
        length, other_length = queries, keys
    tiles = tl.cdiv(length, BLOCK)
    first = tl.program_id(0) % tiles * BLOCK
    sample = tl.program_id(0) // tiles
    if OF_KEYS:
        low, full_low, full_high, high = query_bounds(
            first, shift, queries, window, CAUSAL, HAS_WINDOW, BLOCK_Q, BLOCK_K
        )
    else:
        low, full_low, full_high, high = key_bounds(
            first, shift, keys, window, CAUSAL, HAS_WINDOW, BLOCK_Q, BLOCK_K
        )
    row = first + tl.arange(0, BLOCK)
    own = tl.load(documents_ptr + row.to(tl.int64) * batch + sample, mask=row < length, other=0)
    least = tl.min(tl.where(row < length, own, MOST), 0)
    greatest = tl.max(tl.where(row < length, own, LEAST), 0)
    seen_low = high
    seen_high = low
    same_low = high
    same_high = high // OTHER * OTHER + OTHER
    for start in range(low, high, TILES * OTHER):
        starts = start + tl.arange(0, TILES) * OTHER
        places = starts[:, None] + tl.arange(0, OTHER)[None, :]
        inside = places < tl.minimum(high, other_length)
        ids = tl.load(
            other_documents_ptr + places.to(tl.int64) * batch + sample, mask=inside, other=0
        )
        other_least = tl.min(tl.where(inside, ids, MOST), 1)
        other_greatest = tl.max(tl.where(inside, ids, LEAST), 1)
        overlap = (other_least <= greatest) & (other_greatest >= least)
        seen_low = tl.minimum(seen_low, tl.min(tl.where(overlap, starts, high), 0))
        seen_high = tl.maximum(seen_high, tl.max(tl.where(overlap, starts + OTHER, low), 0))
        same = overlap & (least == greatest)
        same = same & (other_least == least) & (other_greatest == least)
        same_low = tl.minimum(same_low, tl.min(tl.where(same, starts, high), 0))
        after = (starts > same_low) & (starts < high) & (same == 0)
        same_high = tl.minimum(same_high, tl.min(tl.where(after, starts, same_high), 0))
    low, full_low, full_high, high = ordered(
        seen_low,
        tl.maximum(full_low, same_low),
        tl.minimum(full_high, same_high),
        tl.minimum(high, seen_high),
    )
    place = bounds_ptr + tl.program_id(0).to(tl.int64) * 4
    tl.store(place, low)
    tl.store(place + 1, full_low)
    tl.store(place + 2, full_high)
    tl.store(place + 3, high)


@triton.jit
def stored_bounds(bounds_ptr, tile, sample, tiles):
    """Load what `document_bounds_kernel` stored for one tile."""
    place = bounds_ptr + (sample * tiles + tile) * 4
    return tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)
