# SPDX-License-Identifier: Apache-2.0
"""Which keys a query may see: causal order, a left window, documents."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
    """The visibility rule of one attention call.

    Queries and keys are neighbouring tokens of a row: query i stands at place query_start + i, key
    j at key_start + j. Order, window and dropout go by places.

    Args:
        causal: a query sees no later key.
        window: a query at place q sees only keys k with q - k < window.
        document_ids: int [s_k, b], the keys' documents; tokens see only their own document.
        query_document_ids: int [s_q, b]; None takes them from the keys that stand where the
            queries do.
        query_start: place of the first query; None where the queries are the last of the keys.
        key_start: place of the first key.
    """

    causal: bool = True
    window: int | None = None
    document_ids: torch.Tensor | None = None
    query_document_ids: torch.Tensor | None = None
    query_start: int | None = None
    key_start: int = 0

    def shift(self, queries: int, keys: int) -> int:
        """Return how many places the first query stands behind the first key."""
        return keys - queries if self.query_start is None else self.query_start - self.key_start

    def documents_of_queries(self, queries: int, keys: int) -> torch.Tensor | None:
        """Return int [s_q, b], or None without documents."""
        if self.query_document_ids is not None or self.document_ids is None:
            return self.query_document_ids
        shift = self.shift(queries, keys)
        return self.document_ids[shift : shift + queries]

    def key_range(self, first_row: int, last_row: int, queries: int, keys: int) -> tuple[int, int]:
        """Bound the keys that query rows first_row .. last_row - 1 can see, as [low, high)."""
        shift = self.shift(queries, keys)
        high = min(max(last_row + shift, 0), keys) if self.causal else keys
        low = 0
        if self.window is not None:
            low = min(max(first_row + shift - self.window + 1, 0), keys)
        return low, high

    def hidden(
        self,
        rows: tuple[int, int],
        columns: tuple[int, int],
        *,
        shift: int,
        documents: torch.Tensor | None,
        device: torch.device,
    ) -> torch.Tensor | None:
        """Mark the (query, key) pairs that must not see each other.

        Args:
            rows: [first, last) query rows.
            columns: [first, last) keys.
            shift: as `shift` returns it.
            documents: as `documents_of_queries` returns them.
            device: where to put the result.

        Returns:
            bool [1 or b, 1, q, k], True where hidden, or None where every pair is visible.
        """
        hidden = None
        positions = torch.arange(*rows, device=device)[:, None] + shift  # [q, 1]
        keys = torch.arange(*columns, device=device)  # [k]
        if self.causal and columns[1] - 1 > rows[0] + shift:
            hidden = keys > positions
        if self.window is not None and rows[1] - 1 + shift - columns[0] >= self.window:
            outside = positions - keys >= self.window
            hidden = outside if hidden is None else hidden | outside
        if hidden is not None:
            hidden = hidden[None, None]  # [1, 1, q, k]
        if self.document_ids is not None and documents is not None:
            mine = documents[slice(*rows)].t()  # [b, q]
            other = self.document_ids[columns[0] : columns[1]].t()  # [b, k]
            foreign = mine[:, None, :, None] != other[:, None, None, :]  # [b, 1, q, k]
            hidden = foreign if hidden is None else hidden | foreign
        return hidden
