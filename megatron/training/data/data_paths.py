# SPDX-License-Identifier: Apache-2.0
"""Which token files a run reads for training, validation and test, from its options."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.datasets.blend import DataPath, parse_data_path, parse_split
from megatron.core.untrusted_files import MAX_JSON_BYTES, parse_json, read_named
from megatron.training.config import DataConfig

_SPLITS = ("train", "valid", "test")
_TEXT_ENDINGS = (".jsonl", ".json", ".txt", ".parquet", ".jsonl.gz", ".json.gz")


@dataclass(frozen=True, kw_only=True)
class SplitPath:
    """The token files of one split.

    Args:
        path: prefixes and weights.
        which: the share of them that belongs to the split; None takes them whole.
    """

    path: DataPath
    which: int | None = None


def read_paths(config: DataConfig) -> dict[str, SplitPath]:
    """Return the token files of the splits `train`, `valid` and `test`, as far as there are any.

    Raises:
        ValueError: a file of paths cannot be read, or does not hold paths.
    """
    if config.mock_data:
        return {}
    words: dict[str, tuple[str, ...] | None]
    if config.data_path is not None or config.data_args_path is not None:
        shared = config.data_path
        if shared is None:
            assert config.data_args_path is not None
            shared = tuple(shlex.split(_text(config.data_args_path, "--data-args-path")))
        path = _parsed(shared, "--data-args-path" if config.data_path is None else "--data-path")
        return {name: SplitPath(path=path, which=i) for i, name in enumerate(_SPLITS)}
    if config.per_split_data_args_path is not None:
        words = _per_split(config.per_split_data_args_path)
    else:
        words = {name: vars(config)[f"{name}_data_path"] for name in _SPLITS}
    return {
        name: SplitPath(path=_parsed(given, f"the data path of {name}"))
        for name, given in words.items()
        if given is not None
    }


def prefixes(config: DataConfig) -> tuple[str, ...]:
    """Return the prefixes of all token files of a run, each once."""
    found = [prefix for split in read_paths(config).values() for prefix in split.path.prefixes]
    return tuple(dict.fromkeys(found))


def _parsed(words: tuple[str, ...], where: str) -> DataPath:
    try:
        return parse_data_path(words)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _text(path: str, flag: str) -> str:
    try:
        return read_named(path, MAX_JSON_BYTES)
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error}") from None


def _per_split(path: str) -> dict[str, tuple[str, ...] | None]:
    flag = "--per-split-data-args-path"
    try:
        found: Any = parse_json(_text(path, flag))
    except json.JSONDecodeError as error:
        raise ValueError(f"{flag} {path}:{error.lineno}: no JSON: {error.msg}") from None
    if not isinstance(found, dict) or set(found) - set(_SPLITS) or not found.get("train"):
        raise ValueError(
            f'{flag} {path} must hold {{"train": [...], "valid": [...], "test": [...]}}; the last '
            "two may be left out"
        )
    for name, words in found.items():
        if words is not None and not (
            isinstance(words, list) and all(isinstance(w, str | int | float) for w in words)
        ):
            raise ValueError(f"{flag} {path}: {name} must be a list of weights and prefixes")
    return {name: tuple(map(str, found[name])) if found.get(name) else None for name in _SPLITS}


def problems(config: DataConfig) -> Iterator[str]:
    """List what is wrong between the options of data; reads no file."""
    sources = {
        "--data-path": config.data_path is not None,
        "--data-args-path": config.data_args_path is not None,
        "--train-data-path": config.train_data_path is not None,
        "--per-split-data-args-path": config.per_split_data_args_path is not None,
        "--mock-data": config.mock_data,
    }
    given = [name for name, is_given in sources.items() if is_given]
    if len(given) > 1:
        yield f"{' and '.join(given)} exclude each other: keep one"
    if not given:
        yield "no data: give --data-path, --train-data-path or --mock-data"
    for name in ("valid", "test"):
        if vars(config)[f"{name}_data_path"] is not None and config.train_data_path is None:
            yield f"--{name}-data-path goes with --train-data-path: give that too"
    for name in ("data", "train", "valid", "test"):
        words = vars(config)[f"{name}_path" if name == "data" else f"{name}_data_path"]
        if words is not None:
            yield from _word_problems(
                f"--{name}-path" if name == "data" else f"--{name}-data-path", words, config.sft
            )
    try:
        parse_split(config.split)
    except ValueError as error:
        yield f"--{error}"
    if config.sft:
        if config.allow_chat_as_text:
            yield "--allow-chat-as-text has no effect with --sft: drop one"
        if config.mock_data:
            yield "--mock-data makes no conversations: leave --sft out"
        for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
            if vars(config)[name]:
                flag = name.replace("_", "-")
                yield f"--{flag} has no effect with --sft, which keeps conversations apart: drop it"


def _word_problems(flag: str, words: tuple[str, ...], chat: bool) -> Iterator[str]:
    for word in words:
        ending = next((e for e in _TEXT_ENDINGS if word.endswith(e)), None)
        if ending is not None:
            prefix = word.removesuffix(ending)
            yield (
                f"{flag} {word} is text, not token files: run python -m "
                f"megatron.training.preprocess_data{' --chat' if chat else ''} --input {word} "
                f"--output-prefix {prefix} --tokenizer-model ... once and give {flag} {prefix}"
            )
            return
    try:
        parse_data_path(words)
    except ValueError as error:
        yield f"{flag}{str(error).removeprefix('data path')}"
