# SPDX-License-Identifier: Apache-2.0
"""Samples against windows of the concatenated documents, and requests that are refused."""

import dataclasses

import numpy as np
import pytest

from megatron.core.datasets import (
    GPTBatches,
    GPTDataset,
    GPTDatasetConfig,
    IndexedDataset,
    IndexedDatasetWriter,
)

CONFIG = GPTDatasetConfig(sequence_length=7, seed=5)
EOD = 0


@pytest.fixture
def source(tmp_path):
    """A data set of 40 documents of 0 to 29 tokens that end with EOD; other tokens are unique."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(0, 30, 40)
    tokens = np.arange(1, lengths.sum() + 1)
    tokens[(np.cumsum(lengths) - 1)[lengths > 0]] = EOD
    with IndexedDatasetWriter(tmp_path / "data", np.int32) as writer:
        writer.add_documents(tokens, lengths)
    return IndexedDataset(tmp_path / "data")


@pytest.mark.parametrize("num_samples", [None, 3, 200])
@pytest.mark.parametrize("sequence_length", [1, 7, 64])
def test_samples_are_windows_of_the_shuffled_documents(source, num_samples, sequence_length):
    config = dataclasses.replace(CONFIG, sequence_length=sequence_length)
    dataset = GPTDataset(source, config, sequences=range(4, 33), num_samples=num_samples)
    line = np.concatenate([source.get(d) for d in dataset.document_index.tolist()])
    rows = dataset.batch(np.arange(len(dataset)))
    assert rows.dtype == np.int64
    for row, number in zip(rows, dataset.shuffle_index.tolist(), strict=True):
        start = number * sequence_length
        np.testing.assert_array_equal(row, line[start : start + sequence_length + 1])
    assert sorted(dataset.shuffle_index.tolist()) == list(range(len(dataset)))
    assert set(dataset.document_index.tolist()) == set(range(4, 33))


def further_epochs(source, sequences, *, sequence_length, count):
    """Return the samples of `count` further epochs; an epoch repeats data shorter than a sample."""
    rows = []
    tokens = sum(len(source.get(d)) for d in sequences)
    epochs = -(-(sequence_length + 1) // tokens)
    for number in range(1, count + 1):
        rng = np.random.RandomState([CONFIG.seed, number])
        documents = np.tile(np.array(sequences), epochs)
        rng.shuffle(documents)
        line = np.concatenate([source.get(d) for d in documents.tolist()])
        windows = [
            line[start : start + sequence_length + 1]
            for start in range(0, len(line) - sequence_length, sequence_length)
        ]
        order = np.arange(len(windows))
        rng.shuffle(order)
        rows += [windows[i].tolist() for i in order]
    return rows


@pytest.mark.parametrize(
    ("sequence_length", "num_samples"),
    [(7, None), (7, 20), (7, 200), (900, 2)],
    ids=["one epoch", "part of an epoch", "epochs", "longer than the data"],
)
def test_extended_dataset_keeps_its_samples(source, tmp_path, sequence_length, num_samples):
    config = dataclasses.replace(
        CONFIG, sequence_length=sequence_length, cache_dir=str(tmp_path / "cache")
    )
    arguments = {"sequences": range(4, 33), "num_samples": num_samples}
    dataset = GPTDataset(source, config, **arguments)
    rows = dataset.batch(np.arange(len(dataset))).tolist()
    further_rows = further_epochs(source, range(4, 33), sequence_length=sequence_length, count=3)
    assert dataset.extended(len(dataset)) is dataset
    extended = dataset.extended(len(dataset) + len(further_rows) // 3)
    extended_rows = extended.batch(np.arange(len(extended))).tolist()
    assert extended_rows == rows + further_rows[: len(further_rows) // 3]
    size = len(dataset) + len(further_rows)
    for longer in (
        dataset.extended(size),
        extended.extended(size),
        GPTDataset(source, config, **arguments).extended(size),  # from the cache
    ):
        assert longer.batch(np.arange(len(longer))).tolist() == rows + further_rows
        assert longer.fingerprint not in (dataset.fingerprint, extended.fingerprint)


def test_one_sample_equals_its_row_of_a_batch(source):
    dataset = GPTDataset(source, CONFIG, sequences=range(40), num_samples=100)
    rows = dataset.batch([3, 99, 3])
    sample = dataset[99]
    np.testing.assert_array_equal(sample.tokens, rows[1, :-1])
    np.testing.assert_array_equal(sample.labels, rows[1, 1:])
    assert sample.loss_mask.tolist() == [1.0] * 7
    np.testing.assert_array_equal(rows[0], rows[2])
    assert dataset.batch([]).shape == (0, 8)


def test_loss_is_masked_where_the_input_ends_a_document(source):
    config = dataclasses.replace(CONFIG, eod_token=EOD, eod_mask_loss=True)
    dataset = GPTDataset(source, config, sequences=range(40), num_samples=100)
    rows = dataset.batch(np.arange(100))
    mask = dataset.loss_mask(rows)
    assert mask.dtype == np.float32
    assert mask.shape == (100, 7)
    masked = 0
    for row, weights in zip(rows.tolist(), mask.tolist(), strict=True):
        for token, weight in zip(row, weights, strict=False):
            assert weight == (0.0 if token == EOD else 1.0)
            masked += token == EOD
    assert masked > 0


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("attention", [False, True])
def test_eod_resets_positions_and_document_ids_if_enabled(source, positions, attention):
    config = dataclasses.replace(
        CONFIG, eod_token=EOD, reset_position_ids=positions, reset_attention_mask=attention
    )
    dataset = GPTDataset(source, config, sequences=range(40), num_samples=100)
    rows = dataset.read(np.arange(100))
    assert (rows.positions is not None, rows.document_ids is not None) == (positions, attention)
    ends = rows.tokens[:, :-2] == EOD  # the next input begins a document
    assert ends.any()
    if attention:
        np.testing.assert_array_equal(np.diff(rows.document_ids, axis=1), ends)
    if positions:
        np.testing.assert_array_equal(np.diff(rows.positions, axis=1)[~ends], 1)
        equal = bool((rows.positions[:, 0] == 0).all())
        assert equal
        equal = bool((rows.positions[:, 1:][ends] == 0).all())
        assert equal
    batch = next(GPTBatches(dataset, micro_batch_size=100))
    assert (batch.cu_seqlens is not None) == attention
    if attention:
        np.testing.assert_array_equal(batch.document_ids.numpy(), rows.document_ids)
        assert batch.cu_seqlens.shape == (100, ends.sum(1).max() + 2)


def test_ranks_together_read_samples_in_order(source):
    config = dataclasses.replace(CONFIG, eod_token=EOD, eod_mask_loss=True)
    dataset = GPTDataset(source, config, sequences=range(40), num_samples=24)
    rows = dataset.batch(range(24))
    for dp_rank in range(2):
        batches = GPTBatches(
            dataset, micro_batch_size=3, data_parallel_rank=dp_rank, data_parallel_size=2
        )
        for step, batch in zip(range(4), batches, strict=False):
            start = 6 * step + 3 * dp_rank
            assert batch.sample_ids.tolist() == [start, start + 1, start + 2]
            np.testing.assert_array_equal(batch.tokens.numpy(), rows[start : start + 3])
            np.testing.assert_array_equal(
                batch.loss_mask.numpy(), dataset.loss_mask(rows[start : start + 3])
            )


def test_seed_changes_the_samples(source):
    def rows(**changes):
        config = dataclasses.replace(CONFIG, **changes)
        return GPTDataset(source, config, sequences=range(40), num_samples=50).batch(range(50))

    np.testing.assert_array_equal(rows(), rows())
    assert not np.array_equal(rows(), rows(seed=6))


def test_fingerprint_identifies_the_sequence_of_samples(source, tmp_path):
    def fingerprint(sequences=range(40), num_samples=50, **changes):
        config = dataclasses.replace(CONFIG, **changes)
        return GPTDataset(source, config, sequences=sequences, num_samples=num_samples).fingerprint

    assert fingerprint() == fingerprint(cache_dir=str(tmp_path / "cache"), vocab_size=10_000)
    changed = [
        fingerprint(range(39)),
        fingerprint(num_samples=51),
        fingerprint(seed=6),
        fingerprint(sequence_length=8),
    ]
    assert len({fingerprint(), *changed}) == 5


@pytest.mark.parametrize("bad", [-1, 50, 2**31 - 1])
def test_token_outside_the_vocabulary_is_named_in_the_error(tmp_path, bad):
    with IndexedDatasetWriter(tmp_path / "data", np.int32) as writer:
        writer.add_document([1, 2, 3, 4], [2, 2])
        writer.add_document([5, 6, 7, bad, 9], [1, 4])
        writer.add_document([10] * 6)
    config = GPTDatasetConfig(sequence_length=2, seed=1, vocab_size=50)
    dataset = GPTDataset(IndexedDataset(tmp_path / "data"), config, sequences=range(5))
    message = f"token id {bad} at position 2 of document 1 .sequence 3. .* vocabulary size 50"
    with pytest.raises(ValueError, match=message):
        dataset.batch(range(len(dataset)))
    unchecked = dataclasses.replace(config, vocab_size=None)
    dataset = GPTDataset(IndexedDataset(tmp_path / "data"), unchecked, sequences=range(5))
    assert bad in dataset.batch(range(len(dataset)))


def test_largest_token_of_the_vocabulary_is_accepted(tmp_path):
    with IndexedDatasetWriter(tmp_path / "data", np.int32) as writer:
        writer.add_document([49] * 10)
    config = GPTDatasetConfig(sequence_length=2, seed=1, vocab_size=50)
    dataset = GPTDataset(IndexedDataset(tmp_path / "data"), config, sequences=range(1))
    equal = bool((dataset.batch(range(len(dataset))) == 49).all())
    assert equal


def test_impossible_requests_are_refused(source, tmp_path):
    with pytest.raises(ValueError, match="give this split a larger share"):
        GPTDataset(source, CONFIG, sequences=range(5, 5))
    with pytest.raises(ValueError, match="which has 40"):
        GPTDataset(source, CONFIG, sequences=range(30, 41))
    with pytest.raises(ValueError, match="0 train samples requested"):
        GPTDataset(source, CONFIG, sequences=range(40), num_samples=0)
    long = dataclasses.replace(CONFIG, sequence_length=100_000)
    with pytest.raises(ValueError, match=r"data, valid split: .* too few"):
        GPTDataset(source, long, sequences=range(40), name="valid")
    with pytest.raises(ValueError, match="sequence_length 0"):
        GPTDatasetConfig(sequence_length=0, seed=1)
    with pytest.raises(ValueError, match="data seed -1"):
        GPTDatasetConfig(sequence_length=1, seed=-1)
    with pytest.raises(ValueError, match="reset_attention_mask needs eod_token"):
        dataclasses.replace(CONFIG, reset_attention_mask=True)
    with pytest.raises(ValueError, match="eod_mask_loss needs eod_token"):
        GPTDatasetConfig(sequence_length=1, seed=1, eod_mask_loss=True)
    with IndexedDatasetWriter(tmp_path / "float", np.float32) as writer:
        writer.add_document(np.ones(3, dtype=np.float32))
    with pytest.raises(ValueError, match="token ids are integers"):
        GPTDataset(IndexedDataset(tmp_path / "float"), CONFIG, sequences=range(1))


@pytest.mark.parametrize("indices", [[-1], [0, 1000]])
def test_sample_indices_out_of_range_are_refused(source, indices):
    dataset = GPTDataset(source, CONFIG, sequences=range(40))
    with pytest.raises(IndexError, match="of the train split"):
        dataset.batch(indices)
