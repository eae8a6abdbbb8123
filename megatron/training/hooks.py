# SPDX-License-Identifier: Apache-2.0
"""Hooks of the training loop, called at these points of an iteration.

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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron.training.progress_state import Progress
from megatron.training.step_report import StepReport

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing import TensorChunk


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
