# SPDX-License-Identifier: Apache-2.0
"""One training run from its resolved options to its last checkpoint: carried out here.

Order: save folder → data → model → engine and optimizer → checkpoint → loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Literal

import torch

from megatron.core.comm import all_reduce
from megatron.core.datasets.samplers import GPTBatch, PrefetchedBatches
from megatron.core.device import peak_memory_bytes, pin
from megatron.core.dist_checkpointing import CheckpointError, Coordinator, SaveFolderClaim
from megatron.core.models.gpt import Ahead, shifted
from megatron.training.config.resolve import Run
from megatron.training.data.data_paths import prefixes
from megatron.training.data.data_sets import (
    build_data_sets,
    read_ahead,
    training_batches,
    validation_batches,
)
from megatron.training.data.vocabulary import read_vocabulary
from megatron.training.failures.faults import refuse_faulty_hosts
from megatron.training.failures.session_faults import (
    arm_stop,
    compare_replicas,
    session_faults,
    timed_steps,
)
from megatron.training.gpt_options import (
    early_gather,
    learning_rate_schedule,
    weight_decay_schedule,
    weight_dtype,
)
from megatron.training.layouts import Layouts, layouts_of, packed_cuts
from megatron.training.loop import LoopParts, train
from megatron.training.monitoring.describe import (
    batch_line,
    batch_words,
    context_line,
    context_words,
    cut_line,
    data_parallel_line,
    dropout_line,
    expert_line,
    linear_lines,
    pipeline_line,
    pipeline_words,
)
from megatron.training.monitoring.flops import visible_square
from megatron.training.monitoring.log_line import Display, LogPart
from megatron.training.monitoring.metrics import Metrics
from megatron.training.monitoring.model_metrics import load_balance, mtp_losses
from megatron.training.monitoring.observation import observing
from megatron.training.progress_state import Progress
from megatron.training.run_groups import RunGroups
from megatron.training.saves import saving
from megatron.training.session import Session, build_session, restore
from megatron.training.step import Microbatch, StepReport


@contextlib.contextmanager
def claimed_folder(save: str | None, coordinator: Coordinator) -> Iterator[None]:
    """Hold the save folder for this run alone, and know before the first step that it can be
    written. A run that a user's error ends before anything is written leaves no trace of it.

    Raises:
        ValueError: it cannot be written, or another run has it.
    """
    claims: list[SaveFolderClaim] = []

    def claim() -> None:
        if coordinator.rank == 0 and save is not None:
            claims.append(SaveFolderClaim(save))
            if swept := [path.name for path in claims[0].swept]:
                coordinator.say(f"{save}: removed what was never finished: {', '.join(swept)}")

    if save is not None:
        coordinator.begin("claiming the save folder")
        try:
            coordinator.agree("claim", claim, lambda answers: None)
        except CheckpointError as error:
            raise ValueError(f"--save {save}: {error}") from error
    try:
        yield
    except ValueError:
        for held in claims:
            held.abandon()
        raise
    finally:
        for held in claims:
            held.close()


def microbatch(
    batch: GPTBatch,
    device: torch.device,
    *,
    layouts: Layouts,
    depths: int = 0,
    share: float | None = None,
) -> Microbatch:
    """Put a batch on the device.

    Args:
        layouts: say which tokens this rank has of the batch's rows.
        depths: of multi-token prediction, whose tokens are found in whole rows.
        share: of the step's samples, see `Microbatch`.
    """

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        # Only from pinned memory does a copy let the host go on.
        return pin(tensor, device).to(device, non_blocking=True)

    layout = layouts.of(batch)
    ahead = None
    if depths:
        found = shifted(
            batch.input_ids,
            batch.labels,
            batch.loss_mask,
            depths=depths,
            document_ids=batch.document_ids,
        )
        whole = vars(found).values()  # [D, b, s] each
        ahead = Ahead(*(moved(torch.stack([layout.local(x) for x in rows])) for rows in whole))
    rows = (batch.input_ids, batch.labels, batch.loss_mask)
    tokens, labels, loss_mask = (moved(layout.local(x)) for x in rows)  # [b, s/cp]
    layout = layout.with_samples(moved(batch.sample_ids))
    return Microbatch(tokens, labels, loss_mask, layout, ahead=ahead, share=share)


def squared_lengths(batch: GPTBatch, window: int | None = None) -> int:
    """Return the sum of squared document lengths, less what a window hides of them; 0 if each
    sample is one document."""
    if batch.cu_seqlens is None:
        return 0
    return int(visible_square(batch.cu_seqlens.long().diff().numpy(), window).sum())


def take(
    batches: Iterator[GPTBatch],
    count: int,
    device: torch.device,
    *,
    layouts: Layouts,
    depths: int = 0,
    step_samples: int | None = None,
) -> list[Microbatch]:
    """Return the next microbatches of this lane, to be trained on.

    Args:
        step_samples: of a step on all lanes, where it is not divided evenly.
    """
    found = []
    for batch in islice(batches, count):
        share = None if step_samples is None else batch.num_samples / step_samples
        found.append(microbatch(batch, device, layouts=layouts, depths=depths, share=share))
    return found


@contextlib.contextmanager
def closing_reads(batches: Iterator[GPTBatch]) -> Iterator[None]:
    """Stop threads that read ahead, if there are any, at the end of the block."""
    try:
        yield
    finally:
        if isinstance(batches, PrefetchedBatches):
            batches.close()


def pretrain(run: Run, place: RunGroups) -> None:
    """Carry out a run.

    Raises:
        ValueError: an option, a data file or a checkpoint that the user can mend.
        RunStopped: it had to stop; the text says why.
    """
    with claimed_folder(run.config.checkpoint.save, place.coordinator):
        refuse_faulty_hosts(run.config.checkpoint.save, place.coordinator)
        vocabulary = read_vocabulary(run.config.tokenizer, prefixes(run.config.data))
        data = build_data_sets(run, vocabulary)
        session = build_session(run, place, vocabulary, data)
        progress, start = restore(session)
        run_loop(session, progress, start)


class SessionSteps:
    """What the loop does with a session: step and validate.

    Args:
        batches: this lane's training data from the run's position on.
        observe: told the iteration that begins, to profile or collect garbage in.
    """

    def __init__(
        self,
        session: Session,
        batches: Iterator[GPTBatch],
        observe: Callable[[int], None],
    ) -> None:
        self._session, self._batches = session, batches
        self._observe, model = observe, session.model
        self._layouts = layouts_of(session.run, session.place, model.config)
        self._division = session.run.division
        self._depths = 0 if model.multi_token is None else model.config.mtp_num_layers

    def take_step(self, lr: float, weight_decay: float, loss_limit: float) -> StepReport:
        """Train on the next global batch, unless its loss is above the limit."""
        run, device, division = self._session.run, self._session.place.device, self._division
        batches = [next(self._batches) for _ in range(run.num_microbatches)]
        # An estimate where lanes differ: this lane's documents stand for all.
        window = run.config.attention.window_size
        own = [batch for batch in batches if not batch.filler]
        squares = sum(squared_lengths(batch, window) for batch in own)
        samples = sum(batch.num_samples for batch in own)
        self._session.window.add_squares(squares * division.samples // samples)
        microbatches = take(
            iter(batches),
            run.num_microbatches,
            device,
            layouts=self._layouts,
            depths=self._depths,
            step_samples=None if division.is_even else division.samples,
        )
        report = self._session.step(
            microbatches,
            lr=lr,
            weight_decay=weight_decay,
            votes=self._session.place.stop.votes(),
            loss_limit=loss_limit,
        )
        if self._session.balance is not None:
            self._session.balance.finish(applied=report.applied)
        return report

    def more_to_log(self) -> list[LogPart]:
        """Return what parts of the model have to say in a log line; every rank calls this."""
        found, session = [], self._session
        if session.model.config.mtp_num_layers:
            found.append(mtp_losses(session.model))
        if session.balance is not None:
            found.append(load_balance(session.balance.report(), session.balance.config))
        return found

    def validation_loss(self) -> float:
        """Return the mean loss per token over the validation samples, the same every time."""
        return self._loss_on("validation")

    def test_loss(self) -> float:
        """Return the mean loss per token over the test samples."""
        return self._loss_on("test")

    def _loss_on(self, split: Literal["validation", "test"]) -> float:
        run, place = self._session.run, self._session.place
        lanes = place.groups["samples"]
        fresh = validation_batches(self._session.data, run, lanes=lanes, split=split)
        count = run.config.training.eval_iters * run.num_microbatches
        microbatches = (
            microbatch(batch, place.device, layouts=self._layouts) for batch in islice(fresh, count)
        )
        # As many at a time as a step has: it is what activations and schedules are made for.
        return self._session.step.evaluate(microbatches, at_a_time=run.num_microbatches)

    def on_iteration(self, iteration: int) -> None:
        """Let those who watch, and the other ranks, know where this one is."""
        self._observe(iteration)
        if self._session.place.watch is not None:
            self._session.place.watch.iteration = iteration


def choices_of(session: Session) -> list[str]:
    """Return the lines that say what a run has chosen, and why."""
    run = session.run
    lines = (
        pipeline_line(run),
        context_line(run),
        *linear_lines(run),
        expert_line(run, session.model.config),
        batch_line(run),
        data_parallel_line(session.step.engine, session.optimizer),
        dropout_line(run.config, session.place.device),
        None if session.cpu_matmul is None else session.cpu_matmul.line(),
        *session.data.notes,
        _export_line(session),
        early_gather(run.config)[1],
    )
    return [line for line in lines if line is not None]


def _export_line(session: Session) -> str | None:
    """Return whether the model can be exported to Hugging Face, if that was asked."""
    if not session.run.config.checkpoint.hf_export_check:
        return None
    from megatron.hf.config_json import architecture_of, check_exportable
    from megatron.training.config.model_table import model_options

    try:
        check_exportable(session.model.config, flags_of=model_options)
    except ValueError as error:
        return f"Hugging Face: {error}"
    name = architecture_of(session.model.config).class_name
    return f"Hugging Face: the model can be exported as {name}"


#: Microbatches whose documents are looked at before the first step.
MICROBATCHES_SHOWN = 16


def cut_of_rows(session: Session, consumed_samples: int) -> str | None:
    """Return how packed rows are cut over ranks and why, see `cut_line`; None if they are not."""
    run, lanes = session.run, session.place.groups["samples"]
    cuts = packed_cuts(run, session.place, session.model.config)
    if cuts is None:
        return None
    batches = training_batches(session.data, run, lanes=lanes, consumed_samples=consumed_samples)
    return cut_line(cuts, islice(batches, MICROBATCHES_SHOWN))


def run_loop(session: Session, progress: Progress, start: str) -> None:
    """Train from `progress` to the end."""
    run, place, logging = session.run, session.place, session.run.config.logging
    batches = read_ahead(
        training_batches(
            session.data,
            run,
            lanes=place.groups["samples"],
            consumed_samples=progress.consumed_samples,
        ),
        run,
    )
    with (
        closing_reads(batches),
        observing(session, progress) as watching,
        saving(session, say=watching.display.log, metrics=watching.metrics) as saves,
    ):
        display, metrics = watching.display, watching.metrics
        steps = SessionSteps(session, batches, watching.on_iteration)
        display.log(describe(session))
        for line in (*choices_of(session), cut_of_rows(session, progress.consumed_samples)):
            if line is not None:
                display.log(line)
        display.log(start)
        if place.attempt:
            display.log(f"restart {place.attempt} by the launcher")
            metrics.write("start", progress.iteration, {"restarts": place.attempt})
        arm_stop(session)
        take_step, logged = timed_steps(session, steps.take_step, say=display.log, metrics=metrics)
        parts = LoopParts(
            run=run,
            take_step=take_step,
            evaluate=steps.validation_loss if session.data.validation is not None else None,
            test=steps.test_loss if session.data.test is not None else None,
            saves=saves,
            lr=learning_rate_schedule(run),
            weight_decay=weight_decay_schedule(run),
            scaler=session.optimizer.scaler,
            window=session.window,
            params_norm=session.optimizer.params_norm if logging.log_params_norm else None,
            display=display,
            metrics=metrics,
            stop=place.stop,
            faults=session_faults(session, say=display.log, metrics=metrics, saves=saves),
            on_iteration=steps.on_iteration,
            on_logged=logged,
            more=steps.more_to_log,
            compare=compare_replicas(session, say=display.log, metrics=metrics),
        )
        train(parts, progress)
        record_end(session, progress, display=display, metrics=metrics)


def record_end(session: Session, progress: Progress, *, display: Display, metrics: Metrics) -> None:
    """Record how much memory the run took, and what comparing its steps found."""
    place = session.place
    peak = torch.tensor(peak_memory_bytes(place.device), dtype=torch.float64, device=place.device)
    most = all_reduce(peak, place.groups["world"], op="max")
    numbers, line = session.step.replayer.stats()
    metrics.write("end", progress.iteration, {"peak_memory_bytes": float(most), **numbers})
    if line is not None:
        display.log(line)


def describe(session: Session) -> str:
    """Return one line on model, layout and data."""
    run, config = session.run, session.run.config
    return (
        f"{session.model.num_parameters:,} parameters in "
        f"{str(weight_dtype(config)).removeprefix('torch.')}, vocabulary "
        f"{session.vocabulary.size:,}; {run.world_size} processes: tensor parallel "
        f"{config.parallel.tensor_model_parallel_size}"
        f"{' with sequence parallel' if config.parallel.sequence_parallel else ''}, "
        f"{context_words(config)}{pipeline_words(config)}data parallel {run.data_parallel_size} "
        f"({config.data_parallel.strategy}); {batch_words(run)}; {run.train_iters:,} iterations"
    )
