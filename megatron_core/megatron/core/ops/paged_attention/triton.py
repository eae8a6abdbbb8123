# SPDX-License-Identifier: Apache-2.0
"""Paged attention in Triton: tiles, grids and launches; the host waits for nothing."""

from __future__ import annotations

import functools

import torch
import triton

from megatron.core.ops.launches import STAGES, WARPS, Launches
from megatron.core.ops.paged_attention.batch import PagedBatch
from megatron.core.ops.paged_attention.kernels import (
    merge_pieces_kernel,
    paged_attention_kernel,
    write_to_pages_kernel,
)
from megatron.core.ops.paged_attention.splitting import SHORTEST_PIECE, pieces

# Tiles of few rows wait for memory: they want many loads in flight. Tiles of many rows multiply.
# ROWS and BLOCK are of heads of 128 features in 16 bits; wider ones have fewer.
DECODE = Launches(
    "paged_attention_decode",
    {"ROWS": 64, "BLOCK": 64, WARPS: 4, STAGES: 3},
    others=(
        {"ROWS": 64, "BLOCK": 32, WARPS: 4, STAGES: 4},
        {"ROWS": 64, "BLOCK": 64, WARPS: 4, STAGES: 2},
        {"ROWS": 64, "BLOCK": 128, WARPS: 4, STAGES: 2},
        {"ROWS": 64, "BLOCK": 128, WARPS: 8, STAGES: 3},
    ),
)
PREFILL = Launches(
    "paged_attention_prefill",
    {"ROWS": 128, "BLOCK": 64, WARPS: 8, STAGES: 2},
    others=(
        {"ROWS": 128, "BLOCK": 64, WARPS: 8, STAGES: 3},
        {"ROWS": 128, "BLOCK": 128, WARPS: 8, STAGES: 2},
        {"ROWS": 64, "BLOCK": 64, WARPS: 4, STAGES: 2},
        {"ROWS": 64, "BLOCK": 64, WARPS: 4, STAGES: 3},
    ),
)
MERGE = Launches(
    "paged_attention_merge",
    {"BLOCK": 16, WARPS: 4},
    others=({"BLOCK": 8, WARPS: 2}, {"BLOCK": 32, WARPS: 4}),
)
WRITE = Launches(
    "write_to_pages",
    {"BLOCK": 1024, WARPS: 4},
    others=({"BLOCK": 512, WARPS: 2}, {"BLOCK": 2048, WARPS: 8}),
)

SMALLEST_TILE, LARGEST_TILE = 16, 128
USUAL_FEATURES = 128
#: Warps that a processor needs: two decoding programs have 128 KiB on their way, a prefilling one
#: takes most registers.
WARPS_A_PROCESSOR = 8
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
    programs = tiles * groups * triton.cdiv(heads // groups, tile["HEADS"])
    seen = min(batch.max_context, window + tile["QUERIES"] if window else batch.max_context)
    splits = pieces(programs, seen, resident(query.device, tile[WARPS]))
    found, found_lse = out, lse
    if splits > 1:
        found, found_lse = (
            torch.empty((splits, *x.shape), dtype=torch.float32, device=query.device)
            for x in (out, lse)
        )
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
        triton.cdiv(SHORTEST_PIECE, tile["BLOCK"]),
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
    """Write tokens to their slots in place; see `ops.paged_attention.write_to_pages`."""
    key, value = _dense_features(key), _dense_features(value)
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
    wanted = max(SMALLEST_TILE, triton.next_power_of_2(max_query * ratio))
    launches = DECODE if wanted <= DECODE.default["ROWS"] else PREFILL
    launch = launches.pick(query, f"{width} {query.dtype}")
    # Products of fp32 run without tensor cores, from registers: a quarter of the elements.
    width_to_hold = width if query.element_size() == 2 else 4 * width
    most = min(launch["ROWS"], launch["ROWS"] * USUAL_FEATURES // width_to_hold)
    launch["ROWS"] = max(SMALLEST_TILE, min(wanted, most))
    keys = min(LARGEST_TILE, launch["BLOCK"] * USUAL_FEATURES // width_to_hold)
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
    return max(SMALLEST_TILE, triton.next_power_of_2(features))


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
