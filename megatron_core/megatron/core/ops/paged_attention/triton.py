# SPDX-License-Identifier: Apache-2.0
"""Paged attention in Triton: kernels, tiles, grids and launches, without host synchronization.

A program computes one tile: some new tokens of one row times the heads of one group, which share
keys. A decode step therefore reads the keys once for all heads of a group. Exponentials are in base
2; the returned log-sum-exp is natural.

Reading the cache dominates the time of a decode step. A program reads one row's keys of one group,
so a batch of b rows with g groups has only b g programs, while a GPU needs a few programs per SM to
reach its bandwidth. Contexts are therefore split: each program reads one split, and a second kernel
merges the outputs of the splits by their log-sum-exps (Dao et al., "Flash-Decoding for long-context
inference", 2023). The output of a split is 4 d bytes a head in fp32, written once and read once;
its keys and values are 4 d bytes a token in bf16. With r heads in a group, splits of 256 tokens add
8 r d bytes to 4 d 256, which is 6 % at r = 8.

The absorbed form of multi-head latent attention has a kernel of its own: keys are latents followed
by RoPE features, for all heads, and values are the latents. A program reads a tile of latents once
and multiplies it twice, by the queries of its heads and by their softmax weights. Both products
have latents as rows and heads as columns: Hopper's tensor cores need 64 rows, which a tile of
latents has and one token of few heads has not, but only 8 columns. A program computes one new
token; the tokens of a prompt are separate programs.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from megatron.core.ops.attention.kernels import capped
from megatron.core.ops.backend_choice import device_capability
from megatron.core.ops.launches import STAGES, WARPS, Launches, cdiv, next_power_of_2
from megatron.core.ops.paged_attention.cpu import PagedBatch

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def row_of_tile(tile, bounds_ptr, rows, QUERIES: tl.constexpr):
    """Return (row, start of the row's tokens, first token of the tile within the row).

    The tiles of row i begin at bounds[i] // QUERIES + i, an upper bound on the tiles of earlier
    rows; with one query a tile they begin at bounds[i] exactly. The padding after the last row has
    tiles as if it were one more row.
    """
    row = -1
    for start in range(0, rows + 1, 128):
        index = start + tl.arange(0, 128)
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
    """Look up the pages of positions start .. start + BLOCK - 1: a scalar, or BLOCK // PAGE pages.

    Table entries of pages without a position in [low, high) are not read.
    """
    if PAGE >= BLOCK:  # the tile lies in one page, which is read if the tile begins before high
        page = tl.load(table_ptr + start // PAGE, mask=start < high, other=0)
    else:
        page_start = start + tl.arange(0, BLOCK // PAGE) * PAGE
        inside = (page_start + PAGE > low) & (page_start < high)
        page = tl.load(table_ptr + page_start // PAGE, mask=inside, other=0)
    return page


@triton.jit
def attend_to_tile(
    q,
    page,
    maximum,
    denominator,
    acc,
    start,
    low,
    high,
    positions,
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
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update the online softmax with the keys at positions start .. start + BLOCK - 1 of a row.

    Only positions in [low, high) are read. Without MASKED the whole tile is visible to every query.
    `scale` is positive and includes log2(e). `page` holds the tile's pages as `pages_of` returns
    them. The next tile's pages are looked up one tile ahead and returned first, so that the lookup
    does not keep the compiler from prefetching keys several tiles ahead.
    """
    feature = tl.arange(0, FEATURES)
    columns = start + tl.arange(0, BLOCK)
    inside = (columns >= low) & (columns < high)
    if PAGE < BLOCK:  # one page per position
        page = tl.broadcast_to(page[:, None], [BLOCK // PAGE, PAGE])
        page = tl.reshape(page, [BLOCK])
    page = page.to(tl.int64)
    slots = (columns % PAGE).to(tl.int64)
    k_rows = k_ptr + (page * k_stride_b + slots * k_stride_s)
    v_rows = v_ptr + (page * v_stride_b + slots * v_stride_s)
    next_page = pages_of(table_ptr, start + BLOCK, low, high, PAGE, BLOCK)
    key_mask = (feature < features)[:, None]
    value_mask = (feature < features)[None, :]
    if MASKED:
        key_mask = key_mask & inside[None, :]
        value_mask = value_mask & inside[:, None]
    kt = tl.load(k_rows[None, :] + feature[:, None], mask=key_mask, other=0.0)
    products = tl.dot(q, kt, input_precision="ieee")
    products, scale = capped(products, scale, SOFTCAP)
    if MASKED:
        visible = (columns[None, :] <= positions[:, None]) & inside[None, :]
        if HAS_WINDOW:
            visible = visible & (positions[:, None] - columns[None, :] < window)
        products = tl.where(visible, products, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(products, 1) * scale)
    offset = new_maximum
    if MASKED:  # a row without a visible key so far: subtract 0, since -inf - -inf = NaN
        offset = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    # Scaled here and not before: the scale and the offset are one fused multiply-add.
    weights = tl.exp2(products * scale - offset[:, None])
    decay = tl.exp2(maximum - offset)
    v = tl.load(v_rows[:, None] + feature[None, :], mask=value_mask, other=0.0)
    acc = acc * decay[:, None]
    acc += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return next_page, new_maximum, denominator * decay + tl.sum(weights, 1), acc


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
    min_blocks,
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
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attend QUERIES new tokens of one row, HEADS heads of one group, to a split of the context.

    A tile has ROWS >= QUERIES * HEADS rows, query by query. With SPLIT, out and lse are fp32 of
    splits, [splits, t, n, d] and [splits, t, n]; the out of an empty split is not written. A split
    has at least `min_blocks` tiles of keys: short rows have fewer splits.
    """
    tile = tiles - 1 - tl.program_id(0) % tiles  # late tiles first: they have the most visible keys
    split = tl.program_id(0) // tiles % splits
    index = tl.program_id(0) // tiles // splits
    head_block = index % ((RATIO + HEADS - 1) // HEADS)  # block of the group's heads
    group = (index // ((RATIO + HEADS - 1) // HEADS)).to(tl.int64)
    row, begin, offset = row_of_tile(tile, bounds_ptr, rows, QUERIES)
    end = tl.load(bounds_ptr + row + 1, mask=row < rows, other=tokens)
    context = tl.load(contexts_ptr + row, mask=row < rows, other=0)
    tile_row = tl.arange(0, ROWS)
    queries = offset + tile_row // HEADS
    group_head = head_block * HEADS + tile_row % HEADS  # index of the head in its group
    valid = (tile_row < QUERIES * HEADS) & (group_head < RATIO) & (begin + queries < end)
    positions = context - (end - begin) + queries
    feature = tl.arange(0, FEATURES)
    mask = valid[:, None] & (feature < features)[None, :]
    query_token = (begin + queries).to(tl.int64)
    head = group * RATIO + group_head
    q_rows = q_ptr + query_token * q_stride_t + head * q_stride_n
    q = tl.load(q_rows[:, None] + feature[None, :], mask=mask, other=0.0)
    maximum = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    denominator = tl.zeros([ROWS], dtype=tl.float32)
    if HAS_SINKS:  # the sink is an initial key of the first split, whose value is zero
        has_sink = valid & (split == 0) & (context > 0)
        sink = tl.load(sinks_ptr + head, mask=has_sink, other=float("-inf")).to(tl.float32)
        maximum = sink * LOG2_E
        denominator += tl.where(has_sink, 1.0, 0.0)
    # [low, high) are the tile's visible keys; [start, stop) is this program's split of them.
    first_position = context - (end - begin) + offset  # position of the first query
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(first_position - window + 1, 0)
    high = tl.where(begin + offset < end, tl.minimum(context, first_position + QUERIES), 0)
    start = low // BLOCK * BLOCK
    blocks = tl.maximum(tl.cdiv(tl.maximum(high - start, 0), BLOCK * splits), min_blocks)
    start = start + split * (blocks * BLOCK)
    stop = tl.minimum(start + blocks * BLOCK, high)
    table_row = table_ptr + row.to(tl.int64) * table_stride
    k_group = k_ptr + group * k_stride_g
    v_group = v_ptr + group * v_stride_g
    acc = tl.zeros([ROWS, FEATURES], dtype=tl.float32)
    page = pages_of(table_row, start, low, high, PAGE, BLOCK)
    if QUERIES > 1 and not HAS_WINDOW:  # most tiles of keys lie before every query of the tile
        full_stop = tl.minimum(stop, tl.maximum(first_position + 1, 0) // BLOCK * BLOCK)
        for block_start in range(start, full_stop, BLOCK):
            page, maximum, denominator, acc = attend_to_tile(
                q,
                page,
                maximum,
                denominator,
                acc,
                block_start,
                low,
                high,
                positions,
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
                SOFTCAP,
                BLOCK,
            )
        start = tl.maximum(start, full_stop)
    for block_start in range(start, stop, BLOCK):
        page, maximum, denominator, acc = attend_to_tile(
            q,
            page,
            maximum,
            denominator,
            acc,
            block_start,
            low,
            high,
            positions,
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
            SOFTCAP,
            BLOCK,
        )
    empty = denominator == 0.0  # padding, or a split past the context: output 0, lse -inf
    denominator = tl.where(empty, 1.0, denominator)
    lse = tl.where(empty, float("-inf"), maximum * LN_2 + tl.log(denominator))
    dense = query_token * heads + head
    if SPLIT:
        dense += split.to(tl.int64) * tokens * heads
        mask &= (empty == 0)[:, None]
    tl.store(lse_ptr + dense, lse, mask=valid)
    acc = (acc * (1.0 / denominator)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + dense[:, None] * features + feature[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["splits", "rows"])
def merge_pieces_kernel(
    split_ptr,
    split_lse_ptr,
    out_ptr,
    lse_ptr,
    splits,
    rows,
    features,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge the splits [splits, rows, features] of one row (a token's head) by their lse."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, FEATURES)
    maximum = tl.full([1], float("-inf"), dtype=tl.float32)
    denominator = tl.zeros([1], dtype=tl.float32)
    acc = tl.zeros([FEATURES], dtype=tl.float32)
    for start in range(0, splits, BLOCK):
        index = start + tl.arange(0, BLOCK)
        offset = index.to(tl.int64) * rows + row
        lse = tl.load(split_lse_ptr + offset, mask=index < splits, other=float("-inf"))
        nonempty = lse > float("-inf")  # an empty split's out was not written
        mask = nonempty[:, None] & (feature < features)[None, :]
        split_outs = tl.load(
            split_ptr + offset[:, None] * features + feature[None, :], mask=mask, other=0.0
        )
        new_maximum = tl.maximum(maximum, tl.max(lse, 0))
        offset = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp(lse - offset)
        decay = tl.exp(maximum - offset)
        denominator = denominator * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(weights[:, None] * split_outs, 0)
        maximum = new_maximum
    empty = denominator == 0.0
    denominator = tl.where(empty, 1.0, denominator)
    lse = tl.where(empty, float("-inf"), maximum + tl.log(denominator))
    tl.store(lse_ptr + row + tl.arange(0, 1), lse)
    acc = (acc / denominator).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * features + feature, acc, mask=feature < features)


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
    """Copy the key and the value of one token, all heads, to its slot; -1 copies nothing.

    Without HAS_VALUE there are only keys.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    page = slot // PAGE
    page_slot = slot % PAGE
    for start in range(0, width, BLOCK):
        index = start + tl.arange(0, BLOCK)
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
        offset = page * k_stride_b + page_slot * k_stride_s + group * k_stride_g + feature
        tl.store(k_ptr + offset, key, mask=mask)
        if HAS_VALUE:
            offset = page * v_stride_b + page_slot * v_stride_s + group * v_stride_g + feature
            tl.store(v_ptr + offset, value, mask=mask)


MIN_SPLIT_TOKENS = 256  # tokens; rows that are too short have fewer splits
#: Longest split: a program must not read a long context alone after all others have ended.
MAX_SPLIT_TOKENS = 16384
MAX_SPLITS = 128
#: The smallest number of splits with this fraction of the best occupancy is chosen.
MIN_RELATIVE_OCCUPANCY = 0.85


@functools.lru_cache(maxsize=4096)
def num_splits(programs: int, context: int, resident_programs: int) -> int:
    """Choose the number of splits of the contexts.

    Programs run in waves of `resident_programs`; the last wave is not full. More splits make finer
    waves and more work to merge, so the smallest number with nearly the best occupancy is chosen.
    Only bounds known to the host decide, so the number is the same for every batch of a CUDA graph.

    Args:
        programs: number of programs without splits.
        context: largest number of visible tokens of a row.
        resident_programs: programs that the device runs at once.

    Returns:
        The number of splits, at least 1.
    """
    max_splits = min(MAX_SPLITS, context // MIN_SPLIT_TOKENS)
    if max_splits <= 1 or programs == 0:
        return 1
    min_splits = min(max_splits, -(-context // MAX_SPLIT_TOKENS))
    if programs * min_splits >= resident_programs:
        return min_splits
    choices = range(min_splits, max_splits + 1)
    min_occupancy = MIN_RELATIVE_OCCUPANCY * max(
        _wave_occupancy(programs * count, resident_programs) for count in choices
    )
    return next(
        c for c in choices if _wave_occupancy(programs * c, resident_programs) >= min_occupancy
    )


def _wave_occupancy(programs: int, resident_programs: int) -> float:
    """Return the fraction of the waves' slots that the programs fill, 1 for full waves."""
    waves = -(-programs // resident_programs)
    return programs / (waves * resident_programs)


# Tiles of few rows are memory-bound: they need many loads in flight. Large tiles are compute-bound.
# BLOCK is for heads of 128 features in 16 bits; larger heads have fewer keys, so that a warpgroup
# has registers for 64 rows, one wgmma tile of Hopper, of up to 256 features.
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

MIN_TILE, MAX_TILE = 16, 128
REFERENCE_FEATURES = 128
#: Warps that fill an SM: two decode programs have 128 KiB of loads in flight, a prefill program
#: takes most of the registers.
WARPS_PER_SM = 8
#: Major compute capability of the GPUs whose warpgroups multiply 64 rows per instruction.
HOPPER = 9
#: Number of SMs in the interpreter: as on an H100 or H200.
DEFAULT_NUM_SMS = 132


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
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
    tiles = max_tiles(tokens, batch.rows, tile["QUERIES"])
    programs = tiles * groups * cdiv(heads // groups, tile["HEADS"])
    visible = min(batch.max_context, window + tile["QUERIES"] if window else batch.max_context)
    splits = num_splits(programs, visible, resident_programs(query.device, tile[WARPS]))
    split_out, split_lse = _split_buffers(splits, out, lse)
    paged_attention_kernel[(programs * splits,)](
        query,
        key_cache,
        value_cache,
        lse if sinks is None else sinks.contiguous(),
        split_out,
        split_lse,
        batch.block_table,
        batch.query_bounds,
        batch.context_lengths,
        scale,
        tokens,
        batch.rows,
        tiles,
        splits,
        cdiv(MIN_SPLIT_TOKENS, tile["BLOCK"]),
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
        SOFTCAP=softcap or 0.0,
        **tile,
    )
    if splits > 1:
        _merge_splits(split_out, split_lse, out, lse)
    return out, lse


def _split_buffers(
    splits: int, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return buffers of the kernel's out and lse: fp32 per split; `out` and `lse` for one split."""
    if splits == 1:
        return out, lse
    shapes = ((splits, *x.shape) for x in (out, lse))
    split_out, split_lse = (torch.empty(s, dtype=torch.float32, device=out.device) for s in shapes)
    return split_out, split_lse


def _merge_splits(
    split_out: torch.Tensor, split_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Merge splits [splits, t, n, d] with lse [splits, t, n] into out and lse."""
    width = padded(out.shape[-1])
    merge_pieces_kernel[(lse.numel(),)](
        split_out,
        split_lse,
        out,
        lse,
        split_out.shape[0],
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
    """Write tokens to their slots in place; see `ops.paged_attention.write_to_pages`.

    If `value` is `key` itself (a cache with one tensor per token), it is written once.
    """
    is_shared = value is key
    key = _dense_features(key)
    value = key if is_shared else _dense_features(value)
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
        HAS_VALUE=not is_shared,
        PAGE=key_cache.shape[1],
        **WRITE.pick(key, str(key.dtype)),
    )


def tile_shape(query: torch.Tensor, *, ratio: int, max_query: int) -> dict[str, int]:
    """Choose a tile: queries times heads of a group, and keys per iteration.

    Args:
        query: [t, n, d].
        ratio: heads in a group.
        max_query: upper bound on the queries of a row.

    Returns:
        HEADS, QUERIES, FEATURES, ROWS, BLOCK, num_warps and num_stages.
    """
    width = padded(query.shape[-1])
    required_rows = max(MIN_TILE, next_power_of_2(max_query * ratio))
    launches = DECODE if required_rows <= DECODE.default["ROWS"] else PREFILL
    launch = launches.pick(query, f"{width} {query.dtype}")
    max_rows, keys = launch["ROWS"], launch["BLOCK"] * REFERENCE_FEATURES // width
    if query.element_size() > 2:
        # fp32 is multiplied without tensor cores, from registers: a quarter of the elements fits.
        max_rows, keys = min(max_rows, max_rows * REFERENCE_FEATURES // (4 * width)), keys // 4
    elif architecture(query.device) < HOPPER:  # less shared memory
        max_rows = min(max_rows, max_rows * REFERENCE_FEATURES // width)
    launch["ROWS"] = max(MIN_TILE, min(required_rows, max_rows))
    keys = min(MAX_TILE, keys)
    launch["BLOCK"] = max(MIN_TILE, keys)
    heads = min(ratio, launch["ROWS"])
    queries = 1 if max_query == 1 else launch["ROWS"] // heads
    return {"HEADS": heads, "QUERIES": queries, "FEATURES": width, **launch}


def max_tiles(tokens: int, rows: int, queries: int) -> int:
    """Return an upper bound on the tiles of all rows and of the padding after them.

    A row from b to e has ceil((e - b) / q) tiles, at most e // q - b // q + 1 for any b; the same
    holds for the padding. With one query a tile, tiles are tokens.
    """
    return tokens if queries == 1 else tokens // queries + rows + 1


def padded(features: int) -> int:
    """Return the number of features of a tile, a power of two."""
    return max(MIN_TILE, next_power_of_2(features))


def architecture(device: torch.device) -> int:
    """Return the major compute capability of a GPU; Hopper's in the interpreter."""
    return device_capability(device)[0] if device.type == "cuda" else HOPPER


@functools.cache
def resident_programs(device: torch.device, warps: int) -> int:
    """Return how many programs of a number of warps keep a device busy."""
    num_sms = DEFAULT_NUM_SMS
    if device.type == "cuda":
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return num_sms * max(1, WARPS_PER_SM // warps)


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
    min_blocks,
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
    """Attend ROWS heads of one new token to a split of its row's context.

    With SPLIT, out and lse are fp32 of splits, [splits, t, n, r] and [splits, t, n]; the out of an
    empty split is not written. A split has at least `min_blocks` tiles of latents. IS_WHOLE: the
    latents fill tiles of RANK and ROTATED features exactly, so feature masks are not needed.
    """
    token = tokens - 1 - tl.program_id(0) % tokens  # late tokens have the most visible keys
    split = tl.program_id(0) // tokens % splits
    head_block = tl.program_id(0) // tokens // splits
    row, begin, offset = row_of_tile(token, bounds_ptr, rows, 1)
    end = tl.load(bounds_ptr + row + 1, mask=row < rows, other=tokens)
    context = tl.load(contexts_ptr + row, mask=row < rows, other=0)
    high = tl.where(token < end, tl.minimum(context, context - (end - begin) + offset + 1), 0)
    head = head_block * ROWS + tl.arange(0, ROWS)
    valid = head < heads
    feature = tl.arange(0, RANK)
    rotated_feature = tl.arange(0, ROTATED)
    rank_mask = (feature < rank)[None, :]
    rotated_mask = (rotated_feature < rotated)[None, :]
    query_token = token.to(tl.int64)
    exponent = scale * LOG2_E
    q_rows = q_ptr + query_token * q_stride_t + head.to(tl.int64) * q_stride_n
    q = tl.load(q_rows[:, None] + feature[None, :], mask=valid[:, None] & rank_mask, other=0.0)
    q_rotated = tl.load(
        q_rows[:, None] + rank + rotated_feature[None, :],
        mask=valid[:, None] & rotated_mask,
        other=0.0,
    )
    split_size = tl.maximum(tl.cdiv(high, BLOCK * splits), min_blocks) * BLOCK
    start = split * split_size
    stop = tl.minimum(start + split_size, high)
    table_row = table_ptr + row.to(tl.int64) * table_stride
    maximum = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    denominator = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([RANK, ROWS], dtype=tl.float32)
    for block_start in range(start, stop, BLOCK):
        page = pages_of(table_row, block_start, 0, high, PAGE, BLOCK)
        if PAGE < BLOCK:  # one page per position
            page = tl.broadcast_to(page[:, None], [BLOCK // PAGE, PAGE])
            page = tl.reshape(page, [BLOCK])
        columns = block_start + tl.arange(0, BLOCK)
        inside = columns < high
        slots = (columns % PAGE).to(tl.int64)
        c_rows = c_ptr + (page.to(tl.int64) * c_stride_b + slots * c_stride_s)
        mask = inside[:, None]
        c_rotated_mask = mask
        if not IS_WHOLE:
            mask, c_rotated_mask = mask & rank_mask, mask & rotated_mask
        c = tl.load(c_rows[:, None] + feature[None, :], mask=mask, other=0.0)
        c_rotated = tl.load(
            c_rows[:, None] + rank + rotated_feature[None, :], mask=c_rotated_mask, other=0.0
        )
        products = tl.dot(c, tl.trans(q), input_precision="ieee")  # [BLOCK, ROWS]
        products = tl.dot(c_rotated, tl.trans(q_rotated), products, input_precision="ieee")
        products = tl.where(inside[:, None], products, float("-inf"))
        # The maximum is finite: the first position is visible.
        new_maximum = tl.maximum(maximum, tl.max(products, 0) * exponent)
        weights = tl.exp2(products * exponent - new_maximum[None, :])
        decay = tl.exp2(maximum - new_maximum)
        acc = acc * decay[None, :]
        acc = tl.dot(tl.trans(c), weights.to(c.dtype), acc, input_precision="ieee")
        denominator = denominator * decay + tl.sum(weights, 0)
        maximum = new_maximum
    empty = denominator == 0.0  # padding, or a split past the context: output 0, lse -inf
    denominator = tl.where(empty, 1.0, denominator)
    lse = tl.where(empty, float("-inf"), maximum * LN_2 + tl.log(denominator))
    dense = query_token * heads + head
    mask = valid
    if SPLIT:
        dense += split.to(tl.int64) * tokens * heads
        mask &= empty == 0
    tl.store(lse_ptr + dense, lse, mask=valid)
    mask = mask[:, None]
    if not IS_WHOLE:
        mask = mask & rank_mask
    acc = tl.trans(acc * (1.0 / denominator)[None, :]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + dense[:, None] * rank + feature[None, :], acc, mask=mask)


# ROWS and BLOCK are for 512 values in 16 bits: 32 heads fill the registers of a warpgroup on
# Hopper. Older GPUs have less shared memory, and newer ones accumulate in tensor memory.
LATENT_16_ROWS = Launches(
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
REFERENCE_VALUES = 512


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
    # The loads of a large tile take so much shared memory that an SM runs one program.
    fills_sm = launch["ROWS"] * launch["BLOCK"] > MIN_TILE * LATENT_16_ROWS.default["BLOCK"]
    warps = WARPS_PER_SM if fills_sm else launch[WARPS]
    splits = num_splits(programs, batch.max_context, resident_programs(query.device, warps))
    split_out, split_lse = _split_buffers(splits, out, lse)
    paged_latent_attention_kernel[(programs * splits,)](
        query,
        latent_cache,
        split_out,
        split_lse,
        batch.block_table,
        batch.query_bounds,
        batch.context_lengths,
        scale,
        tokens,
        batch.rows,
        splits,
        cdiv(MIN_SPLIT_TOKENS, launch["BLOCK"]),
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
        _merge_splits(split_out, split_lse, out, lse)
    return out


def latent_tile(query: torch.Tensor, value_features: int) -> dict[str, int]:
    """Choose a tile: heads of a token, and latents per iteration.

    Args:
        query: [t, n, c].
        value_features: leading features of a latent that are also its value.

    Returns:
        RANK, ROTATED, ROWS, BLOCK, num_warps and num_stages.
    """
    _, heads, features = query.shape
    width = padded(value_features)
    launches = LATENT if architecture(query.device) == HOPPER else LATENT_16_ROWS
    launch = launches.pick(query, f"{width} {query.dtype}")
    rows, block = launch["ROWS"], launch["BLOCK"]
    # Larger latents and fp32, which is multiplied without tensor cores, need smaller tiles.
    excess = max(1, width // REFERENCE_VALUES) * (1 if query.element_size() == 2 else 4)
    launch["ROWS"] = max(MIN_TILE, min(rows // excess, next_power_of_2(heads)))
    launch["BLOCK"] = max(MIN_TILE, block // excess)
    return {"RANK": width, "ROTATED": padded(features - value_features), **launch}
