# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: what a long row costs on several ranks, beside one.

python -m tools.bench.context_parallel        every engine on 2 and 4 gloo ranks, 8,192 tokens
python -m tools.bench.context_parallel --tokens 4096 --ranks 2 --engine p2p

Forward and backward of a small model over one row. The single process and the ranks take turns;
each process has one thread. A ratio is tokens per second and unit of compute, beside the single
process, so 1 is no loss: `ms` counts the processors that the ranks can use at a time, `cpu ms` the
processor seconds of all ranks, which other work on the machine sways less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron.core.backend import LOCAL
from megatron.core.context_parallel import SequenceLayout
from megatron.core.context_parallel.choice import ENGINES
from megatron.core.context_parallel.cut import SequenceCut
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tools.bench import gloo_ranks, shapes
from tools.bench.ours import config_of
from tools.bench.shapes import SHAPES, Shape
from tools.bench.table import Row, format_table

TARGET = ">= 0.6"
WARMUP_ROUNDS = 1
LOSS_ERROR = 1e-5  # relative


class LongStep:
    """Forward and backward of one row of a model on the ranks of a group of groups."""

    def __init__(
        self, shape: Shape, groups: ProcessGroupCollection, engine: str, row: torch.Tensor
    ) -> None:
        config = DataParallelConfig()
        self.model = GPTModel(
            config_of(shape),
            groups,
            seed=shapes.SEED,
            storage=config.storage(),
            backend=replace(LOCAL, context_engine=engine),
        )
        self.engine = DataParallel(self.model.store, groups, config=config)
        group = groups["cp"]
        cut = SequenceCut.of(shape.sequence, group.size)
        self.layout = SequenceLayout.make(cut, group.rank, rows=1)
        self.tokens, self.labels = (self.layout.local(x) for x in (row[:, :-1], row[:, 1:]))
        self.weights = torch.full(self.tokens.shape, 1.0 / shape.sequence)

    def __call__(self) -> tuple[float, float, float]:
        """Return the seconds, the processor seconds and this rank's part of the loss."""
        start, used = time.perf_counter(), time.process_time()
        self.engine.begin_step()
        loss, _ = self.model.loss(self.tokens, self.labels, self.weights, layout=self.layout)
        self.engine.backward(loss, last=True)
        self.engine.finish()
        return time.perf_counter() - start, time.process_time() - used, loss.item()


def measured(
    rank: int, world: int, shape: Shape, engines: tuple[str, ...], rounds: int
) -> dict[str, list[tuple[float, float, float]]]:
    """Return what every step of every variant took, as one rank; "one" runs on rank 0 alone."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    row = torch.randint(
        0, shape.vocabulary, (1, shape.sequence + 1), generator=torch.Generator().manual_seed(1)
    )
    steps = {name: LongStep(shape, groups, name, row) for name in engines}
    if rank == 0:
        steps["one"] = LongStep(shape, ProcessGroupCollection.single(), "auto", row)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in steps}
    for index in range(WARMUP_ROUNDS + rounds):
        for name in ("one", *engines):
            dist.barrier()
            taken = steps[name]() if name in steps else (0.0, 0.0, 0.0)
            dist.barrier()
            if index >= WARMUP_ROUNDS and name in steps:
                found[name].append(taken)
    return found


def rows_of(world: int, shape: Shape, engines: tuple[str, ...], rounds: int) -> list[Row]:
    """Race the engines on some ranks against one process."""
    ranks = gloo_ranks.run(measured, world, shape, engines, rounds)
    one = ranks[0]["one"]
    processors = min(world, len(os.sched_getaffinity(0)))
    found = []
    for name in engines:
        steps = list(zip(*(rank[name] for rank in ranks), strict=True))
        for alone, step in zip(one, steps, strict=True):
            loss = sum(part for *_, part in step)
            if abs(loss - alone[2]) > LOSS_ERROR * abs(alone[2]):
                raise ValueError(f"{name}: the loss is {loss}, alone it is {alone[2]}")
        wall = [max(seconds for seconds, *_ in step) for step in steps]
        cpu = [sum(used for _, used, _ in step) for step in steps]
        for unit, ours, alone, share in (
            ("ms", wall, [s for s, *_ in one], processors),
            ("cpu ms of all ranks", cpu, [u for _, u, _ in one], 1),
        ):
            pairs = zip(alone, ours, strict=True)
            found.append(
                Row(
                    bench="context_parallel",
                    what=f"{world} ranks: {unit}, {name}, {shape.sequence} tokens",
                    ours=1e3 * statistics.median(ours),
                    peer=1e3 * statistics.median(alone),
                    ratio=statistics.median(a / b / share for a, b in pairs),
                    target=TARGET,
                )
            )
    return found


def rows(quick: bool) -> list[Row]:
    """Measure every engine on 2 ranks and, unless `quick`, on 4."""
    shape = replace(SHAPES["S"], layers=2, batch=1, sequence=4096 if quick else 8192)
    found = []
    for world in (2,) if quick else (2, 4):
        found += rows_of(world, shape, ENGINES, 3 if quick else 7)
    return found


def main() -> None:
    """Measure what was asked for and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", nargs="+", default=list(ENGINES), choices=ENGINES)
    arguments = parser.parse_args()
    shape = replace(SHAPES["S"], layers=2, batch=1, sequence=arguments.tokens)
    for world in arguments.ranks:
        print(format_table(rows_of(world, shape, tuple(arguments.engine), arguments.rounds)))


if __name__ == "__main__":
    main()
