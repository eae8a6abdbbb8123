# SPDX-License-Identifier: Apache-2.0
"""Tokenizers give text back unchanged, and a trained one is repeatable."""

import pytest
from transformers import PreTrainedTokenizerFast

from megatron.training.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    build_tokenizer,
    train_bpe,
)

TEXTS = ["def f(x):\n    return x  # ünïcödé\n", "the theory of the thing", "\t日本 🙂\r\n\x00"] * 3


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A tokenizer of 300 ids."""
    return train_bpe(TEXTS * 5, 300, tmp_path_factory.mktemp("bpe") / "tokenizer.json")


def test_trained_tokenizer_has_all_bytes_and_an_end(bpe):
    assert bpe.vocab_size == 300
    assert bpe.eod == 0
    assert bpe.detokenize([bpe.eod]) == ""
    for text in [*TEXTS, "".join(map(chr, range(0x250))), " leading and trailing ", "<|endoftext"]:
        ids = bpe.tokenize(text)
        assert bpe.detokenize(ids) == text
        assert all(0 <= number < 300 for number in ids)
    assert len(bpe.tokenize("the the the")) < len("the the the")


def test_batches_equal_single_texts(bpe):
    for tokenizer in [bpe, ByteTokenizer()]:
        assert tokenizer.encode_batch(TEXTS) == [tokenizer.tokenize(text) for text in TEXTS]


def test_training_is_repeatable(bpe, tmp_path):
    again = train_bpe(TEXTS * 5, 300, tmp_path / "again.json")
    other = train_bpe(TEXTS * 5, 290, tmp_path / "other.json")
    assert again.fingerprint == bpe.fingerprint
    assert other.fingerprint != bpe.fingerprint


def test_ids_are_those_of_transformers(bpe, tmp_path):
    train_bpe(TEXTS * 5, 300, tmp_path / "tokenizer.json")
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    folder = HuggingFaceTokenizer(tmp_path)
    for text in TEXTS:
        assert folder.tokenize(text) == reference.encode(text) == bpe.tokenize(text)


def test_byte_tokenizer():
    tokenizer = ByteTokenizer()
    assert tokenizer.tokenize("aé") == [97, 195, 169]
    assert tokenizer.detokenize([97, 195, 169, tokenizer.eod]) == "aé"
    assert tokenizer.detokenize([195]) == "\ufffd"
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)


def test_null_tokenizer():
    tokenizer = NullTokenizer(100)
    assert tokenizer.tokenize("0 99\n7") == [0, 99, 7]
    assert tokenizer.detokenize([0, 99, tokenizer.eod]) == "0 99"
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    with pytest.raises(ValueError, match="token id 100 is not below"):
        tokenizer.tokenize("1 100")
    with pytest.raises(ValueError, match="takes numbers only"):
        tokenizer.tokenize("one")


def test_tokenizers_from_flags(bpe, tmp_path):
    train_bpe(TEXTS, 270, tmp_path / "t.json")
    assert build_tokenizer("hf", model=tmp_path / "t.json").vocab_size == 270
    assert build_tokenizer("byte").vocab_size == 257
    assert build_tokenizer("null", vocab_size=5).vocab_size == 6
    (tmp_path / "broken.json").write_text('{"version": "1.0"')
    for arguments, message in [
        ({"kind": "hf"}, "needs --tokenizer-model"),
        ({"kind": "hf", "model": tmp_path / "none.json"}, r"none\.json: No such file"),
        ({"kind": "hf", "model": tmp_path / "broken.json"}, r"broken\.json is no tokenizer\.json"),
        ({"kind": "null"}, "needs --vocab-size"),
        ({"kind": "null", "vocab_size": 0}, "must be 1 or more"),
        ({"kind": "bpe"}, "use one of hf, byte, null"),
    ]:
        with pytest.raises(ValueError, match=message):
            build_tokenizer(**arguments)
    with pytest.raises(ValueError, match="too small: it needs 256 bytes"):
        train_bpe(TEXTS, 256, tmp_path / "small.json")
