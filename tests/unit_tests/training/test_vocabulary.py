# SPDX-License-Identifier: Apache-2.0
"""A run's vocabulary is its token files': another tokenizer or end of document is refused."""

import json
from pathlib import Path

import pytest
import sentencepiece

from megatron.cli.tokenizers import train_bpe
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.inference.checkpoint_model import choose_tokenizer
from megatron.training.config import TokenizerConfig
from megatron.training.data.vocabulary import read_vocabulary
from megatron.training.preprocess_data import PreprocessConfig, preprocess


@pytest.fixture
def written(tmp_path):
    """Return a function that preprocesses a text with a tokenizer and returns the prefix."""
    (tmp_path / "a.txt").write_text("low lower lowest")

    def write(**options):
        prefix = str(tmp_path / "data")
        preprocess(PreprocessConfig(input=(str(tmp_path),), output_prefix=prefix, **options))
        return prefix

    return write


def make_sentencepiece(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["low lower lowest"] * 9), model_prefix=str(tmp_path / "t"),
        vocab_size=30, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return str(tmp_path / "t.model")


def make_bpe(tmp_path):
    train_bpe(["low lower lowest"] * 3, 262, tmp_path / "tokenizer.json")
    return str(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("kind", "make"), [("sentencepiece", make_sentencepiece), ("hf", make_bpe)]
)
def test_training_and_generation_infer_the_same_tokenizer(written, tmp_path, kind, make):
    model = make(tmp_path)
    prefix = written(tokenizer_model=model)
    found = read_vocabulary(TokenizerConfig(tokenizer_model=model), [prefix])
    assert found.tokenizer["type"] == kind
    tokenizer = choose_tokenizer(found.tokenizer, None)
    assert (found.size, found.eod) == (tokenizer.vocab_size, tokenizer.eod)
    assert IndexedDataset(prefix).get(0).tolist() == tokenizer.tokenize("low lower lowest")
    text = "low lowest"
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert choose_tokenizer({}, model).fingerprint == tokenizer.fingerprint
    # Without options the files' own description counts.
    by_files = read_vocabulary(TokenizerConfig(), [prefix])
    assert (by_files.size, by_files.eod) == (found.size, found.eod)
    assert choose_tokenizer(by_files.tokenizer, None).fingerprint == tokenizer.fingerprint


def test_files_of_numbers_bring_their_tokenizer(written, tmp_path):
    (tmp_path / "a.txt").write_text("1 2 3")
    prefix = written(tokenizer_type="null", vocab_size=9)
    found = read_vocabulary(TokenizerConfig(), [prefix])
    assert (found.size, found.eod) == (10, 9)
    assert choose_tokenizer(found.tokenizer, None).fingerprint == "null-9"


def test_another_tokenizer_or_end_of_document_is_refused(written, tmp_path):
    model = make_bpe(tmp_path)
    prefix = written(tokenizer_model=model)
    with pytest.raises(ValueError, match="was written with another tokenizer"):
        read_vocabulary(TokenizerConfig(tokenizer_type="byte"), [prefix])
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    name = next(piece for piece, number in vocabulary.items() if number == 260)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": name}))
    with pytest.raises(ValueError, match=r"token 0, this run's tokenizer with 260"):
        read_vocabulary(TokenizerConfig(tokenizer_model=model), [prefix])


def test_files_that_do_not_say_where_their_tokenizer_is(written, tmp_path):
    prefix = written(tokenizer_model=make_bpe(tmp_path))
    described = json.loads((tmp_path / "data.json").read_text())
    del described["tokenizer"]["model"]
    (tmp_path / "data.json").write_text(json.dumps(described))
    found = read_vocabulary(TokenizerConfig(), [prefix])
    assert found.eod == 0
    with pytest.raises(ValueError, match="does not say which tokenizer"):
        choose_tokenizer(found.tokenizer, None)


@pytest.mark.parametrize(
    "changed",
    [
        {"vocab_size": 1 << 40},
        {"vocab_size": "7"},
        {"vocab_size": -1},
        {"eod": 10**30},
        {"model": []},
        {"fingerprint": {}},
    ],
)
def test_a_description_that_no_tokenizer_has_is_a_line(written, changed):
    prefix = written(tokenizer_type="byte")
    path = Path(f"{prefix}.json")
    described = json.loads(path.read_text())
    described["tokenizer"].update(changed)
    path.write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"data\.json is damaged"):
        read_vocabulary(TokenizerConfig(), [prefix])


def test_an_id_that_no_tokenizer_has_makes_no_vocabulary(tmp_path):
    model = {"type": "WordLevel", "vocab": {"a": (1 << 32) - 1}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    config = TokenizerConfig(tokenizer_model=str(tmp_path))
    with pytest.raises(ValueError, match="--vocab-size 4294967296"):
        read_vocabulary(config, [])
