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
from itertools import pairwise

import torch
from torch import Tensor

from megatron.core.ops.dispatch import accumulation_dtype
from megatron.core.ops.paged_attention.reference import PagedBatch

#: Places of a tile of keys.
KEY_TILE = 64
#: The log-sum-exp of no key, finite so that differences are numbers.
NOTHING = -1e30


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
        refused: document ids and dropout, which have to be None.

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
    found = [
        _attend(
            query[:, row], key[None, :, row], value[None, :, row], ends, 0, scale, window, sinks
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

    Rows that have one new token go together, the others one after another.
    """
    bounds, contexts = batch.query_bounds.tolist(), batch.context_lengths.tolist()
    out, size = torch.zeros_like(query), key_cache.shape[1]
    caches = [cache.flatten(0, 1) for cache in (key_cache, value_cache)]
    one = [row for row, (a, b) in enumerate(pairwise(bounds)) if b - a == 1 and contexts[row]]
    groups = [one] if one else []
    groups += [[row] for row, (a, b) in enumerate(pairwise(bounds)) if b - a > 1 and contexts[row]]
    for rows in groups:
        places = torch.tensor([t for r in rows for t in range(bounds[r], bounds[r + 1])])
        last = torch.tensor([contexts[r] for r in rows])
        new = bounds[rows[0] + 1] - bounds[rows[0]]
        low = 0
        if window is not None:
            low = max(0, min(contexts[r] for r in rows) - new + 1 - window) // KEY_TILE * KEY_TILE
        wanted = torch.arange(low, int(last.max())).expand(len(rows), -1)
        # Places that no query sees take the page of one that all do: what is there may be anything.
        first = torch.zeros_like(last) if window is None else (last - new + 1 - window).clamp(min=0)
        wanted = torch.minimum(torch.maximum(wanted, first[:, None]), last[:, None] - 1)
        slots = batch.block_table[rows].gather(1, wanted // size).long() * size + wanted % size
        ends = last if len(rows) > 1 else torch.arange(contexts[rows[0]] - new, last[0]) + 1
        keys, values = (cache[slots] for cache in caches)  # [rows, k, g, d]
        out[places] = _attend(query[places], keys, values, ends, low, scale, window, sinks)[0]
    return out


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    ends: Tensor,
    low: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (out [q, n, d], lse [q, n]).

    Args:
        query: [q, n, d].
        keys, values: [q or 1, k, g, d], of places from `low` on, a multiple of `KEY_TILE`.
        ends: int64 [q], how many places each query's row has up to itself.
    """
    count, heads, features = query.shape
    groups, wide = keys.shape[2], accumulation_dtype(query.dtype)
    query = (query.to(wide) * scale).view(count, groups, heads // groups, features)
    places = torch.arange(low, low + keys.shape[1], device=query.device)
    out = query.new_zeros(query.shape)
    lse = query.new_full((*query.shape[:-1], 1), NOTHING)
    for start in range(0, len(places), KEY_TILE):
        tile = slice(start, start + KEY_TILE)
        seen = places[tile] < ends[:, None]  # [q, k]
        if window is not None:
            seen &= places[tile] >= ends[:, None] - window
        part = _tile(query, *(x[:, tile].to(wide).contiguous() for x in (keys, values)), seen)
        out, lse = _merged(out, lse, *part)
    if sinks is not None:
        logits = sinks.to(wide).view(1, groups, -1, 1).expand_as(lse)
        out, lse = _merged(out, lse, torch.zeros_like(out), logits)
    lse = lse.masked_fill(lse <= NOTHING / 2, -math.inf)
    return out.flatten(1, 2).to(keys.dtype), lse.flatten(1)


def _tile(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out [q, g, r, d], lse [q, g, r, 1]) over one tile of keys, padded to its size.

    Args:
        query: [q, g, r, d], scaled.
        keys, values: [q or 1, k, g, d].
        seen: bool [q, k].
    """
    count, groups = query.shape[:2]
    if missing := KEY_TILE - keys.shape[1]:
        keys, values = (
            torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing)) for x in (keys, values)
        )
        seen = torch.nn.functional.pad(seen, (0, missing))
    none = ~seen.any(-1)[:, None, None]  # [q, 1, 1]
    outs, sums = [], []
    for group in range(groups):
        key, value = (x[:, :, group].expand(count, -1, -1) for x in (keys, values))  # [q, k, d]
        logits = torch.bmm(query[:, group], key.mT)  # [q, r, k]
        logits = logits.masked_fill(~seen[:, None], -math.inf).masked_fill(none, 0.0)
        shares = logits.softmax(-1).masked_fill(none, 0.0)
        outs.append(torch.bmm(shares, value))
        # The largest logit less its log-probability.
        most = logits.amax(-1, keepdim=True)
        total = most - logits.log_softmax(-1).amax(-1, keepdim=True)
        sums.append(total.masked_fill(none, NOTHING))
    return torch.stack(outs, 1), torch.stack(sums, 1)


def _merged(out: Tensor, lse: Tensor, more: Tensor, lse_more: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention over both sets of keys, from (out [..., d], lse [..., 1]) of each."""
    both = torch.cat([lse, lse_more], -1)
    weights = both.softmax(-1)
    total = both.amax(-1, keepdim=True) - both.log_softmax(-1).amax(-1, keepdim=True)
    return out * weights[..., :1] + more * weights[..., 1:], total
