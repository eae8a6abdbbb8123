# SPDX-License-Identifier: Apache-2.0
"""Packed conversations: each whole in one row, learnt where its mask says, the same every time."""

import dataclasses

import numpy as np
import pytest

from megatron.core.datasets.blend import BlendedDataset
from megatron.core.datasets.chat_dataset import ChatDataset, mask_prefix
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.core.datasets.token_rows import cumulative_lengths, positions_within

LENGTH, END = 24, 1
CONFIG = GPTDatasetConfig(sequence_length=LENGTH, seed=4, vocab_size=5000, eod_token=END)


def write(prefix, conversations, masks):
    with (
        IndexedDatasetWriter(prefix, np.uint16) as tokens,
        IndexedDatasetWriter(mask_prefix(prefix), np.uint8) as mask,
    ):
        for ids, learnt in zip(conversations, masks, strict=True):
            tokens.add_document(ids)
            mask.add_document(learnt)
    return IndexedDataset(prefix)


@pytest.fixture
def talks():
    """Return 60 conversations of tokens that occur nowhere else, and their masks."""
    random = np.random.default_rng(7)
    lengths = random.integers(2, 20, size=60)
    ends = 10 + np.cumsum(lengths)
    ids = [
        list(range(end - n, end)) for n, end in zip(lengths.tolist(), ends.tolist(), strict=True)
    ]
    masks = [[*(random.random(len(t) - 1) < 0.5).astype(int).tolist(), 1] for t in ids]
    return ids, masks


def test_epoch_has_each_conversation_once_with_its_loss_mask(tmp_path, talks):
    data = ChatDataset(write(str(tmp_path / "a"), *talks), CONFIG, sequences=range(60))
    rows = data.read(np.arange(len(data)))
    inputs, labels = rows.tokens[:, :-1], rows.tokens[:, 1:]
    # Every label with its loss, by the token before it: tokens are unique.
    learnt = {
        (i, o) for i, o, m in zip(inputs.flat, labels.flat, rows.loss_mask.flat, strict=True) if m
    }
    wanted = {
        (t[i - 1], t[i])
        for t, mask in zip(*talks, strict=True)
        for i in range(1, len(t))
        if mask[i]
    }
    assert learnt == wanted
    seen = [t for t in rows.tokens.flat if t != END]
    assert sorted(seen) == sorted(token for talk in talks[0] for token in talk)
    assert len(data) < 40


def test_conversations_and_padding_are_separate_documents(tmp_path, talks):
    data = ChatDataset(write(str(tmp_path / "a"), *talks), CONFIG, sequences=range(60))
    rows = data.read(np.arange(len(data)))
    first = {talk[0] for talk in talks[0]}
    ends = np.pad(np.diff(rows.document_ids) > 0, ((0, 0), (0, 1)))  # last tokens of conversations
    ends[:, -1] = (rows.tokens[:, -1] == END) & (rows.tokens[:, -2] != END)
    ends[:, -1] |= [row[-1] in first for row in rows.tokens]
    np.testing.assert_array_equal(rows.padding, (rows.tokens[:, :-1] == END) | ends)
    for tokens, documents, positions in zip(
        rows.tokens, rows.document_ids, rows.positions, strict=True
    ):
        starts = [i for i in range(LENGTH) if tokens[i] in first]
        padding = np.flatnonzero(tokens[:-1] == END)
        starts += [int(padding[0])] if len(padding) else []
        is_start = positions == 0
        assert np.flatnonzero(is_start).tolist() == starts
        assert documents.tolist() == (np.cumsum(is_start) - 1).tolist()
    occurs = bool((rows.tokens == END).any())
    assert occurs
    assert cumulative_lengths(rows.document_ids).shape[0] == len(data)
    np.testing.assert_array_equal(rows.positions, positions_within(rows.document_ids))


def test_what_no_token_follows_is_padding(tmp_path):
    """The rest of a row and the last token of a conversation, which a row that it fills has as a
    label alone; neither what the loss leaves out, nor tokens that end documents inside."""
    ids = [[7, END, 8, END], [9, END, END]]
    source = write(str(tmp_path / "a"), ids, [[0, 0, 1, 0], [0, 1, 0]])
    for length, tail in ((8, [True, True]), (7, [True]), (6, [])):
        config = dataclasses.replace(CONFIG, sequence_length=length)
        rows = ChatDataset(source, config, sequences=range(2)).read(np.arange(1))
        first, second = (4, 3) if rows.tokens[0, 0] == 7 else (3, 4)
        expected = [False] * (first - 1) + [True] + [False] * (second - 1) + tail
        assert rows.padding.tolist() == [expected[:length]]


def test_a_cache_is_not_used_for_another_mask(tmp_path, talks):
    """The mask decides which conversations are left out, so what rows hold depends on it."""
    ids, masks = talks
    config = dataclasses.replace(CONFIG, cache_dir=tmp_path / "cache")
    all_learn = ChatDataset(write(str(tmp_path / "a"), ids, masks), config, sequences=range(60))
    fewer = [mask if number % 2 else [0] * len(mask) for number, mask in enumerate(masks)]
    half_learn = ChatDataset(write(str(tmp_path / "a"), ids, fewer), config, sequences=range(60))
    assert all_learn.statistics.left_out == 0
    assert half_learn.statistics.left_out == 30
    assert half_learn.fingerprint != all_learn.fingerprint
    rows = half_learn.read(np.arange(len(half_learn)))
    assert set(rows.tokens.flat) - {END} == {t for talk in ids[1::2] for t in talk}


def test_more_samples_add_epochs_and_keep_the_first_epoch(tmp_path, talks):
    source = write(str(tmp_path / "a"), *talks)
    one = ChatDataset(source, CONFIG, sequences=range(60))
    more = ChatDataset(source, CONFIG, sequences=range(60), num_samples=3 * len(one))
    assert len(more) >= 3 * len(one)
    here, there = (d.read(np.arange(len(one))).tokens for d in (one, more))
    np.testing.assert_array_equal(here, there)
    second = more.read(np.arange(len(one), 2 * len(one))).tokens
    assert not np.array_equal(here, second)
    assert set(here.flat) == set(more.read(np.arange(len(one), len(more))).tokens.flat)


def test_too_long_and_pointless_conversations_are_counted(tmp_path):
    """Rows take 25 tokens: a longer conversation is cut, one that loses all it teaches is left."""
    ids = [list(range(100, 140)), list(range(200, 240)), [5, 6], [7], list(range(300, 325))]
    masks = [[0] * 20 + [1] * 20, [0] * 30 + [1] * 10, [1, 0], [1], [1] * 25]
    data = ChatDataset(write(str(tmp_path / "a"), ids, masks), CONFIG, sequences=range(5))
    found = data.statistics
    assert (found.conversations, found.truncated, found.left_out, found.rows) == (5, 2, 3, 2)
    assert found.filled == 1.0
    rows = data.read(np.arange(2))
    assert sorted(rows.tokens[:, 0].tolist()) == [100, 300]
    assert sorted(rows.loss_mask.sum(1).tolist()) == [5, 24]  # the first of 25 is no label
    with pytest.raises(ValueError, match=r"valid split: nothing is to be learnt from its 2"):
        ChatDataset(data.source, CONFIG, sequences=range(1, 3), name="valid")


def test_what_is_no_chat_data(tmp_path, talks):
    ids, masks = talks
    write(str(tmp_path / "a"), ids, masks)
    with pytest.raises(ValueError, match=r"larger share"):
        ChatDataset(IndexedDataset(tmp_path / "a"), CONFIG, sequences=range(60, 60))
    with IndexedDatasetWriter(tmp_path / "b", np.uint16) as writer:
        writer.add_document([1, 2, 3])
    with pytest.raises(ValueError, match=r"b is no chat data set.*preprocess_data --chat"):
        ChatDataset(IndexedDataset(tmp_path / "b"), CONFIG, sequences=range(1))
    write(str(tmp_path / "c"), ids, masks)
    with IndexedDatasetWriter(tmp_path / "c.mask", np.uint8) as writer:
        writer.add_document([1, 0, 1])
    with pytest.raises(ValueError, match=r"the mask is of other tokens"):
        ChatDataset(IndexedDataset(tmp_path / "c"), CONFIG, sequences=range(60))
    small = GPTDatasetConfig(sequence_length=LENGTH, seed=4, vocab_size=300)
    data = ChatDataset(IndexedDataset(tmp_path / "a"), small, sequences=range(60))
    with pytest.raises(ValueError, match=r"of conversation \d+ is not below the vocabulary"):
        data.read(np.arange(len(data)))
    source = write(str(tmp_path / "d"), [[0, 7, 300, 9]], [[0, 1, 1, 1]])
    with pytest.raises(ValueError, match=r"token id 300 at position 2 of conversation 0"):
        ChatDataset(source, small, sequences=range(1)).read(np.arange(1))


def test_a_blend_of_chats(tmp_path, talks):
    ids, masks = talks
    parts = [
        ChatDataset(
            write(str(tmp_path / name), ids[cut], masks[cut]),
            CONFIG,
            sequences=range(30),
            num_samples=20,
        )
        for name, cut in (("a", slice(30)), ("b", slice(30, 60)))
    ]
    blend = BlendedDataset(parts, weights=[1, 2], num_samples=24)
    rows = blend.read(np.arange(24))
    assert rows.document_ids.max() > 2
    for i in range(24):
        own = parts[blend.dataset_index[i]].read([blend.dataset_sample_index[i]])
        for name in ("tokens", "loss_mask", "positions", "document_ids", "padding"):
            np.testing.assert_array_equal(vars(rows)[name][i], vars(own)[name][0])
