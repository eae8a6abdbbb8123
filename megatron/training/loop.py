# SPDX-License-Identifier: Apache-2.0
"""The training loop: step, count, log, validate, save, stop. It knows no model and no process
group.

Every rank runs it and comes to the same decisions, since a step's outcome is the same everywhere.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from megatron.core.optimizer.loss_scaler import LossScaler
from megatron.core.optimizer.schedule import LearningRateSchedule, WeightDecaySchedule
from megatron.training.errors import RunStopped
from megatron.training.exit_codes import ExitCode
from megatron.training.log_line import StepRecord, format_step, format_validation
from megatron.training.metrics import Metrics
from megatron.training.progress import Display
from megatron.training.progress_state import Progress
from megatron.training.resolve import Run
from megatron.training.step_window import StepOutcome, StepWindow


@dataclass(frozen=True, kw_only=True)
class LoopParts:
    """What the loop uses.

    Args:
        run: how long, how often.
        take_step: trains on the next global batch with a learning rate and a weight decay.
        evaluate: returns the validation loss; None without validation.
        save: writes a checkpoint of the current progress; None without --save.
        lr, weight_decay: schedules over the samples of applied updates.
        scaler: of the loss.
        window: gathers what is logged.
        params_norm: returns the norm of all weights; None if it is not asked for.
        display, metrics: where the numbers go.
        on_iteration: told the iteration that begins.
    """

    run: Run
    take_step: Callable[[float, float], StepOutcome]
    evaluate: Callable[[], float] | None
    save: Callable[[Progress], object] | None
    lr: LearningRateSchedule
    weight_decay: WeightDecaySchedule
    scaler: LossScaler
    window: StepWindow
    params_norm: Callable[[], float] | None
    display: Display
    metrics: Metrics
    on_iteration: Callable[[int], None] = lambda iteration: None


def train(parts: LoopParts, progress: Progress) -> None:
    """Run the loop from `progress`, which moves along, to the end of the run or an exit condition.

    Raises:
        RunStopped: too many bad steps in a row.
    """
    training, checkpoint = parts.run.config.training, parts.run.config.checkpoint
    saved = progress.iteration
    if progress.iteration == 0:
        validate(parts, progress)
    while progress.iteration < parts.run.train_iters:
        one_iteration(parts, progress)
        done = progress.iteration
        stopping = done == parts.run.train_iters or _is_multiple(done, training.exit_interval)
        # Stopping at exit-interval leaves the last validation to the run's real end.
        if _is_multiple(done, training.eval_interval) or done == parts.run.train_iters:
            validate(parts, progress)
        if parts.save and (stopping or _is_multiple(done, checkpoint.save_interval)):
            parts.save(progress)
            saved = done
        if stopping and done != parts.run.train_iters:
            parts.display.log(f"stopped at iteration {done} as --exit-interval asks")
            return
    if parts.save and saved != progress.iteration:
        parts.save(progress)


def _is_multiple(iteration: int, interval: int | None) -> bool:
    return bool(interval) and iteration % interval == 0


def one_iteration(parts: LoopParts, progress: Progress) -> None:
    """Take one step, move the counters and log it if it is time.

    Raises:
        RunStopped: too many bad steps in a row.
    """
    batch = parts.run.config.training.global_batch_size
    assert batch is not None
    parts.on_iteration(progress.iteration + 1)
    lr = parts.lr.lr(progress.update_samples)
    decay = parts.weight_decay.weight_decay(progress.update_samples)
    scale = parts.scaler.scale
    start = time.perf_counter()
    outcome = parts.take_step(lr, decay)
    seconds = time.perf_counter() - start
    progress.iteration += 1
    progress.consumed_samples += batch
    if outcome.applied:
        progress.update_samples += batch
    _count(parts, progress, outcome, scale)
    parts.window.add(outcome, seconds)
    parts.display.step(progress.iteration, outcome.loss)
    interval = parts.run.config.logging.log_interval
    if progress.iteration % interval == 0 or progress.iteration == parts.run.train_iters:
        norm = parts.params_norm() if parts.params_norm else None
        log(
            parts,
            parts.window.record(
                progress, outcome, learning_rate=lr, loss_scale=scale, params_norm=norm
            ),
        )
    limit = parts.run.config.training.max_consecutive_bad_steps
    if progress.consecutive_bad_steps >= limit:
        raise RunStopped(
            ExitCode.BAD_STEPS,
            f"stopped at iteration {progress.iteration}: {limit} steps in a row had a NaN or Inf "
            f"loss or gradient norm (last loss {outcome.loss}, gradient norm {outcome.grad_norm}); "
            "none of them changed a weight; lower --lr or look at the data, and resume from the "
            "last checkpoint",
        )


def _count(parts: LoopParts, progress: Progress, outcome: StepOutcome, scale: float) -> None:
    """Move the counters of skipped and bad steps.

    An overflow of fp16 gradients while the scale can still be lowered is part of finding the scale.
    """
    finite = math.isfinite(outcome.loss)
    progress.skipped_iterations += not outcome.applied
    progress.nan_iterations += not finite
    seeks = parts.run.config.training.fp16 and parts.scaler.scale < scale
    if finite and (outcome.applied or seeks):
        progress.consecutive_bad_steps = 0
    else:
        progress.consecutive_bad_steps += 1


def log(parts: LoopParts, record: StepRecord) -> None:
    """Show and record one log line."""
    parts.display.log(format_step(record, datetime.datetime.now()), record)
    values = asdict(record)
    iteration = values.pop("iteration")
    parts.metrics.write("train", iteration, values)


def validate(parts: LoopParts, progress: Progress) -> None:
    """Validate, if the run does, and show and record the loss."""
    if parts.evaluate is None:
        return
    loss = parts.evaluate()
    parts.display.log(format_validation(progress.iteration, loss))
    parts.metrics.write("validation", progress.iteration, {"lm_loss": loss})
