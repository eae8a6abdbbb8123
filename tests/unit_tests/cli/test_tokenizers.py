# SPDX-License-Identifier: Apache-2.0
"""Tokenizers give text back unchanged, and a trained one is repeatable."""

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
from megatron.core.inference.text_stream import TextStream
from tests.support.continuation import continuation

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
    arrays = ByteTokenizer().encode_arrays(TEXTS)
    assert [ids.tolist() for ids in arrays] == ByteTokenizer().encode_batch(TEXTS)


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


HARD = [
    "It's 12345 o'clock, THEY'LL say\n\n\tso",
    "e\u0301 \u1e9b\u0323   x  ",
    "a<|endoftext|>b <|im_start|>user\n<tool> x </s>",
    "",
]


@pytest.fixture
def two_files(tmp_path):
    """A folder with vocab.json and merges.txt."""
    train_bpe([*TEXTS, *HARD[:2], "12345 12345"] * 5, 330, tmp_path / "tokenizer.json")
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""]
    (tmp_path / "merges.txt").write_text("\n".join(merges))
    return tmp_path


def describe_tokenizer(folder, **fields):
    """Write tokenizer_config.json, with two tokens behind the 330 of the vocabulary."""
    token = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        "331": {**token, "content": "<tool>", "rstrip": True, "special": False},
        "330": {**token, "content": "<|im_start|>", "special": True},
    }
    fields = {"eos_token": "<|im_start|>", "added_tokens_decoder": added, **fields}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast"])
def test_vocab_json_and_merges_txt_are_read_as_in_transformers(kind, two_files):
    describe_tokenizer(two_files, tokenizer_class=kind)
    named = getattr(transformers, kind.removesuffix("Fast"))
    reference = named.from_pretrained(str(two_files))
    ours, same = HuggingFaceTokenizer(two_files), HuggingFaceTokenizer(two_files / "vocab.json")
    assert (ours.vocab_size, ours.eod) == (332, reference.eos_token_id) == (332, 330)
    for text in [*TEXTS, *HARD]:
        ids = reference.encode(text)
        assert ours.tokenize(text) == same.tokenize(text) == ids
        assert ours.detokenize(ids) == reference.decode(ids, skip_special_tokens=True)
    assert same.fingerprint == ours.fingerprint
    other = "GPT2Tokenizer" if kind.startswith("Qwen2") else "Qwen2Tokenizer"
    describe_tokenizer(two_files, tokenizer_class=other)
    assert HuggingFaceTokenizer(two_files).tokenize(HARD[0]) != ours.tokenize(HARD[0])
    assert HuggingFaceTokenizer(two_files).fingerprint != ours.fingerprint


def test_vocab_file_implies_gpt2_unless_tokenizer_config_differs(two_files):
    reference = transformers.GPT2Tokenizer.from_pretrained(str(two_files))
    for name in ("vocab.json", "merges.txt"):
        (two_files / name).rename(two_files / f"gpt2-{name}")
    ours = HuggingFaceTokenizer(two_files / "gpt2-vocab.json")
    for text in [*TEXTS, *HARD]:
        assert ours.tokenize(text) == reference.encode(text)
    describe_tokenizer(two_files, tokenizer_class="Qwen2Tokenizer")
    other = HuggingFaceTokenizer(two_files / "gpt2-vocab.json")
    assert other.fingerprint != ours.fingerprint
    (two_files / "gpt2-merges.txt").unlink()
    with pytest.raises(ValueError, match=r"gpt2-vocab\.json"):
        HuggingFaceTokenizer(two_files / "gpt2-vocab.json")


def test_the_fingerprint_of_two_files_is_of_their_bytes(two_files):
    """A blank that the library does not keep changes it, and nothing that the library writes
    does."""

    def by_hand() -> str:
        files = [(two_files / name).read_bytes() for name in ("vocab.json", "merges.txt")]
        said = json.dumps(["GPT2Tokenizer", []]).encode()
        parts = [hashlib.sha256(part).digest() for part in (*files, said)]
        return hashlib.sha256(b"".join(parts)).hexdigest()

    seen = set()
    for name in (None, "vocab.json", "merges.txt"):
        if name is not None:
            path = two_files / name
            path.write_bytes(path.read_bytes() + b"\n")
        ours = HuggingFaceTokenizer(two_files / "vocab.json")
        assert ours.fingerprint == by_hand()
        seen.add(ours.fingerprint)
    assert len(seen) == 3


def test_merges_are_not_read_through_a_link_that_leads_elsewhere(two_files, tmp_path_factory):
    """Inside the folder a link is followed, as hub caches have them; the user has named neither."""
    expected = HuggingFaceTokenizer(two_files / "vocab.json").tokenize(HARD[0])
    merges, elsewhere = two_files / "merges.txt", tmp_path_factory.mktemp("elsewhere") / "m.txt"
    merges.rename(two_files / "beside.txt")
    merges.symlink_to("beside.txt")
    assert HuggingFaceTokenizer(two_files / "vocab.json").tokenize(HARD[0]) == expected
    (two_files / "beside.txt").rename(elsewhere)
    merges.unlink()
    merges.symlink_to(elsewhere)
    for path in (two_files, two_files / "vocab.json"):
        with pytest.raises(ValueError, match="link"):
            HuggingFaceTokenizer(path)


def test_merges_file_is_read_from_the_vocabulary_folder():
    assert merge_file_problem(None, None) is None
    assert merge_file_problem("a/gpt2-vocab.json", "a/gpt2-merges.txt") is None
    assert merge_file_problem("a/vocab.json", "./a/merges.txt") is None
    assert "b/gpt2-merges.txt" in merge_file_problem("b/gpt2-vocab.json", "a/gpt2-merges.txt")
    for model in (None, "tokenizer.json"):
        assert "--vocab-file" in merge_file_problem(model, "merges.txt")


def test_what_vocab_json_and_merges_txt_do_not_say_is_refused(two_files):
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
        describe_tokenizer(two_files, **fields)
        with pytest.raises(ValueError, match=text):
            HuggingFaceTokenizer(two_files)
    (two_files / "tokenizer_config.json").write_text(json.dumps(gpt2))
    HuggingFaceTokenizer(two_files)
    (two_files / "added_tokens.json").write_text('{"<x>": 330}')
    with pytest.raises(ValueError, match=r"added_tokens\.json"):
        HuggingFaceTokenizer(two_files)
    (two_files / "added_tokens.json").unlink()
    for content in (b"\xff", b"a b c\n", b"no such\n"):
        (two_files / "merges.txt").write_bytes(content)
        with pytest.raises(ValueError, match=r"vocab\.json and merges\.txt"):
            HuggingFaceTokenizer(two_files)
    (two_files / "merges.txt").unlink()
    with pytest.raises(ValueError, match=r"vocab\.json: No such file|tokenizer"):
        HuggingFaceTokenizer(two_files / "vocab.json")


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
        ({"kind": "bpe"}, "use one of hf, sentencepiece, tiktoken, byte, null"),
    ]:
        with pytest.raises(ValueError, match=message):
            build_tokenizer(**arguments)
    with pytest.raises(ValueError, match="too small: it needs 256 bytes"):
        train_bpe(TEXTS, 256, tmp_path / "small.json")


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """Return the path of a SentencePiece model that falls back to bytes."""
    folder = tmp_path_factory.mktemp("pieces")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the theory of the thing", "a def is a def of a thing"] * 20),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


def test_sentencepiece(pieces):
    reference = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    tokenizer = SentencePieceTokenizer(pieces)
    texts = ["the thing of a def", "日本 🙂 é", "a"]
    assert tokenizer.encode_batch(texts) == [reference.encode(text) for text in texts]
    assert [ids.tolist() for ids in tokenizer.encode_arrays(texts)] == tokenizer.encode_batch(texts)
    for text in texts:
        ids = tokenizer.tokenize(text)
        assert tokenizer.detokenize([*ids, tokenizer.eod, tokenizer.vocab_size + 5]) == text
    assert tokenizer.vocab_size == reference.get_piece_size()
    assert tokenizer.eod == reference.piece_to_id("</s>")
    assert SentencePieceTokenizer(pieces.parent).fingerprint == tokenizer.fingerprint


def test_sentencepiece_files_that_are_none(pieces, tmp_path):
    (tmp_path / "x.model").write_bytes(b"no model")
    (tmp_path / "empty.model").write_bytes(b"")
    for name in ("x.model", "empty.model"):
        with pytest.raises(ValueError, match=rf"{name} is not a SentencePiece model"):
            SentencePieceTokenizer(tmp_path / name)
    with pytest.raises(ValueError, match=r"none\.model: No such file"):
        SentencePieceTokenizer(tmp_path / "none.model")
    with pytest.raises(ValueError, match=r"sentencepiece needs --tokenizer-model"):
        build_tokenizer("sentencepiece")


def test_the_kind_follows_from_the_file(pieces):
    assert guess_type(pieces) == "sentencepiece"
    assert guess_type("tokenizer.json") == guess_type(None) == "hf"
    assert isinstance(build_tokenizer(guess_type(pieces), model=pieces), SentencePieceTokenizer)


def test_a_folder_says_which_token_ends_a_document(bpe, tmp_path):
    train_bpe(TEXTS * 5, 300, tmp_path / "tokenizer.json")
    config = tmp_path / "tokenizer_config.json"
    name = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json")
    ).convert_ids_to_tokens(7)
    for said, expected in [(name, 7), ({"content": name}, 7), (None, bpe.eod)]:
        config.write_text(json.dumps({"eos_token": said}))
        assert HuggingFaceTokenizer(tmp_path).eod == expected
        assert HuggingFaceTokenizer(tmp_path / "tokenizer.json").eod == expected
    config.write_text('{"eos_token": "<none>"}')
    with pytest.raises(ValueError, match=r"names '<none>' as eos_token"):
        HuggingFaceTokenizer(tmp_path)
    config.write_text("[1]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is damaged"):
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
def test_a_continuation_streams_exactly_the_text_that_follows(kind, bpe, pieces):
    tokenizer = {
        "hf": bpe, "sentencepiece": SentencePieceTokenizer(pieces), "byte": ByteTokenizer(),
        "null": NullTokenizer(50),
    }[kind]  # fmt: skip
    prompt, rest = ("3 4", " 5 6") if kind == "null" else ("the theory of", " the 日本 🙂 thing")
    before, ids = tokenizer.tokenize(prompt), tokenizer.tokenize(prompt + rest)
    assert ids[: len(before)] == before
    after = ids[len(before) :]
    assert continuation(tokenizer, before)(after) == rest
    stream = TextStream(tokenizer.detokenize, before)
    shown = [stream.push([token]) for token in after]
    assert "".join([*shown, stream.push([], finished=True)]) == rest
    assert "\ufffd" not in "".join(shown)


@pytest.mark.parametrize("run", ["a" * 3_000_000, "\n" * 3_000_000, "ab" * 1_500_000])
def test_a_word_of_megabytes_does_not_hold_up_training(tmp_path, run):
    texts = ["some words of a text " * 50, f"{run} after it"]
    begin = time.monotonic()
    tokenizer = train_bpe(texts, 300, tmp_path / "tokenizer.json")
    # Uncut it takes hours.
    assert time.monotonic() - begin < 20.0
    assert tokenizer.detokenize(tokenizer.tokenize("after aaa words")) == "after aaa words"
