# SPDX-License-Identifier: Apache-2.0
"""Rows whose keys and values lie in shuffled pages, with NaN wherever attention may not look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megatron.core.ops.paged_attention import PagedBatch


@dataclass(frozen=True, kw_only=True)
class PagedRows:
    """A batch, its queries and its caches; and the same keys and values row by row.

    Args:
        query: fp64 [t, n, d].
        caches: fp64 keys and values, [blocks, block_size, g, d] each; NaN where nothing was put.
        batch: where everything is.
        keys: of each row, fp64 [context, g, d].
        values: of each row, fp64 [context, g, d].
    """

    query: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]
    batch: PagedBatch
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


def paged_rows(
    new: Sequence[int],
    contexts: Sequence[int],
    *,
    heads: tuple[int, int],
    features: int,
    block_size: int = 16,
    padding: int = 0,
    window: int | None = None,
    bounds: tuple[int, int] | None = None,
) -> PagedRows:
    """Make rows of so many new tokens at the end of so long contexts; always the same numbers.

    Args:
        new: new tokens of each row.
        contexts: tokens of each row, the new ones too; 0 for a row of padding.
        heads: (n, g).
        features: d.
        block_size: places of a page.
        padding: tokens of the query behind the last row.
        window: what lies before every window of a row is NaN, its pages are taken back.
        bounds: (max_query, max_context); None are the greatest of the rows.
    """
    source = torch.Generator().manual_seed(sum(new) + 7 * sum(contexts))
    rows, (max_query, max_context) = len(new), bounds or (max(new), max(contexts))
    width = -(-max(max_context, *contexts) // block_size)
    order = torch.randperm(rows * width + 3, generator=source).int()
    table = torch.full((rows, width), -1, dtype=torch.int32)
    shape = (len(order), block_size, heads[1], features)
    caches = tuple(torch.full(shape, torch.nan, dtype=torch.float64) for _ in range(2))
    dense: tuple[list[torch.Tensor], ...] = ([], [])
    for row, (fresh, context) in enumerate(zip(new, contexts, strict=True)):
        low = 0 if window is None else max(context - fresh - window + 1, 0)
        held = range(low // block_size, -(-context // block_size))
        table[row, held.start : held.stop] = order[row * width :][held.start : held.stop]
        place = torch.arange(low, context)
        page = table[row, place // block_size].long()
        for cache, parts in zip(caches, dense, strict=True):
            x = torch.randn(context, *shape[2:], generator=source, dtype=torch.float64)
            cache[page, place % block_size] = x[low:]
            parts.append(x)
    tokens = sum(new) + padding
    return PagedRows(
        query=torch.randn(tokens, heads[0], features, generator=source, dtype=torch.float64),
        caches=caches,
        batch=PagedBatch(
            block_table=table,
            query_bounds=torch.tensor([0, *new]).cumsum(0).int(),
            context_lengths=torch.tensor(contexts).int(),
            max_query=max_query,
            max_context=max_context,
        ),
        keys=tuple(dense[0]),
        values=tuple(dense[1]),
    )


def moved(rows: PagedRows, device: torch.device, dtype: torch.dtype) -> PagedRows:
    """Return the same rows on another device, queries and caches in another dtype."""
    batch = rows.batch
    return replace(
        rows,
        query=rows.query.to(device, dtype),
        caches=tuple(x.to(device, dtype) for x in rows.caches),
        batch=replace(
            batch,
            block_table=batch.block_table.to(device),
            query_bounds=batch.query_bounds.to(device),
            context_lengths=batch.context_lengths.to(device),
        ),
    )
