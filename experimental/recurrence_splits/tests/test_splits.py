# SPDX-License-Identifier: Apache-2.0
"""Sequences cut into segments: never more than asked for, of whole chunks but the last."""

from __future__ import annotations

from itertools import pairwise

import pytest

from experimental.recurrence_splits.splits import Split
from megatron.core.ops.sequences import Sequences


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 50])
def test_a_sequence_has_at_most_so_many_segments_of_whole_chunks(splits):
    chunk, bounds = 4, (0, 29, 29, 32, 56, 57)
    starts = list(Split(Sequences(bounds), splits, chunk=chunk).segments.bounds)
    for first, end in pairwise(bounds):
        inner = [start for start in starts if first < start < end]
        sizes = [b - a for a, b in pairwise([first, *inner, end])]
        assert len(sizes) <= splits, sizes
        assert (len(sizes) > 1) == (splits > 1 and end - first > chunk), sizes
        assert all(size == sizes[0] and size % chunk == 0 for size in sizes[:-1]), sizes
        assert sizes[-1] <= sizes[0]
    if splits == 2:
        assert starts == [0, 16, 29, 29, 32, 44, 56, 57]
