# SPDX-License-Identifier: Apache-2.0
"""Accumulate the steps since the last log line into one record."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron.training.config.model_table import gpt_config
from megatron.training.config.resolve import ResolvedRun
from megatron.training.hooks import Progress, StepReport
from megatron.training.monitoring.flops import (
    flops_per_square,
    training_flops,
    visible_square,
    window,
)
from megatron.training.monitoring.log_line import StepRecord


@dataclass(frozen=True, kw_only=True)
class Speedometer:
    """Sizes that convert step time to tokens and FLOPs per second.

    Args:
        tokens_per_sample: sequence length.
        flops_per_sample: model FLOPs of a sample that is one document.
        squares_per_sample: `visible_square` of the sequence length.
        flops_per_square: attention FLOPs per unit of `visible_square`.
        world_size: number of ranks.
        peak_flops: peak FLOP/s of one device; None if unknown.
    """

    tokens_per_sample: int
    flops_per_sample: float
    squares_per_sample: int
    flops_per_square: float
    world_size: int
    peak_flops: float | None

    @staticmethod
    def of(run: ResolvedRun, *, padded_vocab_size: int, peak_flops: float | None) -> Speedometer:
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
        """Return the model FLOPs of some samples.

        Args:
            samples: number of samples.
            squares: sum of `visible_square` over all documents of the samples; 0 if each sample is
                one document.
        """
        masked_squares = self.squares_per_sample * samples - squares if squares else 0
        return self.flops_per_sample * samples - masked_squares * self.flops_per_square


class StepWindow:
    """Sums over the steps since the last record.

    Args:
        run: the run.
        speed: converts step time to throughput.
        memory: returns current and peak memory in bytes; None records neither.
    """

    def __init__(
        self,
        run: ResolvedRun,
        speed: Speedometer,
        *,
        memory: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._run, self._speed, self._memory = run, speed, memory
        self._clear()

    def _clear(self) -> None:
        self._num_steps = self._samples = self._last_step_samples = 0
        self._seconds = 0.0
        self._squares = 0
        self._sums: dict[str, float] = {"skipped": 0, "nan": 0, "good": 0, "loss": 0.0}

    def add(self, outcome: StepReport, seconds: float, *, samples: int) -> None:
        """Add one step with its number of samples and its seconds."""
        self._num_steps += 1
        self._samples, self._last_step_samples = self._samples + samples, samples
        self._seconds += seconds
        self._sums["skipped"] += not outcome.applied
        self._sums["nan"] += not math.isfinite(outcome.loss)
        if outcome.applied:
            self._sums["good"] += 1
            self._sums["loss"] += outcome.loss

    def add_squares(self, squares: int) -> None:
        """Add the squared document lengths of one step, summed over all ranks."""
        self._squares += squares

    def to_json(self) -> dict[str, float]:
        """Return the sums for a checkpoint, so that the next log line is the same."""
        return dict(self._sums)

    def restore(self, saved: Mapping[str, float]) -> None:
        """Restore saved sums; times measured by another process are not restored.

        Raises:
            KeyError, TypeError: a sum is missing or is not a number.
        """
        sums = {name: saved[name] for name in self._sums}
        if invalid_names := [
            name for name, value in sums.items() if type(value) not in (int, float)
        ]:
            raise TypeError(f"{invalid_names[0]} is {sums[invalid_names[0]]!r}")
        self._sums.update(sums)

    def record(
        self,
        progress: Progress,
        last_outcome: StepReport,
        *,
        learning_rate: float,
        loss_scale: float,
        params_norm: float | None,
    ) -> StepRecord:
        """Return the record of the steps so far and start the next window."""
        seconds = self._seconds / self._num_steps
        sums = self._sums
        flops_total = self._speed.flops(samples=self._samples, squares=self._squares)
        flops = flops_total / self._seconds / self._speed.world_size
        peak = self._speed.peak_flops
        memory = self._memory() if self._memory else (None, None)
        record = StepRecord(
            iteration=progress.iteration,
            train_iters=self._run.train_iters,
            consumed_samples=progress.consumed_samples,
            global_batch_size=self._last_step_samples,
            seconds_per_iteration=seconds,
            tokens_per_second=self._speed.tokens_per_sample * self._samples / self._seconds,
            learning_rate=learning_rate,
            lm_loss=sums["loss"] / sums["good"] if sums["good"] else None,
            loss_scale=loss_scale,
            grad_norm=last_outcome.grad_norm,
            num_skipped=int(sums["skipped"]),
            num_nan=int(sums["nan"]),
            tflops=flops / 1e12,
            mfu=flops / peak if peak else None,
            num_zeros=last_outcome.num_zeros,
            params_norm=params_norm,
            memory_bytes=memory[0],
            peak_memory_bytes=memory[1],
        )
        self._clear()
        return record
