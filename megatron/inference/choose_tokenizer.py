# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a checkpoint, or the one that replaces it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from megatron.cli.tokenizers import (
    SpecialTokens,
    TiktokenOptions,
    Tokenizer,
    build_tokenizer,
    guess_type,
    is_tiktoken_file,
)


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
