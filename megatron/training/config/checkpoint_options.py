# SPDX-License-Identifier: Apache-2.0
"""Options out of a checkpoint: `--use-checkpoint-args`.

Every checkpoint holds the resolved options of its run. The model's shape and the tokenizer come
from there where they are not given, and so does what a run cannot do without: its data, its length
and every option that has no default.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.cli.schema import Option, options
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.manifest import Manifest, read_manifest
from megatron.core.dist_checkpointing.run_folder import latest_checkpoint
from megatron.core.models.layer_pattern import symbols_of
from megatron.training.config import Config
from megatron.training.stored_model import check_counts

_SECTIONS = ("model", "attention", "position", "experts", "hybrid", "tokenizer")
#: Those whose whole numbers are sizes of tensors, or how many there are.
_SHAPES = ("model", "attention", "experts", "hybrid", "tokenizer")
#: Of other sections, what gives a model weights.
_WEIGHTS = {"mtp-num-layers", "mtp-loss-scaling-factor"}
_LENGTHS = {"train-iters", "train-samples"}
_DATA = {
    "data-path",
    "data-args-path",
    "train-data-path",
    "per-split-data-args-path",
    "mock-data",
}


def checkpoint_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that `--use-checkpoint-args` adds to those given, by option name.

    Raises:
        ValueError: there is no checkpoint, it is damaged, or holds no options.
    """
    if not given.get("use-checkpoint-args"):
        return {}
    wanted = [option for option in options(Config) if _is_wanted(option, given)]
    roots = [given[name] for name in ("load", "pretrained-checkpoint") if given.get(name)]
    if not wanted or not roots:
        return {}
    folder, saved, manifest = saved_options(roots)
    found = {
        option.name: option.from_json(saved[option.name], f"{folder}: {option.name}")
        for option in wanted
        if option.name in saved
    }
    taken = {option.name for option in wanted if option.section in _SHAPES} | _WEIGHTS
    try:
        check_counts(folder, {n: saved[n] for n in taken & found.keys()}, manifest)
    except CheckpointError as error:
        raise ValueError(f"--use-checkpoint-args: {error}") from error
    if (pattern := found.get("hybrid-layer-pattern")) is not None:
        found["hybrid-layer-pattern"] = symbols_of(pattern)  # its cuts are a layout's
    return found


def _is_wanted(option: Option, given: Mapping[str, Any]) -> bool:
    """Tell whether an option is taken from the checkpoint."""
    if option.name in given:
        return False
    if option.name in _LENGTHS:
        return not _LENGTHS & set(given)
    if option.section == "data":  # as a whole: a part of it means other samples
        return not _DATA & set(given) and option.name != "allow-data-change"
    return option.section in _SECTIONS or option.name in _WEIGHTS or option.required


def saved_options(roots: list[str]) -> tuple[Path, Mapping[str, Any], Manifest]:
    """Return the first checkpoint that a root holds, its options and its manifest.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    try:
        for root in map(Path, roots):
            one = root.name.startswith("iter_") and root.is_dir()
            # Which one is used, and why, is said again when it is loaded.
            folder = root if one else latest_checkpoint(root, say=lambda text: None)
            if folder is not None:
                manifest = read_manifest(folder)
                saved = manifest.extra.get("config")
                break
        else:
            raise ValueError(f"--use-checkpoint-args: no checkpoint in {' or '.join(roots)}")
    except CheckpointError as error:
        raise ValueError(f"--use-checkpoint-args: {error}") from error
    if not isinstance(saved, dict):
        raise ValueError(f"--use-checkpoint-args: {folder} holds no options: give them as flags")
    return folder, saved, manifest
