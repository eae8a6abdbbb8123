# SPDX-License-Identifier: Apache-2.0
"""Measure saving and loading against plain writes and reads, and planning with many tiny chunks.

    python -m tools.bench.checkpoint [--megabytes 500] [--rounds 7] [--folder DIR]

Both ways take turns, and a ratio is the median of the rounds' ratios: the disk and the other jobs
of a machine change from minute to minute. `--clock cpu` counts seconds of CPU, for a machine that
others use too; a disk takes none.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megatron.core.dist_checkpointing import (
    Coordinator,
    Solo,
    StoreCoordinator,
    TensorChunk,
    load_checkpoint,
    save_checkpoint,
)
from tools.bench import gloo_ranks
from tools.bench.gloo_ranks import CPU, STEP, Measured
from tools.bench.harness import run_rows
from tools.bench.table import Row, compared

TENSORS = 50
#: (kind, what it is compared with, least ratio of rates)
BULK = (("save", "save_file + fsync", ">= 0.9"), ("load", "readinto", ">= 0.6"))
#: Ranks and chunks of planning, and most seconds of a save.
PLANNING = ((2, 2000, ""), (4, 5000, "<= 1.2"))


def rows(
    quick: bool = False,
    *,
    megabytes: int = 500,
    rounds: int = 0,
    folder: str = "",
    clock: Literal["wall", "cpu"] = "wall",
) -> list[Row]:
    """Measure saving and loading with 1 and 2 processes, then planning.

    Args:
        quick: 100 MB.
        megabytes: size of the checkpoint.
        rounds: measurements of each way; 0 is 7, or 3 with `quick`.
        folder: where to write; "" is the system's temporary folder.
        clock: which seconds count.
    """
    megabytes, rounds = 100 if quick else megabytes, rounds or (3 if quick else 7)
    phase = {"wall": STEP, "cpu": CPU}[clock]
    table_rows: list[Row] = []
    for world in (1, 2):
        ranks = _run(_bulk, world, folder, megabytes, rounds)
        for kind, peer, target in BULK:
            seconds, plain = (gloo_ranks.over_ranks(ranks, n, phase) for n in (kind, peer))
            processes = f"{world} process{'es' * (world > 1)}"
            table_rows.append(
                compared(
                    bench="checkpoint",
                    what=f"{kind} {megabytes} MB, {processes}, MB/s / {peer}",
                    mcore=megabytes / statistics.median(seconds),
                    peer=megabytes / statistics.median(plain),
                    ratio=gloo_ranks.ratio(plain, seconds),
                    target=target,
                )
            )
    for world, count, target in PLANNING:
        ranks = _run(_tiny, world, folder, count, rounds)
        for kind in ("save", "load"):
            what = f"{kind} {count} chunks of 16 bytes on {world} ranks, s"
            seconds = statistics.median(gloo_ranks.over_ranks(ranks, kind, phase))
            bound = target if kind == "save" else ""
            table_rows.append(compared(bench="checkpoint", what=what, mcore=seconds, target=bound))
    return table_rows


def _run(job: Callable[..., object], world: int, folder: str, *settings: int) -> list:
    """Run a job on ranks that share a folder and, as in a run, a TCP store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(dir=folder or None, prefix="checkpoint-bench-") as root:
        return gloo_ranks.run(job, world, store.port, root, *settings)


def _coordinator(rank: int, world: int, port: int) -> Coordinator:
    """Return the coordinator of the ranks."""
    if world == 1:
        return Solo()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    return StoreCoordinator(store, rank, world, timeout_seconds=300)


def _timed(work: Callable[[int], object]) -> Callable[[int], Measured]:
    """Return a variant that first lets the disk finish earlier writes of all ranks."""

    def run(index: int) -> Measured:
        os.sync()
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        work(index)
        return {STEP: time.perf_counter() - start, CPU: time.process_time() - used}

    return run


def _bulk(
    rank: int, world: int, port: int, root: str, megabytes: int, rounds: int
) -> dict[str, list[Measured]]:
    """Save and load this rank's share of `megabytes`, in our way and in the plain one."""
    coordinator, folder = _coordinator(rank, world, port), Path(root)
    plain_file = folder / f"plain-{rank}.safetensors"
    rows = megabytes * 250_000 // TENSORS // 1000 // world
    tensors = {f"w{i}": torch.randn(rows, 1000) for i in range(TENSORS)}
    chunks = [
        TensorChunk(
            name=name,
            shape=(rows * world, 1000),
            offsets=(rank * rows, 0),
            tensor=tensor,
            replica_ranks=(rank,),
        )
        for name, tensor in tensors.items()
    ]
    buffers = [memoryview(torch.empty_like(t).view(-1).numpy()).cast("B") for t in tensors.values()]

    def save(index: int) -> None:
        save_checkpoint(folder, index, chunks, {}, coordinator=coordinator)

    def save_and_remove(index: int) -> Measured:
        measured = _timed(save)(index)
        if rank == 0 and index:
            shutil.rmtree(folder / f"iter_{index - 1:07d}")
        return measured

    def save_plainly(index: int) -> None:
        save_file(tensors, plain_file)
        fd = os.open(plain_file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    def load(index: int) -> None:
        load_checkpoint(folder / f"iter_{rounds:07d}", chunks, coordinator=coordinator)

    def load_plainly(index: int) -> None:
        with plain_file.open("rb", buffering=0) as file:
            for buffer in buffers:
                file.readinto(buffer)

    ways = [save_and_remove, *map(_timed, (save_plainly, load, load_plainly))]
    names = [name for kind, peer, _ in BULK for name in (kind, peer)]
    variants = dict(zip(names, ways, strict=True))
    measured = {}
    for pair in (names[:2], names[2:]):
        sides = {name: variants[name] for name in pair}
        measured |= gloo_ranks.take_turns(sides, rounds=rounds, warmup=1)
    return measured


def _tiny(
    rank: int, world: int, port: int, root: str, count: int, rounds: int
) -> dict[str, list[Measured]]:
    """Save and load many chunks of four elements: only planning, messages and the manifest."""
    coordinator, folder = _coordinator(rank, world, port), Path(root)
    chunks = [
        TensorChunk(
            name=f"decoder.blocks.{i}.mlp.gate.weight",
            shape=(4 * world, 1),
            offsets=(4 * rank, 0),
            tensor=torch.ones(4, 1),
            replica_ranks=(rank,),
        )
        for i in range(count)
    ]
    save = _timed(lambda n: save_checkpoint(folder, n, chunks, {}, coordinator=coordinator))
    load = _timed(
        lambda n: load_checkpoint(folder / f"iter_{n:07d}", chunks, coordinator=coordinator)
    )
    measured = gloo_ranks.take_turns({"save": save}, rounds=rounds, warmup=0)
    return measured | gloo_ranks.take_turns({"load": load}, rounds=rounds, warmup=0)


if __name__ == "__main__":
    run_rows(rows, __doc__)
