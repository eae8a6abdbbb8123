# SPDX-License-Identifier: Apache-2.0
"""The benefit of prefetch on a slow link, where every collective takes milliseconds without CPU.

Two gloo ranks on two cores cannot show it, because copies use the cores. Link and clock are
simulated here: the clock counts the CPU time of this rank's thread and the simulated waits for the
link, one collective at a time on each communicator. Other load on the machine and gloo's real time
do not count. The wait that prefetch removes is compared with the wait of gathers without prefetch,
which does not depend on the speed of the CPU.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import partial

from megatron.core.distributed import DataParallelConfig
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tests.support.simulated_links import Latency, simulated
from tools.bench import gloo_ranks
from tools.bench.data_parallel_steps import McoreStep, batch_of
from tools.bench.gloo_ranks import STEP, Measured
from tools.bench.shapes import SHAPES, Shape
from tools.bench.table import Row, compared

#: Nothing but prefetch differs; also what is named in the rows.
VARIANTS = ("prefetch", "none")
#: What the ranks share: layers (ZeRO-3), or matrices over gtp.
AXES = ("dense_dp", "gtp")
#: Of the time that gathers wait for the link.
TARGET = ">= 0.7"
WARMUP_STEPS = 3  # the first leaves the trace that the plan is made of


class ProcessorClock:
    """Seconds of computing and of simulated waiting."""

    def __init__(self) -> None:
        self.slept = 0.0

    def now(self) -> float:
        """Return the seconds so far."""
        return time.thread_time() + self.slept

    def sleep(self, seconds: float) -> None:
        """Advance the clock."""
        self.slept += seconds


def variant_of(
    name: str, axis: str, shape: Shape, groups: ProcessGroupCollection, clock: ProcessorClock
) -> McoreStep:
    """Return a variant of either axis; weights over gtp are always gathered ahead, but here."""
    config = DataParallelConfig(strategy="no_shard")
    if axis == "dense_dp":
        ahead = name == "prefetch"
        config = DataParallelConfig(strategy="optim_grads_params", overlap_param_gather=ahead)
    step = McoreStep(shape, groups, config=config, bucket_bytes=1, now=clock.now)
    for gatherer in step.engine.gatherers:
        gatherer.prefetch = name == "prefetch"
    return step


def race(
    rank: int, world: int, axis: str, shape: Shape, seconds: float, rounds: int
) -> tuple[dict[str, list[Measured]], float]:
    """Let both variants take turns as one rank, on links that take `seconds`.

    Returns:
        (what the counted rounds measured, gathers of a step).
    """
    grid = RankGrid(world_size=world, gtp=world if axis == "gtp" else 1)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    clock = ProcessorClock()
    variants = {name: variant_of(name, axis, shape, groups, clock) for name in VARIANTS}
    links = {
        name: Latency(seconds, shared=False, now=clock.now, sleep=clock.sleep) for name in VARIANTS
    }

    def run(name: str, index: int) -> Measured:
        batch = batch_of(shape, rank, index)
        with simulated(groups, links[name]):
            return variants[name].step(batch)

    steps = {name: partial(run, name) for name in VARIANTS}
    measured = gloo_ranks.take_turns(steps, rounds=rounds, warmup=WARMUP_STEPS)
    gathers = 0.0
    for name, variant in variants.items():
        (gatherer,) = variant.engine.gatherers
        counts = gatherer.counts
        gathers = counts.gathers / (WARMUP_STEPS + rounds)
        if counts.mismatches or (counts.prefetched > 0) != (name == "prefetch"):
            raise ValueError(f"{name} did not do what it is named for: {counts}")
    return measured, gathers


def rows(milliseconds: float, rounds: int, *, ranks: int = 2) -> list[Row]:
    """Race prefetch against none on links of some milliseconds, with much and with little to
    compute between two gathers."""
    table_rows = []
    # Of one row the 29 gathers over gtp take the link for longer than there is to compute.
    cases = (("dense_dp", 4, ""), ("dense_dp", 1, TARGET), ("gtp", 4, TARGET), ("gtp", 1, ""))
    for axis, batch, target in cases:
        shape = replace(SHAPES["S"], batch=batch)
        outcomes = gloo_ranks.run(race, ranks, axis, shape, milliseconds / 1e3, rounds)
        measured, (gathers, *_) = zip(*outcomes, strict=True)
        prefetch, none = (gloo_ranks.over_ranks(measured, name, STEP) for name in VARIANTS)
        late = milliseconds * gathers
        removed = [1e3 * (b - a) for a, b in zip(prefetch, none, strict=True)]
        step = f"{1e3 * statistics.median(none):.0f} ms"
        table_rows.append(
            compared(
                bench="data_parallel",
                what=f"{ranks} ranks, {axis}: ms that prefetch takes off {batch}x256, {step} / "
                f"gathers x {milliseconds:g} ms",
                mcore=statistics.median(removed),
                peer=late,
                ratio=statistics.median(removed) / late,
                target=target if milliseconds == 5 else "",
            )
        )
    return table_rows
