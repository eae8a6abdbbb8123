# SPDX-License-Identifier: Apache-2.0
"""Gloo ranks for benchmarks: fresh processes of one thread each on this machine, and variants of a
step that take turns on them.

A variant is a function of a round's index. It runs a step, and returns seconds by phase and, under
`LOSS`, this rank's share of the loss.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tools.bench.table import Row, compared

Measured = dict[str, float]
#: What `take_turns` measures of every step: seconds of this rank, and those of its processor.
STEP, CPU = "a step", "cpu"
LOSS = "loss"
#: What rows call both.
UNITS = {STEP: "ms of a step", CPU: "cpu ms of all ranks"}
LOSS_ERROR = 1e-5  # relative; fp32 sums in another order
#: How long a collective waits for a peer: a rank that fails must not hold the others for long.
TIMEOUT = datetime.timedelta(seconds=120)


def run(fn: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """Return fn(rank, world, *args) of every rank.

    Args:
        fn: a module-level function; it runs with the default group formed.
        world: number of ranks.
        args: pickled to every rank.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(world, mp_context=context) as pool,
    ):
        # Each waits for the others in its first collective, so each gets a process of its own.
        ranks = [pool.submit(_rank, fn, r, world, folder, args) for r in range(world)]
        return [rank.result() for rank in ranks]


def _rank(fn: Callable[..., Any], rank: int, world: int, folder: str, args: tuple) -> Any:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host name need not resolve
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        return fn(rank, world, *args)
    finally:
        dist.barrier()  # no rank closes its sockets while another may still be reading from them
        dist.destroy_process_group()


def take_turns(
    variants: Mapping[str, Callable[[int], Measured]], *, rounds: int, warmup: int
) -> dict[str, list[Measured]]:
    """Run variants in rotating order as one rank; return what the counted rounds measured."""
    measured: dict[str, list[Measured]] = {name: [] for name in variants}
    for index in range(warmup + rounds):
        names = list(variants)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            phases = variants[name](index)
            seconds = {STEP: time.perf_counter() - start, CPU: time.process_time() - used}
            if index >= warmup:
                measured[name].append(seconds | phases)
    return measured


Ranks = Sequence[Mapping[str, Sequence[Measured]]]


def over_ranks(
    ranks: Ranks, name: str, phase: str, *, total: Callable | None = None
) -> list[float]:
    """Return, of each round, the slowest rank's seconds; of processor time and loss the sum."""
    total = total or (sum if phase in (CPU, LOSS) else max)
    rounds = zip(*(rank[name] for rank in ranks), strict=True)
    return [total(measured[phase] for measured in step) for step in rounds]


def check_losses(ranks: Ranks, names: Sequence[str]) -> None:
    """Raise ValueError unless the losses of all variants agree in every round."""
    for index, losses in enumerate(zip(*(over_ranks(ranks, n, LOSS) for n in names), strict=True)):
        if not max(losses) - min(losses) <= LOSS_ERROR * abs(max(losses)):
            differing = dict(zip(names, losses, strict=True))
            raise ValueError(f"step {index}: the losses differ, so the race is void: {differing}")


def ratio(mcore: Sequence[float], peer: Sequence[float]) -> float:
    """Return the median over rounds of ours / theirs."""
    return statistics.median(a / b for a, b in zip(mcore, peer, strict=True))


def row(
    bench: str, what: str, mcore: Sequence[float], peer: Sequence[float], *, target: str = ""
) -> Row:
    """Return the milliseconds of two variants, and their ratio."""
    return compared(
        bench=bench,
        what=what,
        mcore=1e3 * statistics.median(mcore),
        peer=1e3 * statistics.median(peer),
        ratio=ratio(mcore, peer),
        target=target,
    )
