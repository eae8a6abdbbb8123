# SPDX-License-Identifier: Apache-2.0
"""Our data-parallel engine against torch DDP and FSDP2: one model, the same units, gloo ranks.

python -m tools.bench.data_parallel                        every race on 2 and on 4 ranks
python -m tools.bench.data_parallel --ranks 2 --rounds 60 --race no_shard/ddp

Both sides live in the same processes and take turns step by step, with process groups of their
own. A ratio is the median over rounds of ours / theirs of the slower rank's seconds, so below 1 is
faster. `cpu` is the ratio of the CPU seconds of all ranks, which is valid on a busy machine too.
Every loss of every step must agree, or the race stops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from megatron.core.distributed import DataParallelConfig
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tools.bench import gloo_ranks
from tools.bench.data_parallel_steps import PHASES, McoreStep, TorchStep, batch_of, ddp, fsdp2
from tools.bench.gloo_ranks import CPU, STEP, Measured
from tools.bench.harness import run_rows
from tools.bench.shapes import SHAPES, Shape
from tools.bench.table import Row

#: ours / theirs, and the target of the ratio.
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
BUCKET_BYTES = 4 << 20  # of 21 MB: DDP's and our buckets
WARMUP_ROUNDS = 3  # DDP orders its buckets anew after its first step
PEERS: dict[str, Callable] = {
    "ddp": partial(ddp, bucket_bytes=BUCKET_BYTES),
    "fsdp2": fsdp2,
    "local": lambda plain: plain,
}


def build(
    names: Sequence[str], shape: Shape, groups: ProcessGroupCollection
) -> dict[str, McoreStep | TorchStep]:
    """Build the named variants, all from the same weights.

    Raises:
        ValueError: a name that is no strategy of ours and no peer.
    """
    source = McoreStep(shape, groups, config=MCORE["no_shard"], bucket_bytes=BUCKET_BYTES).model
    steps: dict[str, McoreStep | TorchStep] = {}
    for name in names:
        if name in PEERS:
            steps[name] = TorchStep(shape, source, wrap=PEERS[name])
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


def race(
    rank: int, world: int, names: Sequence[str], shape: Shape, rounds: int
) -> dict[str, list[Measured]]:
    """Let the variants take turns as one rank; return what the counted rounds measured."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    variants = {
        name: lambda index, step=variant.step: step(batch_of(shape, rank, index))
        for name, variant in build(names, shape, groups).items()
    }
    return gloo_ranks.take_turns(variants, rounds=rounds, warmup=WARMUP_ROUNDS)


def rows_of(world: int, name: str, shape: Shape, rounds: int) -> list[Row]:
    """Run one race and return its rows: milliseconds of each phase and the ratios."""
    names = name.split("/")
    ranks = gloo_ranks.run(race, world, names, shape, rounds)
    gloo_ranks.check_losses(ranks, names)
    title = f"{name}, {rounds} pairs, {shape.batch}x{shape.sequence}"
    return [
        gloo_ranks.row(
            "data_parallel",
            f"{world} ranks: ms of {phase}, {title}",
            *(gloo_ranks.over_ranks(ranks, variant, phase) for variant in names[:2]),
            target=RACES.get(name, "") if phase == STEP else "",
        )
        for phase in (*PHASES, STEP, CPU)
    ]


def rows(
    quick: bool = False,
    *,
    ranks: Sequence[int] = (2, 4),
    rounds: int = 0,
    batch: int = SHAPES["S"].batch,
    race: str = "",
) -> list[Row]:
    """Run every race on 2 ranks and, unless `quick`, on 4.

    Args:
        ranks: numbers of ranks.
        rounds: pairs of steps that count; 0 is 40, or 5 with `quick`.
        batch: rows of 256 tokens on each rank.
        race: only this one, ours/theirs.
    """
    rounds = rounds or (5 if quick else 40)
    shape = replace(SHAPES["S"], batch=batch)
    table_rows = []
    for world in ranks[: 1 if quick else None]:
        for name in [race] if race else RACES:
            table_rows += rows_of(world, name, shape, rounds)
    return table_rows


if __name__ == "__main__":
    run_rows(rows, __doc__)
