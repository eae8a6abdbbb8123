# SPDX-License-Identifier: Apache-2.0
"""Training options read from a Hugging Face folder: the flags that `--load-hf` supplies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.cli.tokenizers import guess_type
from megatron.core.models.layer_pattern import symbols_of
from megatron.hf.config_json import HuggingFaceModel, read_folder
from megatron.hf.folder import HuggingFaceFolder, open_folder
from megatron.hf.read_weights import check_tensors
from megatron.training.config.model_table import model_options, options_problem

#: Options that may differ from the folder's: no weight and no output depends on them.
FREE = frozenset(
    {
        "attention-dropout",
        "hidden-dropout",
        "init-method-std",
        "max-position-embeddings",
        "tokenizer-model",
        "tokenizer-type",
    }
)


def folder_defaults(user_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option values that `--load-hf` supplies, by option name.

    Raises:
        ValueError: the folder cannot be used, options cannot describe its model, or explicit
            options describe another model; the message names all of them.
    """
    path = user_values.get("load-hf")
    if path is None:
        return {}
    folder, model = open_model(path, flag="--load-hf")
    if problem := options_problem(model.config):
        raise ValueError(f"--load-hf {path}: {problem}")
    folder_values = {**folder_options(model), **tokenizer_options(folder)}
    conflicts = [
        f"--{name} is {user_values[name]!r}, there {value!r}"
        for name, value in folder_values.items()
        if name in user_values and not _same(name, user_values[name], value) and name not in FREE
    ]
    if conflicts:
        raise ValueError(
            f"--load-hf {path} contains another model: {'; '.join(conflicts)}: drop these"
        )
    return {name: value for name, value in folder_values.items() if name not in user_values}


def _same(name: str, user_value: Any, value: Any) -> bool:
    """Return whether an explicit option value is equivalent to the folder's."""
    if name == "hybrid-layer-pattern" and isinstance(user_value, str):
        return symbols_of(user_value) == value  # stage boundaries are the run's choice
    return list(user_value) == list(value) if isinstance(value, tuple) else user_value == value


def open_model(path: str, *, flag: str) -> tuple[HuggingFaceFolder, HuggingFaceModel]:
    """Open a folder and parse its config.json. Raises ValueError, which names `flag`."""
    try:
        folder = open_folder(path)
        model = read_folder(folder)
        with folder.open_tensors() as opened:  # before building anything from config.json
            check_tensors(folder, opened, model)
        return folder, model
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def folder_options(model: HuggingFaceModel) -> dict[str, Any]:
    """Return the options that describe a folder's model, by name."""
    return {"max-position-embeddings": model.max_length, **model_options(model.config)}


def tokenizer_options(folder: HuggingFaceFolder) -> dict[str, Any]:
    """Return the options of a folder's tokenizer, by name; empty if it has no tokenizer."""
    path = folder.tokenizer
    if path is None:
        return {}
    return {"tokenizer-type": guess_type(path), "tokenizer-model": str(path.absolute())}
