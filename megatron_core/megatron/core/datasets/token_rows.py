# SPDX-License-Identifier: Apache-2.0
"""Rows of samples on the host: tokens, loss mask, positions, document ids and padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True, eq=False, kw_only=True)
class SampleRows:
    """Several samples of the same length.

    Args:
        tokens: int64 [b, s + 1], inputs and labels in one.
        loss_mask: float32 [b, s], 1 for labels that count in the loss.
        positions: int64 [b, s], each input's position in its document; None is 0 .. s - 1.
        document_ids: int32 [b, s], 0, 1, ... along a row: inputs attend only to their own document.
            None means one document per row.
        padding: bool [b, s], True for padding tokens, such as those after the last conversation of
            a packed row. They are excluded from the loss, no other token attends to them, and
            routers neither dispatch nor count them. None means no padding.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    positions: np.ndarray | None = None
    document_ids: np.ndarray | None = None
    padding: np.ndarray | None = None

    @staticmethod
    def merge(size: int, rows_by_source: Sequence[tuple[np.ndarray, SampleRows]]) -> SampleRows:
        """Interleave rows from several sources.

        Args:
            size: number of rows b.
            rows_by_source: (row indices, rows) of each source. Together the indices cover [0, b)
                once; all sources have the same fields.
        """
        merged = {}
        for field in fields(SampleRows):
            values = [(row_indices, vars(rows)[field.name]) for row_indices, rows in rows_by_source]
            first_values = values[0][1]
            if first_values is None:
                continue
            merged[field.name] = np.empty((size, *first_values.shape[1:]), dtype=first_values.dtype)
            for row_indices, value in values:
                merged[field.name][row_indices] = value
        return SampleRows(**merged)


def document_ids_of(tokens: np.ndarray, eod_token: int) -> np.ndarray:
    """Number the documents of each row; an end-of-document token belongs to its document.

    Args:
        tokens: inputs, int64 [b, s].
        eod_token: id of the end-of-document token.

    Returns:
        int32 [b, s], 0, 1, ... along each row.
    """
    document_ids = np.zeros(tokens.shape, dtype=np.int32)
    np.cumsum(tokens[:, :-1] == eod_token, axis=1, out=document_ids[:, 1:])
    return document_ids


def positions_within(document_ids: np.ndarray) -> np.ndarray:
    """Count positions from the start of each document.

    Args:
        document_ids: int [b, s], not decreasing along a row.

    Returns:
        int64 [b, s].
    """
    columns = np.arange(document_ids.shape[1], dtype=np.int64)
    starts = np.zeros(document_ids.shape, dtype=np.int64)
    is_start = document_ids[:, 1:] != document_ids[:, :-1]
    starts[:, 1:] = np.where(is_start, columns[1:], 0)
    return columns - np.maximum.accumulate(starts, axis=1)


def cumulative_lengths(document_ids: np.ndarray) -> np.ndarray:
    """Return `cu_seqlens` of each row, as kernels for packed sequences take them.

    Args:
        document_ids: int [b, s], 0, 1, ... along each row.

    Returns:
        int32 [b, d + 1], where d is the largest number of documents in a row: 0 and the ends of
        the documents; shorter rows are padded with s.
    """
    length = document_ids.shape[1]
    max_documents = int(document_ids.max(initial=0)) + 1
    cu_seqlens = np.full((len(document_ids), max_documents + 1), length, dtype=np.int32)
    cu_seqlens[:, 0] = 0
    rows, ends = np.nonzero(document_ids[:, 1:] != document_ids[:, :-1])
    cu_seqlens[rows, document_ids[rows, ends] + 1] = ends + 1
    return cu_seqlens


def checked_indices(
    indices: Sequence[int] | np.ndarray, length: int, of: tuple[str, str]
) -> np.ndarray:
    """Return indices as int64 [b].

    Args:
        indices: numbers of rows or samples.
        length: how many there are.
        of: noun and source for the message, such as ("samples", "train split").

    Raises:
        IndexError: an index is not in [0, length).
    """
    indices = np.asarray(indices, dtype=np.int64)
    if len(indices) and not 0 <= indices.min() <= indices.max() < length:
        noun, source = of
        raise IndexError(
            f"{noun} {indices.min()} to {indices.max()} of the {source}, which has {length}"
        )
    return indices
