# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of paged attention: attend to pages, merge pieces, write to pages.

A program takes one tile: some new tokens of one row times the heads of one group, which share keys.
So the keys of a decode step are read once for all heads of their group. Exponentials are of base 2;
the log-sum-exp that leaves is natural.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def row_of_tile(tile, bounds_ptr, rows, QUERIES: tl.constexpr):
    """Find the row whose queries a tile holds, where they begin, and which of them is its first.

    Row i has its tiles from bounds[i] // QUERIES + i on, which is always enough; with one query a
    tile from bounds[i] on, which is exact. The padding behind the last row has its tiles as if it
    were one more row.
    """
    row = -1
    for first in range(0, rows + 1, 128):
        index = first + tl.arange(0, 128)
        bound = tl.load(bounds_ptr + index, mask=index <= rows, other=0)
        if QUERIES > 1:
            bound = bound // QUERIES + index
        row += tl.sum(((index <= rows) & (bound <= tile)).to(tl.int32), 0)
    begin = tl.load(bounds_ptr + row)
    offset = tile - begin
    if QUERIES > 1:
        offset = (tile - (begin // QUERIES + row)) * QUERIES
    return row, begin, offset


@triton.jit
def pages_of(table_ptr, start, low, high, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Look up the pages of the places start .. start + BLOCK - 1, one number or several.

    Nothing is read of pages that have no place in [low, high).
    """
    if (
        PAGE >= BLOCK
    ):  # the tile lies in one page, and holds a place inside if it begins before high
        page = tl.load(table_ptr + start // PAGE, mask=start < high, other=0)
    else:
        first = start + tl.arange(0, BLOCK // PAGE) * PAGE
        inside = (first + PAGE > low) & (first < high)
        page = tl.load(table_ptr + first // PAGE, mask=inside, other=0)
    return page


@triton.jit
def attend_to_tile(
    q,
    page,
    maximum,
    total,
    result,
    start,
    low,
    high,
    places,
    table_ptr,
    k_ptr,
    v_ptr,
    k_stride_b,
    k_stride_s,
    v_stride_b,
    v_stride_s,
    features,
    scale,
    window,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    FEATURES: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take the keys at places start .. start + BLOCK - 1 of a row into a running softmax.

    Only places in [low, high) are read. Without MASKED every query sees the whole tile. `page` is
    what `pages_of` said of it; the pages of the next tile are returned first: looked up a tile
    ahead, they do not keep the compiler from loading keys several tiles ahead.
    """
    feature = tl.arange(0, FEATURES)
    columns = start + tl.arange(0, BLOCK)
    inside = (columns >= low) & (columns < high)
    if PAGE < BLOCK:  # one number a place
        page = tl.broadcast_to(page[:, None], [BLOCK // PAGE, PAGE])
        page = tl.reshape(page, [BLOCK])
    page = page.to(tl.int64)
    slots = (columns % PAGE).to(tl.int64)
    k_rows = k_ptr + (page * k_stride_b + slots * k_stride_s)
    v_rows = v_ptr + (page * v_stride_b + slots * v_stride_s)
    following = pages_of(table_ptr, start + BLOCK, low, high, PAGE, BLOCK)
    across = (feature < features)[:, None]
    along = (feature < features)[None, :]
    if MASKED:
        across = across & inside[None, :]
        along = along & inside[:, None]
    kt = tl.load(k_rows[None, :] + feature[:, None], mask=across, other=0.0)
    logits = tl.dot(q, kt, input_precision="ieee") * scale
    if MASKED:
        seen = (columns[None, :] <= places[:, None]) & inside[None, :]
        if HAS_WINDOW:
            seen = seen & (places[:, None] - columns[None, :] < window)
        logits = tl.where(seen, logits, float("-inf"))
    larger = tl.maximum(maximum, tl.max(logits, 1))
    offset = larger
    if MASKED:  # a row that saw no key so far has -inf: shift by 0, so that no inf - inf arises
        offset = tl.where(larger == float("-inf"), 0.0, larger)
    weights = tl.exp2(logits - offset[:, None])
    decay = tl.exp2(maximum - offset)
    v = tl.load(v_rows[:, None] + feature[None, :], mask=along, other=0.0)
    result = result * decay[:, None]
    result += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return following, larger, total * decay + tl.sum(weights, 1), result


@triton.jit(do_not_specialize=["tokens", "rows", "tiles", "splits", "window", "table_stride"])
def paged_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    bounds_ptr,
    contexts_ptr,
    scale,
    tokens,
    rows,
    tiles,
    splits,
    shortest,
    heads,
    features,
    window,
    table_stride,
    q_stride_t,
    q_stride_n,
    k_stride_b,
    k_stride_s,
    k_stride_g,
    v_stride_b,
    v_stride_s,
    v_stride_g,
    HAS_SINKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    RATIO: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    FEATURES: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attend QUERIES new tokens of one row, HEADS heads of one group, to a piece of the context.

    A tile has ROWS >= QUERIES * HEADS rows, query by query. With SPLIT, out and lse are fp32 of
    pieces, [splits, t, n, d] and [splits, t, n]; the out of an empty piece is not written. No
    piece is shorter than `shortest` tiles of keys: short rows have fewer.
    """
    tile = tiles - 1 - tl.program_id(0) % tiles  # late tiles see most keys: they go first
    split = tl.program_id(0) // tiles % splits
    rest = tl.program_id(0) // tiles // splits
    part = rest % ((RATIO + HEADS - 1) // HEADS)  # which heads of the group
    group = (rest // ((RATIO + HEADS - 1) // HEADS)).to(tl.int64)
    row, begin, offset = row_of_tile(tile, bounds_ptr, rows, QUERIES)
    end = tl.load(bounds_ptr + row + 1, mask=row < rows, other=tokens)
    context = tl.load(contexts_ptr + row, mask=row < rows, other=0)
    member = tl.arange(0, ROWS)
    queries = offset + member // HEADS
    within = part * HEADS + member % HEADS  # the head's number in its group
    valid = (member < QUERIES * HEADS) & (within < RATIO) & (begin + queries < end)
    places = context - (end - begin) + queries
    feature = tl.arange(0, FEATURES)
    mask = valid[:, None] & (feature < features)[None, :]
    wide = (begin + queries).to(tl.int64)
    head = group * RATIO + within
    q_rows = q_ptr + wide * q_stride_t + head * q_stride_n
    q = tl.load(q_rows[:, None] + feature[None, :], mask=mask, other=0.0)
    maximum = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    if HAS_SINKS:  # the sink is a key of the first piece, seen first, whose value is zero
        has_sink = valid & (split == 0) & (context > 0)
        sink = tl.load(sinks_ptr + head, mask=has_sink, other=float("-inf")).to(tl.float32)
        maximum = sink * LOG2_E
        total += tl.where(has_sink, 1.0, 0.0)
    # The keys that the tile sees, and of these, in whole tiles of keys, the piece of this program.
    least = context - (end - begin) + offset  # the place of the first query
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(least - window + 1, 0)
    high = tl.where(begin + offset < end, tl.minimum(context, least + QUERIES), 0)
    start = low // BLOCK * BLOCK
    piece = tl.maximum(tl.cdiv(tl.maximum(high - start, 0), BLOCK * splits), shortest) * BLOCK
    start = start + split * piece
    stop = tl.minimum(start + piece, high)
    table_row = table_ptr + row.to(tl.int64) * table_stride
    k_group = k_ptr + group * k_stride_g
    v_group = v_ptr + group * v_stride_g
    result = tl.zeros([ROWS, FEATURES], dtype=tl.float32)
    page = pages_of(table_row, start, low, high, PAGE, BLOCK)
    if QUERIES > 1 and not HAS_WINDOW:  # most tiles of keys lie before every query of the tile
        whole = tl.minimum(stop, tl.maximum(least + 1, 0) // BLOCK * BLOCK)
        for place in range(start, whole, BLOCK):
            page, maximum, total, result = attend_to_tile(
                q,
                page,
                maximum,
                total,
                result,
                place,
                low,
                high,
                places,
                table_row,
                k_group,
                v_group,
                k_stride_b,
                k_stride_s,
                v_stride_b,
                v_stride_s,
                features,
                scale * LOG2_E,
                window,
                False,
                HAS_WINDOW,
                FEATURES,
                PAGE,
                BLOCK,
            )
        start = tl.maximum(start, whole)
    for place in range(start, stop, BLOCK):
        page, maximum, total, result = attend_to_tile(
            q,
            page,
            maximum,
            total,
            result,
            place,
            low,
            high,
            places,
            table_row,
            k_group,
            v_group,
            k_stride_b,
            k_stride_s,
            v_stride_b,
            v_stride_s,
            features,
            scale * LOG2_E,
            window,
            True,
            HAS_WINDOW,
            FEATURES,
            PAGE,
            BLOCK,
        )
    empty = total == 0.0  # padding, or a piece past the context: output 0, lse -inf
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), maximum * LN_2 + tl.log(total))
    dense = wide * heads + head
    if SPLIT:
        dense += split.to(tl.int64) * tokens * heads
        mask &= (empty == 0)[:, None]
    tl.store(lse_ptr + dense, lse, mask=valid)
    result = (result / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + dense[:, None] * features + feature[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["splits", "rows"])
def merge_pieces_kernel(
    piece_ptr,
    piece_lse_ptr,
    out_ptr,
    lse_ptr,
    splits,
    rows,
    features,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge the pieces [splits, rows, features] of one row, a token's head, by their lse."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, FEATURES)
    maximum = tl.full([1], float("-inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    result = tl.zeros([FEATURES], dtype=tl.float32)
    for first in range(0, splits, BLOCK):
        index = first + tl.arange(0, BLOCK)
        place = index.to(tl.int64) * rows + row
        lse = tl.load(piece_lse_ptr + place, mask=index < splits, other=float("-inf"))
        held = lse > float("-inf")  # the others were not written
        mask = held[:, None] & (feature < features)[None, :]
        pieces = tl.load(
            piece_ptr + place[:, None] * features + feature[None, :], mask=mask, other=0.0
        )
        larger = tl.maximum(maximum, tl.max(lse, 0))
        offset = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp(lse - offset)
        decay = tl.exp(maximum - offset)
        total = total * decay + tl.sum(weights, 0)
        result = result * decay + tl.sum(weights[:, None] * pieces, 0)
        maximum = larger
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), maximum + tl.log(total))
    tl.store(lse_ptr + row + tl.arange(0, 1), lse)
    result = (result / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * features + feature, result, mask=feature < features)


@triton.jit
def write_to_pages_kernel(
    key_ptr,
    value_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    width,
    features,
    key_stride_t,
    key_stride_g,
    value_stride_t,
    value_stride_g,
    k_stride_b,
    k_stride_s,
    k_stride_g,
    v_stride_b,
    v_stride_s,
    v_stride_g,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the key and the value of one token, all heads, to its slot; -1 copies nothing."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    page = slot // PAGE
    within = slot % PAGE
    for first in range(0, width, BLOCK):
        index = first + tl.arange(0, BLOCK)
        mask = (index < width) & (slot >= 0)
        group = (index // features).to(tl.int64)
        feature = index % features
        key = tl.load(
            key_ptr + token * key_stride_t + group * key_stride_g + feature, mask=mask, other=0.0
        )
        value = tl.load(
            value_ptr + token * value_stride_t + group * value_stride_g + feature,
            mask=mask,
            other=0.0,
        )
        place = page * k_stride_b + within * k_stride_s + group * k_stride_g + feature
        tl.store(k_ptr + place, key, mask=mask)
        place = page * v_stride_b + within * v_stride_s + group * v_stride_g + feature
        tl.store(v_ptr + place, value, mask=mask)
