# SPDX-License-Identifier: Apache-2.0
"""What prefetch is worth when every collective takes some milliseconds of nobody's processor.

Two gloo ranks on two cores cannot show it: copying takes the cores. Here the link is simulated and
so is the clock: it counts what this rank computed (processor time of its thread) and what it would
have waited for the link, one collective at a time on each communicator. What else the machine does
does not count, nor how long gloo really took. What prefetch removes is compared with what gathers
wait for the link without it, which does not depend on how fast the processor is.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import torch.distributed as dist

from megatron.core.distributed import DataParallelConfig
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tests.support.simulated_links import Latency, simulated
from tools.bench import gloo_ranks
from tools.bench.data_parallel_steps import OurStep, Timing, batch_of
from tools.bench.shapes import SHAPES, Shape
from tools.bench.table import Row

#: Nothing but prefetch differs; also what is named in the rows.
VARIANTS = ("prefetch", "none")
#: What the ranks share: layers (ZeRO-3), or matrices over gtp.
AXES = ("gtp_cp_dp", "gtp")
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
        """Let the clock go on, and nothing else."""
        self.slept += seconds


def variant_of(
    name: str, axis: str, shape: Shape, groups: ProcessGroupCollection, clock: ProcessorClock
) -> OurStep:
    """Return a variant of either axis; weights over gtp are always gathered ahead, but here."""
    config = DataParallelConfig(strategy="no_shard")
    if axis == "gtp_cp_dp":
        ahead = name == "prefetch"
        config = DataParallelConfig(strategy="optim_grads_params", overlap_param_gather=ahead)
    made = OurStep(shape, groups, config=config, bucket_bytes=1, now=clock.now)
    for gatherer in made.engine.gatherers:
        gatherer.prefetch = name == "prefetch"
    return made


def steps(
    rank: int, world: int, axis: str, shape: Shape, seconds: float, rounds: int
) -> tuple[dict[str, list[Timing]], float]:
    """Return the timings of both variants as one rank, on links that take `seconds`, and how many
    gathers a step has."""
    grid = RankGrid(world_size=world, gtp=world if axis == "gtp" else 1)
    groups = ProcessGroupCollection.create(grid, rank=rank)
    clock = ProcessorClock()
    variants = {name: variant_of(name, axis, shape, groups, clock) for name in VARIANTS}
    links = {
        name: Latency(seconds, shared=False, now=clock.now, sleep=clock.sleep) for name in VARIANTS
    }
    found: dict[str, list[Timing]] = {name: [] for name in variants}
    for index in range(WARMUP_STEPS + rounds):
        batch = batch_of(shape, rank, index)
        for name in (*VARIANTS,) if index % 2 else (*VARIANTS,)[::-1]:
            dist.barrier()
            with simulated(groups, links[name]):
                timing = variants[name].step(batch)
            if index >= WARMUP_STEPS:
                found[name].append(timing)
    gathers = 0.0
    for name, variant in variants.items():
        (gatherer,) = variant.engine.gatherers
        counts = gatherer.counts
        gathers = counts.gathers / (WARMUP_STEPS + rounds)
        if counts.mismatches or (counts.prefetched > 0) != (name == "prefetch"):
            raise ValueError(f"{name} did not do what it is named for: {counts}")
    return found, gathers


def rows(milliseconds: float, rounds: int, *, ranks: int = 2) -> list[Row]:
    """Race prefetch against none on links of some milliseconds, with much and with little to
    compute between two gathers."""
    found = []
    # Of one row the 29 gathers over gtp take the link for longer than there is to compute.
    cases = (("gtp_cp_dp", 4, ""), ("gtp_cp_dp", 1, TARGET), ("gtp", 4, TARGET), ("gtp", 1, ""))
    for axis, batch, target in cases:
        shape = replace(SHAPES["S"], batch=batch)
        measured = gloo_ranks.run(steps, ranks, axis, shape, milliseconds / 1e3, rounds)
        both = []
        for name in VARIANTS:
            of_step = zip(*(timings[name] for timings, _ in measured), strict=True)
            both.append([1e3 * max(timing.total for timing in step) for step in of_step])
        late = milliseconds * measured[0][1]
        removed = [b - a for a, b in zip(*both, strict=True)]
        step = f"{statistics.median(both[1]):.0f} ms"
        found.append(
            Row(
                bench="data_parallel",
                what=f"{ranks} ranks, {axis}: ms that prefetch takes off {batch}x256, {step} / "
                f"gathers x {milliseconds:g} ms",
                ours=statistics.median(removed),
                peer=late,
                ratio=statistics.median(removed) / late,
                target=target if milliseconds == 5 else "",
            )
        )
    return found
