# SPDX-License-Identifier: Apache-2.0
"""Resolve the data options to token files for training, validation and test."""

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
        split_index: index of the split in --split; None if the files belong to this split alone.
    """

    path: DataPath
    split_index: int | None = None


def read_paths(config: DataConfig) -> dict[str, SplitPath]:
    """Return the token files of each split (`train`, `valid`, `test`) that has any.

    Raises:
        ValueError: a file of paths cannot be read, or does not contain paths.
    """
    if config.mock_data:
        return {}
    split_arguments: dict[str, tuple[str, ...] | None]
    if config.data_path is not None or config.data_args_path is not None:
        shared = config.data_path
        if shared is None:
            assert config.data_args_path is not None
            shared = tuple(shlex.split(_read_file(config.data_args_path, "--data-args-path")))
        path = _parse(shared, "--data-args-path" if config.data_path is None else "--data-path")
        return {name: SplitPath(path=path, split_index=i) for i, name in enumerate(_SPLITS)}
    if config.per_split_data_args_path is not None:
        split_arguments = _read_split_arguments(config.per_split_data_args_path)
    else:
        split_arguments = {name: vars(config)[f"{name}_data_path"] for name in _SPLITS}
    return {
        name: SplitPath(path=_parse(arguments, f"the data path of {name}"))
        for name, arguments in split_arguments.items()
        if arguments is not None
    }


def prefixes(config: DataConfig) -> tuple[str, ...]:
    """Return the prefixes of all token files of a run, without duplicates."""
    all_prefixes = [
        prefix for split in read_paths(config).values() for prefix in split.path.prefixes
    ]
    return tuple(dict.fromkeys(all_prefixes))


def _parse(arguments: tuple[str, ...], source: str) -> DataPath:
    try:
        return parse_data_path(arguments)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _read_file(path: str, flag: str) -> str:
    try:
        return read_named(path, MAX_JSON_BYTES)
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {error}") from None


def _read_split_arguments(path: str) -> dict[str, tuple[str, ...] | None]:
    flag = "--per-split-data-args-path"
    try:
        split_arguments: Any = parse_json(_read_file(path, flag))
    except json.JSONDecodeError as error:
        raise ValueError(f"{flag} {path}:{error.lineno}: not JSON: {error.msg}") from None
    if (
        not isinstance(split_arguments, dict)
        or set(split_arguments) - set(_SPLITS)
        or not split_arguments.get("train")
    ):
        raise ValueError(
            f'{flag} {path} must contain {{"train": [...], "valid": [...], "test": [...]}}; the '
            "last two are optional"
        )
    for name, arguments in split_arguments.items():
        if arguments is not None and not (
            isinstance(arguments, list)
            and all(isinstance(argument, str | int | float) for argument in arguments)
        ):
            raise ValueError(f"{flag} {path}: {name} must be a list of weights and prefixes")
    return {
        name: tuple(map(str, split_arguments[name])) if split_arguments.get(name) else None
        for name in _SPLITS
    }


def problems(config: DataConfig) -> Iterator[str]:
    """Yield the problems in the data options, without reading files."""
    sources = {
        "--data-path": config.data_path is not None,
        "--data-args-path": config.data_args_path is not None,
        "--train-data-path": config.train_data_path is not None,
        "--per-split-data-args-path": config.per_split_data_args_path is not None,
        "--mock-data": config.mock_data,
    }
    selected = [name for name, is_set in sources.items() if is_set]
    if len(selected) > 1:
        yield f"{' and '.join(selected)} are mutually exclusive: keep one"
    if not selected:
        yield "no data: give --data-path, --train-data-path or --mock-data"
    for name in ("valid", "test"):
        if vars(config)[f"{name}_data_path"] is not None and config.train_data_path is None:
            yield f"--{name}-data-path needs --train-data-path: give that too"
    for name in ("data", "train", "valid", "test"):
        arguments = vars(config)[f"{name}_path" if name == "data" else f"{name}_data_path"]
        if arguments is not None:
            yield from _argument_problems(
                f"--{name}-path" if name == "data" else f"--{name}-data-path", arguments, config.sft
            )
    try:
        parse_split(config.split)
    except ValueError as error:
        yield f"--{error}"
    if config.sft:
        if config.allow_chat_as_text:
            yield "--allow-chat-as-text has no effect with --sft: drop one"
        if config.mock_data:
            yield "--mock-data has no conversations: drop --sft"
        for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
            if vars(config)[name]:
                flag = name.replace("_", "-")
                yield f"--{flag} has no effect with --sft, which separates conversations: drop it"


def _argument_problems(flag: str, arguments: tuple[str, ...], chat: bool) -> Iterator[str]:
    for argument in arguments:
        ending = next((suffix for suffix in _TEXT_ENDINGS if argument.endswith(suffix)), None)
        if ending is not None:
            prefix = argument.removesuffix(ending)
            yield (
                f"{flag} {argument} is text, not token files: run python -m "
                f"megatron.training.preprocess_data{' --chat' if chat else ''} --input {argument} "
                f"--output-prefix {prefix} --tokenizer-model ... once and give {flag} {prefix}"
            )
            return
    try:
        parse_data_path(arguments)
    except ValueError as error:
        yield f"{flag}{str(error).removeprefix('data path')}"
