# SPDX-License-Identifier: Apache-2.0
"""The state of a run to and from checkpoints: weights, optimizer, schedule and data position.

Tensors have logical names: a weight its own, optimizer state `optimizer.KIND/WEIGHT`. In addition
the manifest's `extra` holds JSON:

    model        fields of the model, compared when loading
    config       every option of the run, by flag name
    tokenizer    how to build the tokenizer again
    progress     `Progress`
    optimizer    kind; whether its state is saved (older checkpoints: always), steps, loss scaler
    data         what the order of samples depends on
    window       sums of the log line that is being gathered
    cpu_matmul   the dtype that a CPU multiplied in, where that was a choice; else null

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
from megatron.training.config import Config, EvaluationConfig, TrainingConfig
from megatron.training.config.values import require_all
from megatron.training.cpu_matmul import another_dtype
from megatron.training.data.data_sets import compare_identity
from megatron.training.monitoring.step_window import StepWindow
from megatron.training.newest_checkpoint import read_together
from megatron.training.progress_state import Progress
from megatron.training.stored_model import stored_model

#: Meaning of `extra`; raised when a reader of the old one would misread it.
FORMAT = 1

#: More samples or updates than any run has.
MAX_COUNT = 1 << 62


@dataclass(frozen=True, kw_only=True)
class CheckpointMetadata:
    """Metadata that identifies a run in its checkpoints, as JSON.

    Args:
        model: fields of the model's config.
        config: every option by flag name.
        tokenizer: arguments that rebuild the tokenizer.
        data: inputs that determine the order of samples.
        other_data_is_fine: whether to resume on other data than the checkpoint's, with a log line.
        batch_follows_world: whether the global batch size depends on the number of processes.
        cpu_matmul: the dtype of matmuls on a CPU, if the CPU supports several.
    """

    model: Mapping[str, Any]
    config: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    data: Mapping[str, Any]
    other_data_is_fine: bool = False
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
    """Return the JSON that a checkpoint of a run holds in addition to its tensors.

    Args:
        with_optimizer: whether the tensors of optimizer state are saved.
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
    """Return the weights and states to load, and reset the optional states that are not stored."""
    absent = store.optional_states.keys() - manifest.tensors.keys()
    for name in absent:
        store.states[name].fill_(store.optional_states[name])
    if absent:
        coordinator.say(f"{folder} has no scales of FP8 tensors: delayed scaling begins anew")
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
    """Fill a run's state from a checkpoint of any layout. Every rank calls this.

    After a DamagedCheckpointError it may be called again with another checkpoint: every element
    that the first call may have touched is loaded again or, moments without optimizer state, set
    to zero. All else is only changed once all tensors have been loaded.

    Args:
        folder: an `iter_` folder.
        with_optimizer: also load optimizer state; else its masters are the loaded weights. An
            imported checkpoint has none.
        with_progress: go on from the checkpoint's iteration and sample; else start at the first.
            An imported checkpoint has none.

    Returns:
        Where the run goes on; None: at the first iteration, without progress.

    Raises:
        CheckpointError: the checkpoint is damaged, or another rank failed.
        ValueError: it is of another model, optimizer or data.
    """
    manifest = read_together(folder, coordinator)
    extra = manifest.extra
    if extra.get("weights_only") is True:
        with_optimizer = with_progress = False
    _check_parts(folder, extra)
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
    moved = _other_state_dtypes(extra, metadata) if with_optimizer else []
    if moved:
        coordinator.say(f"converting optimizer state of {folder}: {'; '.join(moved)}")
    # weights keep their dtype where there is optimizer state: --bf16 and --fp16 were compared
    convert = bool(moved) or not with_optimizer
    load_checkpoint(folder, chunks, coordinator=coordinator, convert_dtype=convert)
    try:
        if with_optimizer:
            optimizer.steps = _steps(extra)
            optimizer.scaler.load_state_dict(extra["optimizer"]["scaler"])
        if with_progress:
            window.restore(extra["window"])
    except (KeyError, TypeError, AttributeError) as error:
        raise _unlike_a_run(folder, error) from error
    optimizer.after_load(with_state=with_optimizer)
    if not with_progress:
        return None
    if (dtype_change := another_dtype(extra.get("cpu_matmul"), metadata.cpu_matmul)) is not None:
        coordinator.say(f"{folder}: {dtype_change}")
    return progress


def _progress(folder: Path, extra: Mapping[str, Any]) -> Progress:
    """Return how far the run of a checkpoint is. Raises DamagedCheckpointError."""
    try:
        progress = Progress.from_json(extra["progress"])
    except (ValueError, TypeError) as error:
        raise _unlike_a_run(folder, error) from error
    if iteration_of(folder) not in (None, progress.iteration):
        error = ValueError(f"its progress is of iteration {progress.iteration}")
        raise _unlike_a_run(folder, error)
    if not progress.order_lengths:
        try:
            progress.order_lengths = _order_lengths(extra["config"])
        except (ValueError, TypeError) as error:
            raise _unlike_a_run(folder, error) from error
    counts = [value for value in vars(progress).values() if isinstance(value, int)]
    counts += progress.order_lengths.values()
    if max(counts) > MAX_COUNT:
        raise _unlike_a_run(folder, ValueError(f"its progress has counted to {max(counts)}"))
    return progress


#: What the length of a run follows from.
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
    """Return the lengths that the options of a checkpoint give: of one that was saved before
    progress had any, when every start ordered its samples for its own length.

    Raises:
        ValueError, TypeError: an option has a value that it cannot have, or is missing.
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
    evaluated = evaluation.eval_iters if evaluation.eval_interval else 0
    evaluated *= evaluation.eval_global_batch_size or sizes.sizes[-1]
    train = training.train_samples or sizes.samples(training.train_iters or 0)
    return {"train": train, "valid": evaluated, "test": evaluated}


def _steps(extra: Mapping[str, Any]) -> int:
    """Return how many updates an optimizer has applied. Raises TypeError."""
    steps = extra["optimizer"]["steps"]
    if type(steps) is not int or not 0 <= steps <= MAX_COUNT:
        raise TypeError(f"steps is {steps!r}")
    return steps


def _unlike_a_run(folder: Path, error: Exception) -> DamagedCheckpointError:
    reason = f"{type(error).__name__}: {error}"
    return DamagedCheckpointError(f"{folder} cannot be used: its run is not understood ({reason})")


def _shape(folder: Path, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a model that its function depends on; the others may change on the way,
    and older checkpoints lack some. Raises ValueError if there are unknown ones."""
    try:
        return function_of(GPTConfig.from_json(model)).to_json()
    except ValueError as error:
        raise ValueError(f"{folder} is of another model: {error}") from None


def _check_parts(folder: Path, extra: Mapping[str, Any]) -> None:
    """See that a checkpoint is of a run, or imported, and can be read. Raises ValueError."""
    needed = {"format", "model", "config"}
    if extra.get("weights_only") is not True:
        needed |= {"progress", "optimizer", "data", "window"}
    if needed - set(extra):
        raise ValueError(
            f"{folder} is no training checkpoint: it lacks {', '.join(sorted(needed - set(extra)))}"
        )
    not_objects = sorted(name for name in needed - {"format"} if not isinstance(extra[name], dict))
    if not_objects:
        raise DamagedCheckpointError(
            f"{folder} cannot be used: {', '.join(not_objects)} should be JSON objects"
        )
    if extra["format"] != FORMAT:
        raise ValueError(f"{folder} has format {extra['format']}, this program reads {FORMAT}")


def _check_model(folder: Path, extra: Mapping[str, Any], metadata: CheckpointMetadata) -> None:
    """Compare the model of a checkpoint with this run's, field by field. Raises ValueError."""
    shapes = (_shape(folder, model) for model in (extra["model"], metadata.model))
    if differences := compare_architecture(*shapes):
        raise ValueError(f"{folder} is of another model: {'; '.join(differences)}")


def _check_options(folder: Path, extra: Mapping[str, Any], metadata: CheckpointMetadata) -> None:
    """Compare what optimizer state depends on with this run's. Raises ValueError."""
    names = ("optimizer", "bf16", "fp16")
    saved = {name: extra["config"].get(name) for name in names}
    now = {name: metadata.config[name] for name in names}
    if differences := compare_architecture(saved, now):
        raise ValueError(
            f"{folder} was trained differently: {'; '.join(differences)}: give the same flags, "
            "or leave its optimizer state with --no-load-optim"
        )


def _check_saved_state(folder: Path, extra: Mapping[str, Any]) -> None:
    """See that a checkpoint was saved with optimizer state. Raises ValueError."""
    if extra["optimizer"].get("saved") is False:
        raise ValueError(
            f"{folder} was saved without optimizer state (--no-save-optim): go on with "
            "--no-load-optim, which starts that state and the schedule anew"
        )


def _check_batch(extra: Mapping[str, Any], metadata: CheckpointMetadata) -> None:
    """See that a run with fewer or more processes keeps its global batch, unless an option
    changes it. Raises ValueError."""
    saved, now = (c.get("global-batch-size") for c in (extra["config"], metadata.config))
    if metadata.batch_follows_world and saved not in (None, now):
        raise ValueError(
            f"the checkpoint's global batch is {saved}, and this run's would be {now}, as it "
            f"follows the number of processes: give --global-batch-size {saved} to go on, or "
            f"{now} to change it"
        )


def _check_amax_history(folder: Path, manifest: Manifest, metadata: CheckpointMetadata) -> None:
    """Compare how many steps delayed scaling looks back on. Raises ValueError."""
    now, flag = metadata.config, "fp8-amax-history-len"
    delayed = now.get("fp8-format") is not None and now.get("fp8-recipe") == "delayed"
    stored = {
        tensor.shape[0]
        for name, tensor in manifest.tensors.items()
        if name.endswith(".fp8_amax_history")
    }
    for length in stored if delayed else ():
        if length != now[flag]:
            raise ValueError(
                f"{folder} has the amax of {length} steps, and --{flag} is {now[flag]}: give "
                f"--{flag} {length}"
            )


def _check_state(
    folder: Path, manifest: Manifest, state: list[TensorChunk], coordinator: Coordinator
) -> None:
    """See that a checkpoint holds all state that any rank's optimizer has.

    Raises:
        DamagedCheckpointError: it lacks a part of what Adam keeps of every weight.
        ValueError: it lacks something else, as of an optimizer with other options.
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
            f"{folder} lacks optimizer state of this run: {missing[0]}{suffix}: give the "
            "flags it was "
            "saved with, or leave its optimizer state with --no-load-optim"
        )


def _other_state_dtypes(extra: Mapping[str, Any], metadata: CheckpointMetadata) -> list[str]:
    """List the moments that are kept in another dtype now than in the checkpoint."""
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
    if not metadata.other_data_is_fine:
        raise ValueError(
            f"{message}: give the same data options, go on with the new data by "
            "--allow-data-change, "
            "or start at its first sample with --finetune"
        )
    coordinator.say(f"{message}: going on with it as --allow-data-change asks")
