# SPDX-License-Identifier: Apache-2.0
"""Packing: every sequence once an epoch, no row too full, few places empty, a pure function."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.datasets.chat_dataset import pack_epoch


@given(st.lists(st.integers(0, 40), min_size=1, max_size=200), st.integers(0, 3))
def test_every_sequence_once_and_no_row_too_full(lengths, epoch):
    lengths = np.array(lengths)
    members, starts = pack_epoch(lengths, 40, seed=5, epoch=epoch)
    assert sorted(members.tolist()) == list(range(len(lengths)))
    assert starts[0] == 0
    assert starts[-1] == len(lengths)
    for first, last in itertools.pairwise(starts.tolist()):
        assert last > first
        assert lengths[members[first:last]].sum() <= 40


def test_an_order_of_its_own_for_every_seed_and_epoch():
    lengths = np.random.RandomState(0).randint(1, 30, size=100)
    found = {
        (seed, epoch): tuple(pack_epoch(lengths, 64, seed=seed, epoch=epoch)[0].tolist())
        for seed in (1, 2)
        for epoch in (0, 1)
    }
    assert len(set(found.values())) == 4
    assert found[1, 1] == tuple(pack_epoch(lengths, 64, seed=1, epoch=1)[0].tolist())


@pytest.mark.parametrize(("longest", "filled"), [(1024, 0.96), (300, 0.99)])
def test_few_places_stay_empty(longest, filled):
    lengths = np.random.RandomState(3).randint(1, longest + 1, size=5000)
    _, starts = pack_epoch(lengths, 1024, seed=1, epoch=0)
    assert lengths.sum() / (1024 * (len(starts) - 1)) > filled
