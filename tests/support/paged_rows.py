# SPDX-License-Identifier: Apache-2.0
"""Rows with keys and values in shuffled pages, and NaN in memory that attention must not read."""

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
        caches: fp64 keys and values, [blocks, block_size, g, d] each; NaN in unwritten memory.
        batch: block table and lengths.
        keys: keys of each row, fp64 [context, g, d].
        values: values of each row, fp64 [context, g, d].
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
    """Make rows with `new` tokens at the end of `contexts`; the values are deterministic.

    Args:
        new: number of new tokens of each row.
        contexts: number of tokens of each row, including new tokens; 0 for a padding row.
        heads: (n, g).
        features: d.
        block_size: tokens per page.
        padding: query tokens after the last row.
        window: attention window; pages before the window of every query are freed and hold NaN.
        bounds: (max_query, max_context); None takes the maximum over the rows.
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
        pages = range(low // block_size, -(-context // block_size))
        table[row, pages.start : pages.stop] = order[row * width :][pages.start : pages.stop]
        positions = torch.arange(low, context)
        page = table[row, positions // block_size].long()
        for cache, dense_rows in zip(caches, dense, strict=True):
            x = torch.randn(context, *shape[2:], generator=source, dtype=torch.float64)
            cache[page, positions % block_size] = x[low:]
            dense_rows.append(x)
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
