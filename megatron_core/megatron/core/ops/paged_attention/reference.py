# SPDX-License-Identifier: Apache-2.0
"""Paged attention in plain torch: row by row, the row's keys gathered from their pages.

Reads lengths on the host, so on a GPU it waits for the device; the kernel does not.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from megatron.core.ops.attention.masking import Mask
from megatron.core.ops.attention.reference import attention_forward
from megatron.core.ops.dispatch import accumulation_dtype
from megatron.core.ops.paged_attention.batch import PagedBatch


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out [t, n, d], lse [t, n]); see `ops.paged_attention.paged_attention`."""
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.full(
        query.shape[:2],
        float("-inf"),
        dtype=accumulation_dtype(query.dtype),
        device=query.device,
    )
    bounds, contexts = batch.query_bounds.tolist(), batch.context_lengths.tolist()
    _check_lengths(bounds, contexts, batch, query.shape[0])
    for row, context in enumerate(contexts):
        tokens = slice(bounds[row], bounds[row + 1])
        queries = tokens.stop - tokens.start
        if queries == 0 or context == 0:
            continue
        # What a window hides from all queries may lie in pages that others have by now.
        low = 0 if window is None else max(context - queries - window + 1, 0)
        key, value = (
            _gather(cache, batch.block_table[row], low, context)[:, None]  # [s_k, 1, g, d]
            for cache in (key_cache, value_cache)
        )
        mine, mine_lse = attention_forward(
            query[tokens, None], key, value, sinks, scale, Mask(window=window)
        )
        out[tokens] = mine[:, 0]  # [s_q, n, d]
        lse[tokens] = mine_lse[0].t().to(lse.dtype)  # [s_q, n]
    return out, lse


def write_to_pages(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write tokens to their slots in place; see `ops.paged_attention.write_to_pages`."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    size = key_cache.shape[1]
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache[slots // size, slots % size] = new[kept]


def _gather(cache: torch.Tensor, pages: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Copy the tokens low .. high - 1 of a row out of its pages, as [high - low, g, d]."""
    size = cache.shape[1]
    first = low // size
    found = cache[pages[first : -(-high // size)].long()]  # [pages, size, g, d]
    return found.flatten(0, 1)[low - first * size : high - first * size]


def _check_lengths(bounds: list[int], contexts: list[int], batch: PagedBatch, tokens: int) -> None:
    """Raise ValueError unless the lengths on the device keep to each other and to the bounds."""
    queries = [end - begin for begin, end in pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] > tokens or min(queries, default=0) < 0:
        raise ValueError(
            f"paged_attention: query_bounds {bounds} must begin at 0, never fall and end within"
            f" the {tokens} tokens"
        )
    for row, (new, context) in enumerate(zip(queries, contexts, strict=True)):
        if new > batch.max_query or context > batch.max_context or context < 0:
            raise ValueError(
                f"paged_attention: row {row} has {new} new tokens and a context of {context}, over"
                f" max_query={batch.max_query} or max_context={batch.max_context}: raise these"
            )
        if 0 < context < new:
            raise ValueError(
                f"paged_attention: row {row} has {new} new tokens but a context of only {context}:"
                " context_lengths count the new tokens in"
            )
