# SPDX-License-Identifier: Apache-2.0
"""Data paths and splits as written on a command line."""

import hashlib

import numpy as np
import pytest

from megatron.core.datasets import (
    BlendedDataset,
    DataPath,
    GPTDatasetConfig,
    IndexedDataset,
    IndexedDatasetWriter,
    build_split,
    parse_data_path,
    parse_split,
)
from megatron.core.datasets.blend import has_split, split_ranges

CONFIG = GPTDatasetConfig(sequence_length=4, seed=1)


def test_data_path_is_parsed_with_and_without_weights():
    assert parse_data_path(["a"]) == DataPath(("a",), None)
    assert parse_data_path(["a", "b"]) == DataPath(("a", "b"), None)
    assert parse_data_path(["30", "a", "0.7", "b"]) == DataPath(("a", "b"), (30.0, 0.7))


@pytest.mark.parametrize("words", [[], ["1", "a", "b"], ["a", "1"], ["1"], ["1", "2"], ["0", "a"]])
def test_impossible_data_paths_are_refused(words):
    with pytest.raises(ValueError, match=r"data path|blend weights"):
        parse_data_path(words)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("99,1,0", [99, 1, 0]),
        ("0.5,0.3,0.2", [50, 30, 20]),
        ("1", [100, 0, 0]),
        ("969,30,1", [97, 3, 0]),
        ("1,1,1", [33, 34, 33]),
        ("0,0,1", [0, 0, 100]),
    ],
)
def test_splits_are_ranges_in_file_order(text, sizes):
    ranges = split_ranges(100, parse_split(text))
    assert [len(split_range) for split_range in ranges] == sizes
    assert [number for split_range in ranges for number in split_range] == list(range(100))


@pytest.mark.parametrize("text", ["", "a", "1,-1", "0,0,0", "1,1,1,1", "nan", "inf,1", "99;1"])
def test_impossible_splits_are_refused(text):
    with pytest.raises(ValueError, match=r"split .*such as 99,1,0"):
        parse_split(text)


@pytest.fixture
def prefixes(tmp_path):
    """Two data sets of 20 documents: 10 tokens each, and 30 each from id 1000 on."""
    for name, length, base in [("a", 10, 0), ("b", 30, 1000)]:
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            writer.add_documents(np.arange(20 * length) + base, np.full(20, length))
    return str(tmp_path / "a"), str(tmp_path / "b")


def test_splits_of_one_data_set_share_no_token(prefixes):
    path, shares = DataPath(prefixes[:1], None), parse_split("80,20,0")
    train = build_split(path, CONFIG, shares=shares, num_samples=90)
    valid = build_split(path, CONFIG, name="valid", shares=shares, which=1, num_samples=5)
    assert len(train) >= 90
    assert len(valid) >= 5
    assert (train.name, valid.name) == ("train", "valid")
    assert train.batch(range(90)).max() < 160 <= valid.batch(range(5)).min()


def test_a_split_without_documents_is_refused(prefixes):
    path, shares = DataPath(prefixes[:1], None), parse_split("99,1,0")
    with pytest.raises(ValueError, match=r"the test split .*larger share"):
        build_split(path, CONFIG, name="test", shares=shares, which=2, num_samples=1)
    sources = [IndexedDataset(prefixes[0])]
    assert [has_split(sources, shares, which) for which in range(3)] == [True, False, False]
    assert has_split(sources, parse_split("90,5,5"), 2)


def test_blend_draws_by_weight_or_by_size(prefixes):
    weighted = build_split(DataPath(prefixes, (3.0, 1.0)), CONFIG, num_samples=400)
    assert isinstance(weighted, BlendedDataset)
    assert np.bincount(weighted.dataset_index).tolist() == [300, 100]
    by_size = build_split(DataPath(prefixes, None), CONFIG, num_samples=400)
    assert np.bincount(by_size.dataset_index).tolist() == [99, 301]  # of 49 and 149
    single_pass = build_split(DataPath(prefixes, None), CONFIG)
    assert np.bincount(single_pass.dataset_index).tolist() == [(200 - 1) // 4, (600 - 1) // 4]
    with pytest.raises(ValueError, match="say how many samples"):
        build_split(DataPath(prefixes, (3.0, 1.0)), CONFIG)


#: From megatron-core 0.16.1: data sets, split, samples, data set of each sample, digest of tokens.
BLENDS = [
    ("ab", 0, 40, "1010110110110101101101101101011011011011", "775478c7fb9a721f"),
    ("ab", 0, 70, "1010110110110101101101101101011011011011010110110110101101101101101011",
     "98987cc89c896fb1"),
    ("ba", 0, 40, "0101001001001010010010010010100100100100", "775478c7fb9a721f"),
    ("ab", 1, 9, "101011011", "e5a39155fbc41816"),
    ("ba", 1, 9, "010100100", "e5a39155fbc41816"),
]  # fmt: skip


@pytest.mark.parametrize(("names", "which", "size", "choices", "digest"), BLENDS)
def test_blend_without_weights_matches_megatron_core(tmp_path, names, which, size, choices, digest):
    for name, count, (shortest, step, spread) in [("a", 31, (5, 7, 11)), ("b", 40, (3, 5, 23))]:
        lengths = shortest + step * np.arange(count) % spread
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            writer.add_documents(np.arange(lengths.sum()) + 1000 * (name == "b"), lengths)
    path = DataPath(tuple(str(tmp_path / name) for name in names), None)
    name, shares = ("train", "valid")[which], parse_split("80,20,0")
    blend = build_split(path, CONFIG, name=name, shares=shares, which=which, num_samples=size)
    assert "".join(map(str, blend.dataset_index)) == choices
    tokens = blend.batch(range(size))[:, :-1]
    assert hashlib.sha256(np.ascontiguousarray(tokens).tobytes()).hexdigest()[:16] == digest
    # Megatron-core ends after one epoch; this blend continues.
    longer = build_split(path, CONFIG, name=name, shares=shares, which=which, num_samples=500)
    assert len(longer.batch(range(500))) == 500


@pytest.mark.parametrize("num_samples", [1, 2, 3, 10, 999])
def test_a_blend_never_runs_out_of_samples(prefixes, num_samples):
    blend = build_split(DataPath(prefixes, (1.0, 2.0)), CONFIG, num_samples=num_samples)
    assert blend.batch(range(num_samples)).shape == (num_samples, 5)
