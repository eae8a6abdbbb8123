# SPDX-License-Identifier: Apache-2.0
"""Attention whose bits depend on a query and the keys of its row alone.

Keys are taken in tiles of `KEY_TILE` places that are counted from the beginning of the row,
whatever chunk of it a call computes. Per query, group of heads and tile there are two products of
one shape; the tiles' results are merged by their log-sum-exp in the order of places:

    (o, l), (o', l') → (o w + o' w', log(exp(l) + exp(l')))    [w, w'] = softmax([l, l'])

A tile that the query does not see has weight exactly 0 and leaves the others exactly as they are,
so neither longer neighbours nor chunks change a bit. (The split of keys has a fixed size, not a
fixed number of parts, as in He et al. 2025, "Defeating Nondeterminism in LLM Inference".)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from megatron.core.ops.dispatch import accumulation_dtype
from megatron.core.ops.paged_attention.reference import PagedBatch

#: Places of a tile of keys.
KEY_TILE = 64
#: The log-sum-exp of no key, finite so that differences are numbers.
NOTHING = -1e30

#: What queries see of a tile: the places that are hidden, bool [q, 1, 1, k], and the queries that
#: see none, bool [q, 1, 1, 1]; None if each sees some.
Seen = tuple[Tensor, Tensor | None]


def tiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    **refused: object,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention of whole rows; see `ops.attention.attention`.

    Args:
        query: [s, b, n, d].
        key, value: [s, b, g, d].
        causal, scale, window, sinks: see there.
        refused: document ids, where they begin, and dropout, which have to be None.

    Raises:
        ValueError: several documents in a row, or dropout.
    """
    if not causal or any(option is not None for option in refused.values()):
        raise ValueError(
            "batch-invariant attention takes causal rows of one document, without dropout: give "
            "each document a row of its own, and set attention-dropout 0"
        )
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    ends = torch.arange(1, len(query) + 1, device=query.device)
    tiles = -(-len(key) // KEY_TILE)
    found = [
        _attend(
            query[:, row],
            key[None, :, row],
            value[None, :, row],
            _seen(ends, 0, tiles, window),
            scale,
            window,
            sinks,
        )
        for row in range(query.shape[1])
    ]
    outs, sums = zip(*found, strict=True)
    return torch.stack(outs, 1), torch.stack(sums).transpose(1, 2)


def tiled_paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention over pages, [t, n, d]; see `ops.paged_attention.paged_attention`.

    Rows that have one new token go together, the others one after another: `_groups`, once a step.
    """
    size = key_cache.shape[1]
    if window not in batch.tiles:
        batch.tiles[window] = _groups(batch, size, window)
    out = torch.zeros_like(query)
    for places, slots, seen in batch.tiles[window]:
        keys, values = (  # [rows, k, g, d]
            cache.flatten(0, 1).index_select(0, slots.view(-1)).unflatten(0, slots.shape)
            for cache in (key_cache, value_cache)
        )
        out[places] = _attend(query[places], keys, values, seen, scale, window, sinks)[0]
    return out


def _groups(
    batch: PagedBatch, size: int, window: int | None
) -> list[tuple[Tensor, Tensor, list[Seen]]]:
    """Return rows that are attended to together: places of their tokens [q], slots of the places
    that they see [rows, k], whole tiles, and which of each tile.

    Args:
        size: places of a page.
    """
    bounds, contexts = batch.query_bounds.tolist(), batch.context_lengths.tolist()
    one = [row for row, (a, b) in enumerate(pairwise(bounds)) if b - a == 1 and contexts[row]]
    together = [one] if one else []
    together += [
        [row] for row, (a, b) in enumerate(pairwise(bounds)) if b - a > 1 and contexts[row]
    ]
    found = []
    for rows in together:
        places = torch.tensor([t for r in rows for t in range(bounds[r], bounds[r + 1])])
        last = torch.tensor([contexts[r] for r in rows])
        new = bounds[rows[0] + 1] - bounds[rows[0]]
        low = 0
        if window is not None:
            low = max(0, min(contexts[r] for r in rows) - new + 1 - window) // KEY_TILE * KEY_TILE
        tiles = -(-(int(last.max()) - low) // KEY_TILE)
        wanted = torch.arange(low, low + tiles * KEY_TILE).expand(len(rows), -1)
        # Places that no query sees take the page of one that all do: what is there may be anything.
        first = torch.zeros_like(last) if window is None else (last - new + 1 - window).clamp(min=0)
        wanted = torch.minimum(torch.maximum(wanted, first[:, None]), last[:, None] - 1)
        slots = batch.block_table[rows].gather(1, wanted // size).long() * size + wanted % size
        ends = last if len(rows) > 1 else torch.arange(contexts[rows[0]] - new, last[0]) + 1
        found.append((places, slots, list(_seen(ends, low, tiles, window))))
    return found


def _seen(ends: Tensor, low: int, tiles: int, window: int | None) -> Iterator[Seen]:
    """Yield what queries see of tiles of places from `low` on, a multiple of `KEY_TILE`.

    Args:
        ends: int64 [q], how many places each query's row has up to itself.
    """
    for start in range(low, low + tiles * KEY_TILE, KEY_TILE):
        places = torch.arange(start, start + KEY_TILE, device=ends.device)
        hidden = places >= ends[:, None]  # [q, k]
        if window is not None:
            hidden |= places < ends[:, None] - window
        none = hidden.all(-1)[:, None, None, None]
        yield hidden[:, None, None], none if none.any() else None


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Iterable[Seen],
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (out [q, n, d], lse [q, n]).

    Args:
        query: [q, n, d].
        keys, values: [q or 1, k, g, d], the last tile may be short.
        seen: of each tile of keys, see `_seen`.
    """
    count, heads, features = query.shape
    groups, wide = keys.shape[2], accumulation_dtype(query.dtype)
    query = (query.to(wide) * scale).view(count, groups, heads // groups, features)
    out = query.new_zeros(query.shape)
    lse = query.new_full((*query.shape[:-1], 1), NOTHING)
    for number, some in enumerate(seen):
        tile = slice(number * KEY_TILE, (number + 1) * KEY_TILE)
        part = _tile(query, *(_of_heads(x[:, tile].to(wide)) for x in (keys, values)), *some)
        # Without a window every query sees the first tile of its row.
        out, lse = part if number == 0 and window is None else _merged(out, lse, *part)
    if sinks is not None:
        logits = sinks.to(wide).view(1, groups, -1, 1).expand_as(lse)
        out, lse = _merged(out, lse, torch.zeros_like(out), logits)
    lse = lse.masked_fill(lse <= NOTHING / 2, -math.inf)
    return out.flatten(1, 2).to(keys.dtype), lse.flatten(1)


def _of_heads(x: Tensor) -> Tensor:
    """Return keys or values [q or 1, k, g, d] as [q or 1, g, KEY_TILE, d], contiguous."""
    missing = KEY_TILE - x.shape[1]
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing))
    return x.transpose(1, 2).contiguous()


def _tile(
    query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, none: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return (out [q, g, r, d], lse [q, g, r, 1]) over one tile of keys.

    Args:
        query: [q, g, r, d], scaled.
        keys, values: [q or 1, g, k, d].
        hidden, none: see `Seen`.
    """
    logits = _products(query, keys.mT).masked_fill(hidden, -math.inf)  # [q, g, r, k]
    if none is not None:
        logits = logits.masked_fill(none, 0.0)
    shares = logits.softmax(-1)
    # The largest logit less its log-probability.
    total = logits.amax(-1, keepdim=True) - logits.log_softmax(-1).amax(-1, keepdim=True)
    if none is not None:
        shares, total = shares.masked_fill(none, 0.0), total.masked_fill(none, NOTHING)
    return _products(shares, values), total


def _products(x: Tensor, matrices: Tensor) -> Tensor:
    """Return x [q, g, r, a] times matrices [q or 1, g, a, c], [q, g, r, c], one by one."""
    if len(matrices) == len(x):
        return torch.bmm(x.flatten(0, 1), matrices.flatten(0, 1)).unflatten(0, x.shape[:2])
    found = [
        torch.bmm(x[:, group].contiguous(), matrices[0, group].expand(len(x), -1, -1))
        for group in range(x.shape[1])
    ]
    return torch.stack(found, 1)


def _merged(out: Tensor, lse: Tensor, more: Tensor, lse_more: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention over both sets of keys, from (out [..., d], lse [..., 1]) of each."""
    both = torch.cat([lse, lse_more], -1)
    weights = both.softmax(-1)
    total = both.amax(-1, keepdim=True) - both.log_softmax(-1).amax(-1, keepdim=True)
    return out * weights[..., :1] + more * weights[..., 1:], total
