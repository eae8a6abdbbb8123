# SPDX-License-Identifier: Apache-2.0
"""Paged attention in Triton: tiles, grids and launches; the host waits for nothing.

The Triton kernels of paged attention: attend to pages, merge pieces, write to pages.

A program takes one tile: some new tokens of one row times the heads of one group, which share keys.
So the keys of a decode step are read once for all heads of their group. Exponentials are of base 2;
the log-sum-exp that leaves is natural.

How many pieces contexts are cut into, so that few rows still fill a device.

Reading the cache is all that a decode step costs. A program reads one row's keys of one group, and
a batch of b rows with g groups has only b g programs, while a device needs a few for each of its
processors to reach its bandwidth. So contexts are cut, each program reads one piece, and a second
kernel merges the results of the pieces by their log-sum-exps (Dao et al., "Flash-Decoding for
long-context inference", 2023). The result of a piece is 4 d bytes a head in fp32, written once and
read once, while its keys and values take 4 d bytes a token in bf16: with r heads in a group, pieces
of 256 tokens add 8 r d bytes to 4 d 256, which is 6 % at r = 8.

Attention to latents, the absorbed form of multi-head latent attention, has a kernel of its own:
keys are latents followed by rotated features, for all heads, and values are the latents. A
program reads a tile of latents once and multiplies it twice, by the queries of its heads and by
their weights. Both products have latents as rows and heads as columns: tensor cores of Hopper take
64 rows, which a tile of latents has and one token of few heads has not, but any 8 columns. A
program takes one new token: rows of a decode step have one, and those of a prompt run one after
another without waiting for the host.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from megatron.core.ops.launches import STAGES, WARPS, Launches, cdiv, next_power_of_2
from megatron.core.ops.paged_attention.reference import PagedBatch

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

    Only places in [low, high) are read. Without MASKED every query sees the whole tile. `scale` is
    positive, and of exponents of 2. `page` is what `pages_of` said of the tile; the pages of the
    next tile are returned first: looked up a tile ahead, they do not keep the compiler from loading
    keys several tiles ahead.
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
    products = tl.dot(q, kt, input_precision="ieee")
    if MASKED:
        seen = (columns[None, :] <= places[:, None]) & inside[None, :]
        if HAS_WINDOW:
            seen = seen & (places[:, None] - columns[None, :] < window)
        products = tl.where(seen, products, float("-inf"))
    larger = tl.maximum(maximum, tl.max(products, 1) * scale)
    offset = larger
    if MASKED:  # a row that saw no key so far has -inf: shift by 0, so that no inf - inf arises
        offset = tl.where(larger == float("-inf"), 0.0, larger)
    # Scaled here and not before: one fused multiply-add an element.
    weights = tl.exp2(products * scale - offset[:, None])
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
    result = (result * (1.0 / total)[:, None]).to(out_ptr.dtype.element_ty)
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
    HAS_VALUE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the key and the value of one token, all heads, to its slot; -1 copies nothing. Without
    HAS_VALUE there are keys only."""
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
        if HAS_VALUE:
            value = tl.load(
                value_ptr + token * value_stride_t + group * value_stride_g + feature,
                mask=mask,
                other=0.0,
            )
        place = page * k_stride_b + within * k_stride_s + group * k_stride_g + feature
        tl.store(k_ptr + place, key, mask=mask)
        if HAS_VALUE:
            place = page * v_stride_b + within * v_stride_s + group * v_stride_g + feature
            tl.store(v_ptr + place, value, mask=mask)


SHORTEST_PIECE = 256  # tokens; rows too short for all pieces have fewer
#: Nor does a program read a longer context alone while others have long ended.
LONGEST_PIECE = 16384
MOST_PIECES = 128
#: Fewer pieces are taken where they fill the device so well, compared with the best.
GOOD_ENOUGH = 0.85


@functools.lru_cache(maxsize=4096)
def pieces(programs: int, context: int, resident: int) -> int:
    """Choose into how many pieces contexts are cut.

    Programs run in waves of `resident`; the last wave is not full. More pieces make finer waves
    and more to merge, so the fewest that are nearly as good as the best are taken. Only bounds
    known to the host decide: the choice is the same for every batch of a CUDA graph.

    Args:
        programs: how many there are if nothing is cut.
        context: tokens that the longest row sees.
        resident: programs that the device runs at once.

    Returns:
        How many, at least 1.
    """
    most = min(MOST_PIECES, context // SHORTEST_PIECE)
    if most <= 1 or programs == 0:
        return 1
    least = min(most, -(-context // LONGEST_PIECE))
    if programs * least >= resident:
        return least
    choices = range(least, most + 1)
    wanted = GOOD_ENOUGH * max(_share_of_waves(programs * count, resident) for count in choices)
    return next(c for c in choices if _share_of_waves(programs * c, resident) >= wanted)


def _share_of_waves(programs: int, resident: int) -> float:
    """Return how full the waves of so many programs are, 1 for full ones."""
    waves = -(-programs // resident)
    return programs / (waves * resident)


# Tiles of few rows wait for memory: they want many loads in flight. Tiles of many rows multiply.
# BLOCK is of heads of 128 features in 16 bits; wider ones have fewer keys, so that a warpgroup has
# registers for the 64 rows of any width up to 256 that tensor cores of Hopper multiply at once.
DECODE = Launches(
    "paged_attention_decode",
    {"ROWS": 64, "BLOCK": 64, WARPS: 4, STAGES: 3},
    alternatives=(
        {"ROWS": 64, "BLOCK": 32, WARPS: 4, STAGES: 4},
        {"ROWS": 64, "BLOCK": 64, WARPS: 4, STAGES: 2},
        {"ROWS": 64, "BLOCK": 128, WARPS: 4, STAGES: 2},
        {"ROWS": 64, "BLOCK": 128, WARPS: 8, STAGES: 3},
    ),
)
PREFILL = Launches(
    "paged_attention_prefill",
    {"ROWS": 128, "BLOCK": 64, WARPS: 8, STAGES: 2},
    alternatives=(
        {"ROWS": 128, "BLOCK": 64, WARPS: 8, STAGES: 3},
        {"ROWS": 128, "BLOCK": 128, WARPS: 8, STAGES: 2},
        {"ROWS": 64, "BLOCK": 64, WARPS: 4, STAGES: 2},
        {"ROWS": 64, "BLOCK": 64, WARPS: 4, STAGES: 3},
    ),
)
MERGE = Launches(
    "paged_attention_merge",
    {"BLOCK": 16, WARPS: 4},
    alternatives=({"BLOCK": 8, WARPS: 2}, {"BLOCK": 32, WARPS: 4}),
)
WRITE = Launches(
    "write_to_pages",
    {"BLOCK": 1024, WARPS: 4},
    alternatives=({"BLOCK": 512, WARPS: 2}, {"BLOCK": 2048, WARPS: 8}),
)

SMALLEST_TILE, LARGEST_TILE = 16, 128
USUAL_FEATURES = 128
#: Warps that a processor needs: two decoding programs have 128 KiB on their way, a prefilling one
#: takes most registers.
WARPS_A_PROCESSOR = 8
#: Major compute capability of the GPUs whose warpgroups multiply 64 rows at once.
HOPPER = 9
#: Processors to fill where none are (the interpreter): those of an H100 or H200.
PROCESSORS = 132


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out [t, n, d], lse fp32 [t, n]); see `ops.paged_attention.paged_attention`."""
    query = _dense_features(query)
    tokens, heads, features = query.shape
    groups = key_cache.shape[2]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    if not out.numel():
        return out, lse
    tile = tile_shape(query, ratio=heads // groups, max_query=batch.max_query)
    tiles = tile_count(tokens, batch.rows, tile["QUERIES"])
    programs = tiles * groups * cdiv(heads // groups, tile["HEADS"])
    seen = min(batch.max_context, window + tile["QUERIES"] if window else batch.max_context)
    splits = pieces(programs, seen, resident(query.device, tile[WARPS]))
    found, found_lse = _buffers(splits, out, lse)
    paged_attention_kernel[(programs * splits,)](
        query,
        key_cache,
        value_cache,
        lse if sinks is None else sinks.contiguous(),
        found,
        found_lse,
        batch.block_table,
        batch.query_bounds,
        batch.context_lengths,
        scale,
        tokens,
        batch.rows,
        tiles,
        splits,
        cdiv(SHORTEST_PIECE, tile["BLOCK"]),
        heads,
        features,
        window or 0,
        batch.block_table.stride(0),
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        HAS_SINKS=sinks is not None,
        HAS_WINDOW=window is not None,
        SPLIT=splits > 1,
        RATIO=heads // groups,
        PAGE=key_cache.shape[1],
        **tile,
    )
    if splits > 1:
        _merge(found, found_lse, out, lse)
    return out, lse


def _buffers(
    splits: int, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what out and lse are written to: fp32 of each piece, or themselves for one."""
    if splits == 1:
        return out, lse
    shapes = ((splits, *x.shape) for x in (out, lse))
    found, found_lse = (torch.empty(s, dtype=torch.float32, device=out.device) for s in shapes)
    return found, found_lse


def _merge(
    found: torch.Tensor, found_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Merge pieces [splits, t, n, d] with lse [splits, t, n] into out and lse."""
    width = padded(out.shape[-1])
    merge_pieces_kernel[(lse.numel(),)](
        found,
        found_lse,
        out,
        lse,
        found.shape[0],
        lse.numel(),
        out.shape[-1],
        FEATURES=width,
        **MERGE.pick(out, f"{width} {out.dtype}"),
    )


def write_to_pages(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write tokens to their slots in place; see `ops.paged_attention.write_to_pages`. A value that
    is the key itself, as where a cache keeps one tensor a token, is written once."""
    alone = value is key
    key = _dense_features(key)
    value = key if alone else _dense_features(value)
    tokens, groups, features = key.shape
    if not key.numel():
        return
    write_to_pages_kernel[(tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping.contiguous(),
        groups * features,
        features,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        HAS_VALUE=not alone,
        PAGE=key_cache.shape[1],
        **WRITE.pick(key, str(key.dtype)),
    )


def tile_shape(query: torch.Tensor, *, ratio: int, max_query: int) -> dict[str, int]:
    """Choose a tile: so many queries times heads of a group, and so many keys at once.

    Args:
        query: [t, n, d].
        ratio: heads in a group.
        max_query: no row has more queries.

    Returns:
        HEADS, QUERIES, FEATURES, ROWS, BLOCK, num_warps and num_stages.
    """
    width = padded(query.shape[-1])
    wanted = max(SMALLEST_TILE, next_power_of_2(max_query * ratio))
    launches = DECODE if wanted <= DECODE.default["ROWS"] else PREFILL
    launch = launches.pick(query, f"{width} {query.dtype}")
    most, keys = launch["ROWS"], launch["BLOCK"] * USUAL_FEATURES // width
    if query.element_size() > 2:
        # Products of fp32 run without tensor cores, from registers: a quarter of the elements.
        most, keys = min(most, most * USUAL_FEATURES // (4 * width)), keys // 4
    elif architecture(query.device) < HOPPER:  # with less shared memory
        most = min(most, most * USUAL_FEATURES // width)
    launch["ROWS"] = max(SMALLEST_TILE, min(wanted, most))
    keys = min(LARGEST_TILE, keys)
    launch["BLOCK"] = max(SMALLEST_TILE, keys)
    heads = min(ratio, launch["ROWS"])
    queries = 1 if max_query == 1 else launch["ROWS"] // heads
    return {"HEADS": heads, "QUERIES": queries, "FEATURES": width, **launch}


def tile_count(tokens: int, rows: int, queries: int) -> int:
    """Bound the tiles of so many tokens in so many rows, and of the padding behind them.

    A row from b to e has ceil((e - b) / q) tiles, at most e // q - b // q + 1 whatever b is; so
    has the padding. With one query a tile, tiles are tokens.
    """
    return tokens if queries == 1 else tokens // queries + rows + 1


def padded(features: int) -> int:
    """Return the features of a tile of heads of so many."""
    return max(SMALLEST_TILE, next_power_of_2(features))


@functools.cache
def architecture(device: torch.device) -> int:
    """Return the major compute capability of a GPU; Hopper's where there is none."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else HOPPER


@functools.cache
def resident(device: torch.device, warps: int) -> int:
    """Return how many programs of so many warps keep a device busy."""
    processors = PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return processors * max(1, WARPS_A_PROCESSOR // warps)


def _dense_features(x: torch.Tensor) -> torch.Tensor:
    """Return x with a dense last dimension; slices of a fused projection stay views."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit(do_not_specialize=["tokens", "rows", "splits", "table_stride"])
def paged_latent_attention_kernel(
    q_ptr,
    c_ptr,
    out_ptr,
    lse_ptr,
    table_ptr,
    bounds_ptr,
    contexts_ptr,
    scale,
    tokens,
    rows,
    splits,
    shortest,
    heads,
    rank,
    rotated,
    table_stride,
    q_stride_t,
    q_stride_n,
    c_stride_b,
    c_stride_s,
    SPLIT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attend ROWS heads of one new token to a piece of its row's context.

    With SPLIT, out and lse are fp32 of pieces, [splits, t, n, r] and [splits, t, n]; the out of an
    empty piece is not written. No piece is shorter than `shortest` tiles of latents. IS_WHOLE:
    latents fill tiles of RANK and ROTATED features.
    """
    token = tokens - 1 - tl.program_id(0) % tokens  # late tokens see most: they go first
    split = tl.program_id(0) // tokens % splits
    part = tl.program_id(0) // tokens // splits
    row, begin, offset = row_of_tile(token, bounds_ptr, rows, 1)
    end = tl.load(bounds_ptr + row + 1, mask=row < rows, other=tokens)
    context = tl.load(contexts_ptr + row, mask=row < rows, other=0)
    high = tl.where(token < end, tl.minimum(context, context - (end - begin) + offset + 1), 0)
    head = part * ROWS + tl.arange(0, ROWS)
    valid = head < heads
    feature = tl.arange(0, RANK)
    turned = tl.arange(0, ROTATED)
    along = (feature < rank)[None, :]
    along_turned = (turned < rotated)[None, :]
    wide = token.to(tl.int64)
    exponent = scale * LOG2_E
    q_rows = q_ptr + wide * q_stride_t + head.to(tl.int64) * q_stride_n
    q = tl.load(q_rows[:, None] + feature[None, :], mask=valid[:, None] & along, other=0.0)
    q_turned = tl.load(
        q_rows[:, None] + rank + turned[None, :], mask=valid[:, None] & along_turned, other=0.0
    )
    piece = tl.maximum(tl.cdiv(high, BLOCK * splits), shortest) * BLOCK
    start = split * piece
    stop = tl.minimum(start + piece, high)
    table_row = table_ptr + row.to(tl.int64) * table_stride
    maximum = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    result = tl.zeros([RANK, ROWS], dtype=tl.float32)
    for place in range(start, stop, BLOCK):
        page = pages_of(table_row, place, 0, high, PAGE, BLOCK)
        if PAGE < BLOCK:  # one number a place
            page = tl.broadcast_to(page[:, None], [BLOCK // PAGE, PAGE])
            page = tl.reshape(page, [BLOCK])
        columns = place + tl.arange(0, BLOCK)
        inside = columns < high
        slots = (columns % PAGE).to(tl.int64)
        c_rows = c_ptr + (page.to(tl.int64) * c_stride_b + slots * c_stride_s)
        mask = inside[:, None]
        mask_turned = mask
        if not IS_WHOLE:
            mask, mask_turned = mask & along, mask & along_turned
        c = tl.load(c_rows[:, None] + feature[None, :], mask=mask, other=0.0)
        c_turned = tl.load(c_rows[:, None] + rank + turned[None, :], mask=mask_turned, other=0.0)
        products = tl.dot(c, tl.trans(q), input_precision="ieee")  # [BLOCK, ROWS]
        products = tl.dot(c_turned, tl.trans(q_turned), products, input_precision="ieee")
        products = tl.where(inside[:, None], products, float("-inf"))
        # Finite: the first place is inside.
        larger = tl.maximum(maximum, tl.max(products, 0) * exponent)
        weights = tl.exp2(products * exponent - larger[None, :])
        decay = tl.exp2(maximum - larger)
        result = result * decay[None, :]
        result = tl.dot(tl.trans(c), weights.to(c.dtype), result, input_precision="ieee")
        total = total * decay + tl.sum(weights, 0)
        maximum = larger
    empty = total == 0.0  # padding, or a piece past the context: output 0, lse -inf
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), maximum * LN_2 + tl.log(total))
    dense = wide * heads + head
    mask = valid
    if SPLIT:
        dense += split.to(tl.int64) * tokens * heads
        mask &= empty == 0
    tl.store(lse_ptr + dense, lse, mask=valid)
    mask = mask[:, None]
    if not IS_WHOLE:
        mask = mask & along
    result = tl.trans(result * (1.0 / total)[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + dense[:, None] * rank + feature[None, :], result, mask=mask)


# ROWS and BLOCK are of 512 values in 16 bits, of which 32 heads fill a warpgroup's registers on
# Hopper. Older GPUs have less shared memory, and newer ones accumulate in tensor memory.
LATENT_SMALL = Launches(
    "paged_latent_attention_small", {"ROWS": 16, "BLOCK": 32, WARPS: 4, STAGES: 2}
)
LATENT = Launches(
    "paged_latent_attention",
    {"ROWS": 32, "BLOCK": 64, WARPS: 4, STAGES: 2},
    alternatives=(
        {"ROWS": 16, "BLOCK": 64, WARPS: 4, STAGES: 2},
        {"ROWS": 32, "BLOCK": 128, WARPS: 8, STAGES: 1},
        {"ROWS": 16, "BLOCK": 64, WARPS: 4, STAGES: 1},
    ),
)
USUAL_VALUES = 512


def paged_latent_attention(
    query: torch.Tensor,
    latent_cache: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    value_features: int,
) -> torch.Tensor:
    """Compute [t, n, value_features]; see `ops.paged_attention.paged_latent_attention`."""
    query = _dense_features(query)
    tokens, heads, features = query.shape
    shape = (tokens, heads, value_features)
    out = torch.empty(shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(shape[:2], dtype=torch.float32, device=query.device)
    if not out.numel():
        return out
    rotated = features - value_features
    launch = latent_tile(query, value_features)
    programs = tokens * cdiv(heads, launch["ROWS"])
    # Latents on their way to a program of the large tile leave shared memory for no second one.
    alone = launch["ROWS"] * launch["BLOCK"] > SMALLEST_TILE * LATENT_SMALL.default["BLOCK"]
    warps = WARPS_A_PROCESSOR if alone else launch[WARPS]
    splits = pieces(programs, batch.max_context, resident(query.device, warps))
    found, found_lse = _buffers(splits, out, lse)
    paged_latent_attention_kernel[(programs * splits,)](
        query,
        latent_cache,
        found,
        found_lse,
        batch.block_table,
        batch.query_bounds,
        batch.context_lengths,
        scale,
        tokens,
        batch.rows,
        splits,
        cdiv(SHORTEST_PIECE, launch["BLOCK"]),
        heads,
        value_features,
        rotated,
        batch.block_table.stride(0),
        *query.stride()[:2],
        *latent_cache.stride()[:2],
        SPLIT=splits > 1,
        IS_WHOLE=launch["RANK"] == value_features and launch["ROTATED"] == rotated,
        PAGE=latent_cache.shape[1],
        **launch,
    )
    if splits > 1:
        _merge(found, found_lse, out, lse)
    return out


def latent_tile(query: torch.Tensor, value_features: int) -> dict[str, int]:
    """Choose a tile: so many heads of a token, and so many latents at once.

    Args:
        query: [t, n, c].
        value_features: features of a latent that are values.

    Returns:
        RANK, ROTATED, ROWS, BLOCK, num_warps and num_stages.
    """
    _, heads, features = query.shape
    width = padded(value_features)
    launches = LATENT if architecture(query.device) == HOPPER else LATENT_SMALL
    launch = launches.pick(query, f"{width} {query.dtype}")
    rows, block = launch["ROWS"], launch["BLOCK"]
    # What a tile wider than usual has more of, or products of fp32, which run without tensor cores.
    excess = max(1, width // USUAL_VALUES) * (1 if query.element_size() == 2 else 4)
    launch["ROWS"] = max(SMALLEST_TILE, min(rows // excess, next_power_of_2(heads)))
    launch["BLOCK"] = max(SMALLEST_TILE, block // excess)
    return {"RANK": width, "ROTATED": padded(features - value_features), **launch}
