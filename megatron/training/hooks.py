# SPDX-License-Identifier: Apache-2.0
"""Hooks of the training loop, and the progress and step reports that they receive.

The loop calls the hooks at these points of an iteration:

    on_step_begin       before the step
    on_step_computed    after the step, before counters change
    log_parts, on_log   before and after a log line
    on_step_end         after the iteration has been counted and, if due, logged
    on_evaluate         after a validation
    on_train_end        after the last iteration, unless an error ends the run

Every rank calls the same hooks in the same order, so a hook may use collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing import TensorChunk


#: Counters that older checkpoints lack; they start at 0.
LATER = ("spiked_iterations", "rollbacks", "validation_pending", "failed_saves")


@dataclass(kw_only=True)
class Progress:
    """Counters of a run, updated by the loop and stored in checkpoints.

    Args:
        iteration: number of steps, skipped ones included.
        consumed_samples: samples read, the position in the data.
        update_samples: samples of applied updates, the position in the learning rate schedule.
        skipped_iterations: steps without an update because of a non-finite number or a loss spike.
        nan_iterations: skipped steps with a NaN or Inf loss.
        consecutive_bad_steps: bad steps since the last good one.
        spiked_iterations: steps skipped because of a loss spike.
        rollbacks: number of rollbacks to a checkpoint.
        validation_pending: 1 if the run stopped before a validation that was due, else 0.
        failed_saves: failed saves that did not end the run.
        recent_losses: losses of the last applied steps, whose median defines a spike.
        order_lengths: number of samples for which each split ("train", "valid", "test") was
            shuffled when the run started; a run that gets longer or shorter keeps that order.
            Splits without an entry are shuffled for their current number of samples.
    """

    iteration: int = 0
    consumed_samples: int = 0
    update_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    consecutive_bad_steps: int = 0
    spiked_iterations: int = 0
    rollbacks: int = 0
    validation_pending: int = 0
    failed_saves: int = 0
    recent_losses: list[float] = field(default_factory=list)
    order_lengths: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the counters by name."""
        return asdict(self)

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> Progress:
        """Return the counters of a checkpoint.

        Raises:
            ValueError: a counter is missing or not a count.
        """
        saved = {**dict.fromkeys(LATER, 0), **saved}
        names = [field.name for field in fields(Progress) if field.type == "int"]
        wrong = [n for n in names if not isinstance(saved.get(n), int) or saved[n] < 0]
        losses = saved.get("recent_losses", [])
        if not isinstance(losses, list) or not all(isinstance(x, float) for x in losses):
            wrong.append("recent_losses")
        lengths = saved.get("order_lengths", {})
        if not isinstance(lengths, dict) or not all(
            type(n) is int and n >= 0 for n in lengths.values()
        ):
            wrong.append("order_lengths")
        if wrong:
            raise ValueError(f"the checkpoint's progress lacks {', '.join(wrong)}")
        return Progress(
            **{name: saved[name] for name in names},
            recent_losses=list(losses),
            order_lengths=dict(lengths),
        )


AnomalyKind = Literal["nan", "spike", "inf_norm", "determinism"]
Verdict = Literal["transient", "reproduced", "unchecked", "undecided"]


@dataclass(frozen=True)
class StepAnomaly:
    """An anomaly of a step, equal on every rank.

    Args:
        kind: the first anomaly.
        verdict: `transient` (the rerun is sound and was used), `reproduced` (the rerun is
            anomalous), `unchecked` (no rerun) or `undecided` (sound, but no two of three
            computations are equal).
        ranks: ranks with the anomaly; all if it appears only in sums over ranks.
        values: the loss of each computation, or its gradient norm if that is not finite.
        same: whether the evidence of the last two computations is equal on every rank.
    """

    kind: AnomalyKind
    verdict: Verdict
    ranks: tuple[int, ...]
    values: tuple[float, ...]
    same: bool = False


@dataclass(frozen=True)
class StepReport:
    """The result of a step, equal on all ranks.

    Args:
        loss: mean loss of the step.
        applied: False if the loss or a gradient was not finite, or if the step `spiked`; weights
            and optimizer state are unchanged then.
        grad_norm: gradient norm before clipping.
        loss_scale: loss scale of the gradients.
        num_zeros: number of gradient elements that are exactly zero, if counted.
        control_flags: control flags, summed over all ranks.
        anomaly: the anomaly of the step's first computation; None if it was sound.
        spiked: whether the loss was above the limit, so that the step was skipped.
    """

    loss: float
    applied: bool
    grad_norm: float
    loss_scale: float
    num_zeros: int | None = None
    control_flags: tuple[float, ...] = ()
    anomaly: StepAnomaly | None = None
    spiked: bool = False


@dataclass(frozen=True)
class LogPart:
    """Additional values in a log line.

    Args:
        words: text for the log line, between bars.
        numbers: scalars by name, for every metrics writer.
        tables: tables by name, each with rows by name; written to metrics.jsonl only.
    """

    words: str
    numbers: Mapping[str, float]
    tables: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)


class TrainingHooks:
    """Base class whose hooks do nothing: a subclass overrides the hooks it needs.

    A hook ends the run by raising `RunStopped` on every rank.
    """

    def on_step_begin(self, iteration: int) -> None:
        """Called before a step.

        Args:
            iteration: number of the iteration that begins, from 1.
        """

    def on_step_computed(self, progress: Progress, outcome: StepReport, loss_limit: float) -> None:
        """Called with the outcome of a step, before the step is counted.

        Args:
            loss_limit: the step is skipped if its loss is above this.
        """

    def on_step_end(self, progress: Progress, outcome: StepReport) -> None:
        """Called when an iteration is counted and logged: `progress.iteration` is its number."""

    def log_parts(self) -> Sequence[LogPart]:
        """Return what to add to a log line after Megatron's fields, for the steps since the
        previous line."""
        return ()

    def on_log(self) -> None:
        """Called after a log line."""

    def on_evaluate(self, iteration: int, evaluate: Callable[[], float]) -> Mapping[str, float]:
        """Return additional validation losses by name; each is logged on its own line.

        Args:
            evaluate: returns the validation loss of the current model, on the same samples in every
                call. A hook that changes the model for it must restore it before it returns.
        """
        return {}

    def on_train_end(self, progress: Progress) -> None:
        """Called once at the end of the run."""

    def state_chunks(self) -> Sequence[TensorChunk]:
        """Return the state to store in checkpoints, as views of this rank's memory.

        Tensors are named `experiment.NAME/...`. The chunks are requested before a checkpoint is
        loaded, which fills them, and again before saves. A checkpoint without tensors of
        `experiment.NAME` leaves them unchanged.
        """
        return ()
