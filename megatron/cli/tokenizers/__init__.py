# SPDX-License-Identifier: Apache-2.0
"""Tokenizers behind one protocol: `tokenizer.json`, SentencePiece, tiktoken, bytes, and numbers.

`build_tokenizer` builds the tokenizer of `--tokenizer-type` and `--tokenizer-model`;
`choose_tokenizer` builds a checkpoint's tokenizer, unless another file replaces it.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from megatron.cli.tokenizers.base import (
    END_OF_DOCUMENT,
    ArrayTokenizer,
    ByteTable,
    ByteTokenizer,
    NullTokenizer,
    PairTokens,
    SpecialTokens,
    Tokenizer,
    pair_tokens,
)
from megatron.cli.tokenizers.huggingface import (
    HuggingFaceTokenizer,
    merge_file_problem,
    train_bpe,
)
from megatron.cli.tokenizers.sentencepiece import (
    SentencePieceTokenizer,
)
from megatron.cli.tokenizers.tiktoken import (
    TiktokenOptions,
    TiktokenPattern,
    TiktokenTokenizer,
    is_tiktoken_file,
    tiktoken_record,
)

__all__ = [
    "END_OF_DOCUMENT",
    "ArrayTokenizer",
    "ByteTable",
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "NullTokenizer",
    "PairTokens",
    "SentencePieceTokenizer",
    "SpecialTokens",
    "TiktokenOptions",
    "TiktokenPattern",
    "TiktokenTokenizer",
    "Tokenizer",
    "TokenizerType",
    "build_tokenizer",
    "choose_tokenizer",
    "guess_type",
    "is_tiktoken_file",
    "merge_file_problem",
    "pair_tokens",
    "tiktoken_record",
    "train_bpe",
]


TokenizerType = Literal["hf", "sentencepiece", "tiktoken", "byte", "null"]


def guess_type(model: str | Path | None) -> TokenizerType:
    """Return the type of a tokenizer file by its suffix: hf, unless it is .model or .tiktoken."""
    kinds: dict[str, TokenizerType] = {".model": "sentencepiece", ".tiktoken": "tiktoken"}
    return "hf" if model is None else kinds.get(Path(model).suffix, "hf")


def build_tokenizer(
    kind: TokenizerType,
    *,
    model: str | Path | None = None,
    vocab_size: int | None = None,
    add_special_tokens: bool = True,
    tiktoken: TiktokenOptions | None = None,
) -> Tokenizer:
    """Build the tokenizer that the flags specify.

    Args:
        kind: `--tokenizer-type`.
        model: `--tokenizer-model`, for hf, sentencepiece and tiktoken.
        vocab_size: `--vocab-size`, for null, and for tiktoken if its options have no size.
        add_special_tokens: False for `--tokenizer-hf-no-include-special-tokens`.
        tiktoken: options of a tiktoken vocabulary; None: the defaults.

    Raises:
        ValueError: an argument that the kind needs is missing, or the file is invalid.
    """
    if kind == "hf":
        if model is None:
            raise ValueError("--tokenizer-type hf needs --tokenizer-model PATH of a tokenizer.json")
        return HuggingFaceTokenizer(model, add_special_tokens=add_special_tokens)
    if kind == "sentencepiece":
        if model is None:
            raise ValueError("--tokenizer-type sentencepiece needs --tokenizer-model PATH.model")
        return SentencePieceTokenizer(model, add_special_tokens=add_special_tokens)
    if kind == "tiktoken":
        if model is None:
            raise ValueError("--tokenizer-type tiktoken needs --tokenizer-model PATH of its file")
        options = tiktoken or TiktokenOptions()
        if options.vocab_size is None:
            options = dataclasses.replace(options, vocab_size=vocab_size)
        return TiktokenTokenizer(model, options)
    if kind == "byte":
        return ByteTokenizer()
    if kind != "null":
        names = ", ".join(typing.get_args(TokenizerType))
        raise ValueError(f"--tokenizer-type {kind!r}: use one of {names}")
    if vocab_size is None:
        raise ValueError("--tokenizer-type null needs --vocab-size: how many ids the data uses")
    return NullTokenizer(vocab_size)


def choose_tokenizer(
    recorded: Mapping[str, Any], model: str | None, *, add_special_tokens: bool | None = None
) -> Tokenizer:
    """Return the tokenizer that a checkpoint records, or the one in `model`.

    Args:
        recorded: type, model (path), vocab_size, fingerprint and special_tokens, as training saves
            them.
        model: path of a tokenizer.json, its folder, a SentencePiece .model or a vocabulary of
            tiktoken to use instead; None for the recorded one. A different file logs a warning.
        add_special_tokens: whether to add special tokens to a text; None for the recorded value.

    Raises:
        ValueError: no tokenizer is recorded, or its file is missing or has changed.
    """
    if model is None and recorded.get("type") is None:
        raise ValueError(
            "the checkpoint does not record the tokenizer it was trained with: give the path "
            "of a tokenizer.json or a SentencePiece .model with --tokenizer-model"
        )

    def build(*, add_special_tokens: bool) -> Tokenizer:
        if model is not None:
            kind, size = guess_type(model), None
            if recorded.get("type") == "tiktoken" and is_tiktoken_file(model):
                kind = "tiktoken"
        else:
            kind, size = recorded["type"], recorded.get("vocab_size")
        return build_tokenizer(
            kind,
            model=model or recorded.get("model"),
            vocab_size=size,
            add_special_tokens=add_special_tokens,
            tiktoken=TiktokenOptions.from_json(recorded.get("tiktoken")),
        )

    special = _recorded_special_tokens(recorded)
    with_special_tokens = special is None or bool(special)
    tokenizer = build(
        add_special_tokens=with_special_tokens if add_special_tokens is None else add_special_tokens
    )
    fingerprint = recorded.get("fingerprint")
    matches = fingerprint == tokenizer.fingerprint
    if matches and add_special_tokens is None and special is not None:
        matches = special == tokenizer.special_tokens
    if matches or fingerprint is None:
        return tokenizer
    if model is None:
        raise ValueError(
            f"the tokenizer {recorded.get('model')} has changed since the model was trained: "
            "give the original file with --tokenizer-model"
        )
    print(
        f"warning: --tokenizer-model {model} is not the file that the model was trained with",
        file=sys.stderr,
    )
    return build(add_special_tokens=add_special_tokens is not False)


def _recorded_special_tokens(recorded: Mapping[str, Any]) -> SpecialTokens | None:
    """Return the special tokens that training added to its texts; None if not recorded.

    Checkpoints older than this record were trained without special tokens.
    """
    if recorded.get("fingerprint") is None or recorded.get("special_tokens", {}) is None:
        return None
    return SpecialTokens.from_json(recorded.get("special_tokens"))
