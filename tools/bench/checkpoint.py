# SPDX-License-Identifier: Apache-2.0
"""Measure saving and loading against plain writes and reads, and planning with many tiny chunks.

    python -m tools.bench.checkpoint [--megabytes 500] [--repeats 7] [--folder DIR]

Each repeat does both ways, in an order that changes, and a ratio is the median of the repeats'
ratios: the disk and the other jobs of a machine change from minute to minute.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

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
from tools.bench.table import Row, compared, format_table

TENSORS = 50

#: (kind, what it is compared with, least ratio of rates)
BULK = (("save", "save_file + fsync", ">= 0.9"), ("load", "readinto", ">= 0.6"))

#: Most seconds with many tiny chunks, by kind and ranks.
PLANNING = MappingProxyType({("save", 4): "<= 1.2"})

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

Times = dict[str, list[tuple[float, ...]]]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=500, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each way")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument(
        "--clock",
        choices=sorted(CLOCKS),
        default="wall",
        help="cpu counts seconds of CPU, for a machine that others use too; a disk takes none",
    )
    options = parser.parse_args()
    clock = options.clock
    print(format_table(measure(options.megabytes, options.repeats, options.folder, clock=clock)))


def rows(quick: bool) -> list[Row]:
    """Measure for the common table."""
    return measure(100 if quick else 500, 3 if quick else 7, None)


def measure(megabytes: int, repeats: int, folder: Path | None, *, clock: str = "wall") -> list[Row]:
    """Measure saving and loading with 1 and 2 processes, then planning.

    Args:
        megabytes: size of the checkpoint.
        repeats: measurements of each way.
        folder: where to write; None is the system's temporary folder.
        clock: "wall" or "cpu".
    """
    table_rows: list[Row] = []
    for world in (1, 2):
        times = _on_ranks(_bulk, world, (megabytes, repeats, clock), folder)
        for kind, peer, target in BULK:
            pairs = times[kind]
            what = f"{kind} {megabytes} MB, {world} process{'es' * (world > 1)}, MB/s / {peer}"
            table_rows.append(
                compared(
                    bench="checkpoint",
                    what=what,
                    mcore=megabytes / statistics.median(mcore for mcore, _ in pairs),
                    peer=megabytes / statistics.median(plain for _, plain in pairs),
                    ratio=statistics.median(plain / mcore for mcore, plain in pairs),
                    target=target,
                )
            )
    for world, count in ((2, 2000), (4, 5000)):
        times = _on_ranks(_tiny, world, (count, repeats, clock), folder)
        table_rows += [
            compared(
                bench="checkpoint",
                what=f"{kind} {count} chunks of 16 bytes on {world} ranks, s",
                mcore=statistics.median(seconds for (seconds,) in times[kind]),
                target=PLANNING.get((kind, world), ""),
            )
            for kind in ("save", "load")
        ]
    return table_rows


def _bulk(
    coordinator: Coordinator, barrier: Any, root: Path, megabytes: int, repeats: int, clock: str
) -> Times:
    """Save and load this rank's share of `megabytes`, in our way and in the plain one."""
    rank, world = coordinator.rank, coordinator.world_size
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
    times: Times = {"save": [], "load": []}
    for step in range(repeats + 1):  # the first round warms up
        plain_file = root / f"plain-{rank}-{step}.safetensors"

        def save(step: int = step) -> None:
            save_checkpoint(root, step, chunks, {}, coordinator=coordinator)

        def save_plainly(path: Path = plain_file) -> None:
            save_file(tensors, path)
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

        def load(step: int = step) -> None:
            load_checkpoint(root / f"iter_{step:07d}", chunks, coordinator=coordinator)

        def load_plainly(path: Path = plain_file) -> None:
            with path.open("rb", buffering=0) as file:
                for buffer in buffers:
                    file.readinto(buffer)

        times["save"].append(_pair(save, save_plainly, barrier, step, clock))
        times["load"].append(_pair(load, load_plainly, barrier, step, clock))
        plain_file.unlink()
        barrier.wait()
        if rank == 0:
            shutil.rmtree(root / f"iter_{step:07d}")
    return {kind: rows[1:] for kind, rows in times.items()}


def _tiny(
    coordinator: Coordinator, barrier: Any, root: Path, count: int, repeats: int, clock: str
) -> Times:
    """Save and load many chunks of four elements: only planning, messages and the manifest."""
    rank, world = coordinator.rank, coordinator.world_size
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
    times: Times = {"save": [], "load": []}
    for step in range(repeats):
        for kind in times:
            barrier.wait()
            begin = CLOCKS[clock]()
            if kind == "save":
                save_checkpoint(root, step, chunks, {}, coordinator=coordinator)
            else:
                load_checkpoint(root / f"iter_{step:07d}", chunks, coordinator=coordinator)
            times[kind].append((CLOCKS[clock]() - begin,))
    return times


def _pair(
    mcore: Callable[[], None], plain: Callable[[], None], barrier: Any, step: int, clock: str
) -> tuple[float, float]:
    """Time both, in an order that changes from step to step."""
    seconds = {}
    for way in (mcore, plain) if step % 2 else (plain, mcore):
        os.sync()
        barrier.wait()
        begin = CLOCKS[clock]()
        way()
        seconds[way] = CLOCKS[clock]() - begin
    return seconds[mcore], seconds[plain]


def _on_ranks(
    job: Callable[..., Times], world: int, settings: tuple[int, int, str], folder: Path | None
) -> Times:
    """Run `job` on `world` processes that share a folder and a store; the slowest rank counts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "megatron.core.dist_checkpointing"])
    barrier = context.Barrier(world)
    queue = context.SimpleQueue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(dir=folder, prefix="checkpoint-bench-") as root:
        ranks = [
            context.Process(
                target=_rank_main,
                args=(job, r, world, barrier, queue, store.port, root, settings),
            )
            for r in range(world)
        ]
        for process in ranks:
            process.start()
        times_by_rank = dict(queue.get() for _ in ranks)
        for process in ranks:
            process.join()
    return {
        kind: [
            tuple(map(max, zip(*ranks, strict=True)))
            for ranks in zip(*(times_by_rank[rank][kind] for rank in range(world)), strict=True)
        ]
        for kind in times_by_rank[0]
    }


def _rank_main(
    job: Callable[..., Times], rank: int, world: int, barrier: Any, queue: Any, *args: Any
) -> None:
    port, root, settings = args
    torch.set_num_threads(1)
    coordinator: Coordinator = Solo()
    if world > 1:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        coordinator = StoreCoordinator(store, rank, world, timeout_seconds=300)
    queue.put((rank, job(coordinator, barrier, Path(root), *settings)))


if __name__ == "__main__":
    main()
