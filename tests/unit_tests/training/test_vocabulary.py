# SPDX-License-Identifier: Apache-2.0
"""A run uses the vocabulary of its token files; another tokenizer or EOD token is refused."""

import json
from pathlib import Path

import pytest
import sentencepiece

from megatron.cli.tokenizers import choose_tokenizer, train_bpe
from megatron.core.datasets import IndexedDataset
from megatron.training.config import TokenizerConfig
from megatron.training.data.vocabulary import read_vocabulary
from megatron.training.preprocess_data import PreprocessConfig, preprocess


@pytest.fixture
def preprocess_text(tmp_path):
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
def test_training_and_generation_infer_the_same_tokenizer(preprocess_text, tmp_path, kind, make):
    model = make(tmp_path)
    prefix = preprocess_text(tokenizer_model=model)
    vocabulary = read_vocabulary(TokenizerConfig(tokenizer_model=model), [prefix])
    assert vocabulary.tokenizer["type"] == kind
    tokenizer = choose_tokenizer(vocabulary.tokenizer, None)
    assert (vocabulary.size, vocabulary.eod) == (tokenizer.vocab_size, tokenizer.eod)
    assert IndexedDataset(prefix).get(0).tolist() == tokenizer.tokenize("low lower lowest")
    text = "low lowest"
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert choose_tokenizer({}, model).fingerprint == tokenizer.fingerprint
    # Without options, the description next to the token files applies.
    by_files = read_vocabulary(TokenizerConfig(), [prefix])
    assert (by_files.size, by_files.eod) == (vocabulary.size, vocabulary.eod)
    assert choose_tokenizer(by_files.tokenizer, None).fingerprint == tokenizer.fingerprint


def test_numeric_token_files_name_the_null_tokenizer(preprocess_text, tmp_path):
    (tmp_path / "a.txt").write_text("1 2 3")
    prefix = preprocess_text(tokenizer_type="null", vocab_size=9)
    vocabulary = read_vocabulary(TokenizerConfig(), [prefix])
    assert (vocabulary.size, vocabulary.eod) == (10, 9)
    assert choose_tokenizer(vocabulary.tokenizer, None).fingerprint == "null-9"


def test_another_tokenizer_or_end_of_document_is_refused(preprocess_text, tmp_path):
    model = make_bpe(tmp_path)
    prefix = preprocess_text(tokenizer_model=model)
    with pytest.raises(ValueError, match="was written with another tokenizer"):
        read_vocabulary(TokenizerConfig(tokenizer_type="byte"), [prefix])
    ids = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    name = next(token for token, number in ids.items() if number == 260)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": name}))
    with pytest.raises(ValueError, match=r"token 0, this run's tokenizer with 260"):
        read_vocabulary(TokenizerConfig(tokenizer_model=model), [prefix])


def test_missing_tokenizer_path_is_an_error_for_generation(preprocess_text, tmp_path):
    prefix = preprocess_text(tokenizer_model=make_bpe(tmp_path))
    description = json.loads((tmp_path / "data.json").read_text())
    del description["tokenizer"]["model"]
    (tmp_path / "data.json").write_text(json.dumps(description))
    vocabulary = read_vocabulary(TokenizerConfig(), [prefix])
    assert vocabulary.eod == 0
    with pytest.raises(ValueError, match="does not record the tokenizer"):
        choose_tokenizer(vocabulary.tokenizer, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 1 << 40},
        {"vocab_size": "7"},
        {"vocab_size": -1},
        {"eod": 10**30},
        {"model": []},
        {"fingerprint": {}},
    ],
)
def test_impossible_tokenizer_description_is_an_error(preprocess_text, changes):
    prefix = preprocess_text(tokenizer_type="byte")
    path = Path(f"{prefix}.json")
    description = json.loads(path.read_text())
    description["tokenizer"].update(changes)
    path.write_text(json.dumps(description))
    with pytest.raises(ValueError, match=r"data\.json is damaged"):
        read_vocabulary(TokenizerConfig(), [prefix])


def test_impossible_token_id_makes_no_vocabulary(tmp_path):
    model = {"type": "WordLevel", "vocab": {"a": (1 << 32) - 1}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    config = TokenizerConfig(tokenizer_model=str(tmp_path))
    with pytest.raises(ValueError, match="--vocab-size 4294967296"):
        read_vocabulary(config, [])
