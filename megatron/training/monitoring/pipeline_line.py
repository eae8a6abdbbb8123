# SPDX-License-Identifier: Apache-2.0
"""The line of a run's log on its pipeline: stages, order of work, and how long they wait."""

from __future__ import annotations

from megatron.core.pipeline_parallel.schedule import make_schedule
from megatron.core.pipeline_parallel.simulate import Times, simulate
from megatron.training.config import Config
from megatron.training.config.resolve import Run
from megatron.training.gpt_options import pipeline_order, split


def pipeline_words(config: Config) -> str:
    """Return the pipeline for a line about all kinds of parallelism; nothing for one stage."""
    if (stages := split(config)) is None:
        return ""
    order = pipeline_order(config)["schedule"]
    return f"pipeline parallel {stages.stages} ({order}), {stages.describe()}, "


def pipeline_line(run: Run) -> str | None:
    """Return how the stages work and the share of time that they wait; None where there is one.

    The share is that of a simulation in which each block takes as long forward as for its input's
    and for its weights' gradients; transfers and the model's ends take no time there.
    """
    if (stages := split(run.config)) is None:
        return None
    order = pipeline_order(run.config)
    made = make_schedule(
        order["schedule"],
        stages=stages.stages,
        microbatches=run.num_microbatches,
        chunks=stages.chunks,
        group_size=order["group_size"],
        weight_delay=order["weight_delay"],
    )
    blocks = tuple(float(last - first) for first, last in stages.ranges)
    found = simulate(made, Times(forward=blocks, input_gradient=blocks, weight_gradient=blocks))
    bubble = 100.0 * found.bubble_fraction
    return (
        f"pipeline: {made.name}, {made.stages} stages of {stages.describe()}, {made.microbatches} "
        f"microbatches, bubble {bubble:.1f} % if a layer's input and weight gradients take as long "
        "as its forward"
    )
