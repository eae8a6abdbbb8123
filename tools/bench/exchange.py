# SPDX-License-Identifier: Apache-2.0
"""Our collectives on the CPU against gloo's own, in the sizes that data parallelism sends."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron.core.comm import all_gather, all_reduce, reduce_scatter
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tools.bench import gloo_ranks
from tools.bench.table import Row, compared

#: A layer of the S shape, a norm's worth, and something between.
ELEMENTS = (1 << 10, 1 << 16, 852_480)


def pairs(rank: int, world: int, elements: int, rounds: int) -> dict[str, list[list[float]]]:
    """Return, by kind, the seconds of ours and of gloo's in every round, as one rank."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world), rank=rank)
    group, chunk = groups["dense_dp"], elements // world
    gloo = dist.distributed_c10d._get_default_group()
    whole, shard = torch.ones(elements), torch.ones(chunk)
    received = torch.empty(elements)
    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "all_reduce": (
            lambda: all_reduce(whole, group, out=whole),
            lambda: gloo.allreduce([whole]).wait(),
        ),
        "reduce_scatter": (
            lambda: reduce_scatter(whole, group, out=shard),
            lambda: gloo._reduce_scatter_base(shard, whole).wait(),
        ),
        "all_gather": (
            lambda: all_gather(shard, group, out=received),
            lambda: gloo._allgather_base(received, shard).wait(),
        ),
    }
    timings: dict[str, list[list[float]]] = {kind: [] for kind in calls}
    for index in range(rounds + 2):
        for kind, sides in calls.items():
            seconds = [0.0, 0.0]
            for side in (0, 1) if index % 2 else (1, 0):
                whole.fill_(1.0)
                dist.barrier()
                start = time.perf_counter()
                sides[side]()
                seconds[side] = time.perf_counter() - start
            if index >= 2:
                timings[kind].append(seconds)
    return timings


def rows(world: int, rounds: int) -> list[Row]:
    """Measure every kind and size on `world` ranks: milliseconds of the slowest rank."""
    table_rows = []
    for elements in ELEMENTS:
        elements -= elements % world
        ranks = gloo_ranks.run(pairs, world, elements, rounds)
        for kind in ranks[0]:
            steps = list(zip(*(rank[kind] for rank in ranks), strict=True))
            mcore, gloo = ([max(r[side] for r in step) for step in steps] for side in (0, 1))
            table_rows.append(
                compared(
                    bench="data_parallel",
                    what=f"{world} ranks: ms of {kind} of {4 * elements:,} bytes / gloo",
                    mcore=1e3 * statistics.median(mcore),
                    peer=1e3 * statistics.median(gloo),
                    ratio=statistics.median(a / b for a, b in zip(mcore, gloo, strict=True)),
                    target="",
                )
            )
    return table_rows
