# SPDX-License-Identifier: Apache-2.0
"""Steps that must not change the weights: a loss that is not finite, or a spike of it.

Every rank calls these functions with the same numbers and comes to the same decisions. A step whose
loss is NaN or Inf has been computed twice by then (`TrainStep`), which tells a glitch of a machine,
whose second result is good, from what comes out every time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.training.config import Config
from megatron.training.monitoring.step_window import StepOutcome


def spike_limit(config: Config, recent_losses: Sequence[float]) -> float:
    """Return the loss above which a step is skipped; Inf before half a window of losses is known.

    The median, because a mean would follow a slow divergence into it.
    """
    factor, window = config.failures.loss_spike_factor, config.failures.loss_spike_window
    if factor is None or len(recent_losses) < max(1, window // 2):
        return math.inf
    return factor * statistics.median(recent_losses)


def remember_loss(config: Config, recent_losses: list[float], loss: float) -> None:
    """Add the loss of an applied step to those that tell a spike, where they are used."""
    if config.failures.loss_spike_factor is not None:
        recent_losses.append(loss)
        del recent_losses[: -config.failures.loss_spike_window]


@dataclass(frozen=True)
class Glitch:
    """A loss that was not finite when it was first computed.

    Args:
        ranks: whose part of it was not finite; with pipeline stages all that computed it, as any of
            them may have begun.
        verdict: `transient` (a second computation was sound), `reproduced` (it was not), or
            `unchecked` (there was none).
        stages: of a pipeline.
    """

    ranks: tuple[int, ...]
    verdict: str
    stages: int = 1

    @staticmethod
    def of(outcome: StepOutcome, pipelines: Sequence[Sequence[int]] = ()) -> Glitch | None:
        """Return what was wrong with a step's loss; None if nothing was.

        Args:
            pipelines: the ranks of each pipeline, by stage; none if there is one stage.
        """
        if not outcome.parts:
            return None
        first, *again = outcome.parts
        bad = {rank for rank, part in enumerate(first) if not math.isfinite(part)}
        bad |= {rank for stages in pipelines if bad & {*stages} for rank in stages}
        ranks, stages = tuple(sorted(bad)), len(pipelines[0]) if pipelines else 1
        if not again:
            return Glitch(ranks, "unchecked", stages)
        sound = all(math.isfinite(part) for part in again[0])
        return Glitch(ranks, "transient" if sound else "reproduced", stages)

    def text(self, iteration: int, host_of: Callable[[int], str]) -> str:
        """Say what happened, with the machines."""
        shown = ", ".join(f"rank {rank} on {host_of(rank)}" for rank in self.ranks[:8])
        shown += f" and {len(self.ranks) - 8} more" if len(self.ranks) > 8 else ""
        end = {
            "transient": "the step computed once more is sound and was used: transient, watch that "
            "machine",
            "reproduced": "the step computed once more gives it again: reproduced, the step was "
            "skipped",
            "unchecked": "the step was skipped",
        }[self.verdict]
        whose = "a pipeline of " if self.stages > 1 else ""
        return f"iteration {iteration}: NaN or Inf loss of {whose}{shown}; {end}"


def spike_text(iteration: int, loss: float, limit: float) -> str:
    """Say that a step was skipped because its loss is a spike."""
    return (
        f"iteration {iteration}: loss {loss:.4g} is above {limit:.4g}, the limit of "
        "--loss-spike-factor; the step was skipped"
    )
