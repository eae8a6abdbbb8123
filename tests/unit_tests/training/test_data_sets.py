# SPDX-License-Identifier: Apache-2.0
"""The vocabulary and the data sets of a run: their sources, their order and their identity."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from megatron.core import Group
from megatron.core.datasets import GPTBatches, IndexedDatasetWriter, PrefetchedBatches
from megatron.training.config.resolve import ResolvedRun, resolve
from megatron.training.data.data_sets import (
    build_data_sets,
    compare_identity,
    read_ahead,
    training_batches,
    validation_batches,
)
from megatron.training.data.vocabulary import Vocabulary, read_vocabulary
from tests.unit_tests.training.small_config import small_config

VOCABULARY = Vocabulary(size=300, eod=0, tokenizer={})


@pytest.fixture
def prefix(tmp_path):
    with IndexedDatasetWriter(tmp_path / "tokens", np.dtype("<u2")) as writer:
        for document in range(20):
            tokens = np.arange(document, document + 51, dtype=np.int64)
            tokens[-1] = 0
            writer.add_documents(tokens, np.array([51]))
    return str(tmp_path / "tokens")


def _run(prefix: str, flags: str = "") -> ResolvedRun:
    text = f"--data-path {prefix} --split 80,20 --global-batch-size 6 --eval-iters 2 {flags}"
    return resolve(small_config(text), 1)


def _run_without_data_path(flags: str) -> ResolvedRun:
    return resolve(small_config(flags, without=("--data-path",)), 1)


def _tokens(batches, count):
    return [next(batches).tokens.tolist() for _ in range(count)]


def _training(data_sets, run, consumed_samples=0):
    """Return the training batches of a single rank."""
    dp_group = Group.single("dense_dp")
    return training_batches(data_sets, run, dp_group=dp_group, consumed_samples=consumed_samples)


def test_training_data_resumes_at_consumed_samples(prefix):
    run = _run(prefix)
    data_sets = build_data_sets(run, VOCABULARY)
    whole = _tokens(_training(data_sets, run), 8)
    resumed = _tokens(_training(data_sets, run, 12), 4)
    assert resumed == whole[4:]
    assert len(data_sets.train) >= run.train_samples


def test_validation_repeats_samples_disjoint_from_training(prefix):
    run = _run(prefix)
    data_sets = build_data_sets(run, VOCABULARY)
    dp_group = Group.single("dense_dp")
    samples, repeated = (
        _tokens(validation_batches(data_sets, run, dp_group=dp_group), 4) for _ in range(2)
    )
    assert samples == repeated
    trained = _tokens(_training(data_sets, run), 20)
    highest = max(max(max(row) for row in batch) for batch in trained)
    assert highest < 16 + 50 <= max(max(max(row) for row in batch) for batch in samples) + 1


def test_run_without_validation_builds_no_validation_set(prefix):
    run = _run(prefix, "--eval-interval 0 --split 1")
    assert build_data_sets(run, VOCABULARY).validation is None


def test_cyclic_permutes_every_epoch(prefix):
    run = _run(prefix, "--dataloader-type cyclic --train-iters 40")
    data_sets = build_data_sets(run, VOCABULARY)
    size = len(data_sets.train)
    batches = _training(data_sets, run)
    rows = [tuple(row) for batch in _tokens(batches, -(-2 * size // 3)) for row in batch]
    assert sorted(rows[:size]) == sorted(rows[size : 2 * size])
    assert rows[:size] != rows[size : 2 * size]


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--data-path 1 {0} 3 {1}",
        "--data-path {0} {1}",
        "--data-path {0} {1} --dataloader-type cyclic",
        "--dataloader-type cyclic",
        "--data-path 1 {0} 3 {1} --dataloader-type cyclic",
        "--mock-data",
        "--mock-data --dataloader-type cyclic",
        "--data-path 1 {0} 3 {1} --sft",
    ],
)
@pytest.mark.parametrize("initial_iters", [4, 13], ids=["less than an epoch", "epochs"])
def test_changed_run_length_keeps_the_sample_order(prefix, tmp_path, flags, initial_iters):
    """The run is resumed with another number of steps, and batches of 3 samples instead of 6."""
    names = (prefix, str(tmp_path / "chats"))
    for ending in (".bin", ".idx"):
        shutil.copy(prefix + ending, names[1] + ending)
    for name in names if "--sft" in flags else ():
        with IndexedDatasetWriter(f"{name}.mask", np.uint8) as writer:
            writer.add_documents(np.ones(20 * 51, dtype=np.int64), np.full(20, 51))
    words, without = flags.format(*names), ()
    if "--mock-data" in flags:
        without = ("--data-path",)

    def order(steps, batch, **saved):
        text = f"--data-path {prefix} --split 80,20 --eval-iters 2 {words} --train-iters {steps}"
        text = text.replace(f"--data-path {prefix}", "") if without else text
        config = small_config(f"{text} --global-batch-size {batch}", without=without)
        run = resolve(config, 1)
        data_sets = build_data_sets(run, VOCABULARY, **saved)
        batches = _training(data_sets, run)
        samples = max(run.train_samples, saved.get("train_samples", 0))
        micro = run.config.training.micro_batch_size
        rows = [row for batch in _tokens(batches, samples // micro) for row in batch]
        return rows[:samples], data_sets

    initial, initial_sets = order(initial_iters, 6)
    lengths = {"train": initial_iters * 6, "valid": 12, "test": 12}
    assert initial_sets.order_lengths == lengths
    longer, longer_sets = order(80, 3, order_lengths=lengths)
    assert longer[: initial_iters * 6] == initial
    longest, _ = order(80, 3, order_lengths=lengths, train_samples=300)
    assert longest[:240] == longer
    assert len(longest) == 300
    shorter, _ = order(5, 3, order_lengths=lengths)
    assert shorter == longer[:15]
    assert longer_sets.order_lengths == lengths
    assert longer_sets.validation is not None
    indices = np.arange(12)
    expected = initial_sets.validation.read(indices).tokens
    assert longer_sets.validation.read(indices).tokens.tolist() == expected.tolist()
    if flags in ("", "--data-path 1 {0} 3 {1}"):
        assert order(80, 3)[0][: initial_iters * 6] != initial, "the order depends on order_lengths"


def test_eod_tokens_can_be_masked_from_the_loss(prefix):
    plain, masked = _run(prefix), _run(prefix, "--eod-mask-loss")
    for run, expected in ((plain, 0), (masked, 1)):
        data_sets = build_data_sets(run, VOCABULARY)
        batches = _training(data_sets, run)
        batch = next(batches)
        zeros = int((batch.loss_mask == 0).sum())
        starts = int((batch.input_ids == 0).sum())
        assert zeros == expected * starts


@pytest.mark.parametrize("marker", ["kind", "mask"])
@pytest.mark.parametrize("flag", ["--data-path", "--valid-data-path"])
def test_chat_data_is_refused_without_sft(prefix, tmp_path, flag, marker):
    """In any split; a mask file marks chats when the description is absent."""
    for ending in (".bin", ".idx"):
        shutil.copy(prefix + ending, tmp_path / f"chats{ending}")
    chats = str(tmp_path / "chats")
    if marker == "kind":
        (tmp_path / "chats.json").write_text('{"kind": "chat", "tokenizer": {}}')
    else:
        (tmp_path / "chats.mask.idx").touch()
    mixture = f"1 {prefix} 1 {chats}"
    shared_paths = f"--data-path {mixture} --split 80,20"
    paths = (
        shared_paths if flag == "--data-path" else f"--train-data-path {prefix} {flag} {mixture}"
    )
    with pytest.raises(
        ValueError, match=f"^{chats} contains conversations.*--sft.*--allow-chat-as-te"
    ):
        build_data_sets(_run_without_data_path(f"{paths} --eval-iters 2"), VOCABULARY)
    allowed = _run_without_data_path(f"{paths} --eval-iters 2 --allow-chat-as-text")
    assert build_data_sets(allowed, VOCABULARY).train.read(np.array([0])).loss_mask.all()
    (tmp_path / "chats.json").write_text('{"kind": "text", "tokenizer": {}}')
    assert build_data_sets(_run_without_data_path(f"{paths} --eval-iters 2"), VOCABULARY)


def test_a_missing_file_is_a_user_error(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        build_data_sets(_run(str(tmp_path / "absent")), VOCABULARY)


def test_data_identity_ignores_path_and_run_length(prefix, tmp_path):
    saved = build_data_sets(_run(prefix), VOCABULARY).identity
    for ending in (".bin", ".idx"):
        shutil.copy(prefix + ending, tmp_path / f"moved{ending}")
    moved = _run(str(tmp_path / "moved"), "--train-iters 20")
    current = build_data_sets(moved, VOCABULARY).identity
    assert compare_identity(json.loads(json.dumps(saved)), current) == []
    changed = build_data_sets(_run(prefix, "--seed 7 --split 90,10"), VOCABULARY).identity
    differences = compare_identity(saved, changed)
    assert len(differences) == 2
    assert "seed: 1234 in the checkpoint, 7 now" in differences


def _write_description(prefix: str, **description) -> None:
    with open(f"{prefix}.json", "w") as file:
        json.dump({"tokenizer": description}, file)


def test_vocabulary_size_comes_from_the_tokenizer(prefix):
    vocabulary = read_vocabulary(small_config("--tokenizer-type byte").tokenizer, [prefix])
    assert (vocabulary.size, vocabulary.eod, vocabulary.tokenizer["type"]) == (257, 256, "byte")
    larger = read_vocabulary(
        small_config("--tokenizer-type byte --vocab-size 300").tokenizer, [prefix]
    )
    assert larger.size == 300
    null = read_vocabulary(
        small_config("--tokenizer-type null --vocab-size 300").tokenizer, [prefix]
    )
    assert (null.size, null.eod, null.tokenizer["vocab_size"]) == (301, 300, 300)
    with pytest.raises(ValueError, match="--vocab-size 100 is less than the tokenizer's 257"):
        read_vocabulary(small_config("--tokenizer-type byte --vocab-size 100").tokenizer, [prefix])


def test_vocabulary_size_comes_from_the_token_files(prefix):
    _write_description(prefix, vocab_size=211, eod=3, fingerprint="f")
    vocabulary = read_vocabulary(small_config().tokenizer, [prefix])
    assert (vocabulary.size, vocabulary.eod) == (211, 3)
    with pytest.raises(ValueError, match="less than the 211 of the token files"):
        read_vocabulary(small_config("--vocab-size 100").tokenizer, [prefix])
    with pytest.raises(ValueError, match="written with another tokenizer"):
        read_vocabulary(small_config("--tokenizer-type byte").tokenizer, [prefix])


def test_missing_vocabulary_and_damaged_description_are_errors(prefix):
    with pytest.raises(ValueError, match="give --tokenizer-model, or --vocab-size"):
        read_vocabulary(small_config().tokenizer, [prefix])
    with open(f"{prefix}.json", "w") as file:
        file.write("{")
    with pytest.raises(ValueError, match="is damaged"):
        read_vocabulary(small_config("--vocab-size 300").tokenizer, [prefix])


def test_each_split_can_have_its_own_files(prefix, tmp_path):
    for name, base in (("valid", 100), ("test", 200)):
        with IndexedDatasetWriter(tmp_path / name, np.dtype("<u2")) as writer:
            writer.add_document(np.arange(base, base + 90))
    flags = f"--train-data-path {prefix} --valid-data-path {tmp_path}/valid --global-batch-size 6 "
    run = _run_without_data_path(f"{flags} --eval-iters 1 --test-data-path {tmp_path}/test")
    data_sets = build_data_sets(run, VOCABULARY)
    dp_group = Group.single("dense_dp")
    seen = {}
    for split in ("validation", "test"):
        batch = next(validation_batches(data_sets, run, dp_group=dp_group, split=split))
        seen[split] = (int(batch.tokens.min()), int(batch.tokens.max()))
    assert 100 <= seen["validation"][0] <= seen["validation"][1] < 190
    assert 200 <= seen["test"][0] <= seen["test"][1] < 290
    whole = _tokens(_training(data_sets, run), 20)
    assert max(max(max(row) for row in batch) for batch in whole) == 19 + 49
    run = _run_without_data_path(f"--train-data-path {prefix} --global-batch-size 6")
    train_only = build_data_sets(run, VOCABULARY)
    assert (train_only.validation, train_only.test) == (None, None)
    assert train_only.notes == ("no validation: there is no --valid-data-path",)


def test_test_split_is_built_if_it_has_documents(prefix):
    assert build_data_sets(_run(prefix, "--split 80,10,10"), VOCABULARY).test is not None
    empty_split = build_data_sets(_run(prefix, "--split 969,30,1"), VOCABULARY)
    assert empty_split.test is None
    assert "--split 969,30,1 gives it no document" in empty_split.notes[0]
    without_eval = build_data_sets(_run(prefix, "--split 80,10,10 --eval-interval 0"), VOCABULARY)
    assert (without_eval.test, without_eval.notes) == (None, ())
    assert build_data_sets(_run(prefix, "--split 80,20"), VOCABULARY).notes == ()


def test_positions_and_document_ids_reset_by_option(prefix):
    run = _run(prefix, "--reset-position-ids --reset-attention-mask")
    data_sets = build_data_sets(run, VOCABULARY)
    batch = next(_training(data_sets, run))
    ends = batch.input_ids[:, :-1] == 0
    assert ends.any()
    starts = batch.positions[:, 1:] == 0
    assert torch.equal(starts, ends)
    assert torch.equal(batch.document_ids.diff(dim=1), ends.int())
    assert batch.cu_seqlens.shape == (3, int(ends.sum(1).max()) + 2)
    with pytest.raises(ValueError, match="--reset-position-ids needs an end-of-document token"):
        build_data_sets(run, Vocabulary(size=300, eod=None, tokenizer={}))


def test_mock_data_do_not_depend_on_the_run_length():
    runs = [
        _run_without_data_path(f"--mock-data --global-batch-size 6 --train-iters {n}")
        for n in (4, 9)
    ]
    sets = [build_data_sets(run, VOCABULARY) for run in runs]
    short, long = (_tokens(_training(d, r), 8) for d, r in zip(sets, runs, strict=True))
    assert short == long
    assert compare_identity(sets[0].identity, sets[1].identity) == []
    smaller_vocabulary = build_data_sets(
        _run_without_data_path("--mock-data"), Vocabulary(size=99, eod=0, tokenizer={})
    )
    assert compare_identity(sets[0].identity, smaller_vocabulary.identity) == [
        "vocab_size: 300 in the checkpoint, 99 now"
    ]


def test_identity_differences_name_the_files(prefix, tmp_path):
    two_files = f"--train-data-path {prefix} {prefix} --eval-interval 0"
    identity = build_data_sets(_run_without_data_path(two_files), VOCABULARY).identity
    with IndexedDatasetWriter(tmp_path / "changed", np.dtype("<u2")) as writer:
        writer.add_document(np.arange(90))
    text = f"--train-data-path {prefix} {tmp_path}/changed --eval-interval 0"
    changed = build_data_sets(_run_without_data_path(text), VOCABULARY).identity
    assert compare_identity(identity, changed) == [
        f"data file 2, {tmp_path}/changed, has other content"
    ]
    without_paths = {
        k: v for k, v in identity.items() if k != "paths"
    }  # as older versions wrote the identity
    assert compare_identity(
        without_paths, {**identity, "files": identity["files"][:1], "paths": [prefix]}
    ) == [f"2 data files in the checkpoint (unnamed), 1 now ({prefix})"]
    assert compare_identity(identity, {**identity, "weights": [1, 2], "kind": "sft"}) == [
        "weights: None in the checkpoint, [1, 2] now",
        "kind: None in the checkpoint, sft now",
    ]


def test_prefetching_is_optional_and_changes_no_sample(prefix):
    run, plain = _run(prefix, "--num-workers 3"), _run(prefix, "--num-workers 0")
    data_sets = build_data_sets(run, VOCABULARY)
    loaders = [read_ahead(_training(data_sets, r), r) for r in (run, plain)]
    assert [type(b) for b in loaders] == [PrefetchedBatches, GPTBatches]
    assert _tokens(loaders[0], 6) == _tokens(loaders[1], 6)
    loaders[0].close()
