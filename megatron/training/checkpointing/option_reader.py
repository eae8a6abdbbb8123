# SPDX-License-Identifier: Apache-2.0
"""Options read from a checkpoint: `--use-checkpoint-args`, and the schedule and Muon matrices of a
resumed run.

Every checkpoint stores the resolved options of its run. Options of the model's shape and the
tokenizer that are not given are read from there, as are the data, the length of the run and every
option without a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.cli.schema import Option, flatten, options
from megatron.core.dist_checkpointing.checkpoint_errors import CheckpointError
from megatron.core.dist_checkpointing.manifest import Manifest, read_manifest
from megatron.core.dist_checkpointing.run_folder import latest_checkpoint
from megatron.core.models.layer_pattern import symbols_of
from megatron.training.checkpointing.stored_model import check_counts
from megatron.training.config import Config

_SECTIONS = ("model", "attention", "position", "experts", "hybrid", "tokenizer")
#: Sections whose integers are tensor dimensions or counts of layers, heads and experts.
_SHAPES = ("model", "attention", "experts", "hybrid", "tokenizer")
#: Options of other sections that add weights to a model.
_WEIGHTS = {"mtp-num-layers", "mtp-loss-scaling-factor"}
_LENGTHS = {"train-iters", "train-samples"}
_DATA_SOURCES = {
    "data-path",
    "data-args-path",
    "train-data-path",
    "per-split-data-args-path",
    "mock-data",
}

#: Data options that apply to one start of a run only.
_PER_START = {"allow-data-change", "reorder-samples"}

#: Options that `--use-checkpoint-opt-param-scheduler` reads, by section.
_SCHEDULE = {
    "schedule": (
        "lr",
        "min-lr",
        "decoupled-lr",
        "decoupled-min-lr",
        "lr-decay-style",
        "lr-decay-iters",
        "lr-decay-samples",
        "lr-warmup-iters",
        "lr-warmup-samples",
        "lr-warmup-fraction",
    ),
    "optimizer": (
        "weight-decay",
        "start-weight-decay",
        "end-weight-decay",
        "weight-decay-incr-style",
    ),
}


def checkpoint_defaults(user_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option values that `--use-checkpoint-args` reads from the checkpoint, by name.

    Without a checkpoint the result is empty, provided that the required options are given.

    Raises:
        ValueError: the checkpoint is damaged or stores no options, or there is no checkpoint and a
            required option is missing.
    """
    if not user_values.get("use-checkpoint-args"):
        return {}
    options_to_read = [
        option for option in options(Config) if _is_read_from_checkpoint(option, user_values)
    ]
    roots = [
        user_values[name] for name in ("load", "pretrained-checkpoint") if user_values.get(name)
    ]
    if not options_to_read or not roots:
        return {}
    saved_run = saved_options(roots)
    if saved_run is None:
        by_pattern = {"num-layers"} if user_values.get("hybrid-layer-pattern") else set()
        missing = [o.name for o in options_to_read if o.required and o.name not in by_pattern]
        if missing:
            raise ValueError(
                f"--use-checkpoint-args: no checkpoint in {' or '.join(roots)}, and no "
                f"--{', --'.join(missing)}: name another folder, or give them"
            )
        return {}
    folder, saved, manifest = saved_run
    stored_values = {
        option.name: option.from_json(saved[option.name], f"{folder}: {option.name}")
        for option in options_to_read
        if option.name in saved
    }
    shape_options = {
        option.name for option in options_to_read if option.section in _SHAPES
    } | _WEIGHTS
    try:
        check_counts(folder, {n: saved[n] for n in shape_options & stored_values.keys()}, manifest)
    except CheckpointError as error:
        raise ValueError(f"--use-checkpoint-args: {error}") from error
    if (pattern := stored_values.get("hybrid-layer-pattern")) is not None:
        stored_values["hybrid-layer-pattern"] = symbols_of(pattern)  # without stage boundaries
    return stored_values


def _is_read_from_checkpoint(option: Option, user_values: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint supplies the value of an option."""
    if option.name in user_values:
        return False
    if option.name in _LENGTHS:
        return not _LENGTHS & set(user_values)
    if option.section == "data":  # all or none: single options would change the samples
        return not _DATA_SOURCES & set(user_values) and option.name not in _PER_START
    return option.section in _SECTIONS or option.name in _WEIGHTS or option.required


#: Options that determine how many samples a number of steps has.
_BATCH_SIZES = ("global-batch-size", "step-batch-size-schedule", "rampup-batch-size")


def _value_text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def with_checkpoint_schedule(config: Config, world_size: int) -> tuple[Config, tuple[str, ...]]:
    """Return a config with the schedule of the checkpoint that the run resumes from.

    Args:
        config: the config; returned unchanged unless `--use-checkpoint-opt-param-scheduler` is on
            and the run resumes a checkpoint in `--load` with its schedule.
        world_size: number of processes.

    Returns the config, and a line for each option that the checkpoint overrides.

    Raises:
        ValueError: the checkpoint is damaged, stores no schedule, or counts it in steps of another
            batch size.
    """
    flag, chosen = "--use-checkpoint-opt-param-scheduler", config.checkpoint
    resumes = chosen.resumes_schedule and not chosen.finetune
    if not (chosen.use_checkpoint_opt_param_scheduler and chosen.load and resumes):
        return config, ()
    checkpoint = _newest([chosen.load], flag)
    if checkpoint is None:
        return config, ()
    folder, manifest = checkpoint
    saved = manifest.extra.get("config")
    names = [name for section in _SCHEDULE.values() for name in section]
    if not isinstance(saved, dict) or not saved.keys() >= {*names, "global-batch-size"}:
        raise ValueError(f"{flag}: {folder} stores no schedule: drop the flag")
    training = config.training
    sizes = training.batch_sizes(world_size // config.model_parallel_size)
    if saved["lr-decay-iters"] or saved["lr-warmup-iters"]:
        now = {"global-batch-size": sizes.sizes[-1]}
        now |= {name: vars(training)[name.replace("-", "_")] for name in _BATCH_SIZES[1:]}
        for name, value in now.items():
            was = tuple(was) if isinstance(was := saved.get(name), list) else was
            if was == value:
                continue
            raise ValueError(
                f"{flag}: {folder} counts its schedule in steps of --{name} "
                f"{_value_text(was)}, this run's have {_value_text(value)}: give the former, or "
                "drop the flag and give the schedule"
            )
    lines: list[str] = []
    sections: dict[str, Any] = {}
    option_by_name = {option.name: option for option in options(Config)}
    run_values = flatten(config)
    for section, members in _SCHEDULE.items():
        values = {}
        for name in members:
            value = option_by_name[name].from_json(saved[name], f"{folder}: {name}")
            values[option_by_name[name].field] = value
            if run_values[name] not in (value, None):
                lines.append(f"--{name} is {value} as in {folder}, not {run_values[name]}")
        sections[section] = replace(vars(config)[section], **values)
    return replace(config, **sections), tuple(lines)


def with_checkpoint_matrices(config: Config) -> tuple[Config, tuple[str, ...]]:
    """Return a config with Muon's division into matrices from the checkpoint the run resumes from.

    Runs saved before `--muon-split-matrices` existed orthogonalized every tensor separately, or
    with `--no-muon-split-qkv` whole fused weights. An explicit option wins.

    Args:
        config: the config; returned unchanged unless the run resumes a Muon checkpoint.

    Returns the config, and a line if the division differs from a new run's or from the
    checkpoint's.

    Raises:
        ValueError: the checkpoint's value is invalid, or contradicts explicit options.
    """
    flag, chosen = "--muon-split-matrices", config.checkpoint
    if config.optimizer.optimizer != "muon" or chosen.load is None or chosen.finetune:
        return config, ()
    try:
        checkpoint = _newest([chosen.load], flag)
    except ValueError:  # loading the checkpoint reports the error in more detail
        return config, ()
    if checkpoint is None or checkpoint[1].extra.get("weights_only") is True:
        return config, ()
    saved = checkpoint[1].extra.get("config")
    if not isinstance(saved, dict) or saved.get("optimizer") != "muon":
        return config, ()
    folder, now = checkpoint[0], config.muon.muon_split_matrices
    before_the_option = "all" if config.muon.muon_split_qkv else "whole"
    option = next(option for option in options(Config) if option.name == flag.removeprefix("--"))
    stored = saved.get(option.name, before_the_option)
    stored = option.from_json(stored, f"{folder}: {option.name}") or "megatron"
    if now is not None:
        differs = now != stored and f"{flag} is {now}, and {folder} was trained with {stored}"
        return config, (differs,) if differs else ()
    muon = replace(config.muon, muon_split_matrices=stored)
    line = f"{flag} is {stored} as in {folder}; a new run has megatron"
    return replace(config, muon=muon), () if stored == "megatron" else (line,)


def _newest(roots: list[str], flag: str) -> tuple[Path, Manifest] | None:
    """Return the first checkpoint in the folders, and its manifest; None if there is none."""
    try:
        for root in map(Path, roots):
            is_checkpoint = root.name.startswith("iter_") and root.is_dir()
            # Loading the checkpoint later logs which one is used, and why.
            folder = root if is_checkpoint else latest_checkpoint(root, say=lambda text: None)
            if folder is not None:
                return folder, read_manifest(folder)
    except CheckpointError as error:
        raise ValueError(f"{flag}: {error}") from error
    return None


def stored_options(user_values: Mapping[str, Any]) -> tuple[Path, Mapping[str, Any]] | None:
    """Return the checkpoint that a run starts from, and its options by name.

    Args:
        user_values: explicit option values by name.

    Returns None if there is no checkpoint, or it stores no options.

    Raises:
        ValueError: the checkpoint is damaged.
    """
    for name in ("load", "pretrained-checkpoint"):
        checkpoint = _newest([user_values[name]], f"--{name}") if user_values.get(name) else None
        if checkpoint is not None:
            saved = checkpoint[1].extra.get("config")
            return (checkpoint[0], saved) if isinstance(saved, dict) else None
    return None


def saved_options(roots: list[str]) -> tuple[Path, Mapping[str, Any], Manifest] | None:
    """Return the first checkpoint in the folders, its options and its manifest; None if there is
    none.

    Raises:
        ValueError: the checkpoint is damaged, or stores no options.
    """
    checkpoint = _newest(roots, "--use-checkpoint-args")
    if checkpoint is None:
        return None
    folder, manifest = checkpoint
    saved = manifest.extra.get("config")
    if not isinstance(saved, dict):
        raise ValueError(f"--use-checkpoint-args: {folder} stores no options: give them as flags")
    return folder, saved, manifest
