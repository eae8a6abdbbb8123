# SPDX-License-Identifier: Apache-2.0
"""Rows of samples as the host reads them: tokens, where the loss counts, what documents there are
in a row, and which of its positions are padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True, eq=False, kw_only=True)
class SampleRows:
    """Several samples of one length.

    Args:
        tokens: int64 [b, s + 1], inputs and labels in one.
        loss_mask: float32 [b, s], 1 where the loss counts.
        positions: int64 [b, s], each input's position in its document; None is 0 .. s - 1.
        document_ids: int32 [b, s], 0, 1, ... along a row: inputs see only their own document. None
            is one document a row.
        padding: bool [b, s], True for inputs that hold no data, as after the last conversation of
            a packed row. They are not in the loss and no other input sees them; routers of experts
            neither dispatch nor count them. None is no padding.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    positions: np.ndarray | None = None
    document_ids: np.ndarray | None = None
    padding: np.ndarray | None = None

    @staticmethod
    def merge(size: int, parts: Sequence[tuple[np.ndarray, SampleRows]]) -> SampleRows:
        """Put rows from several sources into one order.

        Args:
            size: b.
            parts: (the rows' places, the rows), together every place once; all with the same
                fields.
        """
        merged = {}
        for field in fields(SampleRows):
            values = [(places, vars(rows)[field.name]) for places, rows in parts]
            first = values[0][1]
            if first is None:
                continue
            merged[field.name] = np.empty((size, *first.shape[1:]), dtype=first.dtype)
            for places, value in values:
                merged[field.name][places] = value
        return SampleRows(**merged)


def documents_between(tokens: np.ndarray, end: int) -> np.ndarray:
    """Number the documents of each row; the token that ends one belongs to it.

    Args:
        tokens: inputs, int64 [b, s].
        end: id of the end-of-document token.

    Returns:
        int32 [b, s], 0, 1, ... along each row.
    """
    found = np.zeros(tokens.shape, dtype=np.int32)
    np.cumsum(tokens[:, :-1] == end, axis=1, out=found[:, 1:])
    return found


def positions_within(document_ids: np.ndarray) -> np.ndarray:
    """Count positions from the start of each document.

    Args:
        document_ids: int [b, s], not falling along a row.

    Returns:
        int64 [b, s].
    """
    places = np.arange(document_ids.shape[1], dtype=np.int64)
    starts = np.zeros(document_ids.shape, dtype=np.int64)
    new = document_ids[:, 1:] != document_ids[:, :-1]
    starts[:, 1:] = np.where(new, places[1:], 0)
    return places - np.maximum.accumulate(starts, axis=1)


def cumulative_lengths(document_ids: np.ndarray) -> np.ndarray:
    """Say where the documents of each row start: what kernels for packed sequences take.

    Args:
        document_ids: int [b, s], 0, 1, ... along each row.

    Returns:
        int32 [b, d + 1] with d the most documents of a row: 0, the ends of the documents, and s
        again for each document that a row has fewer.
    """
    length = document_ids.shape[1]
    most = int(document_ids.max(initial=0)) + 1
    found = np.full((len(document_ids), most + 1), length, dtype=np.int32)
    found[:, 0] = 0
    rows, ends = np.nonzero(document_ids[:, 1:] != document_ids[:, :-1])
    found[rows, document_ids[rows, ends] + 1] = ends + 1
    return found
