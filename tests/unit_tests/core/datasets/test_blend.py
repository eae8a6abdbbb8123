# SPDX-License-Identifier: Apache-2.0
"""Blends against the greedy rule written out, and their proportions at every prefix."""

import numpy as np
import pytest

from megatron.core.datasets.blend import (
    BlendedDataset,
    blend_by_weight,
    blend_everything,
    check_weights,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetWriter

WEIGHTS = [[1.0], [0.3, 0.7], [0.5, 0.5], [0.2, 0.0, 0.5, 0.3], (np.ones(7) / 7).tolist()]


def greedy(weights, size):
    """Apply the rule with an array per step."""
    drawn, chosen, numbers = np.zeros(len(weights)), [], []
    for step in range(size):
        pick = int(np.argmax(np.array(weights) * max(step, 1) - drawn))
        chosen.append(pick)
        numbers.append(int(drawn[pick]))
        drawn[pick] += 1
    return chosen, numbers


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("block", [7, 1 << 16])
def test_choices_follow_the_greedy_rule(monkeypatch, weights, block):
    monkeypatch.setattr("megatron.core.datasets.blend._STEPS_AT_ONCE", block)
    arrays = blend_by_weight(weights, 500)
    chosen, numbers = greedy(weights, 500)
    assert arrays["dataset_index"].tolist() == chosen
    assert arrays["dataset_sample_index"].tolist() == numbers
    assert arrays["dataset_index"].dtype == np.int16
    assert arrays["dataset_sample_index"].dtype == np.int64


@pytest.mark.parametrize("weights", [*WEIGHTS, check_weights(range(1, 60))])
def test_no_prefix_overdraws_by_a_whole_sample(weights):
    index = blend_by_weight(weights, 2000)["dataset_index"]
    counts = np.cumsum(index[:, None] == np.arange(len(weights)), axis=0)
    shares = np.arange(1, 2001)[:, None] * np.array(weights)
    assert (counts - shares).max() < 1


def test_everything_is_drawn_once_in_proportion():
    sizes = [5, 0, 200, 31]
    arrays = blend_everything(sizes)
    for part, size in enumerate(sizes):
        numbers = arrays["dataset_sample_index"][arrays["dataset_index"] == part]
        assert numbers.tolist() == list(range(size))
    half = np.bincount(arrays["dataset_index"][:118], minlength=4)
    assert np.abs(half - np.array(sizes) / 2).max() < 2


@pytest.mark.parametrize("weights", [[-1.0, 2.0], [0.0, 0.0], [float("nan"), 1.0], [float("inf")]])
def test_impossible_weights_are_refused(weights):
    with pytest.raises(ValueError, match="blend weights"):
        check_weights(weights)


@pytest.fixture
def parts(tmp_path):
    """Two data sets: ids below 1000 and from 1000 on."""
    config = GPTDatasetConfig(sequence_length=4, seed=1, cache_dir=str(tmp_path / "cache"))
    data = []
    for number in range(2):
        with IndexedDatasetWriter(tmp_path / f"{number}", np.uint16) as writer:
            writer.add_document(np.arange(400) + 1000 * number)
        source = IndexedDataset(tmp_path / f"{number}")
        data.append(GPTDataset(source, config, sequences=range(1), num_samples=60))
    return data


def test_rows_come_from_the_chosen_part(parts):
    blend = BlendedDataset(parts, weights=[1, 3], num_samples=80)
    rows = blend.batch(np.arange(79, -1, -1))[::-1]
    chosen, numbers = greedy([0.25, 0.75], 80)
    for row, part, number in zip(rows, chosen, numbers, strict=True):
        np.testing.assert_array_equal(row, parts[part].batch([number])[0])
    assert rows.min() < 1000 < rows.max()
    assert len(blend) == 80
    assert blend.read(np.arange(80)).loss_mask.shape == (80, 4)
    again = BlendedDataset(parts, weights=[1, 3], num_samples=80)
    assert blend.fingerprint == again.fingerprint
    other = BlendedDataset(parts, weights=[3, 1], num_samples=80)
    assert blend.fingerprint != other.fingerprint


def test_a_longer_blend_keeps_samples_and_proportions(parts):
    blend = BlendedDataset(parts, weights=[2, 2], num_samples=80)
    longer = blend.extended(500)
    assert len(longer) == 500
    chosen, numbers = greedy([0.5, 0.5], 500)
    rows = longer.batch(np.arange(500))
    np.testing.assert_array_equal(rows[:80], blend.batch(np.arange(80)))
    whole = [part.extended(251) for part in parts]
    for row, part, number in zip(rows, chosen, numbers, strict=True):
        np.testing.assert_array_equal(row, whole[part].batch([number])[0])
    assert blend.extended(80) is blend
    everything = BlendedDataset(parts)
    with pytest.raises(ValueError, match="build it with weights to have more"):
        everything.extended(len(everything) + 1)


def test_impossible_blends_are_refused(parts):
    with pytest.raises(ValueError, match=r"draws 150 samples of .*1, which gives"):
        BlendedDataset(parts, weights=[1, 3], num_samples=200)
    with pytest.raises(ValueError, match="1 blend weights for 2 data sets"):
        BlendedDataset(parts, weights=[1], num_samples=2)
    with pytest.raises(ValueError, match="or neither of them"):
        BlendedDataset(parts, weights=[1, 3])
    blend = BlendedDataset(parts)
    assert len(blend) == sum(len(part) for part in parts)
    with pytest.raises(IndexError, match="train blend"):
        blend.batch([len(blend)])
