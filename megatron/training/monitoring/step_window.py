# SPDX-License-Identifier: Apache-2.0
"""What happened since the last log line, gathered step by step into one record."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from megatron.training.config.model_table import gpt_config
from megatron.training.config.resolve import Run
from megatron.training.failures.replay import Doubt
from megatron.training.monitoring.flops import (
    flops_per_square,
    training_flops,
    visible_square,
    window,
)
from megatron.training.monitoring.log_line import StepRecord
from megatron.training.progress_state import Progress


class StepOutcome(Protocol):
    """What one training step did, equal on every rank: `step.StepReport`."""

    @property
    def loss(self) -> float:
        """Mean loss over the global batch, in nats per token."""

    @property
    def applied(self) -> bool:
        """Whether the weights changed; False if a number was not finite."""

    @property
    def grad_norm(self) -> float:
        """L2 norm of the gradient before clipping."""

    @property
    def num_zeros(self) -> int | None:
        """Gradient elements that are zero, if counted."""

    @property
    def votes(self) -> tuple[float, ...]:
        """Sums over all ranks of what each of them gave."""

    @property
    def doubt(self) -> Doubt | None:
        """What was wrong with the step when it was first computed."""

    @property
    def spiked(self) -> bool:
        """Whether the step was skipped because its loss was above the limit."""


@dataclass(frozen=True, kw_only=True)
class Speedometer:
    """Turns the seconds of a step into tokens and operations per second.

    Args:
        tokens_per_sample: its length.
        flops_per_sample: over all ranks, a sample being one document.
        squares_per_sample: its squared length in that, less what a window hides.
        flops_per_square: of attention, for each of them.
        world_size: number of ranks.
        peak_flops: of one device, where it is known.
    """

    tokens_per_sample: int
    flops_per_sample: float
    squares_per_sample: int
    flops_per_square: float
    world_size: int
    peak_flops: float | None

    @staticmethod
    def of(run: Run, *, padded_vocab_size: int, peak_flops: float | None) -> Speedometer:
        """Return the speedometer of a run."""
        training = run.config.training
        model = gpt_config(run.config, padded_vocab_size)
        return Speedometer(
            tokens_per_sample=training.seq_length,
            flops_per_sample=training_flops(
                model,
                vocab_size=padded_vocab_size,
                seq_length=training.seq_length,
                samples=1,
            ),
            squares_per_sample=int(visible_square(training.seq_length, window(model))),
            flops_per_square=flops_per_square(model),
            world_size=run.world_size,
            peak_flops=peak_flops,
        )

    def flops(self, *, samples: int, squares: int) -> float:
        """Return the operations of some samples.

        Args:
            samples: how many.
            squares: sum of squared document lengths in all of them, less what a window hides; 0 if
                each sample is one document.
        """
        fewer = self.squares_per_sample * samples - squares if squares else 0
        return self.flops_per_sample * samples - fewer * self.flops_per_square


class StepWindow:
    """Sums over the steps since the last record.

    Args:
        run: of which batch size and length go into the record.
        speed: how time becomes speed.
        memory: returns the bytes in use and the most so far; None records none.
    """

    def __init__(
        self,
        run: Run,
        speed: Speedometer,
        *,
        memory: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._run, self._speed, self._memory = run, speed, memory
        self._clear()

    def _clear(self) -> None:
        self._timed = self._samples = self._last_samples = 0
        self._seconds = 0.0
        self._squares = 0
        self._sums: dict[str, float] = {"skipped": 0, "nan": 0, "good": 0, "loss": 0.0}

    def add(self, outcome: StepOutcome, seconds: float, *, samples: int) -> None:
        """Take note of one step, its samples and the time it took."""
        self._timed += 1
        self._samples, self._last_samples = self._samples + samples, samples
        self._seconds += seconds
        self._sums["skipped"] += not outcome.applied
        self._sums["nan"] += not math.isfinite(outcome.loss)
        if outcome.applied:
            self._sums["good"] += 1
            self._sums["loss"] += outcome.loss

    def add_squares(self, squares: int) -> None:
        """Take note of the squared document lengths of one step, over all ranks."""
        self._squares += squares

    def to_json(self) -> dict[str, float]:
        """Return the sums for a checkpoint, so that the next log line is the same."""
        return dict(self._sums)

    def restore(self, saved: Mapping[str, float]) -> None:
        """Go on from saved sums; the times of steps of another process do not count.

        Raises:
            KeyError, TypeError: a sum is missing or no number.
        """
        found = {name: saved[name] for name in self._sums}
        if odd := [name for name, value in found.items() if type(value) not in (int, float)]:
            raise TypeError(f"{odd[0]} is {found[odd[0]]!r}")
        self._sums.update(found)

    def record(
        self,
        progress: Progress,
        last: StepOutcome,
        *,
        learning_rate: float,
        loss_scale: float,
        params_norm: float | None,
    ) -> StepRecord:
        """Return the record of the steps so far and start the next window."""
        seconds = self._seconds / self._timed
        sums = self._sums
        done = self._speed.flops(samples=self._samples, squares=self._squares)
        flops = done / self._seconds / self._speed.world_size
        peak = self._speed.peak_flops
        used = self._memory() if self._memory else (None, None)
        found = StepRecord(
            iteration=progress.iteration,
            train_iters=self._run.train_iters,
            consumed_samples=progress.consumed_samples,
            global_batch_size=self._last_samples,
            seconds_per_iteration=seconds,
            tokens_per_second=self._speed.tokens_per_sample * self._samples / self._seconds,
            learning_rate=learning_rate,
            lm_loss=sums["loss"] / sums["good"] if sums["good"] else None,
            loss_scale=loss_scale,
            grad_norm=last.grad_norm,
            num_skipped=int(sums["skipped"]),
            num_nan=int(sums["nan"]),
            tflops=flops / 1e12,
            mfu=flops / peak if peak else None,
            num_zeros=last.num_zeros,
            params_norm=params_norm,
            memory_bytes=used[0],
            peak_memory_bytes=used[1],
        )
        self._clear()
        return found
