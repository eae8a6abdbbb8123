# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant attention: a query's bits depend on the query and its sequence's keys alone.

Keys are split into tiles of `KEY_TILE` positions, counted from the start of the sequence whatever
chunk of it a call computes. Each query, group of heads and tile has two matmuls of a fixed shape.
The tiles' outputs are merged by their log-sum-exp in the order of positions:

    (o, l), (o', l') → (o w + o' w', log(exp(l) + exp(l')))    [w, w'] = softmax([l, l'])

A tile that is masked out for a query has weight exactly 0 and leaves the merged output unchanged,
so neither longer sequences in the batch nor chunked prefill change a bit. (As in He et al. 2025,
"Defeating Nondeterminism in LLM Inference", the split of the keys has a fixed size, not a fixed
number of splits.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from megatron.core.ops.backend_choice import accumulation_dtype
from megatron.core.ops.paged_attention.cpu import PagedBatch

#: Positions of a tile of keys.
KEY_TILE = 64
#: The log-sum-exp over no keys; finite, so that differences are not NaN.
EMPTY_LSE = -1e30

#: Mask of a tile: True for masked positions, bool [q, 1, 1, k], and True for queries whose whole
#: tile is masked, bool [q, 1, 1, 1], or None if there are no such queries.
TileMask = tuple[Tensor, Tensor | None]


def tiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    **unsupported: object,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention of whole sequences; see `ops.attention.attention`.

    Args:
        query: [s, b, n, d].
        key, value: [s, b, g, d].
        causal, scale, softcap, window, sinks: as in `ops.attention.attention`; causal must be True.
        unsupported: document ids, document starts and dropout, which must be None.

    Returns:
        out [s, b, n, d] and lse [b, n, s].

    Raises:
        ValueError: several documents in a row, or dropout.
    """
    if not causal or any(option is not None for option in unsupported.values()):
        raise ValueError(
            "batch-invariant attention supports causal rows of one document, without "
            "dropout: give each document a separate row, and set attention-dropout 0"
        )
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    ends = torch.arange(1, len(query) + 1, device=query.device)
    num_tiles = -(-len(key) // KEY_TILE)
    outputs = [
        _attend(
            query[:, row],
            key[None, :, row],
            value[None, :, row],
            _tile_masks(ends, 0, num_tiles, window),
            scale,
            window,
            sinks,
            softcap,
        )
        for row in range(query.shape[1])
    ]
    outs, lses = zip(*outputs, strict=True)
    return torch.stack(outs, 1), torch.stack(lses).transpose(1, 2)


def tiled_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    batch: PagedBatch,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention over pages, [t, n, d]; see `ops.paged_attention.paged_attention`.

    Sequences with one new token are computed together, all others one by one. The groups are built
    once a step and shared by all layers of a window.
    """
    block_size = key_cache.shape[1]
    if window not in batch.tiles:
        batch.tiles[window] = _sequence_groups(batch, block_size, window)
    out = torch.zeros_like(query)
    for tokens, slots, masks in batch.tiles[window]:
        keys, values = (  # [rows, k, g, d]
            cache.flatten(0, 1).index_select(0, slots.view(-1)).unflatten(0, slots.shape)
            for cache in (key_cache, value_cache)
        )
        out[tokens] = _attend(query[tokens], keys, values, masks, scale, window, sinks, softcap)[0]
    return out


def _sequence_groups(
    batch: PagedBatch, block_size: int, window: int | None
) -> list[tuple[Tensor, Tensor, list[TileMask]]]:
    """Group the sequences of a step: those with one new token together, all others alone.

    Args:
        block_size: tokens of a page.

    Returns:
        For each group the indices of its query tokens [q], the cache slots of its keys [rows, k],
        in whole tiles, and the mask of each tile.
    """
    bounds, contexts = batch.query_bounds.tolist(), batch.context_lengths.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    decoding = [row for row, new in enumerate(lengths) if new == 1 and contexts[row]]
    row_groups = [decoding] if decoding else []
    row_groups += [[row] for row, new in enumerate(lengths) if new > 1 and contexts[row]]
    groups = []
    for rows in row_groups:
        tokens = torch.tensor([t for r in rows for t in range(bounds[r], bounds[r + 1])])
        context = torch.tensor([contexts[r] for r in rows])
        new = lengths[rows[0]]
        low = 0
        if window is not None:
            low = max(0, min(contexts[r] for r in rows) - new + 1 - window) // KEY_TILE * KEY_TILE
        num_tiles = -(-(int(context.max()) - low) // KEY_TILE)
        positions = torch.arange(low, low + num_tiles * KEY_TILE).expand(len(rows), -1)
        # A masked position reads a visible position's slot: its own page may be freed and hold NaN,
        # which a zero probability would not cancel.
        start = torch.zeros_like(context)
        if window is not None:
            start = (context - new + 1 - window).clamp(min=0)
        positions = torch.minimum(torch.maximum(positions, start[:, None]), context[:, None] - 1)
        slots = batch.block_table[rows].gather(1, positions // block_size).long() * block_size
        slots += positions % block_size
        end = contexts[rows[0]]
        ends = context if len(rows) > 1 else torch.arange(end - new, end) + 1
        groups.append((tokens, slots, list(_tile_masks(ends, low, num_tiles, window))))
    return groups


def _tile_masks(ends: Tensor, low: int, num_tiles: int, window: int | None) -> Iterator[TileMask]:
    """Yield the masks of the tiles from position `low` on.

    Args:
        ends: int64 [q], the number of positions up to and including each query.
        low: a multiple of `KEY_TILE`.
    """
    for start in range(low, low + num_tiles * KEY_TILE, KEY_TILE):
        positions = torch.arange(start, start + KEY_TILE, device=ends.device)
        masked = positions >= ends[:, None]  # [q, k]
        if window is not None:
            masked |= positions < ends[:, None] - window
        all_masked = masked.all(-1)[:, None, None, None]
        yield masked[:, None, None], all_masked if all_masked.any() else None


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    masks: Iterable[TileMask],
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return (out [q, n, d], lse [q, n]).

    Args:
        query: [q, n, d].
        keys, values: [q or 1, k, g, d]; the last tile may be short.
        masks: of each tile of keys, see `_tile_masks`.
    """
    num_queries, heads, features = query.shape
    groups, dtype = keys.shape[2], accumulation_dtype(query.dtype)
    query = (query.to(dtype) * scale).view(num_queries, groups, heads // groups, features)
    out = query.new_zeros(query.shape)
    lse = query.new_full((*query.shape[:-1], 1), EMPTY_LSE)
    for index, mask in enumerate(masks):
        tile = slice(index * KEY_TILE, (index + 1) * KEY_TILE)
        key, value = (_heads_first(x[:, tile].to(dtype)) for x in (keys, values))
        output = _attend_tile(query, key, value, *mask, softcap=softcap)
        # Without a window every query attends to the first tile of its sequence.
        out, lse = output if index == 0 and window is None else _merge(out, lse, *output)
    if sinks is not None:
        logits = sinks.to(dtype).view(1, groups, -1, 1).expand_as(lse)
        out, lse = _merge(out, lse, torch.zeros_like(out), logits)
    lse = lse.masked_fill(lse <= EMPTY_LSE / 2, -math.inf)
    return out.flatten(1, 2).to(keys.dtype), lse.flatten(1)


def _heads_first(x: Tensor) -> Tensor:
    """Return keys or values [q or 1, k, g, d] as [q or 1, g, KEY_TILE, d], zero-padded."""
    missing = KEY_TILE - x.shape[1]
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing))
    return x.transpose(1, 2).contiguous()


def _attend_tile(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    masked: Tensor,
    all_masked: Tensor | None,
    *,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return (out [q, g, r, d], lse [q, g, r, 1]) over one tile of keys.

    Args:
        query: [q, g, r, d], scaled.
        keys, values: [q or 1, g, k, d].
        masked, all_masked: see `TileMask`.
        softcap: of the logits before the mask.
    """
    logits = _bmm(query, keys.mT)  # [q, g, r, k]
    if softcap is not None:
        logits = (logits / softcap).tanh() * softcap
    logits = logits.masked_fill(masked, -math.inf)
    if all_masked is not None:
        # The softmax of a row of -inf is NaN.
        logits = logits.masked_fill(all_masked, 0.0)
    probs = logits.softmax(-1)
    lse = _logsumexp(logits)
    if all_masked is not None:
        probs, lse = probs.masked_fill(all_masked, 0.0), lse.masked_fill(all_masked, EMPTY_LSE)
    return _bmm(probs, values), lse


def _logsumexp(logits: Tensor) -> Tensor:
    """Return log Σ exp over the last dimension, kept: the maximum minus its log-probability."""
    return logits.amax(-1, keepdim=True) - logits.log_softmax(-1).amax(-1, keepdim=True)


def _bmm(x: Tensor, matrices: Tensor) -> Tensor:
    """Return x [q, g, r, a] times matrices [q or 1, g, a, c], [q, g, r, c].

    Every (query, group) pair is its own matrix of the batch, so its shape is fixed.
    """
    if len(matrices) == len(x):
        return torch.bmm(x.flatten(0, 1), matrices.flatten(0, 1)).unflatten(0, x.shape[:2])
    products = [
        torch.bmm(x[:, group].contiguous(), matrices[0, group].expand(len(x), -1, -1))
        for group in range(x.shape[1])
    ]
    return torch.stack(products, 1)


def _merge(out: Tensor, lse: Tensor, tile_out: Tensor, tile_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention (out [..., d], lse [..., 1]) over two disjoint sets of keys."""
    lses = torch.cat([lse, tile_lse], -1)
    weights = lses.softmax(-1)
    return out * weights[..., :1] + tile_out * weights[..., 1:], _logsumexp(lses)
