# SPDX-License-Identifier: Apache-2.0
"""Options of training out of a Hugging Face folder: the flags that `--load-hf` supplies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.cli.tokenizers import guess_type
from megatron.core.models.layer_pattern import symbols_of
from megatron.hf.config_json import HuggingFaceModel, read_folder
from megatron.hf.folder import HuggingFaceFolder, open_folder
from megatron.hf.read_weights import check_tensors
from megatron.training.config.model_table import model_options, options_problem

#: What a run may choose although the folder says something: no weight and no output depends on it.
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
    """Return the values that `--load-hf` adds to those given, by option name.

    Raises:
        ValueError: the folder cannot be used, no options describe its model, or a given option
            makes another model than it holds; names all of these.
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
            f"--load-hf {path} holds another model: {'; '.join(conflicts)}: leave these out"
        )
    return {name: value for name, value in folder_values.items() if name not in user_values}


def _same(name: str, user_value: Any, value: Any) -> bool:
    """Tell whether an option that is given says what a folder does."""
    if name == "hybrid-layer-pattern" and isinstance(user_value, str):
        return symbols_of(user_value) == value  # where it is cut into stages is the run's to choose
    return list(user_value) == list(value) if isinstance(value, tuple) else user_value == value


def open_model(path: str, *, flag: str) -> tuple[HuggingFaceFolder, HuggingFaceModel]:
    """Look at a folder and translate its config.json. Raises ValueError, which names `flag`."""
    try:
        folder = open_folder(path)
        model = read_folder(folder)
        with folder.open_tensors() as opened:  # before anything is made of what config.json says
            check_tensors(folder, opened, model)
        return folder, model
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def folder_options(model: HuggingFaceModel) -> dict[str, Any]:
    """Return the options that describe a folder's model, by name."""
    return {"max-position-embeddings": model.max_length, **model_options(model.config)}


def tokenizer_options(folder: HuggingFaceFolder) -> dict[str, Any]:
    """Return the options of a folder's tokenizer, by name; none if it has no tokenizer."""
    path = folder.tokenizer
    if path is None:
        return {}
    return {"tokenizer-type": guess_type(path), "tokenizer-model": str(path.absolute())}
