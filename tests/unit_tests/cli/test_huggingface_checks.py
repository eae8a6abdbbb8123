# SPDX-License-Identifier: Apache-2.0
"""A tokenizer.json that makes its library panic or end the process is refused in one line."""

from __future__ import annotations

import base64
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.cli.tokenizers import HuggingFaceTokenizer
from megatron.training import preprocess_data
from tests.functional_tests.hostile_kinds import command
from tests.support.read_limits import ReadCost, ReadLimits, check_read, measure_read

VOCABULARY = {"<s>": 0, "a": 1, "b": 2, "ab": 3, "é": 4, "aé": 5, "##b": 6, "a##b": 7}
BPE = {"type": "BPE", "vocab": VOCABULARY, "merges": [["a", "b"]], "unk_token": "<s>"}
VALID = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}}


def tokenizer(model: dict[str, Any] | None = None, **overrides: Any) -> str:
    fields = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    return json.dumps(
        {**VALID, **dict.fromkeys(fields), "model": {**BPE, **(model or {})}, **overrides}
    )


def charsmap(content: bytes) -> dict[str, str]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


def template(*tokens: dict[str, Any]) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": tokens, "pair": [], "special_tokens": {}}


def sequence(kind: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "Sequence", kind: steps}


def sequence_token(name: str) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": 0}}


PREFIX = {"continuing_subword_prefix": "x"}
DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
HIDDEN = tokenizer(PREFIX).replace("continuing", r"\u0063ontinuing")
#: Files and the text of their errors. In the library, the first files abort or panic when they are
#: read, the others when a text is encoded or ids are decoded.
REFUSED_FILES = {
    "prefix": (tokenizer(PREFIX), "continuing_subword_prefix is 'x'"),
    "prefix, escaped": (HIDDEN, "continuing_subword_prefix is 'x'"),
    "prefix inside a character": (
        tokenizer({**PREFIX, "merges": [["a", "é"]]}),
        "continuing_subword_prefix is 'x'",
    ),
    "map without a trie": (tokenizer(normalizer=charsmap(b"")), "precompiled_charsmap"),
    "map of 4 GB": (tokenizer(normalizer=charsmap(b"\xfc\xff\xff\xff")), "precompiled_charsmap"),
    "map of one unit": (tokenizer(normalizer=charsmap(b"\x04\0\0\0" + bytes(8))), "panics"),
    "chunks of 0": (tokenizer(pre_tokenizer={"type": "FixedLength", "length": 0}), "chunk size"),
    "second text": (tokenizer(post_processor=template(sequence_token("B"))), "panics"),
    "strip": (
        tokenizer(decoder={"type": "Strip", "content": "a", "start": 1 << 30, "stop": 9}),
        "panics",
    ),
    "replaced again and again": (
        tokenizer(normalizer=sequence("normalizers", [DOUBLE] * 40)),
        "its normalizer lengthen",
    ),
    "decoded again and again": (
        tokenizer(decoder=sequence("decoders", [DOUBLE] * 40)),
        "its decoder lengthen",
    ),
    "templates in templates": (
        tokenizer(
            post_processor=sequence(
                "processors", [template(sequence_token("A"), sequence_token("A"))] * 40
            )
        ),
        "its post_processor lengthen",
    ),
    "no unknown token": (
        tokenizer({"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "y"}),
        "cannot encode a text",
    ),
}


def read(path: Path) -> int:
    """Encode a text with a tokenizer, by the command that a user runs."""
    for old_output in path.parent.glob("tokens*"):
        old_output.unlink()
    words = (f"--tokenizer-model={path}", f"--input={path.with_name('text.jsonl')}")
    output = (f"--output-prefix={path.with_name('tokens')}", "--workers=1", "--progress=false")
    return command(preprocess_data._main, *words, *output[:2])(path.parent)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "text.jsonl").write_text('{"text": "a b ab é"}\n')
    (tmp_path / "tokenizer.json").write_text(tokenizer())
    return tmp_path / "tokenizer.json"


@pytest.fixture
def trivial(path: Path) -> ReadCost:
    cost = measure_read(partial(read, path))
    assert cost.code == 0, cost.text
    return cost


@pytest.mark.parametrize("name", REFUSED_FILES)
def test_file_that_breaks_the_library_is_refused_in_one_line(
    name: str, path: Path, trivial: ReadCost
) -> None:
    content, text = REFUSED_FILES[name]
    path.write_text(content)
    limits = ReadLimits.of(len(content), metadata_bytes=len(content))
    texts = (str(path), text)
    check_read(partial(read, path), limits=limits, trivial=trivial, refused=texts)


def test_valid_prefixes_and_normalizers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer({"continuing_subword_prefix": "##", "merges": [["a", "##b"]]}))
    loaded = HuggingFaceTokenizer(path)
    assert loaded.tokenize("ab") == [VOCABULARY["ab"]]
    path.write_text(tokenizer(normalizer=sequence("normalizers", [DOUBLE] * 3)))
    assert HuggingFaceTokenizer(path).tokenize("a") == [VOCABULARY["a"]] * 8


def test_regex_retry_limit_is_an_error_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    pattern = {"Regex": "(b+)+(b+)+$"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    path.write_text(tokenizer(pre_tokenizer=split))
    loaded = HuggingFaceTokenizer(path)
    for encode in (
        loaded.tokenize,
        loaded.tokenize_with_offsets,
        lambda t: loaded.encode_batch([t]),
    ):
        with pytest.raises(ValueError, match="retry-limit"):
            encode("b" * 60 + "a")


def test_stderr_is_restored_after_a_tokenizer_is_read(path: Path, capfd: Any) -> None:
    before = os.fstat(2).st_ino
    HuggingFaceTokenizer(path)
    path.write_text(REFUSED_FILES["chunks of 0"][0])
    with pytest.raises(ValueError, match="chunk size"):
        HuggingFaceTokenizer(path)
    os.write(2, b"still here")
    assert capfd.readouterr().err == "still here"
    assert os.fstat(2).st_ino == before
