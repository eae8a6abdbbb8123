# SPDX-License-Identifier: Apache-2.0
"""SequenceLayout: positions, documents and samples of one microbatch, shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """What layers need to know of the tokens beside their values.

    Args:
        positions: int64 [s] or [s, b], each token's position in its sequence.
        document_ids: int [s_k, b], or None if every token sees all earlier ones. With a key-value
            cache s_k counts the cached tokens too.
        sample_ids: int64 [b], the global number of each sequence, or None outside training: dropout
            is a function of it and of the place in the row.
        places: int64 [s], each token's place in its row; None where that is its position.
    """

    positions: torch.Tensor
    document_ids: torch.Tensor | None = None
    sample_ids: torch.Tensor | None = None
    places: torch.Tensor | None = None

    @staticmethod
    def dense(
        length: int, *, sample_ids: torch.Tensor | None = None, device: torch.device | None = None
    ) -> SequenceLayout:
        """Return the layout of whole sequences of equal length."""
        return SequenceLayout(torch.arange(length, device=device), None, sample_ids)

    @staticmethod
    def packed(
        length: int,
        *,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        sample_ids: torch.Tensor | None = None,
        device: torch.device | None = None,
    ) -> SequenceLayout:
        """Return the layout of rows that may hold several documents each.

        Args:
            length: s.
            positions: int64 [b, s], each token's position in its document; None is 0 … s-1.
            document_ids: int [b, s]; None lets every token see all earlier ones.
            sample_ids: int64 [b]; None turns dropout off.
            device: of what is made here.
        """
        places = torch.arange(length, device=device)
        return SequenceLayout(
            positions=places if positions is None else positions.t().contiguous(),
            document_ids=None if document_ids is None else document_ids.t().contiguous(),
            sample_ids=sample_ids,
            places=places,
        )
