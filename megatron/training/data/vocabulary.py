# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of a run: from its tokenizer, or from what is written next to its token files."""

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

#: More ids than any tokenizer has: a file that says so would have a model made of that size.
MAX_VOCABULARY = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What training needs to know of a tokenizer.

    Args:
        size: number of token ids, without padding.
        eod: id of the end-of-document token, if there is one.
        tokenizer: how to make the tokenizer again, as JSON: type, model (path), vocab_size,
            fingerprint, eod, special_tokens; what a checkpoint keeps.
    """

    size: int
    eod: int | None
    tokenizer: Mapping[str, Any]


def read_vocabulary(config: TokenizerConfig, prefixes: Sequence[str]) -> Vocabulary:
    """Find the vocabulary of a run and compare it with the token files'.

    Args:
        config: tokenizer options; without any, the token files' own description counts.
        prefixes: of the token files; `PREFIX.json`, where it exists, says which tokenizer wrote
            them.

    Raises:
        ValueError: nothing specifies how large the vocabulary is, or the files were written with
            another tokenizer.
    """
    written = {prefix: describe_files(prefix) for prefix in prefixes}
    found = _from_options(config) or _from_files(config, written)
    if found.size > MAX_VOCABULARY and config.vocab_size is None:
        raise ValueError(
            f"the tokenizer has ids up to {found.size - 1}: if that is meant, give --vocab-size "
            f"{found.size}"
        )
    for prefix, description in written.items():
        theirs, ours = description.get("fingerprint"), found.tokenizer.get("fingerprint")
        if theirs and ours and theirs != ours:
            raise ValueError(
                f"{prefix} was written with another tokenizer than this run's: give "
                "--tokenizer-model the file it was written with, or write it again"
            )
        if ours and theirs and description.get("eod") != found.eod:
            raise ValueError(
                f"{prefix} ends documents with token {description.get('eod')}, this run's "
                f"tokenizer with {found.eod}: give both the same tokenizer_config.json"
            )
        if ours and theirs:
            _check_special_tokens(prefix, description, found)
    return found


def _check_special_tokens(prefix: str, description: Mapping[str, Any], found: Vocabulary) -> None:
    """Raise ValueError if files were not encoded as prompts of the model will be."""
    if description["special_tokens"] is None:  # conversations: the template writes them
        return
    theirs = SpecialTokens.from_json(description["special_tokens"])
    ours = SpecialTokens.from_json(found.tokenizer["special_tokens"])
    if theirs == ours:
        return
    fix = "" if theirs else "give --tokenizer-hf-no-include-special-tokens, or "
    if theirs and not ours:
        fix = "leave --tokenizer-hf-no-include-special-tokens out, or "
    raise ValueError(
        f"{prefix} was written with {theirs}, this run's tokenizer adds {ours}: {fix}write the "
        "files again"
    )


def describe_files(prefix: str) -> dict[str, Any]:
    """Return what `PREFIX.json` states about the tokenizer; nothing if there is no such file.

    Its `special_tokens` are None for conversations, which have those of their template. Files of
    before there was a record were written without any.

    Args:
        prefix: of a pair of token files.

    Raises:
        ValueError: the file is damaged.
    """
    path = Path(f"{prefix}.json")
    if not os.path.exists(path):
        return {}
    try:
        found = read_json(path, follow_links=True)
        special = SpecialTokens.from_json(found["tokenizer"].get("special_tokens"))
        chat = found.get("kind") == "chat"
        _check(dict(found["tokenizer"]))
        return {**found["tokenizer"], "special_tokens": None if chat else special.to_json()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is damaged: remove it, or write the token files again") from None


def holds_chats(prefix: str) -> bool:
    """Tell whether token files hold conversations: by `PREFIX.json`, or without that by a mask.

    Args:
        prefix: of a pair of token files.

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


def _check(description: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for a description with values that none has."""
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
                "or leave it out"
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


def _from_files(config: TokenizerConfig, written: Mapping[str, Mapping[str, Any]]) -> Vocabulary:
    known = [d for d in written.values() if "vocab_size" in d]
    size = config.vocab_size or max((d["vocab_size"] for d in known), default=None)
    if size is None:
        raise ValueError(
            f"the vocabulary of {', '.join(written) or 'mock data'} is unknown: give "
            "--tokenizer-model, or --vocab-size"
        )
    largest = max((d["vocab_size"] for d in known), default=0)
    if size < largest:
        raise ValueError(
            f"--vocab-size {size} is less than the {largest} of the token files: raise it"
        )
    first = known[0] if known else {}
    kind, model = first.get("type"), first.get("model")
    if kind in ("hf", "sentencepiece", "tiktoken") and model is None:
        kind = None  # written before the files said which one
    special = first.get("special_tokens")
    if config.tokenizer_hf_no_include_special_tokens:
        special = SpecialTokens().to_json()
    return Vocabulary(
        size=size,
        eod=first.get("eod"),
        tokenizer={
            "type": kind,
            "model": model,
            # The null tokenizer counts the end of a document apart.
            "vocab_size": first["vocab_size"] - 1 if kind == "null" else size,
            "fingerprint": first.get("fingerprint"),
            "eod": first.get("eod"),
            "special_tokens": special,
            **({"tiktoken": first["tiktoken"]} if "tiktoken" in first else {}),
        },
    )
