# SPDX-License-Identifier: Apache-2.0
"""Tokenizers reproduce text unchanged, and training a tokenizer is repeatable."""

import hashlib
import json
import time

import pytest
import sentencepiece
import transformers
from transformers import PreTrainedTokenizerFast

from megatron.cli.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    SentencePieceTokenizer,
    build_tokenizer,
    guess_type,
    merge_file_problem,
    train_bpe,
)
from megatron.core.inference import TextStream
from tests.support.continuation import continuation

TEXTS = ["def f(x):\n    return x  # ünïcödé\n", "the theory of the thing", "\t日本 🙂\r\n\x00"] * 3


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A BPE tokenizer with 300 ids."""
    return train_bpe(TEXTS * 5, 300, tmp_path_factory.mktemp("bpe") / "tokenizer.json")


def test_trained_tokenizer_has_all_bytes_and_an_eod(bpe):
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
    arrays = ByteTokenizer().encode_arrays(TEXTS)
    assert [ids.tolist() for ids in arrays] == ByteTokenizer().encode_batch(TEXTS)


def test_tokenizer_training_is_repeatable(bpe, tmp_path):
    repeated = train_bpe(TEXTS * 5, 300, tmp_path / "again.json")
    smaller = train_bpe(TEXTS * 5, 290, tmp_path / "other.json")
    assert repeated.fingerprint == bpe.fingerprint
    assert smaller.fingerprint != bpe.fingerprint


def test_ids_match_transformers(bpe, tmp_path):
    train_bpe(TEXTS * 5, 300, tmp_path / "tokenizer.json")
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    folder = HuggingFaceTokenizer(tmp_path)
    for text in TEXTS:
        assert folder.tokenize(text) == reference.encode(text) == bpe.tokenize(text)


HARD = [
    "It's 12345 o'clock, THEY'LL say\n\n\tso",
    "e\u0301 \u1e9b\u0323   x  ",
    "a<|endoftext|>b <|im_start|>user\n<tool> x </s>",
    "",
]


@pytest.fixture
def vocabulary_folder(tmp_path):
    """Return a folder with vocab.json and merges.txt."""
    train_bpe([*TEXTS, *HARD[:2], "12345 12345"] * 5, 330, tmp_path / "tokenizer.json")
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""]
    (tmp_path / "merges.txt").write_text("\n".join(merges))
    return tmp_path


def describe_tokenizer(folder, **fields):
    """Write tokenizer_config.json with two tokens after the 330 of the vocabulary."""
    token = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        "331": {**token, "content": "<tool>", "rstrip": True, "special": False},
        "330": {**token, "content": "<|im_start|>", "special": True},
    }
    fields = {"eos_token": "<|im_start|>", "added_tokens_decoder": added, **fields}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast"])
def test_vocab_json_and_merges_txt_match_transformers(kind, vocabulary_folder):
    describe_tokenizer(vocabulary_folder, tokenizer_class=kind)
    hf_class = getattr(transformers, kind.removesuffix("Fast"))
    reference = hf_class.from_pretrained(str(vocabulary_folder))
    tokenizer = HuggingFaceTokenizer(vocabulary_folder)
    from_file = HuggingFaceTokenizer(vocabulary_folder / "vocab.json")
    assert (tokenizer.vocab_size, tokenizer.eod) == (332, reference.eos_token_id) == (332, 330)
    for text in [*TEXTS, *HARD]:
        ids = reference.encode(text)
        assert tokenizer.tokenize(text) == from_file.tokenize(text) == ids
        assert tokenizer.detokenize(ids) == reference.decode(ids, skip_special_tokens=True)
    assert from_file.fingerprint == tokenizer.fingerprint
    other_class = "GPT2Tokenizer" if kind.startswith("Qwen2") else "Qwen2Tokenizer"
    describe_tokenizer(vocabulary_folder, tokenizer_class=other_class)
    assert HuggingFaceTokenizer(vocabulary_folder).tokenize(HARD[0]) != tokenizer.tokenize(HARD[0])
    assert HuggingFaceTokenizer(vocabulary_folder).fingerprint != tokenizer.fingerprint


def test_vocab_file_implies_gpt2_unless_tokenizer_config_differs(vocabulary_folder):
    reference = transformers.GPT2Tokenizer.from_pretrained(str(vocabulary_folder))
    for name in ("vocab.json", "merges.txt"):
        (vocabulary_folder / name).rename(vocabulary_folder / f"gpt2-{name}")
    tokenizer = HuggingFaceTokenizer(vocabulary_folder / "gpt2-vocab.json")
    for text in [*TEXTS, *HARD]:
        assert tokenizer.tokenize(text) == reference.encode(text)
    describe_tokenizer(vocabulary_folder, tokenizer_class="Qwen2Tokenizer")
    qwen2 = HuggingFaceTokenizer(vocabulary_folder / "gpt2-vocab.json")
    assert qwen2.fingerprint != tokenizer.fingerprint
    (vocabulary_folder / "gpt2-merges.txt").unlink()
    with pytest.raises(ValueError, match=r"gpt2-vocab\.json"):
        HuggingFaceTokenizer(vocabulary_folder / "gpt2-vocab.json")


def test_fingerprint_hashes_the_bytes_of_both_files(vocabulary_folder):
    """Whitespace that the library drops changes the fingerprint; its own output does not."""

    def expected_fingerprint() -> str:
        files = [(vocabulary_folder / name).read_bytes() for name in ("vocab.json", "merges.txt")]
        settings = json.dumps(["GPT2Tokenizer", []]).encode()
        digests = [hashlib.sha256(content).digest() for content in (*files, settings)]
        return hashlib.sha256(b"".join(digests)).hexdigest()

    fingerprints = set()
    for name in (None, "vocab.json", "merges.txt"):
        if name is not None:
            path = vocabulary_folder / name
            path.write_bytes(path.read_bytes() + b"\n")
        tokenizer = HuggingFaceTokenizer(vocabulary_folder / "vocab.json")
        assert tokenizer.fingerprint == expected_fingerprint()
        fingerprints.add(tokenizer.fingerprint)
    assert len(fingerprints) == 3


def test_merges_link_out_of_the_folder_is_refused(vocabulary_folder, tmp_path_factory):
    """A link inside the folder is followed, because hub caches use such links."""
    expected = HuggingFaceTokenizer(vocabulary_folder / "vocab.json").tokenize(HARD[0])
    merges = vocabulary_folder / "merges.txt"
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "m.txt"
    merges.rename(vocabulary_folder / "target.txt")
    merges.symlink_to("target.txt")
    assert HuggingFaceTokenizer(vocabulary_folder / "vocab.json").tokenize(HARD[0]) == expected
    (vocabulary_folder / "target.txt").rename(elsewhere)
    merges.unlink()
    merges.symlink_to(elsewhere)
    for path in (vocabulary_folder, vocabulary_folder / "vocab.json"):
        with pytest.raises(ValueError, match="link"):
            HuggingFaceTokenizer(path)


def test_merges_file_is_read_from_the_vocabulary_folder():
    assert merge_file_problem(None, None) is None
    assert merge_file_problem("a/gpt2-vocab.json", "a/gpt2-merges.txt") is None
    assert merge_file_problem("a/vocab.json", "./a/merges.txt") is None
    assert "b/gpt2-merges.txt" in merge_file_problem("b/gpt2-vocab.json", "a/gpt2-merges.txt")
    for model in (None, "tokenizer.json"):
        assert "--vocab-file" in merge_file_problem(model, "merges.txt")


def test_unsupported_vocab_json_settings_are_refused(vocabulary_folder):
    gpt2 = {"tokenizer_class": "GPT2Tokenizer"}
    for fields, text in (
        ({}, "tokenizer_class is None"),
        ({"tokenizer_class": "RobertaTokenizer"}, "tokenizer_class is 'RobertaTokenizer'"),
        ({**gpt2, "add_bos_token": True}, "add_bos_token"),
        ({**gpt2, "add_prefix_space": True}, "add_prefix_space"),
        ({**gpt2, "eos_token": "<nowhere>"}, "names '<nowhere>' as eos_token"),
        ({**gpt2, "added_tokens_decoder": {"7": {"content": "<x>"}}}, "cannot have the id 7"),
        ({**gpt2, "added_tokens_decoder": {"x": {"content": "<x>"}}}, "added_tokens_decoder"),
        ({**gpt2, "added_tokens_decoder": ["<x>"]}, "added_tokens_decoder"),
    ):
        describe_tokenizer(vocabulary_folder, **fields)
        with pytest.raises(ValueError, match=text):
            HuggingFaceTokenizer(vocabulary_folder)
    (vocabulary_folder / "tokenizer_config.json").write_text(json.dumps(gpt2))
    HuggingFaceTokenizer(vocabulary_folder)
    (vocabulary_folder / "added_tokens.json").write_text('{"<x>": 330}')
    with pytest.raises(ValueError, match=r"added_tokens\.json"):
        HuggingFaceTokenizer(vocabulary_folder)
    (vocabulary_folder / "added_tokens.json").unlink()
    for content in (b"\xff", b"a b c\n", b"no such\n"):
        (vocabulary_folder / "merges.txt").write_bytes(content)
        with pytest.raises(ValueError, match=r"vocab\.json and merges\.txt"):
            HuggingFaceTokenizer(vocabulary_folder)
    (vocabulary_folder / "merges.txt").unlink()
    with pytest.raises(ValueError, match=r"vocab\.json: No such file|tokenizer"):
        HuggingFaceTokenizer(vocabulary_folder / "vocab.json")


def test_byte_tokenizer_encodes_utf8_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.tokenize("aé") == [97, 195, 169]
    assert tokenizer.detokenize([97, 195, 169, tokenizer.eod]) == "aé"
    assert tokenizer.detokenize([195]) == "\ufffd"
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)


def test_null_tokenizer_reads_numbers():
    tokenizer = NullTokenizer(100)
    assert tokenizer.tokenize("0 99\n7") == [0, 99, 7]
    assert tokenizer.detokenize([0, 99, tokenizer.eod]) == "0 99"
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    with pytest.raises(ValueError, match="token id 100 is not below"):
        tokenizer.tokenize("1 100")
    with pytest.raises(ValueError, match="takes numbers only"):
        tokenizer.tokenize("one")


def test_tokenizers_are_built_from_flags(bpe, tmp_path):
    train_bpe(TEXTS, 270, tmp_path / "t.json")
    assert build_tokenizer("hf", model=tmp_path / "t.json").vocab_size == 270
    assert build_tokenizer("byte").vocab_size == 257
    assert build_tokenizer("null", vocab_size=5).vocab_size == 6
    (tmp_path / "broken.json").write_text('{"version": "1.0"')
    for arguments, message in [
        ({"kind": "hf"}, "needs --tokenizer-model"),
        ({"kind": "hf", "model": tmp_path / "none.json"}, r"none\.json: No such file"),
        (
            {"kind": "hf", "model": tmp_path / "broken.json"},
            r"broken\.json is not a tokenizer\.json",
        ),
        ({"kind": "null"}, "needs --vocab-size"),
        ({"kind": "null", "vocab_size": 0}, "must be 1 or more"),
        ({"kind": "bpe"}, "use one of hf, sentencepiece, tiktoken, byte, null"),
    ]:
        with pytest.raises(ValueError, match=message):
            build_tokenizer(**arguments)
    with pytest.raises(ValueError, match="too small: it needs 256 bytes"):
        train_bpe(TEXTS, 256, tmp_path / "small.json")


@pytest.fixture(scope="module")
def sp_model(tmp_path_factory):
    """Return the path of a SentencePiece model with byte fallback."""
    folder = tmp_path_factory.mktemp("sp_model")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the theory of the thing", "a def is a def of a thing"] * 20),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


def test_sentencepiece_tokenizer_matches_the_library(sp_model):
    reference = sentencepiece.SentencePieceProcessor(model_file=str(sp_model))
    tokenizer = SentencePieceTokenizer(sp_model)
    texts = ["the thing of a def", "日本 🙂 é", "a"]
    assert tokenizer.encode_batch(texts) == [reference.encode(text) for text in texts]
    assert [ids.tolist() for ids in tokenizer.encode_arrays(texts)] == tokenizer.encode_batch(texts)
    for text in texts:
        ids = tokenizer.tokenize(text)
        assert tokenizer.detokenize([*ids, tokenizer.eod, tokenizer.vocab_size + 5]) == text
    assert tokenizer.vocab_size == reference.get_piece_size()
    assert tokenizer.eod == reference.piece_to_id("</s>")
    assert SentencePieceTokenizer(sp_model.parent).fingerprint == tokenizer.fingerprint


def test_invalid_sentencepiece_files_are_refused(sp_model, tmp_path):
    (tmp_path / "x.model").write_bytes(b"no model")
    (tmp_path / "empty.model").write_bytes(b"")
    for name in ("x.model", "empty.model"):
        with pytest.raises(ValueError, match=rf"{name} is not a SentencePiece model"):
            SentencePieceTokenizer(tmp_path / name)
    with pytest.raises(ValueError, match=r"none\.model"):
        SentencePieceTokenizer(tmp_path / "none.model")
    with pytest.raises(ValueError, match="--tokenizer-model"):
        build_tokenizer("sentencepiece")


def test_tokenizer_type_is_guessed_from_the_file(sp_model):
    assert guess_type(sp_model) == "sentencepiece"
    assert guess_type("tokenizer.json") == guess_type(None) == "hf"
    assert isinstance(
        build_tokenizer(guess_type(sp_model), model=sp_model),
        SentencePieceTokenizer,
    )


def test_eos_token_of_a_folder_is_the_eod(bpe, tmp_path):
    train_bpe(TEXTS * 5, 300, tmp_path / "tokenizer.json")
    config = tmp_path / "tokenizer_config.json"
    name = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json")
    ).convert_ids_to_tokens(7)
    for eos_token, expected in [(name, 7), ({"content": name}, 7), (None, bpe.eod)]:
        config.write_text(json.dumps({"eos_token": eos_token}))
        assert HuggingFaceTokenizer(tmp_path).eod == expected
        assert HuggingFaceTokenizer(tmp_path / "tokenizer.json").eod == expected
    config.write_text('{"eos_token": "<none>"}')
    with pytest.raises(ValueError, match=r"'<none>'.*eos_token"):
        HuggingFaceTokenizer(tmp_path)
    config.write_text("[1]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        HuggingFaceTokenizer(tmp_path)


def test_truncation_and_padding_of_tokenizer_file_are_ignored(bpe, tmp_path):
    train_bpe(TEXTS * 5, 300, tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text())
    content["truncation"] = {
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    (tmp_path / "t.json").write_text(json.dumps(content))
    assert HuggingFaceTokenizer(tmp_path / "t.json").tokenize(TEXTS[0]) == bpe.tokenize(TEXTS[0])


@pytest.mark.parametrize("kind", ["hf", "sentencepiece", "byte", "null"])
def test_continuation_streams_exactly_the_following_text(kind, bpe, sp_model):
    tokenizer = {
        "hf": bpe, "sentencepiece": SentencePieceTokenizer(sp_model), "byte": ByteTokenizer(),
        "null": NullTokenizer(50),
    }[kind]  # fmt: skip
    prompt, suffix = ("3 4", " 5 6") if kind == "null" else ("the theory of", " the 日本 🙂 thing")
    before, ids = tokenizer.tokenize(prompt), tokenizer.tokenize(prompt + suffix)
    assert ids[: len(before)] == before
    after = ids[len(before) :]
    assert continuation(tokenizer, before)(after) == suffix
    stream = TextStream(tokenizer.detokenize, before)
    deltas = [stream.push([token]) for token in after]
    assert "".join([*deltas, stream.push([], finished=True)]) == suffix
    assert "\ufffd" not in "".join(deltas)


@pytest.mark.parametrize("run", ["a" * 3_000_000, "\n" * 3_000_000, "ab" * 1_500_000])
def test_training_splits_a_word_of_megabytes(tmp_path, run):
    texts = ["some words of a text " * 50, f"{run} after it"]
    begin = time.monotonic()
    tokenizer = train_bpe(texts, 300, tmp_path / "tokenizer.json")
    # Without the split, training takes hours.
    assert time.monotonic() - begin < 20.0
    assert tokenizer.detokenize(tokenizer.tokenize("after aaa words")) == "after aaa words"
