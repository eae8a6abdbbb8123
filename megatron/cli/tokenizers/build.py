# SPDX-License-Identifier: Apache-2.0
"""Choose a tokenizer by its type, as the flags `--tokenizer-type` and `--tokenizer-model` do."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Literal

from megatron.cli.tokenizers.base import ByteTokenizer, NullTokenizer, Tokenizer
from megatron.cli.tokenizers.huggingface import HuggingFaceTokenizer
from megatron.cli.tokenizers.sentencepiece import SentencePieceTokenizer
from megatron.cli.tokenizers.tiktoken import TiktokenOptions, TiktokenTokenizer

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
