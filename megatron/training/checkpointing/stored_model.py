# SPDX-License-Identifier: Apache-2.0
"""The options and the model that a checkpoint stores.

Every checkpoint stores the resolved options of its run. With `--use-checkpoint-args`, options of
the model's shape and the tokenizer that are not given are read from there, as are the data, the
length of the run and every option without a default. A resumed run reads the schedule and the
division of Muon's matrices.

The model is compared with the tensors before either is built. A damaged description may claim any
number of layers or any size. Numbers that determine how much is built are compared with the
manifest first, then the shape of every weight, on the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.cli.schema import Option, flatten, options
from megatron.core.dist_checkpointing.manifest import Manifest, read_manifest
from megatron.core.dist_checkpointing.run_folder import latest_checkpoint
from megatron.core.dist_checkpointing.shard_format import (
    CheckpointError,
    DamagedCheckpointError,
)
from megatron.core.models.layer_pattern import without_stages
from megatron.training.config import Config

if TYPE_CHECKING:
    from megatron.core.models.gpt_config import GPTConfig


#: Counts of layers and blocks, and strings with a character per layer or block; each has tensors.
_LAYERS = (
    *("num_layers", "num-layers", "mtp_num_layers", "mtp-num-layers"),
    *("pattern", "ffn_pattern", "mtp_pattern", "hybrid-layer-pattern"),
)
#: Larger counts are treated as corrupt: building a block takes a millisecond even on meta.
_MAX_LAYERS = 4096
#: Fields that are not tensor dimensions.
_UNCHECKED = (
    "rope",
    "window",
    "window-size",
    "max_position_embeddings",
    "max-position-embeddings",
)
#: Limit on counts that need not be a tensor dimension.
_MAX_COUNT_SIZE = 4096
#: Number of problems listed in one error; others are counted.
_MAX_LISTED = 4

#: Adam's moments, stored for every weight.
_MOMENTS = ("exp_avg", "exp_avg_sq")


def check_counts(folder: Path, described: Mapping[str, Any], manifest: Manifest) -> None:
    """Check that no count in a description exceeds what the checkpoint's tensors allow.

    Args:
        folder: folder of the checkpoint.
        described: fields of a model config, or options by flag name that define its shape.
        manifest: manifest of the checkpoint.

    Raises:
        DamagedCheckpointError: a count is too large.
    """
    shapes = [tensor.shape for tensor in manifest.tensors.values()]
    largest = max((size for shape in shapes for size in shape), default=0)
    max_layers = min(max(len(shapes), 1), _MAX_LAYERS)
    max_size = max(largest, len(shapes), _MAX_COUNT_SIZE)
    for name, value in _counts(described):
        limit = max_layers if name in _LAYERS else max_size
        if abs(value) > limit:
            raise DamagedCheckpointError(
                f"{folder} cannot be used: {name} is {str(value)[:40]}, its {len(shapes)} tensors "
                f"allow at most {limit}"
            )


def _counts(fields: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the integers of nested fields, and the lengths of strings and lists, by name."""
    counts: list[tuple[str, int]] = []
    for name, value in fields.items():
        if name in _UNCHECKED:
            continue
        if isinstance(value, Mapping):
            counts += _counts(value)
        elif isinstance(value, str | list):
            counts.append((name, len(value)))
        elif type(value) is int:
            counts.append((name, value))
    return counts


def described_config(folder: Path, manifest: Manifest) -> GPTConfig:
    """Return the model config that a checkpoint describes, after comparing its counts with the
    tensors.

    Raises:
        ValueError: the checkpoint describes no model, or one of another version of this program.
        DamagedCheckpointError: the tensors cannot belong to the described model.
    """
    from megatron.core.models.gpt_config import GPTConfig

    described = manifest.extra.get("model")
    if described is None or manifest.extra.get("config") is None:
        raise ValueError(f"{folder} is not a training checkpoint: it lacks 'model' or 'config'")
    for name in ("model", "config", "tokenizer"):
        if not isinstance(manifest.extra.get(name, {}), Mapping):
            raise DamagedCheckpointError(f"{folder} cannot be used: {name} is not a JSON object")
    check_counts(folder, described, manifest)
    try:
        return GPTConfig.from_json(described)
    except ValueError as error:
        raise ValueError(f"{folder} contains {error}") from None
    except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise DamagedCheckpointError(
            f"{folder} cannot be used: cannot parse its model: {error}"
        ) from error


def stored_model(folder: Path, manifest: Manifest) -> GPTConfig:
    """Return the config of the model whose weights a checkpoint contains.

    Raises:
        ValueError: the checkpoint describes no model, or one of another version of this program.
        DamagedCheckpointError: the tensors do not belong to the described model.
    """
    config = described_config(folder, manifest)
    _check_shapes(folder, manifest, config)
    return config


def _check_shapes(folder: Path, manifest: Manifest, config: GPTConfig) -> list[str]:
    """Compare the tensors of a checkpoint with its model and return the names of the weights;
    raises like `stored_model`."""
    try:
        weights, states = _shapes(config)
    except (ValueError, CheckpointError) as error:
        raise ValueError(f"{folder} contains {error}") from None
    except (TypeError, KeyError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise DamagedCheckpointError(
            f"{folder} cannot be used: cannot build the model that it describes: {error}"
        ) from error
    problems = []
    for name, shape in (weights | states).items():
        stored = manifest.tensors.get(name)
        if stored is None:
            problems.append(f"{name} is missing")
        elif stored.shape != shape:
            problems.append(f"{name} is {list(stored.shape)}, its model requires {list(shape)}")
    if problems:
        num_unlisted = len(problems) - _MAX_LISTED
        raise DamagedCheckpointError(
            f"{folder} does not contain the weights of its model: "
            f"{'; '.join(problems[:_MAX_LISTED])}"
            f"{f'; and {num_unlisted} more' if num_unlisted > 0 else ''}"
        )
    return list(weights)


def _shapes(config: GPTConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return the shapes of a model's weights, and of its states; nothing is allocated."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups import ProcessGroupCollection
    from megatron.core.weight_gather import Storage

    model = GPTModel(
        config,
        ProcessGroupCollection.single(),
        device="meta",
        storage=Storage(initialize=False),
    )
    shardings = (handle.sharding for handle in model.store.handles.values())
    weights = {
        sub_weight.name: tuple(sub_weight.shape)
        for sharding in shardings
        for sub_weight in sharding.sub_weights
    }
    return weights, {name: tuple(tensor.shape) for name, tensor in model.store.states.items()}


def check_stored(folder: Path, manifest: Manifest) -> str:
    """Check that a checkpoint of a run contains every tensor that it should.

    Args:
        folder: folder of the checkpoint.
        manifest: manifest of the checkpoint.

    Returns:
        A line on why this cannot be checked; "" if it was checked, or the checkpoint is not a
        run's.

    Raises:
        DamagedCheckpointError: a tensor is missing.
    """
    if "model" not in manifest.extra or "config" not in manifest.extra:
        return ""  # not written by a training run
    try:
        weights = _check_shapes(folder, manifest, described_config(folder, manifest))
    except ValueError as error:
        return f"its tensors are not checked: its model is unknown to this version: {error}"
    optimizer = manifest.extra.get("optimizer")
    is_adam = isinstance(optimizer, Mapping) and optimizer.get("kind") == "adam"
    if not is_adam or manifest.extra.get("weights_only") is True:
        return ""
    if optimizer.get("saved") is False:  # --no-save-optim
        return ""
    names = (f"optimizer.{kind}/{weight}" for weight in weights for kind in _MOMENTS)
    absent = [name for name in names if name not in manifest.tensors]
    if absent:
        raise DamagedCheckpointError(f"{folder} lacks {absent[0]} ({len(absent)} missing in all)")
    return ""


_SECTIONS = (
    "model",
    "activations",
    "attention",
    "position",
    "rope_scaling",
    "experts",
    "hybrid",
    "tokenizer",
)
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
        stored_values["hybrid-layer-pattern"] = without_stages(pattern)  # without stage boundaries
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
