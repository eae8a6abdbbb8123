# SPDX-License-Identifier: Apache-2.0
"""Paged attention in plain torch: row by row, the row's keys gathered from their pages.

Reads lengths on the host, so on a GPU it waits for the device; the kernel does not.

Which pages hold the keys of each row of a batch, and which tokens of the batch are new.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import torch

from megatron.core.ops.attention.reference import Mask, attention_forward
from megatron.core.ops.dispatch import accumulation_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedBatch:
    """The rows of one engine step: packed new tokens, and the pages that hold their contexts.

    A page is a block of the cache. Token number p of row i lies in page block_table[i, p // size],
    at place p % size. The new tokens of a row are the last ones of its context, and their keys and
    values are in the cache before attention is asked for. Numbers on the device are never read by
    the host, which knows two upper bounds instead: so a CUDA graph can be captured with the bounds
    of its bucket, and replayed with any batch that fits.

    Padding is inert. A row of context length 0 gets out 0 and lse -inf for its tokens, and so do
    tokens behind the last row; a row without new tokens does nothing. Entries of the table past a
    context, or wholly before what a window still sees, are never used and may hold anything.

    Args:
        block_table: int32 [b, blocks of a row].
        query_bounds: int32 [b + 1], where each row's new tokens begin; the first is 0.
        context_lengths: int32 [b], tokens of each row in the cache, the new ones too.
        max_query: no row has more new tokens.
        max_context: no row has a longer context.

    Raises:
        ValueError: shapes, dtypes or bounds that do not fit.
    """

    block_table: torch.Tensor
    query_bounds: torch.Tensor
    context_lengths: torch.Tensor
    max_query: int
    max_context: int

    def __post_init__(self) -> None:
        rows = self.context_lengths.numel()
        for name, x, shape, fits in (
            ("context_lengths", self.context_lengths, "[b]", self.context_lengths.ndim == 1),
            ("query_bounds", self.query_bounds, "[b + 1]", self.query_bounds.shape == (rows + 1,)),
            (
                "block_table",
                self.block_table,
                "[b, blocks]",
                self.block_table.shape[:-1] == (rows,),
            ),
        ):
            if not fits or x.dtype != torch.int32 or not _is_dense(x) or x.device != self.device:
                raise ValueError(
                    f"paged attention: {name} {tuple(x.shape)} {x.dtype} on {x.device} must be"
                    f" int32 {shape}, b = {rows}, on one device, its last dimension dense"
                )
        if self.max_query < 1 or self.max_context < 1:
            raise ValueError(
                f"paged attention: max_query={self.max_query} and max_context={self.max_context}"
                " must be at least 1: give the bounds of the largest batch"
            )

    @property
    def device(self) -> torch.device:
        """Where table, bounds and lengths are."""
        return self.context_lengths.device

    @property
    def rows(self) -> int:
        """How many rows the batch has, padding included."""
        return self.context_lengths.shape[0]


def _is_dense(x: torch.Tensor) -> bool:
    """Say whether the last dimension has no gaps."""
    return x.stride(-1) == 1 or x.shape[-1] <= 1


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
