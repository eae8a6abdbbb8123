# SPDX-License-Identifier: Apache-2.0
"""Index maps between whole rows and what each rank holds of them, on the host.

NumPy, for what torch does with several threads takes far longer where they must share a core.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from megatron.core.context_parallel.cut import PADDING, SequenceCut


def columns_of(cut: SequenceCut, rank: int) -> torch.Tensor:
    """Return the place of each token that a rank holds, int64 [s/cp], `PADDING` where none is.

    Raises:
        ValueError: no such rank.
    """
    index, place = _spread([(run.start, run.length, run.place) for run in cut.runs(rank)])
    found = np.full(cut.local_length, PADDING, dtype=np.int64)
    found[index] = place
    return torch.from_numpy(found)


def inverse_of(cut: SequenceCut) -> torch.Tensor | None:
    """Return where each place is among the tokens gathered from all ranks, int64 [s].

    None if they are gathered in the order of places, without padding.
    """
    runs = [
        (run.start + rank * cut.local_length, run.length, run.place)
        for rank in range(cut.size)
        for run in cut.runs(rank)
    ]
    if not cut.is_padded and all(start == place for start, _, place in runs):
        return None
    index, place = _spread(runs)
    found = np.empty_like(index)
    found[place] = index
    return torch.from_numpy(found)


def take_columns(x: torch.Tensor, columns: torch.Tensor, fill: float) -> torch.Tensor:
    """Return the columns of rows that a rank holds.

    Args:
        x: [b, s, ...] on the host.
        columns: int64 [s/cp], from `columns_of`.
        fill: what padding gets.

    Returns:
        [b, s/cp, ...].
    """
    empty = columns.numpy() == PADDING
    if not empty.any():
        return x.index_select(1, columns)
    found = x.index_select(1, columns.clamp(min=0))
    found[:, torch.from_numpy(empty)] = fill
    return found


def documents_of(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Return where the documents of each row begin and end by place, [0, ..., s].

    Args:
        ids: int [b, s], not falling along a row.

    Raises:
        ValueError: ids that fall.
    """
    found = []
    for row, numbers in enumerate(ids):
        borders = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        first = numbers[np.concatenate(([0], borders))].tolist()  # the id of each document
        for at, (before, after) in zip(borders.tolist(), pairwise(first), strict=True):
            if after < before:
                raise ValueError(
                    f"document_ids of row {row} fall from {before} to {after} at column {at}: "
                    "number documents along the row"
                )
        found.append((0, *borders.tolist(), len(numbers)))
    return tuple(found)


def ids_of(bounds: Sequence[int], rows: int) -> torch.Tensor:
    """Return the number of each token's document, int32 [b, s], the same in each row.

    Args:
        bounds: where documents begin and end by place, [0, ..., s].
        rows: b.
    """
    ids = np.repeat(np.arange(len(bounds) - 1, dtype=np.int32), np.diff(bounds))
    return torch.from_numpy(ids).expand(rows, -1)


def _spread(runs: Sequence[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return (index, place) of each token of runs (first index, length, first place), int64."""
    start, length, place = np.array(runs, dtype=np.int64).reshape(-1, 3).T
    before = np.repeat(length.cumsum() - length, length)  # tokens of earlier runs
    within = np.arange(before.size) - before
    return np.repeat(start, length) + within, np.repeat(place, length) + within
