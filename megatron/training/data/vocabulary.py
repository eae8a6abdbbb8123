# SPDX-License-Identifier: Apache-2.0
"""Vocabulary of a run, from its tokenizer or from the description of its token files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.cli.tokenizers import (
    SpecialTokens,
    TiktokenOptions,
    build_tokenizer,
    guess_type,
    tiktoken_record,
)
from megatron.core.datasets.chat_dataset import mask_prefix
from megatron.core.untrusted_files import read_json
from megatron.training.config import TokenizerConfig

#: Larger than any tokenizer's vocabulary. The model is allocated at this size, so a corrupt
#: description must not ask for more.
MAX_VOCABULARY = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Properties of the tokenizer that training uses.

    Args:
        size: number of token ids, without padding.
        eod: id of the end-of-document token, if there is one.
        tokenizer: description that rebuilds the tokenizer, stored in checkpoints as JSON: type,
            model (path), vocab_size, fingerprint, eod, special_tokens.
    """

    size: int
    eod: int | None
    tokenizer: Mapping[str, Any]


def read_vocabulary(config: TokenizerConfig, prefixes: Sequence[str]) -> Vocabulary:
    """Return the vocabulary of a run after checking that the token files match it.

    Args:
        config: tokenizer options; without any, the token files' description is used.
        prefixes: prefixes of the token files; `PREFIX.json`, if it exists, describes the tokenizer
            that wrote them.

    Raises:
        ValueError: the vocabulary size is unknown, or the files were written with another
            tokenizer.
    """
    descriptions = {prefix: describe_files(prefix) for prefix in prefixes}
    vocabulary = _from_options(config) or _from_files(config, descriptions)
    if vocabulary.size > MAX_VOCABULARY and config.vocab_size is None:
        raise ValueError(
            f"the tokenizer has ids up to {vocabulary.size - 1}: if that is intended, give "
            f"--vocab-size {vocabulary.size}"
        )
    for prefix, description in descriptions.items():
        file_fingerprint, run_fingerprint = (
            description.get("fingerprint"),
            vocabulary.tokenizer.get("fingerprint"),
        )
        if file_fingerprint and run_fingerprint and file_fingerprint != run_fingerprint:
            raise ValueError(
                f"{prefix} was written with another tokenizer than this run's: give as "
                "--tokenizer-model the file it was written with, or write it again"
            )
        if run_fingerprint and file_fingerprint and description.get("eod") != vocabulary.eod:
            raise ValueError(
                f"{prefix} ends documents with token {description.get('eod')}, this run's "
                f"tokenizer with {vocabulary.eod}: give both the same tokenizer_config.json"
            )
        if run_fingerprint and file_fingerprint:
            _check_special_tokens(prefix, description, vocabulary)
    return vocabulary


def _check_special_tokens(
    prefix: str, description: Mapping[str, Any], vocabulary: Vocabulary
) -> None:
    """Raise ValueError if the files and the run's tokenizer add different special tokens."""
    if (
        description["special_tokens"] is None
    ):  # conversations: the chat template adds special tokens
        return
    file_tokens = SpecialTokens.from_json(description["special_tokens"])
    run_tokens = SpecialTokens.from_json(vocabulary.tokenizer["special_tokens"])
    if file_tokens == run_tokens:
        return
    fix = "" if file_tokens else "give --tokenizer-hf-no-include-special-tokens, or "
    if file_tokens and not run_tokens:
        fix = "drop --tokenizer-hf-no-include-special-tokens, or "
    raise ValueError(
        f"{prefix} was written with {file_tokens}, this run's tokenizer adds {run_tokens}: "
        f"{fix}write the files again"
    )


def describe_files(prefix: str) -> dict[str, Any]:
    """Return the tokenizer's description in `PREFIX.json`; empty if there is no such file.

    `special_tokens` is None for conversations, whose template adds special tokens. Files without a
    record of special tokens were written without any.

    Args:
        prefix: prefix of a pair of token files.

    Raises:
        ValueError: the file is damaged.
    """
    path = Path(f"{prefix}.json")
    if not os.path.exists(path):
        return {}
    try:
        vocabulary = read_json(path, follow_links=True)
        special = SpecialTokens.from_json(vocabulary["tokenizer"].get("special_tokens"))
        chat = vocabulary.get("kind") == "chat"
        _check_description(dict(vocabulary["tokenizer"]))
        return {**vocabulary["tokenizer"], "special_tokens": None if chat else special.to_json()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is damaged: remove it, or write the token files again") from None


def holds_chats(prefix: str) -> bool:
    """Return whether token files contain conversations: by `PREFIX.json`, else by a mask file.

    Args:
        prefix: prefix of a pair of token files.

    Raises:
        ValueError: `PREFIX.json` is damaged.
    """
    path = Path(f"{prefix}.json")
    if not os.path.exists(path):
        return os.path.exists(f"{mask_prefix(prefix)}.idx")
    try:
        return read_json(path, follow_links=True).get("kind") == "chat"
    except (OSError, ValueError, AttributeError):
        raise ValueError(f"{path} is damaged: remove it, or write the token files again") from None


def _check_description(description: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for a description with invalid values."""
    size, eod = description.get("vocab_size", 1), description.get("eod")
    if type(size) is not int or not 0 < size <= MAX_VOCABULARY:
        raise TypeError("vocab_size")
    if eod is not None and (type(eod) is not int or not 0 <= eod < size):
        raise TypeError("eod")
    TiktokenOptions.from_json(description.get("tiktoken"))
    for name in ("type", "model", "fingerprint"):
        if not isinstance(description.get(name), str | None):
            raise TypeError(name)


def _from_options(config: TokenizerConfig) -> Vocabulary | None:
    kind = config.tokenizer_type
    if kind is None and config.tokenizer_model:
        kind = guess_type(config.tokenizer_model)
    if kind is None:
        return None
    tokenizer = build_tokenizer(
        kind,
        model=config.tokenizer_model,
        vocab_size=config.vocab_size,
        add_special_tokens=not config.tokenizer_hf_no_include_special_tokens,
        tiktoken=TiktokenOptions(
            pattern=config.tiktoken_pattern,
            num_special_tokens=config.tiktoken_num_special_tokens,
            special_tokens=config.tiktoken_special_tokens,
        ),
    )
    size = tokenizer.vocab_size
    if kind != "null" and config.vocab_size is not None:
        if config.vocab_size < size:
            raise ValueError(
                f"--vocab-size {config.vocab_size} is less than the tokenizer's {size}: raise it, "
                "or drop it"
            )
        size = config.vocab_size
    model = config.tokenizer_model
    return Vocabulary(
        size=size,
        eod=tokenizer.eod,
        tokenizer={
            "type": kind,
            "model": str(Path(model).resolve()) if model else None,
            "vocab_size": config.vocab_size if kind == "null" else size,
            "fingerprint": tokenizer.fingerprint,
            "eod": tokenizer.eod,
            "special_tokens": tokenizer.special_tokens.to_json(),
            **tiktoken_record(tokenizer),
        },
    )


def _from_files(
    config: TokenizerConfig, descriptions: Mapping[str, Mapping[str, Any]]
) -> Vocabulary:
    described = [d for d in descriptions.values() if "vocab_size" in d]
    size = config.vocab_size or max((d["vocab_size"] for d in described), default=None)
    if size is None:
        raise ValueError(
            f"the vocabulary of {', '.join(descriptions) or 'mock data'} is unknown: give "
            "--tokenizer-model, or --vocab-size"
        )
    largest = max((d["vocab_size"] for d in described), default=0)
    if size < largest:
        raise ValueError(
            f"--vocab-size {size} is less than the {largest} of the token files: raise it"
        )
    reference = described[0] if described else {}
    kind, model = reference.get("type"), reference.get("model")
    if kind in ("hf", "sentencepiece", "tiktoken") and model is None:
        kind = None  # written before descriptions named the model
    special_tokens = reference.get("special_tokens")
    if config.tokenizer_hf_no_include_special_tokens:
        special_tokens = SpecialTokens().to_json()
    return Vocabulary(
        size=size,
        eod=reference.get("eod"),
        tokenizer={
            "type": kind,
            "model": model,
            # --vocab-size of the null tokenizer excludes the end-of-document token.
            "vocab_size": reference["vocab_size"] - 1 if kind == "null" else size,
            "fingerprint": reference.get("fingerprint"),
            "eod": reference.get("eod"),
            "special_tokens": special_tokens,
            **({"tiktoken": reference["tiktoken"]} if "tiktoken" in reference else {}),
        },
    )
