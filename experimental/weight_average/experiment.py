# SPDX-License-Identifier: Apache-2.0
"""`--experiment weight_average`: validates the average of the weights and the last weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from experimental.weight_average.average import WeightAverage
from megatron.core.dist_checkpointing import TensorChunk
from megatron.core.models.gpt import GPTModel
from megatron.training.config.resolve import ResolvedRun
from megatron.training.experiments import Experiment
from megatron.training.hooks import LogPart, Progress, StepReport, TrainingHooks
from megatron.training.step import TrainStep

#: Default half-life as a share of the run's samples.
DEFAULT_SHARE = 0.02


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the experiment."""

    half_life_samples: float | None = None
    """Samples after which a weight's share in the average has halved; None is 2 % of the run's."""


class AverageHooks(TrainingHooks):
    """Updates the average after each step, and validates it.

    Args:
        step: the training step whose weights are averaged.
        samples_at: returns the batch size at a number of consumed samples.
        half_life_samples: half-life of the average.
    """

    def __init__(
        self, step: TrainStep, *, samples_at: Callable[[int], int], half_life_samples: float
    ) -> None:
        self._step, self._samples_at, self._samples = step, samples_at, 0
        self._owned = step.engine.owned()
        self.average = WeightAverage(self._owned, half_life_samples=half_life_samples)
        # A tensor, so that checkpoints keep it with the average.
        self._updates = torch.zeros(1, dtype=torch.int64)
        self._seconds = self._logged_updates = 0.0

    def on_step_begin(self, iteration: int) -> None:
        """Start from the run's initial weights, unless a checkpoint had an average."""
        if not self._updates:
            self.average.restart()

    def on_step_computed(self, progress: Progress, outcome: StepReport, loss_limit: float) -> None:
        """Record the step's batch size."""
        self._samples = self._samples_at(progress.consumed_samples)

    def on_step_end(self, progress: Progress, outcome: StepReport) -> None:
        """Update the average if the step was applied."""
        if not outcome.applied:
            return
        start = time.perf_counter()
        self.average.update(samples=self._samples)
        self._seconds += time.perf_counter() - start
        self._logged_updates += 1
        self._updates += 1

    def log_parts(self) -> list[LogPart]:
        """Return the number of updates, and their mean time since the last log line.

        The log line of an iteration precedes its update.
        """
        mean = self._seconds / max(self._logged_updates, 1.0)
        self._seconds = self._logged_updates = 0.0
        numbers = {"weight_average_updates": float(self._updates), "weight_average_seconds": mean}
        return [LogPart(f"weight average updates: {int(self._updates)}", numbers)]

    def on_evaluate(self, iteration: int, evaluate: Callable[[], float]) -> dict[str, float]:
        """Return the loss of the average, or {} before the first update."""
        if not self._updates:
            return {}
        engine = self._step.engine
        engine.complete_weights()
        self._step.before_update()  # an asynchronous save may still read the weights
        with self.average.in_place_of_weights():
            engine.start_param_sync()
            loss = evaluate()
            engine.complete_weights()
        engine.start_param_sync()
        return {"weight_average": loss}

    def state_chunks(self) -> list[TensorChunk]:
        """Return the average by logical weight, and the number of updates."""
        world = tuple(range(self._step.groups.grid.world_size))
        updates = TensorChunk(
            name="experiment.weight_average/updates",
            shape=(1,),
            offsets=(0,),
            tensor=self._updates,
            replica_ranks=world,
        )
        return [updates] + [
            TensorChunk(
                name=f"experiment.weight_average/{box.name}",
                shape=box.shape,
                offsets=box.box.offsets,
                tensor=box.of(average),
                replica_ranks=box.replica_ranks,
            )
            for owned, average in zip(self._owned, self.average.ranges, strict=True)
            for box in owned.boxes
        ]


def experiment(run: ResolvedRun, options: Options) -> Experiment:
    """Return the hooks of a run.

    Raises:
        ValueError: a half-life that is not positive.
    """
    option = options.half_life_samples
    if option is not None and option <= 0:
        raise ValueError(
            f"--experiment weight_average: half_life_samples {option}: use a positive number"
        )
    half_life = DEFAULT_SHARE * run.train_samples if option is None else option

    def hooks(model: GPTModel, step: TrainStep) -> AverageHooks:
        return AverageHooks(step, samples_at=run.batch_sizes.at, half_life_samples=half_life)

    return Experiment(hooks=hooks)
