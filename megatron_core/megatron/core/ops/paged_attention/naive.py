# SPDX-License-Identifier: Apache-2.0
"""The equations of paged attention: each row attends to the keys that its block table names."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from megatron.core.ops.attention import naive

if TYPE_CHECKING:
    from megatron.core.ops.paged_attention import PagedBatch


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    batch: PagedBatch,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out [t, n, d], lse [t, n]), see `ops.paged_attention.paged_attention`.

    Token p of a row is in block table[p // size] at offset p % size; the new tokens are its last.
    Pages before the window of all new tokens are not read.
    """
    out = query.new_zeros(*query.shape[:2], value_cache.shape[-1])
    lse = query.new_full(query.shape[:2], -torch.inf)
    contexts, size = batch.context_lengths.tolist(), key_cache.shape[1]
    for row, (begin, end) in enumerate(pairwise(batch.query_bounds.tolist())):
        if begin == end or not contexts[row]:
            continue
        start = 0 if window is None else max(contexts[row] - (end - begin) - window + 1, 0)
        position = torch.arange(start, contexts[row], device=query.device)
        block = batch.block_table[row, position // size].long()
        keys, values = (x[block, position % size, :][:, None] for x in (key_cache, value_cache))
        options = {"causal": True, "scale": scale, "softcap": softcap, "window": window}
        y, row_lse = naive.attention(query[begin:end, None], keys, values, sinks, **options)
        out[begin:end], lse[begin:end] = y[:, 0], row_lse[0].t()
    return out, lse
