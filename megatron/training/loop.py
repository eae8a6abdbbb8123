# SPDX-License-Identifier: Apache-2.0
"""The training loop: step, count, log, validate, save, stop. It knows no model and no process
group.

Every rank runs it and comes to the same decisions, since a step's outcome is the same everywhere.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from megatron.core.optimizer.loss_scaler import LossScaler
from megatron.core.optimizer.schedule import LearningRateSchedule, WeightDecaySchedule
from megatron.training.config.resolve import Run
from megatron.training.failures.faults import Faults, remember_loss, spike_limit
from megatron.training.failures.stopping import StopRequests
from megatron.training.monitoring.log_line import (
    Display,
    LogPart,
    StepRecord,
    format_step,
    format_validation,
)
from megatron.training.monitoring.metrics import Metrics
from megatron.training.monitoring.step_window import StepOutcome, StepWindow
from megatron.training.progress_state import Progress


class RunSaves(Protocol):
    """What writes checkpoints: `Saves`."""

    def begin(self, progress: Progress) -> None:
        """Save the current progress, at once or in the background."""

    def finish(self, progress: Progress) -> None:
        """Save it for the end of the run: it is on disk when this returns."""

    def poll(self, progress: Progress) -> None:
        """Tell what has become of saves in the background."""


@dataclass(frozen=True, kw_only=True)
class LoopParts:
    """What the loop uses.

    Args:
        run: how long, how often.
        take_step: trains on the next global batch with a learning rate, a weight decay and the loss
            above which it is skipped.
        evaluate: returns the validation loss; None without validation.
        test: returns the loss on the test set; None without one.
        saves: writes checkpoints; None without --save.
        lr, weight_decay: schedules over the samples of applied updates.
        scaler: of the loss.
        window: gathers what is logged.
        params_norm: returns the norm of all weights; None if it is not asked for.
        display, metrics: where the numbers go.
        on_iteration: told the iteration that begins.
        on_logged: called behind every log line.
        more: returns what parts of the model have to say in a log line; every rank calls it.
        compare: compares replicas behind a step, and raises if they differ.
        stop: who wants the run to end early.
        faults: what to do about steps that go wrong.
    """

    run: Run
    take_step: Callable[[float, float, float], StepOutcome]
    evaluate: Callable[[], float] | None
    saves: RunSaves | None
    lr: LearningRateSchedule
    weight_decay: WeightDecaySchedule
    scaler: LossScaler
    window: StepWindow
    params_norm: Callable[[], float] | None
    display: Display
    metrics: Metrics
    stop: StopRequests
    faults: Faults
    on_iteration: Callable[[int], None] = lambda iteration: None
    test: Callable[[], float] | None = None
    on_logged: Callable[[], None] = lambda: None
    more: Callable[[], Sequence[LogPart]] = lambda: ()
    compare: Callable[[int], None] = lambda iteration: None


def train(parts: LoopParts, progress: Progress) -> None:
    """Run the loop from `progress`, which moves along, to the end of the run or an exit condition.

    Raises:
        RunStopped: too many bad steps in a row, or replicas that differ.
    """
    training, checkpoint = parts.run.config.training, parts.run.config.checkpoint
    failures = parts.run.config.failures
    first = saved = progress.iteration
    left_over = bool(progress.validation_pending)
    if progress.iteration == 0 or left_over:
        validate(parts, progress)
    while progress.iteration < parts.run.train_iters:
        outcome = one_iteration(parts, progress)
        done = progress.iteration
        if parts.saves:
            parts.saves.poll(progress)
        if _is_multiple(done, failures.check_weight_hash_across_dp_replicas_interval):
            parts.compare(done)  # before a save of them
        # The same on every rank, as the votes of all of them are in it.
        early = parts.stop.reason(outcome.votes)
        asked = _is_multiple(done, training.exit_interval)
        stopping = bool(early) or asked or done == parts.run.train_iters
        # Stopping at exit-interval leaves the last validation to the run's real end; stopping
        # early leaves one that is due to the next start.
        if _is_multiple(done, training.eval_interval) or done == parts.run.train_iters:
            if early:
                progress.validation_pending = 1
            else:
                validate(parts, progress)
        if parts.saves and (stopping or _is_multiple(done, checkpoint.save_interval)):
            (parts.saves.finish if stopping else parts.saves.begin)(progress)
            saved = done
        if stopping and (early or done != parts.run.train_iters):
            parts.display.log(f"stopped at iteration {done} as {early or '--exit-interval asks'}")
            parts.stop.stopped(outcome.votes)
            return
    if parts.saves and saved != progress.iteration:
        parts.saves.finish(progress)
    if progress.iteration != first or left_over:
        evaluate_at_end(parts, progress)


def _is_multiple(iteration: int, interval: int | None) -> bool:
    return bool(interval) and iteration % interval == 0


def one_iteration(parts: LoopParts, progress: Progress) -> StepOutcome:
    """Take one step, move the counters and log it if it is time.

    Raises:
        RunStopped: too many bad steps in a row, or one whose cause is to be found elsewhere.
    """
    config = parts.run.config
    batch = config.training.global_batch_size
    assert batch is not None
    parts.on_iteration(progress.iteration + 1)
    lr = parts.lr.lr(progress.update_samples)
    decay = parts.weight_decay.weight_decay(progress.update_samples)
    scale = parts.scaler.scale
    limit = spike_limit(config, progress.recent_losses)
    start = time.perf_counter()
    outcome = parts.take_step(lr, decay, limit)
    seconds = time.perf_counter() - start
    parts.stop.note("step", seconds)
    parts.faults.after_step(progress, outcome, limit)
    progress.iteration += 1
    progress.consumed_samples += batch
    if outcome.applied:
        progress.update_samples += batch
        remember_loss(config, progress.recent_losses, outcome.loss)
    _count(parts, progress, outcome, scale)
    parts.window.add(outcome, seconds)
    parts.display.step(progress.iteration, outcome.loss)
    interval = config.logging.log_interval
    if progress.iteration % interval == 0 or progress.iteration == parts.run.train_iters:
        norm = parts.params_norm() if parts.params_norm else None
        record = parts.window.record(
            progress, outcome, learning_rate=lr, loss_scale=scale, params_norm=norm
        )
        log(parts, record, more=parts.more())
        parts.on_logged()
    parts.faults.after_count(progress, outcome)
    return outcome


def _count(parts: LoopParts, progress: Progress, outcome: StepOutcome, scale: float) -> None:
    """Move the counters of skipped and bad steps.

    An overflow of fp16 gradients while the scale can still be lowered is part of finding the scale.
    """
    finite = math.isfinite(outcome.loss)
    progress.skipped_iterations += not outcome.applied
    progress.spiked_iterations += outcome.spiked
    progress.nan_iterations += not finite
    seeks = parts.run.config.training.fp16 and parts.scaler.scale < scale
    if finite and (outcome.applied or seeks):
        progress.consecutive_bad_steps = 0
    else:
        progress.consecutive_bad_steps += 1


def log(parts: LoopParts, record: StepRecord, *, more: Sequence[LogPart] = ()) -> None:
    """Show and record one log line.

    Args:
        more: what else it has.
    """
    shows = parts.run.config.logging.log_throughput
    line = format_step(record, datetime.datetime.now(), throughput=shows, more=more)
    parts.display.log(line, record)
    values = asdict(record)
    iteration = values.pop("iteration")
    for part in more:
        values.update(**part.numbers, **part.tables)
    parts.metrics.write("train", iteration, values)


def validate(parts: LoopParts, progress: Progress) -> None:
    """Validate, if the run does, and show and record the loss."""
    progress.validation_pending = 0
    if parts.evaluate is None:
        return
    start = time.perf_counter()
    loss = parts.evaluate()
    parts.stop.note("validation", time.perf_counter() - start)
    parts.display.log(format_validation(progress.iteration, loss))
    parts.metrics.write("validation", progress.iteration, {"lm_loss": loss})


def evaluate_at_end(parts: LoopParts, progress: Progress) -> None:
    """Evaluate the finished model on the test set, if there is one; show and record the loss."""
    if parts.test is None:
        return
    loss = parts.test()
    parts.display.log(format_validation(progress.iteration, loss, on="test set"))
    parts.metrics.write("test", progress.iteration, {"lm_loss": loss})
