# SPDX-License-Identifier: Apache-2.0
"""Load the checkpoint or Hugging Face folder from which a run starts, at the right progress."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from megatron.core.dist_checkpointing import load_checkpoint, weight_chunks
from megatron.hf.config_json import differences
from megatron.hf.folder import is_folder
from megatron.hf.read_weights import read_weights, reading_lines
from megatron.training.checkpointing.find import (
    load_newest,
    read_together,
    reject_later_checkpoints,
)
from megatron.training.checkpointing.hf_import import open_model
from megatron.training.checkpointing.state import load_run
from megatron.training.config import Config
from megatron.training.hooks import Progress
from megatron.training.session import Session, hook_chunks


def restore(session: Session) -> tuple[Progress, str]:
    """Load the checkpoint that the options name, if there is one.

    Returns the progress to start from, and a line that describes it.

    Raises:
        ValueError: the checkpoint cannot be used.
    """
    chosen, context = session.run.config.checkpoint, session.context
    if chosen.load is not None and is_folder(chosen.load):
        raise ValueError(f"--load {chosen.load} is a Hugging Face folder: give it to --load-hf")
    # A run that starts from weights has no optimizer state to load.
    sources = [("--load", chosen.load, chosen.finetune)]
    sources.append(("--pretrained-checkpoint", chosen.pretrained_checkpoint, True))
    for flag, source, is_start in sources:
        if source is None:
            continue
        loaded = load_newest(
            source,
            lambda folder, is_start=is_start: load_session(
                session,
                folder,
                with_optimizer=chosen.load_optim and not is_start,
                with_progress=not is_start,
            ),
            context.coordinator,
            flag=flag,
            fall_back=chosen.load_fallback,
        )
        if loaded is not None:
            is_load = flag == "--load" and not is_start
            return _start_from(session, *loaded, resumes_from=source if is_load else None)
        if flag == "--pretrained-checkpoint":
            raise ValueError(f"{flag} {source}: there is no checkpoint: name another")
    if chosen.save is not None:
        reject_later_checkpoints(
            chosen.save, 0, resumes_newest=False, coordinator=context.coordinator
        )
    if chosen.load_hf is not None:
        dtype_note = _read_folder(chosen.load_hf, session)
        also = "" if dtype_note is None else f" ({dtype_note})"
        return Progress(), f"read the weights of {chosen.load_hf}{also}; starting at iteration 0"
    why = "" if chosen.load is None else f": no checkpoint in {chosen.load}"
    return Progress(), f"starting at iteration 0{why}"


def load_session(
    session: Session, folder: Path, *, with_optimizer: bool = True, with_progress: bool = True
) -> Progress | None:
    """Load a session's state by `load_run`, and the state of hooks with the progress. Every rank
    calls this."""
    coordinator = session.context.coordinator
    progress = load_run(
        folder,
        store=session.model.store,
        optimizer=session.optimizer,
        window=session.window,
        metadata=session.metadata,
        coordinator=coordinator,
        with_optimizer=with_optimizer,
        with_progress=with_progress,
    )
    if progress is None:
        return None
    manifest = read_together(folder, coordinator)
    stored = _experiments_in(manifest.tensors)
    if not (stored or session.run.config.experiments.experiment):
        return progress
    chunks = [(chunk.name.partition("/")[0], chunk) for chunk in hook_chunks(session)]

    def union(names_by_rank: list[list[str]]) -> list[str]:
        return sorted({name for names in names_by_rank for name in names})

    # A rank may hold no chunk of some state, and still takes part in the load.
    coordinator.begin(f"experiments in {folder.name}")
    local_names = sorted({name for name, _ in chunks})
    experiment_names = set(coordinator.agree("experiments", lambda: local_names, union))
    if experiment_names & stored:
        stored_chunks = [chunk for name, chunk in chunks if name in stored]
        load_checkpoint(folder, stored_chunks, coordinator=coordinator)
    for name in sorted(stored ^ experiment_names):
        flag = f"--{name.replace('.', ' ')}"
        if name in experiment_names:
            coordinator.say(f"{folder} has no state of {flag}: it starts from these weights")
        else:
            coordinator.say(f"{folder} was trained with {flag}: continuing without")
    return progress


def _experiments_in(tensors: Collection[str]) -> set[str]:
    """Return the `experiment.NAME` prefixes among the tensors of a checkpoint."""
    prefixes = {name.partition("/")[0] for name in tensors if "/" in name}
    return {name for name in prefixes if name.startswith("experiment.")}


def _start_from(
    session: Session, folder: Path, progress: Progress | None, *, resumes_from: str | None
) -> tuple[Progress, str]:
    """Check that the save folder contains no later checkpoint; return the progress to start from,
    and a line that describes it. Raises ValueError.

    Args:
        resumes_from: the folder of --load; None if only weights are loaded.
    """
    save, start = session.run.config.checkpoint.save, progress or Progress()
    if save is not None:
        reject_later_checkpoints(
            save,
            start.iteration,
            resumes_newest=resumes_from is not None
            and Path(resumes_from).resolve() == Path(save).resolve(),
            coordinator=session.context.coordinator,
        )
    if progress is None:
        return start, f"loaded the weights of {folder}; starting at iteration 0"
    return start, f"loaded {folder}; {_resume_line(session.run.config, start)}"


def _resume_line(config: Config, progress: Progress) -> str:
    """Restart the schedules if the options say so, and return a line that states where the run
    resumes."""
    chosen, text = config.checkpoint, f"resuming at iteration {progress.iteration}"
    if not chosen.resumes_schedule:
        progress.update_samples = 0
    if chosen.load_optim and chosen.resumes_schedule:
        return text
    state = "with its optimizer state" if chosen.load_optim else "without its optimizer state"
    if chosen.resumes_schedule:
        return f"{text} {state}, in its schedule (--schedule-on-load restart restarts it)"
    text = f"{text} {state}, at the start of the schedule"
    return f"{text} (--schedule-on-load continue resumes it)"


def _read_folder(path: str, session: Session) -> str | None:
    """Load the model from a Hugging Face folder, and the optimizer's master weights from the model.

    Returns:
        A line about ignored and quantized tensors, if there are any.

    Raises:
        ValueError: the folder is damaged or contains another model.
    """
    folder, model = open_model(path, flag="--load-hf")
    if model_differences := differences(model.config, session.model.config):
        raise ValueError(f"--load-hf {path} contains another model: {'; '.join(model_differences)}")
    chunks = weight_chunks(session.model.store)
    read_weights(folder, model, chunks, coordinator=session.context.coordinator)
    session.optimizer.after_load(with_state=False)
    return "; ".join(reading_lines(folder, model)) or None
