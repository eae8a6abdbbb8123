# SPDX-License-Identifier: Apache-2.0
"""Blends against a plain greedy algorithm, and their proportions at every prefix."""

import numpy as np
import pytest

from megatron.core.datasets import (
    BlendedDataset,
    GPTDataset,
    GPTDatasetConfig,
    IndexedDataset,
    IndexedDatasetWriter,
)
from megatron.core.datasets.blend import blend_by_weight, blend_everything, check_weights

WEIGHTS = [[1.0], [0.3, 0.7], [0.5, 0.5], [0.2, 0.0, 0.5, 0.3], (np.ones(7) / 7).tolist()]


def greedy(weights, size):
    """Draw each sample from the data set that is furthest behind its weight."""
    counts, chosen, sample_indices = np.zeros(len(weights)), [], []
    for step in range(size):
        pick = int(np.argmax(np.array(weights) * max(step, 1) - counts))
        chosen.append(pick)
        sample_indices.append(int(counts[pick]))
        counts[pick] += 1
    return chosen, sample_indices


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("block", [7, 1 << 16])
def test_choices_follow_the_greedy_rule(monkeypatch, weights, block):
    monkeypatch.setattr("megatron.core.datasets.blend._STEPS_AT_ONCE", block)
    arrays = blend_by_weight(weights, 500)
    chosen, sample_indices = greedy(weights, 500)
    assert arrays["dataset_index"].tolist() == chosen
    assert arrays["dataset_sample_index"].tolist() == sample_indices
    assert arrays["dataset_index"].dtype == np.int16
    assert arrays["dataset_sample_index"].dtype == np.int64


@pytest.mark.parametrize("weights", [*WEIGHTS, check_weights(range(1, 60))])
def test_no_prefix_overdraws_by_a_whole_sample(weights):
    index = blend_by_weight(weights, 2000)["dataset_index"]
    counts = np.cumsum(index[:, None] == np.arange(len(weights)), axis=0)
    shares = np.arange(1, 2001)[:, None] * np.array(weights)
    assert (counts - shares).max() < 1


def test_blend_everything_draws_each_sample_once_in_proportion():
    sizes = [5, 0, 200, 31]
    arrays = blend_everything(sizes)
    for number, size in enumerate(sizes):
        sample_indices = arrays["dataset_sample_index"][arrays["dataset_index"] == number]
        assert sample_indices.tolist() == list(range(size))
    half = np.bincount(arrays["dataset_index"][:118], minlength=4)
    assert np.abs(half - np.array(sizes) / 2).max() < 2


@pytest.mark.parametrize("weights", [[-1.0, 2.0], [0.0, 0.0], [float("nan"), 1.0], [float("inf")]])
def test_impossible_weights_are_refused(weights):
    with pytest.raises(ValueError, match="blend weights"):
        check_weights(weights)


@pytest.fixture
def datasets(tmp_path):
    """Two data sets: ids below 1000 and from 1000 on."""
    config = GPTDatasetConfig(sequence_length=4, seed=1, cache_dir=str(tmp_path / "cache"))
    built = []
    for number in range(2):
        with IndexedDatasetWriter(tmp_path / f"{number}", np.uint16) as writer:
            writer.add_document(np.arange(400) + 1000 * number)
        source = IndexedDataset(tmp_path / f"{number}")
        built.append(GPTDataset(source, config, sequences=range(1), num_samples=60))
    return built


def test_rows_come_from_the_chosen_dataset(datasets):
    blend = BlendedDataset(datasets, weights=[1, 3], num_samples=80)
    rows = blend.batch(np.arange(79, -1, -1))[::-1]
    chosen, sample_indices = greedy([0.25, 0.75], 80)
    for row, dataset_index, sample_index in zip(rows, chosen, sample_indices, strict=True):
        np.testing.assert_array_equal(row, datasets[dataset_index].batch([sample_index])[0])
    assert rows.min() < 1000 < rows.max()
    assert len(blend) == 80
    assert blend.read(np.arange(80)).loss_mask.shape == (80, 4)
    same_blend = BlendedDataset(datasets, weights=[1, 3], num_samples=80)
    assert blend.fingerprint == same_blend.fingerprint
    swapped_blend = BlendedDataset(datasets, weights=[3, 1], num_samples=80)
    assert blend.fingerprint != swapped_blend.fingerprint


def test_a_longer_blend_keeps_samples_and_proportions(datasets):
    blend = BlendedDataset(datasets, weights=[2, 2], num_samples=80)
    longer = blend.extended(500)
    assert len(longer) == 500
    chosen, sample_indices = greedy([0.5, 0.5], 500)
    rows = longer.batch(np.arange(500))
    np.testing.assert_array_equal(rows[:80], blend.batch(np.arange(80)))
    extended = [dataset.extended(251) for dataset in datasets]
    for row, dataset_index, sample_index in zip(rows, chosen, sample_indices, strict=True):
        np.testing.assert_array_equal(row, extended[dataset_index].batch([sample_index])[0])
    assert blend.extended(80) is blend
    everything = BlendedDataset(datasets)
    with pytest.raises(ValueError, match="build it with weights for more"):
        everything.extended(len(everything) + 1)


def test_impossible_blends_are_refused(datasets):
    with pytest.raises(ValueError, match=r"draws 150 samples of .*1, which has"):
        BlendedDataset(datasets, weights=[1, 3], num_samples=200)
    with pytest.raises(ValueError, match="1 blend weights for 2 data sets"):
        BlendedDataset(datasets, weights=[1], num_samples=2)
    with pytest.raises(ValueError, match="or neither of them"):
        BlendedDataset(datasets, weights=[1, 3])
    blend = BlendedDataset(datasets)
    assert len(blend) == sum(len(dataset) for dataset in datasets)
    with pytest.raises(IndexError, match="train blend"):
        blend.batch([len(blend)])
