# SPDX-License-Identifier: Apache-2.0
"""Packing: each sequence once per epoch, no overfull row, little padding, a pure function."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.datasets.chat_dataset import pack_epoch


@given(st.lists(st.integers(0, 40), min_size=1, max_size=200), st.integers(0, 3))
def test_each_sequence_is_packed_once_and_rows_fit(lengths, epoch):
    lengths = np.array(lengths)
    members, starts = pack_epoch(lengths, 40, seed=5, epoch=epoch)
    assert sorted(members.tolist()) == list(range(len(lengths)))
    assert starts[0] == 0
    assert starts[-1] == len(lengths)
    for start, end in itertools.pairwise(starts.tolist()):
        assert end > start
        assert lengths[members[start:end]].sum() <= 40


def test_order_depends_on_seed_and_epoch():
    lengths = np.random.RandomState(0).randint(1, 30, size=100)
    orders = {
        (seed, epoch): tuple(pack_epoch(lengths, 64, seed=seed, epoch=epoch)[0].tolist())
        for seed in (1, 2)
        for epoch in (0, 1)
    }
    assert len(set(orders.values())) == 4
    assert orders[1, 1] == tuple(pack_epoch(lengths, 64, seed=1, epoch=1)[0].tolist())


@pytest.mark.parametrize(("longest", "min_fill"), [(1024, 0.96), (300, 0.99)])
def test_packing_fills_most_of_each_row(longest, min_fill):
    lengths = np.random.RandomState(3).randint(1, longest + 1, size=5000)
    _, starts = pack_epoch(lengths, 1024, seed=1, epoch=0)
    assert lengths.sum() / (1024 * (len(starts) - 1)) > min_fill
