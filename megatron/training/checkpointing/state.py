# SPDX-License-Identifier: Apache-2.0
"""Save and load the state of a run: weights, optimizer, schedule and data position.

Tensors have logical names: `WEIGHT` for weights, `optimizer.KIND/WEIGHT` for optimizer state. The
manifest's `extra` holds JSON:

    format       version of `extra`
    model        fields of the model config, compared when loading
    config       every option of the run, by flag name
    tokenizer    how to rebuild the tokenizer
    progress     `Progress`
    optimizer    kind; whether state is saved (older checkpoints: always), steps, loss scaler
    data         what the order of samples depends on
    window       sums of the current logging interval
    cpu_matmul   dtype of matrix products on a CPU if there was a choice; else null

An imported checkpoint has no progress, optimizer, data and window, but `weights_only`: true.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.cli.schema import options
from megatron.core.dist_checkpointing import (
    Coordinator,
    DamagedCheckpointError,
    Manifest,
    TensorChunk,
    compare_architecture,
    load_checkpoint,
    optimizer_chunks,
    weight_chunks,
)
from megatron.core.dist_checkpointing.manifest import iteration_of
from megatron.core.models.gpt import GPTConfig
from megatron.core.optimizer import Optimizer
from megatron.core.weight_gather import WeightStore
from megatron.hf.config_json import function_of
from megatron.training.checkpointing.find import read_together
from megatron.training.checkpointing.stored_model import stored_model
from megatron.training.config import Config, EvaluationConfig, TrainingConfig
from megatron.training.config.values import require_all
from megatron.training.core_configs import another_dtype
from megatron.training.data.data_sets import compare_identity
from megatron.training.hooks import Progress
from megatron.training.monitoring.log_line import StepWindow

#: Version of `extra`; raised when older code would misread it.
FORMAT = 1

#: Limit on counters of samples and updates; larger ones are treated as corrupt.
MAX_COUNT = 1 << 62


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """The identity of a run in its checkpoints, as JSON.

    Args:
        model: fields of the model config.
        config: every option by flag name.
        tokenizer: how to rebuild the tokenizer.
        data: what the order of samples depends on.
        allow_other_data: allow resuming on other data than the checkpoint's, and log it.
        batch_follows_world: whether the global batch size was derived from the number of processes.
        cpu_matmul: dtype of matrix products on a CPU, if there was a choice.
    """

    model: Mapping[str, Any]
    config: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    data: Mapping[str, Any]
    allow_other_data: bool = False
    batch_follows_world: bool = False
    cpu_matmul: str | None = None


def run_extra(
    *,
    optimizer: Optimizer,
    progress: Progress,
    window: StepWindow,
    metadata: CheckpointMetadata,
    with_optimizer: bool = True,
) -> dict[str, Any]:
    """Return the JSON that a checkpoint of a run stores in addition to tensors.

    Args:
        with_optimizer: whether optimizer state is saved.
    """
    state: dict[str, Any] = {"kind": optimizer.config.kind, "saved": with_optimizer}
    if with_optimizer:
        state |= {"steps": optimizer.steps, "scaler": optimizer.scaler.state_dict()}
    return {
        "format": FORMAT,
        "model": dict(metadata.model),
        "config": dict(metadata.config),
        "tokenizer": dict(metadata.tokenizer),
        "progress": progress.to_json(),
        "optimizer": state,
        "data": dict(metadata.data),
        "window": window.to_json(),
        "cpu_matmul": metadata.cpu_matmul,
    }


def _stored_chunks(
    folder: Path, manifest: Manifest, store: WeightStore, coordinator: Coordinator
) -> list[TensorChunk]:
    """Return the weights and states to load, and reset optional states the checkpoint lacks."""
    absent = store.optional_states.keys() - manifest.tensors.keys()
    for name in absent:
        store.states[name].fill_(store.optional_states[name])
    if absent:
        coordinator.say(f"{folder} has no scales of FP8 tensors: delayed scaling restarts")
    return [chunk for chunk in weight_chunks(store) if chunk.name not in absent]


def load_run(
    folder: Path,
    *,
    store: WeightStore,
    optimizer: Optimizer,
    window: StepWindow,
    metadata: CheckpointMetadata,
    coordinator: Coordinator,
    with_optimizer: bool = True,
    with_progress: bool = True,
) -> Progress | None:
    """Load a run's state from a checkpoint of any parallel layout. Every rank calls this.

    After a DamagedCheckpointError it may be called again with another checkpoint: the second call
    overwrites every element that the first may have changed (moments are set to zero if no
    optimizer state is loaded). Scalars change only after all tensors have been loaded.

    Args:
        folder: an `iter_` folder.
        with_optimizer: load optimizer state too; otherwise master weights are copied from the
            loaded weights. Imported checkpoints have no optimizer state.
        with_progress: resume at the checkpoint's iteration and sample; otherwise start at the
            first. Imported checkpoints have no progress.

    Returns:
        The progress to resume from; None without progress.

    Raises:
        CheckpointError: the checkpoint is damaged, or another rank failed.
        ValueError: the checkpoint belongs to another model, optimizer or data set.
    """
    manifest = read_together(folder, coordinator)
    extra = manifest.extra
    if extra.get("weights_only") is True:
        with_optimizer = with_progress = False
    _check_fields(folder, extra)
    stored_model(folder, manifest)
    progress = _progress(folder, extra) if with_progress else None
    require_all(
        lambda: _check_model(folder, extra, metadata),
        lambda: _check_options(folder, extra, metadata) if with_optimizer else None,
        lambda: _check_saved_state(folder, extra) if with_optimizer else None,
        lambda: _check_batch(extra, metadata) if with_progress else None,
        lambda: (
            _check_data(folder, extra["data"], metadata, coordinator) if with_progress else None
        ),
        lambda: _check_amax_history(folder, manifest, metadata),
    )
    chunks = _stored_chunks(folder, manifest, store, coordinator)
    if with_optimizer:
        state = optimizer_chunks(optimizer, scalars=False)
        _check_state(folder, manifest, state, coordinator)
        chunks += state
    dtype_changes = _other_state_dtypes(extra, metadata) if with_optimizer else []
    if dtype_changes:
        coordinator.say(f"converting optimizer state of {folder}: {'; '.join(dtype_changes)}")
    # With optimizer state, weights keep their dtype: --bf16 and --fp16 have been compared.
    convert = bool(dtype_changes) or not with_optimizer
    load_checkpoint(folder, chunks, coordinator=coordinator, convert_dtype=convert)
    try:
        if with_optimizer:
            optimizer.steps = _steps(extra)
            optimizer.scaler.load_state_dict(extra["optimizer"]["scaler"])
        if with_progress:
            window.restore(extra["window"])
    except (KeyError, TypeError, AttributeError) as error:
        raise _invalid_run_state(folder, error) from error
    optimizer.after_load(with_state=with_optimizer)
    if not with_progress:
        return None
    if (dtype_change := another_dtype(extra.get("cpu_matmul"), metadata.cpu_matmul)) is not None:
        coordinator.say(f"{folder}: {dtype_change}")
    return progress


def _progress(folder: Path, extra: Mapping[str, Any]) -> Progress:
    """Return the progress stored in a checkpoint. Raises DamagedCheckpointError."""
    try:
        progress = Progress.from_json(extra["progress"])
    except (ValueError, TypeError) as error:
        raise _invalid_run_state(folder, error) from error
    if iteration_of(folder) not in (None, progress.iteration):
        error = ValueError(f"its progress contradicts iteration {progress.iteration}")
        raise _invalid_run_state(folder, error)
    if not progress.order_lengths:
        try:
            progress.order_lengths = _order_lengths(extra["config"])
        except (ValueError, TypeError) as error:
            raise _invalid_run_state(folder, error) from error
    counts = [value for value in vars(progress).values() if isinstance(value, int)]
    counts += progress.order_lengths.values()
    if max(counts) > MAX_COUNT:
        raise _invalid_run_state(
            folder, ValueError(f"its progress contains the count {max(counts)}")
        )
    return progress


#: Options that determine the length of a run.
_LENGTH_OPTIONS = (
    "seq-length",
    "micro-batch-size",
    "global-batch-size",
    "step-batch-size-schedule",
    "rampup-batch-size",
    "train-iters",
    "train-samples",
    "eval-interval",
    "eval-iters",
    "eval-global-batch-size",
)


def _order_lengths(saved: Mapping[str, Any]) -> dict[str, int]:
    """Return the lengths that the options of an older checkpoint imply, in samples by split.

    Before `Progress` stored lengths, every start shuffled samples for its own length.

    Raises:
        ValueError, TypeError: an option is missing or has an invalid value.
    """
    if saved.get("train-iters") is None and saved.get("train-samples") is None:
        return {}
    sections: dict[str | None, dict[str, Any]] = {"training": {}, "evaluation": {}}
    for option in options(Config):
        if option.name in _LENGTH_OPTIONS and option.name in saved:
            value = option.from_json(saved[option.name], option.name)
            sections[option.section][option.field] = value
    training = TrainingConfig(**sections["training"])
    evaluation = EvaluationConfig(**sections["evaluation"])
    sizes = training.batch_sizes(1)
    eval_samples = evaluation.eval_iters if evaluation.eval_interval else 0
    eval_samples *= evaluation.eval_global_batch_size or sizes.sizes[-1]
    train = training.train_samples or sizes.samples(training.train_iters or 0)
    return {"train": train, "valid": eval_samples, "test": eval_samples}


def _steps(extra: Mapping[str, Any]) -> int:
    """Return the number of updates that the optimizer has applied. Raises TypeError."""
    steps = extra["optimizer"]["steps"]
    if type(steps) is not int or not 0 <= steps <= MAX_COUNT:
        raise TypeError(f"steps is {steps!r}")
    return steps


def _invalid_run_state(folder: Path, error: Exception) -> DamagedCheckpointError:
    reason = f"{type(error).__name__}: {error}"
    return DamagedCheckpointError(f"{folder} cannot be used: cannot parse its run state ({reason})")


def _architecture(folder: Path, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the model's function depends on; other fields may change between runs,
    and older checkpoints lack some. Raises ValueError for unknown fields."""
    try:
        return function_of(GPTConfig.from_json(model)).to_json()
    except ValueError as error:
        raise ValueError(f"{folder} contains another model: {error}") from None


def _check_fields(folder: Path, extra: Mapping[str, Any]) -> None:
    """Check that a checkpoint belongs to a run, or was imported, and can be read. Raises
    ValueError."""
    needed = {"format", "model", "config"}
    if extra.get("weights_only") is not True:
        needed |= {"progress", "optimizer", "data", "window"}
    if needed - set(extra):
        raise ValueError(
            f"{folder} is not a training checkpoint: it lacks "
            f"{', '.join(sorted(needed - set(extra)))}"
        )
    not_objects = sorted(name for name in needed - {"format"} if not isinstance(extra[name], dict))
    if not_objects:
        raise DamagedCheckpointError(
            f"{folder} cannot be used: {', '.join(not_objects)} should be JSON objects"
        )
    if extra["format"] != FORMAT:
        raise ValueError(f"{folder} has format {extra['format']}, this version reads {FORMAT}")


def _check_model(folder: Path, extra: Mapping[str, Any], metadata: CheckpointMetadata) -> None:
    """Compare the model of a checkpoint with this run's, field by field. Raises ValueError."""
    architectures = (_architecture(folder, model) for model in (extra["model"], metadata.model))
    if differences := compare_architecture(*architectures):
        raise ValueError(f"{folder} contains another model: {'; '.join(differences)}")


def _check_options(folder: Path, extra: Mapping[str, Any], metadata: CheckpointMetadata) -> None:
    """Compare the options that optimizer state depends on with this run's. Raises ValueError."""
    names = ("optimizer", "bf16", "fp16")
    saved = {name: extra["config"].get(name) for name in names}
    now = {name: metadata.config[name] for name in names}
    if differences := compare_architecture(saved, now):
        raise ValueError(
            f"{folder} was trained differently: {'; '.join(differences)}: give the same flags, "
            "or load without optimizer state by --no-load-optim"
        )


def _check_saved_state(folder: Path, extra: Mapping[str, Any]) -> None:
    """Check that a checkpoint contains optimizer state. Raises ValueError."""
    if extra["optimizer"].get("saved") is False:
        raise ValueError(
            f"{folder} was saved without optimizer state (--no-save-optim): resume with "
            "--no-load-optim, which resets that state and the schedule"
        )


def _check_batch(extra: Mapping[str, Any], metadata: CheckpointMetadata) -> None:
    """Check that a run on another number of processes keeps its global batch size, unless an option
    sets it. Raises ValueError."""
    saved, now = (c.get("global-batch-size") for c in (extra["config"], metadata.config))
    if metadata.batch_follows_world and saved not in (None, now):
        raise ValueError(
            f"the checkpoint's global batch is {saved}, but this run's would be {now}, "
            f"because it follows the number of processes: give --global-batch-size {saved} to "
            f"keep it, or {now} to change it"
        )


def _check_amax_history(folder: Path, manifest: Manifest, metadata: CheckpointMetadata) -> None:
    """Compare the length of the amax history of delayed scaling. Raises ValueError."""
    current, flag = metadata.config, "fp8-amax-history-len"
    delayed = current.get("fp8-format") is not None and current.get("fp8-recipe") == "delayed"
    stored = {
        tensor.shape[0]
        for name, tensor in manifest.tensors.items()
        if name.endswith(".fp8_amax_history")
    }
    for length in stored if delayed else ():
        if length != current[flag]:
            raise ValueError(
                f"{folder} has an amax history of {length} steps, and --{flag} is "
                f"{current[flag]}: give --{flag} {length}"
            )


def _check_state(
    folder: Path, manifest: Manifest, state: list[TensorChunk], coordinator: Coordinator
) -> None:
    """Check that a checkpoint contains the optimizer state of every rank.

    Raises:
        DamagedCheckpointError: a moment of some weight is missing.
        ValueError: other state is missing, as after a change of optimizer options.
    """

    def absent() -> list[str]:
        return sorted({chunk.name for chunk in state} - manifest.tensors.keys())

    coordinator.begin(f"comparing optimizer state with {folder.name}")
    missing = coordinator.agree(
        "state", absent, lambda names: sorted({n for names_of_rank in names for n in names_of_rank})
    )
    if missing:
        suffix = f" and {len(missing) - 1} tensors more" if len(missing) > 1 else ""
        kinds = {name.partition("/")[0] for name in manifest.tensors}
        partly = any(name.partition("/")[0] in kinds for name in missing)
        if partly and manifest.extra["optimizer"].get("kind") == "adam":
            raise DamagedCheckpointError(f"{folder} lacks optimizer state: {missing[0]}{suffix}")
        raise ValueError(
            f"{folder} lacks optimizer state of this run: {missing[0]}{suffix}: give the flags it "
            "was saved with, or load without optimizer state by --no-load-optim"
        )


def _other_state_dtypes(extra: Mapping[str, Any], metadata: CheckpointMetadata) -> list[str]:
    """List the moments whose dtype differs from the checkpoint's."""
    changes = []
    for name in ("exp-avg-dtype", "exp-avg-sq-dtype"):
        saved, now = extra["config"].get(name, "fp32"), metadata.config[name]
        if saved != now:
            changes.append(f"--{name} was {saved}, is {now}")
    return changes


def _check_data(
    folder: Path, saved: Mapping[str, Any], metadata: CheckpointMetadata, coordinator: Coordinator
) -> None:
    """Compare the data of a checkpoint with this run's. Raises ValueError."""
    if not (differences := compare_identity(saved, metadata.data)):
        return
    message = f"{folder} was trained on other data: {'; '.join(differences)}"
    if not metadata.allow_other_data:
        raise ValueError(
            f"{message}: give the same data options, continue with the new data by "
            "--allow-data-change, or start at its first sample with --finetune"
        )
    coordinator.say(f"{message}: continuing with the new data, as --allow-data-change is given")
