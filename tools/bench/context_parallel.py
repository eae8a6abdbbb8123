# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: the cost of a long row on several ranks, relative to one.

python -m tools.bench.context_parallel        every engine on 2 and 4 gloo ranks, 8,192 tokens
python -m tools.bench.context_parallel --tokens 4096 --ranks 2 --engine p2p
python -m tools.bench.context_parallel --packed    documents of 3/4 and 1/4 of a row, cut both ways

Forward and backward of a small model over one row. The single process and the ranks take turns;
each process has one thread. A ratio is tokens per second and unit of compute, relative to the
single process, so 1 is no loss: `ms` counts the cores that the ranks can use at a time, `cpu ms`
the CPU seconds of all ranks, which depend less on other work of the machine. Packed rows compare
the cut by documents with the cut by row, on the same ranks, by the time of the slowest rank;
attention uses all-gather, since an engine that splits heads is balanced with either cut.
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
from megatron.core.context_parallel.comm_type import ENGINES
from megatron.core.context_parallel.sequence_sharding import (
    SequenceSharding,
    attention_work,
    shard_documents,
)
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tools.bench import gloo_ranks, shapes
from tools.bench.mcore_step import config_of
from tools.bench.shapes import SHAPES, Shape
from tools.bench.table import Row, compared, format_table

TARGET = ">= 0.6"
PACKED_TARGET = ">= 1"
WARMUP_ROUNDS = 1
LOSS_ERROR = 1e-5  # relative


class LongStep:
    """Forward and backward of one row of a model on the ranks of a group of groups."""

    def __init__(
        self,
        shape: Shape,
        groups: ProcessGroupCollection,
        engine: str,
        row: torch.Tensor,
        *,
        cut: SequenceSharding | None = None,
        bounds: tuple[int, ...] | None = None,
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
        cut = SequenceSharding.of(shape.sequence, group.size) if cut is None else cut
        ids = None
        if bounds is not None:
            ids = torch.bucketize(
                torch.arange(shape.sequence), torch.tensor(bounds[1:]), right=True
            )
            ids = ids.view(1, -1)
        self.layout = SequenceLayout.make(cut, group.rank, rows=1, document_ids=ids)
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
    timings: dict[str, list[tuple[float, float, float]]] = {name: [] for name in steps}
    for index in range(WARMUP_ROUNDS + rounds):
        for name in ("one", *engines):
            dist.barrier()
            timing = steps[name]() if name in steps else (0.0, 0.0, 0.0)
            dist.barrier()
            if index >= WARMUP_ROUNDS and name in steps:
                timings[name].append(timing)
    return timings


def rows_of(world: int, shape: Shape, engines: tuple[str, ...], rounds: int) -> list[Row]:
    """Race the engines on some ranks against one process."""
    ranks = gloo_ranks.run(measured, world, shape, engines, rounds)
    single = ranks[0]["one"]
    processors = min(world, len(os.sched_getaffinity(0)))
    table_rows = []
    for name in engines:
        steps = list(zip(*(rank[name] for rank in ranks), strict=True))
        for alone, step in zip(single, steps, strict=True):
            loss = sum(partial_loss for *_, partial_loss in step)
            if abs(loss - alone[2]) > LOSS_ERROR * abs(alone[2]):
                raise ValueError(f"{name}: the loss is {loss}, alone it is {alone[2]}")
        wall = [max(seconds for seconds, *_ in step) for step in steps]
        cpu = [sum(used for _, used, _ in step) for step in steps]
        for unit, mcore, alone, share in (
            ("ms", wall, [s for s, *_ in single], processors),
            ("cpu ms of all ranks", cpu, [u for _, u, _ in single], 1),
        ):
            pairs = zip(alone, mcore, strict=True)
            table_rows.append(
                compared(
                    bench="context_parallel",
                    what=f"{world} ranks: {unit}, {name}, {shape.sequence} tokens",
                    mcore=1e3 * statistics.median(mcore),
                    peer=1e3 * statistics.median(alone),
                    ratio=statistics.median(a / b / share for a, b in pairs),
                    target=TARGET,
                )
            )
    return table_rows


def raced_cuts(
    rank: int, world: int, shape: Shape, bounds: tuple[int, ...], rounds: int
) -> dict[str, list[tuple[float, float, float]]]:
    """Return what every step takes with documents cut by row and by documents, as one rank."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    row = torch.randint(
        0, shape.vocabulary, (1, shape.sequence + 1), generator=torch.Generator().manual_seed(1)
    )
    steps = {
        name: LongStep(shape, groups, "all_gather", row, cut=cut, bounds=bounds)
        for name, cut in cuts_of(bounds, world).items()
    }
    timings: dict[str, list[tuple[float, float, float]]] = {name: [] for name in steps}
    for index in range(WARMUP_ROUNDS + rounds):
        for name, step in steps.items():
            dist.barrier()
            timing = step()
            dist.barrier()
            if index >= WARMUP_ROUNDS:
                timings[name].append(timing)
    return timings


def cuts_of(bounds: tuple[int, ...], world: int) -> dict[str, SequenceSharding]:
    """Return both cuts of a row of documents."""
    return {
        "row": SequenceSharding.of(bounds[-1], world),
        "documents": shard_documents([bounds], world),
    }


def packed_rows(world: int, shape: Shape, rounds: int) -> list[Row]:
    """Race sharding by documents against by row, with documents of 3/4 and 1/4 of a row."""
    bounds = (0, 3 * shape.sequence // 4, shape.sequence)
    ranks = gloo_ranks.run(raced_cuts, world, shape, bounds, rounds)
    pairs = {
        name: attention_work(cut, [bounds]).imbalance
        for name, cut in cuts_of(bounds, world).items()
    }
    # Of each round what the slowest rank takes: seconds, and seconds of its processor.
    slowest = {
        name: [
            tuple(max(rank[name][index][kind] for rank in ranks) for kind in range(2))
            for index in range(rounds)
        ]
        for name in pairs
    }
    losses = {name: sum(rank[name][0][2] for rank in ranks) for name in pairs}
    if abs(losses["documents"] - losses["row"]) > LOSS_ERROR * abs(losses["row"]):
        raise ValueError(f"the loss is {losses['documents']} by documents, {losses['row']} by row")
    table_rows = []
    for kind, unit in enumerate(("ms", "cpu ms of the slowest rank")):
        row, documents = ([step[kind] for step in slowest[name]] for name in ("row", "documents"))
        table_rows.append(
            compared(
                bench="context_parallel",
                what=(
                    f"{world} ranks: {unit}, cut by documents / by row, pairs "
                    f"{pairs['documents']:.2f} / {pairs['row']:.2f} x the mean"
                ),
                mcore=1e3 * statistics.median(documents),
                peer=1e3 * statistics.median(row),
                ratio=statistics.median(a / b for a, b in zip(row, documents, strict=True)),
                target=PACKED_TARGET,
            )
        )
    return table_rows


def rows(quick: bool) -> list[Row]:
    """Measure every engine on 2 ranks and, unless `quick`, on 4."""
    shape = replace(SHAPES["S"], layers=2, batch=1, sequence=4096 if quick else 8192)
    table_rows = []
    for world in (2,) if quick else (2, 4):
        table_rows += rows_of(world, shape, ENGINES, 3 if quick else 7)
    return table_rows + packed_rows(2, shape, 3 if quick else 7)


def main() -> None:
    """Measure the selected cases and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--packed", action="store_true", help="race cuts of packed rows alone")
    arguments = parser.parse_args()
    shape = replace(SHAPES["S"], layers=2, batch=1, sequence=arguments.tokens)
    if arguments.packed:
        for world in arguments.ranks:
            print(format_table(packed_rows(world, shape, arguments.rounds)))
        return
    for world in arguments.ranks:
        print(format_table(rows_of(world, shape, tuple(arguments.engine), arguments.rounds)))


if __name__ == "__main__":
    main()
