# SPDX-License-Identifier: Apache-2.0
"""Mock data: a function of seed, split and index; documents with constant steps and an EOD."""

import dataclasses

import numpy as np
import pytest

from megatron.core.datasets import GPTDatasetConfig, MockDataset

CONFIG = GPTDatasetConfig(
    sequence_length=40, seed=3, vocab_size=50, eod_token=49, reset_attention_mask=True
)


def test_sample_depends_only_on_seed_split_and_index():
    rows = MockDataset(CONFIG, num_samples=20).read(range(20)).tokens
    assert rows.shape == (20, 41)
    assert len({tuple(row) for row in rows.tolist()}) == 20
    longer = MockDataset(CONFIG, num_samples=10**12)
    np.testing.assert_array_equal(longer.read([7, 3]).tokens, rows[[7, 3]])
    assert not np.array_equal(longer.read([7 + (1 << 32)]).tokens, rows[[7]])
    for variant in (
        MockDataset(CONFIG, num_samples=20, split=1),
        MockDataset(dataclasses.replace(CONFIG, seed=4), num_samples=20),
    ):
        assert not np.array_equal(variant.read(range(20)).tokens, rows)
        assert variant.fingerprint != longer.fingerprint
    with pytest.raises(IndexError, match="train mock data, which has 20"):
        MockDataset(CONFIG, num_samples=20).read([20])


def test_documents_have_constant_steps_and_end_with_eod():
    rows = MockDataset(CONFIG, num_samples=50).read(range(50))
    assert rows.tokens.min() >= 0
    assert rows.tokens.max() == 49
    equal = bool((rows.tokens[:, -1] == 49).all())
    assert equal
    assert rows.document_ids.max() >= 1
    for row in rows.tokens.tolist():
        for document in " ".join(map(str, row)).split(" 49"):
            steps = np.diff([int(word) for word in document.split()]) % 50
            assert len(set(steps.tolist())) <= 1


def test_vocabulary_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="vocabulary of 8 or more, not 5"):
        MockDataset(dataclasses.replace(CONFIG, vocab_size=5, eod_token=4), num_samples=1)
