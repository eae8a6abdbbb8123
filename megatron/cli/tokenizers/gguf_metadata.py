# SPDX-License-Identifier: Apache-2.0
"""The tokenizer in the metadata of a GGUF file, as the text of a tokenizer.json.

Kinds: `gpt2`, byte-level BPE, whose pre-tokenizer the metadata name; and `llama`, the BPE
of SentencePiece with scores in place of merges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron.cli.gguf_file import GGUFFile

_PREFIX = "tokenizer.ggml."
_KINDS = ("gpt2", "llama")

#: Types of tokens: unknown, control and user-defined tokens.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

#: Longest token whose merges are derived from scores, which takes time that grows with its square,
#: and most merges per token. Llama 2 has 2.
_MAX_TOKEN_CHARS, _MAX_MERGES_PER_TOKEN = 128, 8

_BLANK = "\u2581"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Patterns of words by the name of the pre-tokenizer; None for GPT-2's, which the library has.
_PATTERNS: Mapping[str, str | None] = MappingProxyType(
    {
        "gpt-2": None,
        "llama-bpe": _WORDS.format(digits=r"\p{N}{1,3}"),
        "qwen2": _WORDS.format(digits=r"\p{N}"),
    }
)


def has_tokenizer(metadata: Mapping[str, Any]) -> bool:
    """Return whether the metadata of a GGUF file has a supported tokenizer."""
    kind = metadata.get(f"{_PREFIX}model")
    if kind == "gpt2":
        return metadata.get(f"{_PREFIX}pre") in _PATTERNS
    return kind in _KINDS


def gguf_chat_fields(path: Path) -> dict[str, Any]:
    """Return the fields of a tokenizer_config.json: chat template, BOS and EOS.

    Raises:
        ValueError: the file is invalid.
    """
    with GGUFFile(path, follow_links=True) as file:
        metadata = file.metadata
    tokens = metadata.get(f"{_PREFIX}tokens")
    fields: dict[str, Any] = {}
    for name in ("bos", "eos", "unknown", "padding"):
        number = metadata.get(f"{_PREFIX}{name}_token_id")
        if isinstance(tokens, list) and type(number) is int and 0 <= number < len(tokens):
            hf_name = {"unknown": "unk", "padding": "pad"}.get(name, name)
            fields[f"{hf_name}_token"] = tokens[number]
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        fields["chat_template"] = template
    return fields


def gguf_tokenizer_json(path: Path) -> bytes:
    """Return the tokenizer of a GGUF file as a tokenizer.json.

    Raises:
        ValueError: the file is invalid, or its tokenizer is not supported.
    """
    with GGUFFile(path, follow_links=True) as file:
        metadata = file.metadata
    if not has_tokenizer(metadata):
        raise ValueError(
            f"{path} has the tokenizer {metadata.get(f'{_PREFIX}model')!r:.40} with the "
            f"pre-tokenizer {metadata.get(f'{_PREFIX}pre')!r:.40}, which cannot be built: give its "
            "tokenizer.json with --tokenizer-model"
        )
    tokens = metadata.get(f"{_PREFIX}tokens")
    if not isinstance(tokens, list) or len(set(tokens)) != len(tokens):
        raise ValueError(f"{path}: {_PREFIX}tokens must be a list of distinct texts")
    types = _numbers(path, metadata, "token_type", len(tokens))
    is_byte_level = metadata[f"{_PREFIX}model"] == "gpt2"
    steps = _byte_level(metadata) if is_byte_level else _sentencepiece(metadata)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    model: dict[str, Any] = {"type": "BPE", "vocab": vocabulary}
    if is_byte_level:
        lines = metadata.get(f"{_PREFIX}merges")
        pairs = [line.split(" ", 1) for line in lines] if isinstance(lines, list) else []
        if not pairs or any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"{path}: {_PREFIX}merges must be a list of pairs of tokens")
        model |= {"merges": pairs, "ignore_merges": metadata[f"{_PREFIX}pre"] == "llama-bpe"}
    else:
        scores = _numbers(path, metadata, "scores", len(tokens))
        model |= {
            "merges": _merges_of_scores(path, vocabulary, scores),
            "unk_token": _named_token(metadata, tokens, "unknown"),
            "byte_fallback": True,
            "fuse_unk": True,
        }
    added = [
        {
            "id": number,
            "content": tokens[number],
            "special": bool(types[number] != _USER_DEFINED),
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for number in np.flatnonzero(np.isin(types, (_UNKNOWN, _CONTROL, _USER_DEFINED))).tolist()
    ]
    post_processor = _special_tokens(metadata, tokens, add_bos=not is_byte_level)
    fields = {"version": "1.0", "added_tokens": added, **steps, "model": model}
    return json.dumps({**fields, "post_processor": post_processor}, ensure_ascii=False).encode()


def _numbers(path: Path, metadata: Mapping[str, Any], name: str, count: int) -> np.ndarray:
    """Return an array with one number per token."""
    values = metadata.get(f"{_PREFIX}{name}")
    if not isinstance(values, np.ndarray) or len(values) != count:
        raise ValueError(f"{path}: {_PREFIX}{name} must have {count} numbers, one per token")
    return values


def _named_token(metadata: Mapping[str, Any], tokens: list[str], name: str) -> str | None:
    """Return the token whose id a field has; None without a valid id."""
    number = metadata.get(f"{_PREFIX}{name}_token_id")
    return tokens[number] if type(number) is int and 0 <= number < len(tokens) else None


def _special_tokens(
    metadata: Mapping[str, Any], tokens: list[str], *, add_bos: bool
) -> dict[str, Any] | None:
    """Return the post-processor that adds BOS and EOS; None if none is added."""
    template: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special: dict[str, Any] = {}
    for name, is_default in (("bos", add_bos), ("eos", False)):
        token = _named_token(metadata, tokens, name)
        if metadata.get(f"{_PREFIX}add_{name}_token", is_default) is not True or token is None:
            continue
        step = {"SpecialToken": {"id": token, "type_id": 0}}
        template = [step, *template] if name == "bos" else [*template, step]
        number = metadata[f"{_PREFIX}{name}_token_id"]
        special[token] = {"id": token, "ids": [number], "tokens": [token]}
    if not special:
        return None
    pair = [*template, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": template,
        "pair": pair,
        "special_tokens": special,
    }


def _byte_level(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the steps of byte-level BPE around its model."""
    kind = metadata[f"{_PREFIX}pre"]
    pattern = _PATTERNS[kind]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": pattern is None,
    }
    pre_tokenizer: dict[str, Any] = byte_level
    if pattern is not None:
        split = {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    return {
        "normalizer": {"type": "NFC"} if kind == "qwen2" else None,
        "pre_tokenizer": pre_tokenizer,
        "decoder": byte_level,
    }


def _sentencepiece(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the steps of the BPE of SentencePiece around its model."""
    adds_blank = metadata.get(f"{_PREFIX}add_space_prefix", True) is not False
    steps: list[dict[str, Any]] = [{"type": "Prepend", "prepend": _BLANK}] if adds_blank else []
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _BLANK})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if adds_blank:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def _merges_of_scores(
    path: Path, vocabulary: Mapping[str, int], scores: np.ndarray
) -> list[list[str]]:
    """Return the merges of SentencePiece's BPE: all pairs of tokens whose union is a token, the
    union with the highest score first."""
    merges: list[tuple[float, str, str]] = []
    for token, number in vocabulary.items():
        if len(token) > _MAX_TOKEN_CHARS:
            raise ValueError(
                f"{path}: the token {token[:20]!r}… has {len(token)} characters, more than the "
                f"limit of {_MAX_TOKEN_CHARS}: give the tokenizer.json with --tokenizer-model"
            )
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                score = -float(scores[number])
                merges.append((score, left, right))
        if len(merges) > _MAX_MERGES_PER_TOKEN * len(vocabulary):
            raise ValueError(
                f"{path}: more than {_MAX_MERGES_PER_TOKEN} merges per token follow from the "
                "scores: give the tokenizer.json with --tokenizer-model"
            )
    # Unions of one score in the order of the vocabulary, as a stable sort leaves them.
    merges.sort(key=lambda merge: merge[0])
    return [[left, right] for _, left, right in merges]
