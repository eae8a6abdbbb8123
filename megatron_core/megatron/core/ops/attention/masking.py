# SPDX-License-Identifier: Apache-2.0
"""Which keys a query may see: causal order, a left window, documents."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
    """The visibility rule of one attention call.

    Query row i stands at position i + (s_k - s_q).

    Args:
        causal: a query sees no later key.
        window: a query at position q sees only keys k with q - k < window.
        document_ids: int [s_k, b]; tokens see only their own document.
    """

    causal: bool = True
    window: int | None = None
    document_ids: torch.Tensor | None = None

    def key_range(self, first_row: int, last_row: int, queries: int, keys: int) -> tuple[int, int]:
        """Bound the keys that query rows first_row .. last_row - 1 can see, as [low, high)."""
        shift = keys - queries
        high = min(last_row + shift, keys) if self.causal else keys
        low = 0
        if self.window is not None:
            low = min(max(first_row + shift - self.window + 1, 0), keys - 1)
        return low, high

    def hidden(
        self,
        rows: tuple[int, int],
        columns: tuple[int, int],
        *,
        shift: int,
        device: torch.device,
    ) -> torch.Tensor | None:
        """Mark the (query, key) pairs that must not see each other.

        Args:
            rows: [first, last) query rows.
            columns: [first, last) key positions.
            shift: position of query row 0, s_k - s_q.
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
        if self.document_ids is not None:
            mine = self.document_ids[rows[0] + shift : rows[1] + shift].t()  # [b, q]
            other = self.document_ids[columns[0] : columns[1]].t()  # [b, k]
            foreign = mine[:, None, :, None] != other[:, None, None, :]  # [b, 1, q, k]
            hidden = foreign if hidden is None else hidden | foreign
        return hidden
