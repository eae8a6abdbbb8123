# SPDX-License-Identifier: Apache-2.0
"""Packed conversations: each lies within one row, has loss where its mask is 1, and a seed fixes
the order."""

import dataclasses

import numpy as np
import pytest

from megatron.core.datasets import (
    BlendedDataset,
    ChatDataset,
    GPTDatasetConfig,
    IndexedDataset,
    IndexedDatasetWriter,
)
from megatron.core.datasets.chat_dataset import mask_prefix
from megatron.core.datasets.token_rows import cumulative_lengths, positions_within

LENGTH, END = 24, 1
CONFIG = GPTDatasetConfig(sequence_length=LENGTH, seed=4, vocab_size=5000, eod_token=END)


def write(prefix, conversations, masks):
    with (
        IndexedDatasetWriter(prefix, np.uint16) as tokens,
        IndexedDatasetWriter(mask_prefix(prefix), np.uint8) as mask,
    ):
        for ids, loss_mask in zip(conversations, masks, strict=True):
            tokens.add_document(ids)
            mask.add_document(loss_mask)
    return IndexedDataset(prefix)


@pytest.fixture
def conversations():
    """Return 60 conversations of tokens that are all unique, and their loss masks."""
    rng = np.random.default_rng(7)
    lengths = rng.integers(2, 20, size=60)
    ends = 10 + np.cumsum(lengths)
    ids = [
        list(range(end - n, end)) for n, end in zip(lengths.tolist(), ends.tolist(), strict=True)
    ]
    masks = [[*(rng.random(len(t) - 1) < 0.5).astype(int).tolist(), 1] for t in ids]
    return ids, masks


def test_epoch_has_each_conversation_once_with_its_loss_mask(tmp_path, conversations):
    dataset = ChatDataset(write(str(tmp_path / "a"), *conversations), CONFIG, sequences=range(60))
    rows = dataset.read(np.arange(len(dataset)))
    inputs, labels = rows.tokens[:, :-1], rows.tokens[:, 1:]
    # (input, label) pairs that have loss; tokens are unique.
    trained_pairs = {
        (i, o) for i, o, m in zip(inputs.flat, labels.flat, rows.loss_mask.flat, strict=True) if m
    }
    expected = {
        (t[i - 1], t[i])
        for t, mask in zip(*conversations, strict=True)
        for i in range(1, len(t))
        if mask[i]
    }
    assert trained_pairs == expected
    tokens = [t for t in rows.tokens.flat if t != END]
    assert sorted(tokens) == sorted(
        token for conversation in conversations[0] for token in conversation
    )
    assert len(dataset) < 40


def test_conversations_and_padding_are_separate_documents(tmp_path, conversations):
    dataset = ChatDataset(write(str(tmp_path / "a"), *conversations), CONFIG, sequences=range(60))
    rows = dataset.read(np.arange(len(dataset)))
    first_tokens = {conversation[0] for conversation in conversations[0]}
    ends = np.pad(np.diff(rows.document_ids) > 0, ((0, 0), (0, 1)))  # last tokens of conversations
    ends[:, -1] = (rows.tokens[:, -1] == END) & (rows.tokens[:, -2] != END)
    ends[:, -1] |= [row[-1] in first_tokens for row in rows.tokens]
    np.testing.assert_array_equal(rows.padding, (rows.tokens[:, :-1] == END) | ends)
    for tokens, documents, positions in zip(
        rows.tokens, rows.document_ids, rows.positions, strict=True
    ):
        starts = [i for i in range(LENGTH) if tokens[i] in first_tokens]
        padding = np.flatnonzero(tokens[:-1] == END)
        starts += [int(padding[0])] if len(padding) else []
        is_start = positions == 0
        assert np.flatnonzero(is_start).tolist() == starts
        assert documents.tolist() == (np.cumsum(is_start) - 1).tolist()
    has_padding = bool((rows.tokens == END).any())
    assert has_padding
    assert cumulative_lengths(rows.document_ids).shape[0] == len(dataset)
    np.testing.assert_array_equal(rows.positions, positions_within(rows.document_ids))


def test_tokens_without_a_next_token_are_padding(tmp_path):
    """Padding covers the rest of a row and the last token of a conversation (in a full row that
    token is only a label), but neither masked tokens nor END tokens within a conversation."""
    ids = [[7, END, 8, END], [9, END, END]]
    source = write(str(tmp_path / "a"), ids, [[0, 0, 1, 0], [0, 1, 0]])
    for length, row_end in ((8, [True, True]), (7, [True]), (6, [])):
        config = dataclasses.replace(CONFIG, sequence_length=length)
        rows = ChatDataset(source, config, sequences=range(2)).read(np.arange(1))
        first_length, second_length = (4, 3) if rows.tokens[0, 0] == 7 else (3, 4)
        expected = [False] * (first_length - 1) + [True] + [False] * (second_length - 1) + row_end
        assert rows.padding.tolist() == [expected[:length]]


def test_a_cache_is_not_used_for_another_mask(tmp_path, conversations):
    """The mask decides which conversations are left out, so the rows depend on it."""
    ids, masks = conversations
    config = dataclasses.replace(CONFIG, cache_dir=tmp_path / "cache")
    all_trained = ChatDataset(write(str(tmp_path / "a"), ids, masks), config, sequences=range(60))
    half_masks = [mask if number % 2 else [0] * len(mask) for number, mask in enumerate(masks)]
    half_trained = ChatDataset(
        write(str(tmp_path / "a"), ids, half_masks), config, sequences=range(60)
    )
    assert all_trained.statistics.left_out == 0
    assert half_trained.statistics.left_out == 30
    assert half_trained.fingerprint != all_trained.fingerprint
    rows = half_trained.read(np.arange(len(half_trained)))
    assert set(rows.tokens.flat) - {END} == {t for conversation in ids[1::2] for t in conversation}


def test_more_samples_add_epochs_and_keep_the_first_epoch(tmp_path, conversations):
    source = write(str(tmp_path / "a"), *conversations)
    epoch = ChatDataset(source, CONFIG, sequences=range(60))
    epochs = ChatDataset(source, CONFIG, sequences=range(60), num_samples=3 * len(epoch))
    assert len(epochs) >= 3 * len(epoch)
    expected, actual = (d.read(np.arange(len(epoch))).tokens for d in (epoch, epochs))
    np.testing.assert_array_equal(expected, actual)
    second_epoch = epochs.read(np.arange(len(epoch), 2 * len(epoch))).tokens
    assert not np.array_equal(expected, second_epoch)
    assert set(expected.flat) == set(epochs.read(np.arange(len(epoch), len(epochs))).tokens.flat)


def test_truncated_and_left_out_conversations_are_counted(tmp_path):
    """Rows take 25 tokens: a longer conversation is truncated, and a conversation is left out if
    no token with loss remains."""
    ids = [list(range(100, 140)), list(range(200, 240)), [5, 6], [7], list(range(300, 325))]
    masks = [[0] * 20 + [1] * 20, [0] * 30 + [1] * 10, [1, 0], [1], [1] * 25]
    dataset = ChatDataset(write(str(tmp_path / "a"), ids, masks), CONFIG, sequences=range(5))
    statistics = dataset.statistics
    assert (statistics.conversations, statistics.rows) == (5, 2)
    assert (statistics.truncated, statistics.left_out) == (2, 3)
    assert statistics.filled == 1.0
    rows = dataset.read(np.arange(2))
    assert sorted(rows.tokens[:, 0].tolist()) == [100, 300]
    assert sorted(rows.loss_mask.sum(1).tolist()) == [5, 24]  # the first of 25 tokens is no label
    with pytest.raises(ValueError, match=r"valid split: its 2"):
        ChatDataset(dataset.source, CONFIG, sequences=range(1, 3), name="valid")


def test_invalid_chat_data_is_refused(tmp_path, conversations):
    ids, masks = conversations
    write(str(tmp_path / "a"), ids, masks)
    with pytest.raises(ValueError, match=r"larger share"):
        ChatDataset(IndexedDataset(tmp_path / "a"), CONFIG, sequences=range(60, 60))
    with IndexedDatasetWriter(tmp_path / "b", np.uint16) as writer:
        writer.add_document([1, 2, 3])
    with pytest.raises(ValueError, match="preprocess_data --chat"):
        ChatDataset(IndexedDataset(tmp_path / "b"), CONFIG, sequences=range(1))
    write(str(tmp_path / "c"), ids, masks)
    with IndexedDatasetWriter(tmp_path / "c.mask", np.uint8) as writer:
        writer.add_document([1, 0, 1])
    with pytest.raises(ValueError, match=r"the mask belongs to other tokens"):
        ChatDataset(IndexedDataset(tmp_path / "c"), CONFIG, sequences=range(60))
    small_vocab = GPTDatasetConfig(sequence_length=LENGTH, seed=4, vocab_size=300)
    dataset = ChatDataset(IndexedDataset(tmp_path / "a"), small_vocab, sequences=range(60))
    with pytest.raises(ValueError, match=r"of conversation \d+ is not below the vocabulary"):
        dataset.read(np.arange(len(dataset)))
    source = write(str(tmp_path / "d"), [[0, 7, 300, 9]], [[0, 1, 1, 1]])
    with pytest.raises(ValueError, match=r"token id 300 at position 2 of conversation 0"):
        ChatDataset(source, small_vocab, sequences=range(1)).read(np.arange(1))


def test_blend_of_chat_datasets_matches_its_sources(tmp_path, conversations):
    ids, masks = conversations
    datasets = [
        ChatDataset(
            write(str(tmp_path / name), ids[half], masks[half]),
            CONFIG,
            sequences=range(30),
            num_samples=20,
        )
        for name, half in (("a", slice(30)), ("b", slice(30, 60)))
    ]
    blend = BlendedDataset(datasets, weights=[1, 2], num_samples=24)
    rows = blend.read(np.arange(24))
    assert rows.document_ids.max() > 2
    for i in range(24):
        sample = datasets[blend.dataset_index[i]].read([blend.dataset_sample_index[i]])
        for name in ("tokens", "loss_mask", "positions", "document_ids", "padding"):
            np.testing.assert_array_equal(vars(rows)[name][i], vars(sample)[name][0])
