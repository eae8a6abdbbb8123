# SPDX-License-Identifier: Apache-2.0
"""Documents of a row: ids, positions and boundaries, against values written by hand."""

import numpy as np

from megatron.core.datasets.token_rows import (
    cumulative_lengths,
    document_ids_of,
    positions_within,
)

END = 9
TOKENS = np.array([[1, 2, END, 3, END, END, 4, 5], [END, 1, 2, 3, 4, 5, 6, END], [1] * 8])
DOCUMENTS = [[0, 0, 0, 1, 1, 2, 3, 3], [0, 1, 1, 1, 1, 1, 1, 1], [0] * 8]


def test_document_includes_its_eod_token():
    document_ids = document_ids_of(TOKENS, END)
    assert document_ids.dtype == np.int32
    assert document_ids.tolist() == DOCUMENTS


def test_positions_restart_with_each_document():
    positions = positions_within(np.array(DOCUMENTS))
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 0, 1], [0, *range(7)], list(range(8))]


def test_cu_seqlens_are_document_bounds_and_total_length():
    cu_seqlens = cumulative_lengths(np.array(DOCUMENTS))
    assert cu_seqlens.dtype == np.int32
    assert cu_seqlens.tolist() == [[0, 3, 5, 6, 8], [0, 1, 8, 8, 8], [0, 8, 8, 8, 8]]
