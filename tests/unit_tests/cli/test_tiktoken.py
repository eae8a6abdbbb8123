# SPDX-License-Identifier: Apache-2.0
"""tiktoken vocabularies: ids equal to the library's, options, records, and invalid files."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest

from megatron.cli.launch import Launch
from megatron.cli.tokenizers import (
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TiktokenOptions,
    TiktokenTokenizer,
    build_tokenizer,
    choose_tokenizer,
    guess_type,
    is_tiktoken_file,
)
from megatron.training.config import TokenizerConfig
from megatron.training.config.check import check
from megatron.training.data.encoder import TiktokenFlags
from megatron.training.data.vocabulary import read_vocabulary
from megatron.training.inspect_data import _main as inspect_main
from megatron.training.preprocess_data import PreprocessConfig, preprocess
from megatron.training.preprocess_data import _main as preprocess_main
from megatron.training.pretrain_gpt import read_run
from tests.support.tiktoken_files import TEXTS, TOKENS, write_ranks, write_vocabulary
from tests.unit_tests.training.small_config import ARGUMENTS, small_config

tiktoken = pytest.importorskip("tiktoken")

#: Copied from Megatron's documentation and Llama 3's reference, not from the code under test.
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "llama3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
MEGATRON_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")


def encoding(pattern: str, first_rank: int, special: dict[str, int], num: int = len(TOKENS)):
    """Return the library's encoding of the same vocabulary."""
    ranks = {token: first_rank + i for i, token in enumerate(TOKENS[:num])}
    return tiktoken.Encoding(
        "own", pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens=special
    )


@pytest.mark.parametrize("pattern", PATTERNS)
def test_vocabulary_json_has_special_tokens_first(pattern, tmp_path):
    path = write_vocabulary(tmp_path / "vocab.json")
    special = dict(zip(MEGATRON_SPECIAL_TOKENS, range(7), strict=True))
    special |= {f"<SPECIAL_{i}>": i for i in range(7, 1000)}
    reference = encoding(pattern, 1000, special)
    tokenizer = build_tokenizer("tiktoken", model=path, tiktoken=TiktokenOptions(pattern=pattern))
    assert tokenizer.encode_batch(TEXTS) == reference.encode_ordinary_batch(list(TEXTS))
    assert [tokenizer.tokenize(t, add_special_tokens=False) for t in TEXTS] == [
        reference.encode(t, allowed_special="all") for t in TEXTS
    ]
    assert 2 not in tokenizer.tokenize(TEXTS[3])
    assert {2, 9} < set(tokenizer.tokenize(TEXTS[3], add_special_tokens=False))
    assert (
        (tokenizer.vocab_size, tokenizer.eod) == (reference.n_vocab, 2) == (1000 + len(TOKENS), 2)
    )
    for text in TEXTS:
        assert (
            tokenizer.detokenize([1, *tokenizer.tokenize(text), 2, tokenizer.vocab_size + 4])
            == text
        )


def test_patterns_differ_and_v2_is_the_default(tmp_path):
    path = write_vocabulary(tmp_path / "vocab.json")
    tokenizers = {
        name: build_tokenizer("tiktoken", model=path, tiktoken=TiktokenOptions(pattern=name))
        for name in PATTERNS
    }
    for name, tokenizer in tokenizers.items():
        for other_name in tokenizers.keys() - {name}:
            assert tokenizer.encode_batch(TEXTS) != tokenizers[other_name].encode_batch(TEXTS)
            assert tokenizer.fingerprint != tokenizers[other_name].fingerprint
    assert build_tokenizer("tiktoken", model=path).fingerprint == tokenizers["v2"].fingerprint


def test_rank_lines_have_special_tokens_last(tmp_path):
    path = write_ranks(tmp_path / "x.tiktoken")
    names = ("<|begin_of_text|>", "<|end_of_text|>")
    n = len(TOKENS)
    special = {names[0]: n, names[1]: n + 1, "<SPECIAL_2>": n + 2, "<SPECIAL_3>": n + 3}
    reference = encoding("llama3", 0, special)
    options = TiktokenOptions(special_tokens=names, num_special_tokens=4)
    tokenizer = build_tokenizer(guess_type(path), model=path, tiktoken=options)
    assert tokenizer.encode_batch(TEXTS) == reference.encode_ordinary_batch(list(TEXTS))
    assert (tokenizer.vocab_size, tokenizer.eod) == (reference.n_vocab, n + 1)
    text = "<|begin_of_text|>the"
    assert tokenizer.tokenize(text, add_special_tokens=False)[0] == n
    assert tokenizer.detokenize([n, *tokenizer.tokenize("the"), n + 1]) == "the"
    plain = build_tokenizer("tiktoken", model=path)
    assert (plain.vocab_size, plain.eod) == (n, None)
    assert plain.tokenize("the") == [258]


def test_vocab_size_truncates_the_ranks(tmp_path):
    path = write_vocabulary(tmp_path / "vocab.json")
    options = TiktokenOptions(num_special_tokens=10)
    tokenizer = build_tokenizer("tiktoken", model=path, vocab_size=270, tiktoken=options)
    special = dict(zip(MEGATRON_SPECIAL_TOKENS, range(7), strict=True))
    special |= {f"<SPECIAL_{i}>": i for i in range(7, 10)}
    reference = encoding("v2", 10, special, num=260)
    assert tokenizer.encode_batch(TEXTS) == reference.encode_ordinary_batch(list(TEXTS))
    assert tokenizer.vocab_size == reference.n_vocab == 270
    untruncated = build_tokenizer("tiktoken", model=path, vocab_size=9999, tiktoken=options)
    assert untruncated.vocab_size == 10 + len(TOKENS)
    with pytest.raises(ValueError, match="--vocab-size 265"):
        build_tokenizer("tiktoken", model=path, vocab_size=265, tiktoken=options)


def test_truncation_that_drops_a_byte_is_refused(tmp_path):
    """On a byte without a token the library panics, which raises no Exception subclass."""
    path = write_vocabulary(tmp_path / "vocab.json", (*TOKENS[256:], *TOKENS[:256]))
    options = TiktokenOptions(num_special_tokens=10)
    vocab_size = 10 + len(TOKENS)
    tokenizer = build_tokenizer("tiktoken", model=path, vocab_size=vocab_size, tiktoken=options)
    assert tokenizer.detokenize(tokenizer.tokenize("\U0010ffff")) == "\U0010ffff"
    with pytest.raises(ValueError, match=r"1.*256.*--vocab-size"):
        build_tokenizer("tiktoken", model=path, vocab_size=vocab_size - 1, tiktoken=options)


@pytest.mark.parametrize("character", [" ", "a", "^"])
def test_million_equal_characters_survive_a_round_trip(character, tmp_path):
    tokenizer = build_tokenizer("tiktoken", model=write_vocabulary(tmp_path / "vocab.json"))
    text = f"the {character * 1_000_000}a lower"
    assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "v3"}, "--tiktoken-pattern 'v3'"),
        ({"num_special_tokens": -1}, "--tiktoken-num-special-tokens -1"),
        ({"num_special_tokens": 10**9}, "--tiktoken-num-special-tokens 1000000000"),
        ({"special_tokens": ("a", "a")}, "named twice"),
        ({"special_tokens": ("",)}, "is empty"),
        ({"special_tokens": ("a", "b"), "num_special_tokens": 1}, "names 2"),
    ],
)
def test_invalid_tiktoken_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TiktokenOptions(**options)
    if "pattern" in options:  # the flag has choices
        return
    config = TokenizerConfig(
        tokenizer_type="tiktoken",
        tokenizer_model="a",
        **{f"tiktoken_{name}": value for name, value in options.items()},
    )
    problems = check(dataclasses.replace(small_config(), tokenizer=config), 1)
    assert any(message in problem for problem in problems)


def change_entry(path: Path, **fields: object) -> None:
    """Change an entry of a vocabulary JSON."""
    entries = json.loads(path.read_text())
    entries[7] |= fields
    path.write_text(json.dumps(entries))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "256 of the 256 bytes"),
        (b"AA== 0\n", "255 of the 256 bytes"),
        (b"AA== 0 1\n", "not a base64 token"),
        (b"AA== -1\n", "not a base64 token"),
        (b"AA== 99999999999999999999\n", "not a base64 token"),
        (b"A?== 0\n", "not a base64 token"),
        (b"AA== 0\nAQ== 2\n", "are not 0 to 1"),
        (b"AA== 0\nAQ== 0\n", "are not 0 to 1"),
        (b"AA== 0\nAA== 1\n", "two ranks"),
        (b"[", "is not a tiktoken vocabulary"),
        (b"[1]", "entry 0 needs rank 0"),
        (b"[" * 100_000, "is not a tiktoken vocabulary"),
        (b'[{"rank": 0}]', "entry 0 needs rank 0"),
        (b'[{"rank": 1, "token_bytes": "AA=="}]', "entry 0 needs rank 0"),
        (b'[{"rank": 0, "token_bytes": "!"}]', "not a base64 token"),
        (b'[{"rank": 0, "token_bytes": "\xc3\xa9"}]', "not a base64 token"),
        (b"\x00\xff" * 50, "not a base64 token"),
    ],
)
def test_invalid_tiktoken_file_is_refused_in_one_line(content, message, tmp_path):
    (tmp_path / "x.tiktoken").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        build_tokenizer("tiktoken", model=tmp_path / "x.tiktoken")
    assert "\n" not in str(caught.value)
    assert "x.tiktoken" in str(caught.value)


def test_missing_special_and_huge_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none\.tiktoken"):
        build_tokenizer("tiktoken", model=tmp_path / "none.tiktoken")
    with pytest.raises(ValueError, match="needs --tokenizer-model"):
        build_tokenizer("tiktoken")
    os.mkfifo(tmp_path / "pipe.tiktoken")
    with (tmp_path / "huge.tiktoken").open("wb") as file:
        file.truncate(65 << 20)
    for name in ("pipe.tiktoken", "huge.tiktoken", ""):
        with pytest.raises(ValueError, match=str(tmp_path / name)):
            build_tokenizer("tiktoken", model=tmp_path / name)


def test_missing_tiktoken_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ValueError, match="pip install tiktoken"):
        build_tokenizer("tiktoken", model=write_ranks(tmp_path / "x.tiktoken"))


def test_other_tokenizers_name_the_type_that_reads_the_file(tmp_path):
    ranks = write_ranks(tmp_path / "tokenizer.model")  # the file's name in Llama 3
    vocabulary = write_vocabulary(tmp_path / "tokens.json")
    for kind, path in ((SentencePieceTokenizer, ranks), (HuggingFaceTokenizer, vocabulary)):
        with pytest.raises(ValueError, match="--tokenizer-type"):
            kind(path)
        assert is_tiktoken_file(path)
    (tmp_path / "t.json").write_text('{"version": "1.0"}')
    assert not is_tiktoken_file(tmp_path / "t.json")
    assert not is_tiktoken_file(tmp_path / "none")


def test_tokenizer_is_rebuilt_from_token_files_and_checkpoints(tmp_path, capsys):
    model = write_vocabulary(tmp_path / "vocab.json")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS[:4]))
    flags = {"tiktoken_pattern": "v1", "tiktoken_num_special_tokens": 20}
    preprocess(
        PreprocessConfig(
            input=(str(tmp_path / "a.jsonl"),),
            output_prefix=str(tmp_path / "data"),
            tokenizer_type="tiktoken",
            tokenizer_model=str(model),
            append_eod=True,
            workers=1,
            tiktoken=TiktokenFlags(**flags),
        )
    )
    words = "--tokenizer-type TikTokenizer --tiktoken-pattern v1 --tiktoken-num-special-tokens 20"
    paths = f"--input {tmp_path}/a.jsonl --output-prefix {tmp_path}/same --tokenizer-model {model}"
    preprocess_main(f"{paths} {words} --append-eod --workers 1".split())
    assert (tmp_path / "same.bin").read_bytes() == (tmp_path / "data.bin").read_bytes()
    inspect_main([str(tmp_path / "data"), "--document", "0"])
    assert TEXTS[0] in capsys.readouterr().out
    prefix = str(tmp_path / "data")
    kind = {"tokenizer_type": "tiktoken", "tokenizer_model": str(model)}
    vocabulary = read_vocabulary(TokenizerConfig(**kind, **flags), [prefix])
    recorded = read_vocabulary(TokenizerConfig(), [prefix])
    assert vocabulary == recorded
    assert (vocabulary.size, vocabulary.eod) == (20 + len(TOKENS), 2)
    with pytest.raises(ValueError, match="written with another tokenizer"):
        read_vocabulary(TokenizerConfig(**kind, tiktoken_pattern="v2"), [prefix])
    moved = write_vocabulary(tmp_path / "moved.json")
    for path in (None, str(moved)):
        rebuilt = choose_tokenizer(json.loads(json.dumps(dict(vocabulary.tokenizer))), path)
        assert isinstance(rebuilt, TiktokenTokenizer)
        assert rebuilt.fingerprint == vocabulary.tokenizer["fingerprint"]
    assert capsys.readouterr().err == ""
    change_entry(model, token_str="other")
    with pytest.raises(ValueError, match="has changed since"):
        choose_tokenizer(vocabulary.tokenizer, None)


@pytest.mark.parametrize(
    "record", [3, [], {"pattern": 3}, {"special_tokens": [3]}, {"num_special_tokens": "a"}]
)
def test_invalid_tiktoken_record_is_refused(record, tmp_path):
    with pytest.raises(ValueError, match="tiktoken"):
        TiktokenOptions.from_json(record)


def test_tiktoken_flags_have_no_effect_on_other_types(tmp_path, capsys):
    words = [*ARGUMENTS.split(), "--tiktoken-pattern", "v2"]
    read_run(words, Launch())
    assert "no effect here: --tiktoken-pattern" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--strict-flags"):
        read_run([*words, "--strict-flags"], Launch())
    kind = ["--tokenizer-type", "TikTokenizer", "--tokenizer-model", "a.json"]
    config = read_run([*words, *kind], Launch()).config.tokenizer
    assert (config.tokenizer_type, config.tiktoken_pattern) == ("tiktoken", "v2")
    assert "no effect" not in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"--tiktoken-pattern.*--tokenizer-type"):
        PreprocessConfig(
            input=("a",),
            output_prefix="b",
            tokenizer_type="byte",
            tiktoken=TiktokenFlags(tiktoken_pattern="v1"),
        )
