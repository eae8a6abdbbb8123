# SPDX-License-Identifier: Apache-2.0
"""Hooks of the training loop: what is called at the moments of an iteration.

    on_step_begin       before the step
    on_step_computed    the step is done, the counters have not moved
    log_parts, on_log   at a log line: for it, and after it
    on_step_end         the iteration is counted and, if it is time, logged
    on_evaluate         after a validation
    on_train_end        after the last iteration, unless an error ends the run

Every rank calls the same hooks in the same order, so a hook may use collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing import TensorChunk
    from megatron.training.monitoring.log_line import LogPart
    from megatron.training.monitoring.step_window import StepOutcome
    from megatron.training.progress_state import Progress


class TrainingHooks:
    """Does nothing: a subclass overrides the moments that it needs.

    A hook ends the run by raising `RunStopped`, on every rank alike.
    """

    def on_step_begin(self, iteration: int) -> None:
        """Called before a step.

        Args:
            iteration: that begins, counted from 1.
        """

    def on_step_computed(self, progress: Progress, outcome: StepOutcome, loss_limit: float) -> None:
        """Called with the outcome of a step before it is counted.

        Args:
            loss_limit: above which the step was skipped.
        """

    def on_step_end(self, progress: Progress, outcome: StepOutcome) -> None:
        """Called when an iteration is counted and logged: `progress.iteration` is its number."""

    def log_parts(self) -> Sequence[LogPart]:
        """Return what a log line is to show beside Megatron's fields, since the line before."""
        return ()

    def on_log(self) -> None:
        """Called after a log line."""

    def on_evaluate(self, iteration: int, evaluate: Callable[[], float]) -> Mapping[str, float]:
        """Return further validation losses by name; each has a line of its own.

        Args:
            evaluate: returns the validation loss of the model as it is, over the same samples at
                every call. Whatever the hook changes for it must be as it was when it returns.
        """
        return {}

    def on_train_end(self, progress: Progress) -> None:
        """Called once when the run is over."""

    def state_chunks(self) -> Sequence[TensorChunk]:
        """Return the state to keep in checkpoints, as views of this rank's memory.

        A tensor is named `experiment.NAME/...`. Chunks are asked for before a checkpoint is loaded,
        which fills them, and again before saves. A checkpoint without tensors of `experiment.NAME`
        leaves them as they are.
        """
        return ()
