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

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from megatron.core.backend import LOCAL
from megatron.core.context_parallel import SequenceLayout
from megatron.core.context_parallel.attention import ENGINES
from megatron.core.context_parallel.sequence_sharding import (
    SequenceSharding,
    attention_work,
    shard_documents,
)
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tools.bench import gloo_ranks, shapes
from tools.bench.gloo_ranks import CPU, LOSS, STEP, Measured
from tools.bench.harness import run_rows
from tools.bench.mcore_step import config_of
from tools.bench.shapes import SHAPES, Shape
from tools.bench.table import Row, compared

TARGET = ">= 0.6"
PACKED_TARGET = ">= 1"
WARMUP_ROUNDS = 1
#: The variant that runs in a single process.
SINGLE = "one process"


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

    def __call__(self, index: int) -> Measured:
        """Run a step; return this rank's part of the loss."""
        self.engine.begin_step()
        loss, _ = self.model.loss(self.tokens, self.labels, self.weights, layout=self.layout)
        self.engine.backward(loss, last=True)
        self.engine.finish()
        return {LOSS: loss.item()}


def row_of(shape: Shape) -> torch.Tensor:
    """Return a row of tokens."""
    size, generator = (1, shape.sequence + 1), torch.Generator().manual_seed(1)
    return torch.randint(0, shape.vocabulary, size, generator=generator)


def raced_engines(
    rank: int, world: int, shape: Shape, engines: Sequence[str], rounds: int
) -> dict[str, list[Measured]]:
    """Run every engine, as one rank; `SINGLE` runs on rank 0 alone."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    row = row_of(shape)
    variants: dict[str, Callable[[int], Measured]] = {SINGLE: lambda index: {LOSS: 0.0}}
    if rank == 0:
        variants[SINGLE] = LongStep(shape, ProcessGroupCollection.single(), "auto", row)
    variants |= {name: LongStep(shape, groups, name, row) for name in engines}
    return gloo_ranks.take_turns(variants, rounds=rounds, warmup=WARMUP_ROUNDS)


def engine_rows(world: int, shape: Shape, engines: Sequence[str], rounds: int) -> list[Row]:
    """Race the engines on some ranks against one process."""
    ranks = gloo_ranks.run(raced_engines, world, shape, engines, rounds)
    gloo_ranks.check_losses(ranks, (SINGLE, *engines))
    shares = {STEP: min(world, len(os.sched_getaffinity(0))), CPU: 1}
    table_rows = []
    for name in engines:
        for phase, unit in gloo_ranks.UNITS.items():
            seconds = gloo_ranks.over_ranks(ranks, name, phase)
            alone = gloo_ranks.over_ranks(ranks[:1], SINGLE, phase)
            table_rows.append(
                compared(
                    bench="context_parallel",
                    what=f"{world} ranks: {unit}, {name}, {shape.sequence} tokens",
                    mcore=1e3 * statistics.median(seconds),
                    peer=1e3 * statistics.median(alone),
                    ratio=gloo_ranks.ratio(alone, seconds) / shares[phase],
                    target=TARGET,
                )
            )
    return table_rows


def raced_cuts(
    rank: int, world: int, shape: Shape, bounds: tuple[int, ...], rounds: int
) -> dict[str, list[Measured]]:
    """Run steps with documents cut by row and by documents, as one rank."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, cp=world), rank=rank)
    variants = {
        name: LongStep(shape, groups, "all_gather", row_of(shape), cut=cut, bounds=bounds)
        for name, cut in cuts_of(bounds, world).items()
    }
    return gloo_ranks.take_turns(variants, rounds=rounds, warmup=WARMUP_ROUNDS)


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
    gloo_ranks.check_losses(ranks, ("row", "documents"))
    pairs = {
        name: attention_work(cut, [bounds]).imbalance
        for name, cut in cuts_of(bounds, world).items()
    }
    imbalance = f"pairs {pairs['documents']:.2f} / {pairs['row']:.2f} x the mean"
    table_rows = []
    for phase, unit in ((STEP, "ms"), (CPU, "cpu ms of the slowest rank")):
        row, documents = (
            gloo_ranks.over_ranks(ranks, name, phase, total=max) for name in ("row", "documents")
        )
        table_rows.append(
            compared(
                bench="context_parallel",
                what=f"{world} ranks: {unit}, cut by documents / by row, {imbalance}",
                mcore=1e3 * statistics.median(documents),
                peer=1e3 * statistics.median(row),
                ratio=gloo_ranks.ratio(row, documents),
                target=PACKED_TARGET,
            )
        )
    return table_rows


def rows(
    quick: bool = False,
    *,
    tokens: int = 8192,
    ranks: Sequence[int] = (2, 4),
    rounds: int = 0,
    engine: Sequence[str] = ENGINES,
    packed: bool = False,
) -> list[Row]:
    """Measure every engine on 2 ranks and, unless `quick`, on 4; then the cuts of packed rows.

    Args:
        tokens: length of the row; at most 4096 with `quick`.
        ranks: numbers of ranks.
        rounds: counted steps of each variant; 0 is 7, or 3 with `quick`.
        engine: the engines.
        packed: race the cuts of packed rows alone, on all numbers of ranks.
    """
    rounds = rounds or (3 if quick else 7)
    shape = replace(SHAPES["S"], layers=2, batch=1, sequence=min(tokens, 4096) if quick else tokens)
    if packed:
        return [row for world in ranks for row in packed_rows(world, shape, rounds)]
    table_rows = []
    for world in ranks[: 1 if quick else None]:
        table_rows += engine_rows(world, shape, engine, rounds)
    return table_rows + packed_rows(ranks[0], shape, rounds)


if __name__ == "__main__":
    run_rows(rows, __doc__)
