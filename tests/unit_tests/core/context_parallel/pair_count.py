# SPDX-License-Identifier: Apache-2.0
"""The number of visible (query, key) pairs in a list of attention blocks."""

from __future__ import annotations

from collections.abc import Iterable

from megatron.core.context_parallel.blockwise import AttentionBlock


def pair_count(blocks: Iterable[AttentionBlock], *, window: int | None = None) -> int:
    """Return the number of visible (row, query, key) triples, which measures attention's work.

    Args:
        blocks: blocks built for `window`; joined only without a window.
        window: sliding window of the blocks, in tokens.
    """
    count = 0
    for block in blocks:
        queries, keys = block.q1 - block.q0, block.k1 - block.k0
        pairs = queries * (queries + 1) // 2 if block.causal else queries * keys
        if window is not None:
            # Query i does not see the first i + hidden keys; each query sees at least one key.
            hidden = block.q_row_start - block.k_row_start - window + 1
            pairs -= _triangle(hidden + queries - 1) - _triangle(hidden - 1)
        count += (block.row1 - block.row0) * pairs
    return count


def _triangle(n: int) -> int:
    """Return 1 + 2 + ... + n; 0 for n < 1."""
    return n * (n + 1) // 2 if n > 0 else 0
