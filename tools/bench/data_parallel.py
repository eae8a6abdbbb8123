# SPDX-License-Identifier: Apache-2.0
"""Our data-parallel engine against torch DDP and FSDP2: one model, the same units, gloo ranks.

python -m tools.bench.data_parallel                        every race on 2 and on 4 ranks
python -m tools.bench.data_parallel --ranks 2 --rounds 60 --race no_shard/ddp
python -m tools.bench.data_parallel --profile optim_grads_params
python -m tools.bench.data_parallel --latency 5            prefetch against none on a slow link
python -m tools.bench.data_parallel --machinery            the cost of a weight on one rank
python -m tools.bench.data_parallel --exchange             our collectives against gloo's own

Both sides live in the same processes and take turns step by step, with process groups of their
own. A ratio is the median over rounds of ours / theirs of the slower rank's seconds, so below 1 is
faster. `cpu` is the ratio of the CPU seconds of all ranks, which is valid on a busy machine too.
Every loss of every step must agree, or the race stops.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch.distributed as dist

from megatron.core.distributed import DataParallelConfig
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tools.bench import exchange, gloo_ranks, machinery, slow_link
from tools.bench.data_parallel_steps import (
    McoreStep,
    TimedStep,
    Timing,
    TorchStep,
    batch_of,
    ddp,
    fsdp2,
)
from tools.bench.shapes import SHAPES, Shape
from tools.bench.table import Row, compared, format_table

#: ours / theirs, and what the issue of the engine promises of the ratio.
RACES = {
    "no_shard/ddp": "<= 1.0",
    "optim_grads_params/fsdp2": "<= 0.9",
    "gtp/fsdp2": "<= 0.95",
}
MCORE = {
    "no_shard": DataParallelConfig(strategy="no_shard"),
    "optim": DataParallelConfig(strategy="optim", overlap_param_gather=True),
    "optim_grads": DataParallelConfig(strategy="optim_grads", overlap_param_gather=True),
    "optim_grads_params": DataParallelConfig(
        strategy="optim_grads_params", overlap_param_gather=True
    ),
    "optim_grads_params_on_demand": DataParallelConfig(
        strategy="optim_grads_params", overlap_grad_reduce=False
    ),
    "gtp": DataParallelConfig(strategy="no_shard"),
}
#: Variants whose ranks shard matrices over gtp instead of being replicas.
OVER_GTP = ("gtp",)
PEERS = ("ddp", "fsdp2", "local")
BUCKET_BYTES = 4 << 20  # of 21 MB: DDP's and our buckets
WARMUP_ROUNDS = 3  # DDP orders its buckets anew after its first step
LOSS_ERROR = 1e-5  # relative; fp32 sums in another order, over some tens of steps


def build(names: Sequence[str], shape: Shape, groups: ProcessGroupCollection) -> dict[str, object]:
    """Build the named variants, all from the same weights.

    Raises:
        ValueError: a name that is no strategy of ours and no peer.
    """
    source = McoreStep(shape, groups, config=MCORE["no_shard"], bucket_bytes=BUCKET_BYTES).model
    wraps: dict[str, Callable] = {
        "ddp": partial(ddp, bucket_bytes=BUCKET_BYTES),
        "fsdp2": fsdp2,
        "local": lambda plain: plain,
    }
    steps: dict[str, object] = {}
    for name in names:
        if name in wraps:
            steps[name] = TorchStep(shape, source, wrap=wraps[name])
        elif name in MCORE:
            step_groups = over_gtp(groups) if name in OVER_GTP else groups
            steps[name] = McoreStep(
                shape, step_groups, config=MCORE[name], bucket_bytes=BUCKET_BYTES
            )
        else:
            raise ValueError(f"variant {name!r}: use {', '.join((*MCORE, *PEERS))}")
    return steps


def over_gtp(groups: ProcessGroupCollection) -> ProcessGroupCollection:
    """Return the groups of the same ranks with all ranks on the gtp axis."""
    world = groups.grid.world_size
    return ProcessGroupCollection.create(RankGrid(world_size=world, gtp=world), rank=groups.rank)


@dataclass(frozen=True, kw_only=True)
class Course:
    """The variants of a race, and its settings.

    Args:
        names: the variants; the ratio compares the first two.
        rounds: measured steps of each variant.
        shape: the model, and the batch of each rank.
    """

    names: tuple[str, ...]
    rounds: int
    shape: Shape = SHAPES["S"]

    @property
    def title(self) -> str:
        """Return what tells its rows from other courses'."""
        batch = f"{self.shape.batch}x{self.shape.sequence}"
        return f"{'/'.join(self.names)}, {self.rounds} pairs, {batch}"


def race(rank: int, world: int, course: Course) -> dict[str, list[Timing]]:
    """Let the variants take turns as one rank; return the timings of the counted rounds."""
    shape, names, rounds = course.shape, course.names, course.rounds
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    steps: dict[str, TimedStep] = {n: v.step for n, v in build(names, shape, groups).items()}
    timings: dict[str, list[Timing]] = {name: [] for name in names}
    for index in range(WARMUP_ROUNDS + rounds):
        batch = batch_of(shape, rank, index)
        turn = index % len(names)
        losses = {}
        for name in (*names[turn:], *names[:turn]):
            dist.barrier()
            timing = steps[name](batch)
            losses[name] = timing.loss
            if index >= WARMUP_ROUNDS:
                timings[name].append(timing)
        check_losses(losses, world, index)
    return timings


def check_losses(losses: dict[str, float], world: int, index: int) -> None:
    """Raise ValueError unless all variants saw the same loss on this rank."""
    means = {n: v if n in PEERS else v * world for n, v in losses.items()}
    low, high = min(means.values()), max(means.values())
    if not high - low <= LOSS_ERROR * abs(high):
        raise ValueError(f"step {index}: the losses differ, so the race is void: {means}")


def over_ranks(timings: Sequence[Sequence[Timing]], phase: str) -> list[float]:
    """Return, of each step, the slowest rank's seconds of a part; of `cpu` the sum over ranks."""
    total = sum if phase == "cpu" else max
    return [total(_seconds(t, phase) for t in step) for step in zip(*timings, strict=True)]


def _seconds(timing: Timing, phase: str) -> float:
    phases = {
        "forward": timing.forward,
        "backward": timing.backward,
        "update": timing.update,
        "total": timing.total,
        "cpu": timing.cpu,
    }
    return phases[phase]


def ratio(mcore: Sequence[float], peer: Sequence[float]) -> float:
    """Return the median over steps of ours / theirs."""
    return statistics.median(a / b for a, b in zip(mcore, peer, strict=True))


PARTS = ("forward", "backward", "update", "total", "cpu")


def describe(course: Course, world: int, *, target: str = "") -> list[Row]:
    """Run one race and return its rows: milliseconds of each part and the ratios."""
    ranks = gloo_ranks.run(race, world, course)
    table_rows = []
    for phase in PARTS:
        seconds = [over_ranks([rank[n] for rank in ranks], phase) for n in course.names]
        medians = [1e3 * statistics.median(s) for s in seconds]
        table_rows.append(
            compared(
                bench="data_parallel",
                what=f"{world} ranks: ms of {phase}, {course.title}",
                mcore=medians[0],
                peer=medians[1] if len(medians) > 1 else None,
                ratio=ratio(*seconds) if len(seconds) > 1 else None,
                target=target if phase == "total" else "",
            )
        )
    return table_rows


def profile(rank: int, world: int, name: str, steps: int) -> str:
    """Return the table of a profile of some steps, as one rank saw them."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    shape = SHAPES["S"]
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    step = build([name], shape, groups)[name].step
    for index in range(WARMUP_ROUNDS):
        step(batch_of(shape, rank, index))
    with profiler(activities=[ProfilerActivity.CPU]) as torch_profile:
        for index in range(steps):
            step(batch_of(shape, rank, index))
    return torch_profile.key_averages().table(
        sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=60
    )


def rows(quick: bool) -> list[Row]:
    """Run every race on 2 ranks and, unless `quick`, on 4; then the slow links, and one rank."""
    rounds = 5 if quick else 40
    table_rows = []
    for world in (2,) if quick else (2, 4):
        for name, target in RACES.items():
            course = Course(names=tuple(name.split("/")), rounds=rounds)
            table_rows += describe(course, world, target=target)
    return table_rows + slow_link.rows(5.0, rounds) + machinery.rows(quick)


def main() -> None:
    """Measure the selected cases and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=40, help="pairs of steps that count")
    parser.add_argument("--batch", type=int, help="rows of 256 tokens on each rank")
    parser.add_argument(
        "--race",
        nargs="+",
        default=list(RACES),
        help=f"ours/theirs, of {', '.join((*MCORE, *PEERS))}",
    )
    parser.add_argument("--latency", type=float, metavar="MS", help="race prefetch against none")
    parser.add_argument("--machinery", action="store_true", help="microseconds of a weight")
    parser.add_argument("--exchange", action="store_true", help="our collectives against gloo's")
    parser.add_argument("--profile", metavar="VARIANT", help="print where five steps' time goes")
    arguments = parser.parse_args()
    if arguments.machinery:
        print(format_table(machinery.rows(quick=False)))
    elif arguments.exchange:
        for world in arguments.ranks:
            print(format_table(exchange.rows(world, arguments.rounds)), flush=True)
    elif arguments.latency:
        print(format_table(slow_link.rows(arguments.latency, arguments.rounds)))
    elif arguments.profile:
        print(gloo_ranks.run(profile, arguments.ranks[0], arguments.profile, 5)[0])
    else:
        shape = replace(SHAPES["S"], batch=arguments.batch or SHAPES["S"].batch)
        for world in arguments.ranks:
            table_rows = []
            for name in arguments.race:
                names = tuple(name.split("/"))
                course = Course(names=names, rounds=arguments.rounds, shape=shape)
                table_rows += describe(course, world, target=RACES.get(name, ""))
            print(format_table(table_rows), flush=True)


if __name__ == "__main__":
    main()
