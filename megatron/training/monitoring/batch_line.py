# SPDX-License-Identifier: Apache-2.0
"""The line of a run's log on a global batch that its ranks do not share evenly, and what that
costs."""

from __future__ import annotations

from megatron.training.config.resolve import Run


def batch_words(run: Run) -> str:
    """Return how a step's samples are divided, for a line about all kinds of parallelism."""
    made = run.division
    if made.is_even:
        return (
            f"global batch {made.samples} = {made.lanes} x {made.micro_batch_size} x "
            f"{made.rounds} microbatches"
        )
    return f"global batch {made.samples} in {made.blocks} microbatches of {made.micro_batch_size}"


def batch_line(run: Run) -> str | None:
    """Return how many fillers each lane computes in a step, and the share of time that they and a
    smaller last microbatch waste; None where the batch is divided evenly."""
    made = run.division
    if made.is_even:
        return None
    which = "none has a filler"
    lanes_compute = (
        "1 lane that computes" if made.lanes == 1 else f"{made.lanes} lanes that compute"
    )
    if made.fillers:
        first = made.lanes - made.fillers
        lanes = f"lane {first}" if made.fillers == 1 else f"each of lanes {first}-{made.lanes - 1}"
        which = f"{lanes} has 1 filler a step"
    rest = made.samples % made.micro_batch_size
    last = f", the last one of {rest}" if rest else ""
    return (
        f"uneven batch: {made.blocks} microbatches of {made.micro_batch_size}{last}, on "
        f"{lanes_compute} {made.rounds} each: {which}; "
        f"{100.0 * made.wasted:.1f} % of the lanes' time is wasted"
    )
