# SPDX-License-Identifier: Apache-2.0
"""Split sequences have at most `splits` segments of whole chunks, except the last segment."""

from __future__ import annotations

from itertools import pairwise

import pytest

from experimental.recurrence_splits.splits import Split
from megatron.core.ops.sequences import Sequences


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 50])
def test_segments_are_whole_chunks_and_at_most_splits(splits):
    chunk, bounds = 4, (0, 29, 29, 32, 56, 57)
    starts = list(Split(Sequences(bounds), splits, chunk=chunk).segments.bounds)
    for begin, end in pairwise(bounds):
        inner = [start for start in starts if begin < start < end]
        sizes = [b - a for a, b in pairwise([begin, *inner, end])]
        assert len(sizes) <= splits, sizes
        assert (len(sizes) > 1) == (splits > 1 and end - begin > chunk), sizes
        assert all(size == sizes[0] and size % chunk == 0 for size in sizes[:-1]), sizes
        assert sizes[-1] <= sizes[0]
    if splits == 2:
        assert starts == [0, 16, 29, 29, 32, 44, 56, 57]
