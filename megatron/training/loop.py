# SPDX-License-Identifier: Apache-2.0
"""The training loop: step, count, log, validate, save, stop. It knows no model and no process
group.

Every rank runs it and takes the same decisions, since a step's outcome is the same on all ranks.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal, Protocol

from megatron.core.optimizer.loss_scaler import LossScaler
from megatron.core.optimizer.schedule import LearningRateSchedule
from megatron.training.config.resolve import ResolvedRun
from megatron.training.fault_tolerance.faults import record_loss, spike_limit
from megatron.training.fault_tolerance.stopping import StopRequests
from megatron.training.hooks import Progress, StepReport, TrainingHooks
from megatron.training.monitoring.log_line import (
    Display,
    StepRecord,
    StepWindow,
    format_step,
    format_validation,
)
from megatron.training.monitoring.metrics import Metrics


class Steps(Protocol):
    """Interface for training steps and evaluation, implemented by `SessionSteps`.

    Attributes:
        lr: learning rate schedule over samples of applied updates.
        scaler: the loss scaler.
        window: sums of the current logging interval.
    """

    lr: LearningRateSchedule
    scaler: LossScaler
    window: StepWindow

    def take_step(self, samples: int, *, update_samples: int, loss_limit: float) -> StepReport:
        """Train on the next global batch, unless its loss is above the limit.

        Args:
            samples: samples of this batch.
            update_samples: samples of all applied updates so far, the position in the schedules.
        """
        ...

    def loss_on(self, split: Literal["validation", "test"]) -> float | None:
        """Return the mean loss on a split; None if the run has no such data."""

    def params_norm(self) -> float | None:
        """Return the norm of all weights; None if it is not logged."""


class RunSaves(Protocol):
    """Interface for writing checkpoints, implemented by `Saves`."""

    def begin(self, progress: Progress) -> None:
        """Save the current progress, immediately or in the background."""

    def finish(self, progress: Progress) -> None:
        """Save at the end of the run; the checkpoint is on disk when this returns."""


class TrainingLoop:
    """The loop of one run.

    Args:
        run: lengths and intervals.
        steps: takes steps and evaluates.
        hooks: called in this order.
        saves: writes checkpoints; None without --save.
        stop: requests to end the run early.
        display, metrics: destinations of the log.
    """

    def __init__(
        self,
        run: ResolvedRun,
        steps: Steps,
        *,
        hooks: Sequence[TrainingHooks],
        saves: RunSaves | None,
        stop: StopRequests,
        display: Display,
        metrics: Metrics,
    ) -> None:
        self._run, self._steps, self._hooks = run, steps, hooks
        self._saves, self._stop = saves, stop
        self._display, self._metrics = display, metrics

    def train(self, progress: Progress) -> None:
        """Run from `progress`, which is updated, to the end of the run or an exit condition.

        Raises:
            RunStopped: too many consecutive bad steps, or replicas that differ.
        """
        self._iterate(progress)
        for hooks in self._hooks:
            hooks.on_train_end(progress)

    def _iterate(self, progress: Progress) -> None:
        training, checkpoint = self._run.config.training, self._run.config.checkpoint
        evaluation = self._run.config.evaluation
        first_iteration = saved = progress.iteration
        validation_was_pending = bool(progress.validation_pending)
        if progress.iteration == 0 or validation_was_pending:
            self._validate(progress)
        while progress.iteration < self._run.train_iters:
            outcome = self._one_iteration(progress)
            iteration = progress.iteration
            # The same on every rank, because the control flags are summed over all ranks.
            early_stop_reason = self._stop.reason(outcome.control_flags)
            exits_by_interval = _is_multiple(iteration, training.exit_interval)
            stopping = (
                bool(early_stop_reason) or exits_by_interval or iteration == self._run.train_iters
            )
            # A stop at exit-interval leaves the last validation to the end of the run; an early
            # stop leaves a due validation to the next start.
            if (
                _is_multiple(iteration, evaluation.eval_interval)
                or iteration == self._run.train_iters
            ):
                if early_stop_reason:
                    progress.validation_pending = 1
                else:
                    self._validate(progress)
            if self._saves and (stopping or _is_multiple(iteration, checkpoint.save_interval)):
                (self._saves.finish if stopping else self._saves.begin)(progress)
                saved = iteration
            if stopping and (early_stop_reason or iteration != self._run.train_iters):
                reason = early_stop_reason or "--exit-interval asks"
                self._display.log(f"stopped at iteration {iteration} because {reason}")
                self._stop.stopped(outcome.control_flags)
                return
        if self._saves and saved != progress.iteration:
            self._saves.finish(progress)
        if progress.iteration != first_iteration or validation_was_pending:
            self._evaluate_at_end(progress)

    def _one_iteration(self, progress: Progress) -> StepReport:
        """Take one step, update the counters and log if due.

        Raises:
            RunStopped: a hook ends the run.
        """
        config, steps = self._run.config, self._steps
        batch = self._run.batch_sizes.at(progress.consumed_samples)
        for hooks in self._hooks:
            hooks.on_step_begin(progress.iteration + 1)
        lr = steps.lr.lr(progress.update_samples)
        scale = steps.scaler.scale
        limit = spike_limit(config, progress.recent_losses)
        start = time.perf_counter()
        outcome = steps.take_step(batch, update_samples=progress.update_samples, loss_limit=limit)
        seconds = time.perf_counter() - start
        self._stop.note("step", seconds)
        for hooks in self._hooks:
            hooks.on_step_computed(progress, outcome, limit)
        progress.iteration += 1
        progress.consumed_samples += batch
        if outcome.applied:
            progress.update_samples += batch
            record_loss(config, progress.recent_losses, outcome.loss)
        self._count(progress, outcome, scale)
        steps.window.add(outcome, seconds, samples=batch)
        self._display.step(progress.iteration, outcome.loss)
        interval = config.logging.log_interval
        if progress.iteration % interval == 0 or progress.iteration == self._run.train_iters:
            self._log(
                steps.window.record(
                    progress,
                    outcome,
                    learning_rate=lr,
                    loss_scale=scale,
                    params_norm=steps.params_norm(),
                )
            )
        for hooks in self._hooks:
            hooks.on_step_end(progress, outcome)
        return outcome

    def _count(self, progress: Progress, outcome: StepReport, scale: float) -> None:
        """Update the counters of skipped and bad steps.

        An overflow of fp16 gradients while the loss scale can still be lowered is not a bad step:
        the scaler is still searching for the scale.
        """
        finite = math.isfinite(outcome.loss)
        progress.skipped_iterations += not outcome.applied
        progress.spiked_iterations += outcome.spiked
        progress.nan_iterations += not finite
        seeks = self._run.config.training.fp16 and self._steps.scaler.scale < scale
        if finite and (outcome.applied or seeks):
            progress.consecutive_bad_steps = 0
        else:
            progress.consecutive_bad_steps += 1

    def _log(self, record: StepRecord) -> None:
        """Log and record one line, with the parts that hooks add."""
        log_parts = [log_part for hooks in self._hooks for log_part in hooks.log_parts()]
        throughput = self._run.config.logging.log_throughput
        line = format_step(
            record, datetime.datetime.now(), throughput=throughput, sections=log_parts
        )
        self._display.log(line, record)
        values = asdict(record)
        iteration = values.pop("iteration")
        for log_part in log_parts:
            values.update(**log_part.numbers, **log_part.tables)
        self._metrics.write("train", iteration, values)
        for hooks in self._hooks:
            hooks.on_log()

    def _validate(self, progress: Progress) -> None:
        """Validate, if the run does, and log and record the loss and the losses of hooks."""
        progress.validation_pending = 0
        start, iteration = time.perf_counter(), progress.iteration
        loss = self._steps.loss_on("validation")
        if loss is None:
            return
        self._display.log(format_validation(iteration, loss))
        values = {"lm_loss": loss}
        for hooks in self._hooks:
            for name, hook_loss in hooks.on_evaluate(iteration, self._validation_loss).items():
                self._display.log(format_validation(iteration, hook_loss, split=name))
                values[f"{name}_lm_loss"] = hook_loss
        self._stop.note("validation", time.perf_counter() - start)
        self._metrics.write("validation", iteration, values)

    def _validation_loss(self) -> float:
        """Return the validation loss of a run that validates."""
        loss = self._steps.loss_on("validation")
        assert loss is not None
        return loss

    def _evaluate_at_end(self, progress: Progress) -> None:
        """Evaluate the trained model on the test set, if there is one; log and record the loss."""
        loss = self._steps.loss_on("test")
        if loss is None:
            return
        self._display.log(format_validation(progress.iteration, loss, split="test set"))
        self._metrics.write("test", progress.iteration, {"lm_loss": loss})


def _is_multiple(iteration: int, interval: int | None) -> bool:
    """Return whether an action with an interval is due; None and 0 mean never."""
    return bool(interval) and iteration % interval == 0
