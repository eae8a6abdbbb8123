# SPDX-License-Identifier: Apache-2.0
"""How many pairs of a query and a key a list of attention's blocks shows."""

from __future__ import annotations

from collections.abc import Iterable

from megatron.core.context_parallel.blockwise import AttentionBlock


def pair_count(blocks: Iterable[AttentionBlock], *, window: int | None = None) -> int:
    """Return how many (row, query, key) the blocks show: their part of attention's work.

    Args:
        blocks: of one window; with one they are not joined.
        window: the one they were made for.
    """
    count = 0
    for block in blocks:
        queries, keys = block.q1 - block.q0, block.k1 - block.k0
        pairs = queries * (queries + 1) // 2 if block.causal else queries * keys
        if window is not None:
            # Query number i does not see the first i + ahead keys; each query sees one at least.
            ahead = block.q_row_start - block.k_row_start - window + 1
            pairs -= _triangle(ahead + queries - 1) - _triangle(ahead - 1)
        count += (block.row1 - block.row0) * pairs
    return count


def _triangle(n: int) -> int:
    """Return 1 + 2 + ... + n; 0 for n < 1."""
    return n * (n + 1) // 2 if n > 0 else 0
