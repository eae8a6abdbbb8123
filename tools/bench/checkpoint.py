# SPDX-License-Identifier: Apache-2.0
"""Measure saving and loading against plain writes and reads, and planning with many tiny chunks.

    python tools/bench/checkpoint.py [--megabytes 500] [--repeats 5] [--folder DIR]

Each row alternates the two ways in one run and compares medians: the disk and the other jobs of a
machine change from minute to minute, their ratio hardly does. A ratio above 1 means ours is faster.
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

TENSORS = 50
WANTED = {"save": 0.9, "load": 0.6}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=500, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each way")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    options = parser.parse_args()
    print(f"{'':38}{'ours s':>9}{'plain s':>9}{'ratio':>8}{'wanted':>8}")
    for world in (1, 2):
        results = _on_ranks(_bulk, world, options.megabytes, options.repeats, options.folder)
        for kind, plain in (("save", "save_file + fsync"), ("load", "readinto")):
            ours, other = (_slowest(results, kind, column) for column in (0, 1))
            label = f"{kind}, {world} process{'es' * (world > 1)}, {plain}"
            wanted = f"{WANTED[kind]:.1f}"
            print(f"{label:38}{ours:9.3f}{other:9.3f}{other / ours:8.2f}{wanted:>8}")
    for world, count in ((2, 2000), (4, 5000)):
        results = _on_ranks(_tiny, world, count, options.repeats, options.folder)
        for kind in ("save", "load"):
            label = f"{kind}, {world} x {count} tiny chunks"
            print(f"{label:38}{_slowest(results, kind, 0):9.3f}")


Times = dict[str, list[tuple[float, ...]]]


def _slowest(results: list[Times], kind: str, column: int) -> float:
    """Return the median over repeats of the slowest rank's seconds."""
    ranks = [[row[column] for row in times[kind]] for times in results]
    return statistics.median(max(times) for times in zip(*ranks, strict=True))


def _bulk(rank: int, world: int, barrier: Any, coordinator: Coordinator, root: Path, *sizes: int):
    """Save and load this rank's share of `megabytes`, in our way and in the plain one."""
    megabytes, repeats = sizes
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

        times["save"].append(_pair(save, save_plainly, barrier, step))
        times["load"].append(_pair(load, load_plainly, barrier, step))
        plain_file.unlink()
        barrier.wait()
        if rank == 0:
            shutil.rmtree(root / f"iter_{step:07d}")
    return {kind: rows[1:] for kind, rows in times.items()}


def _tiny(rank: int, world: int, barrier: Any, coordinator: Coordinator, root: Path, *sizes: int):
    """Save and load many chunks of four elements: only planning, messages and the manifest."""
    count, repeats = sizes
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
            begin = time.perf_counter()
            if kind == "save":
                save_checkpoint(root, step, chunks, {}, coordinator=coordinator)
            else:
                load_checkpoint(root / f"iter_{step:07d}", chunks, coordinator=coordinator)
            times[kind].append((time.perf_counter() - begin,))
    return times


def _pair(
    ours: Callable[[], None], plain: Callable[[], None], barrier: Any, step: int
) -> tuple[float, float]:
    """Time both, in an order that changes from step to step."""
    seconds = {}
    for way in (ours, plain) if step % 2 else (plain, ours):
        os.sync()
        barrier.wait()
        begin = time.perf_counter()
        way()
        seconds[way] = time.perf_counter() - begin
    return seconds[ours], seconds[plain]


def _on_ranks(job: Callable[..., Times], world: int, *arguments: Any) -> list[Times]:
    """Run `job` on `world` processes that share a folder and a store."""
    *sizes, folder = arguments
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "megatron.core.dist_checkpointing"])
    barrier = context.Barrier(world)
    queue = context.SimpleQueue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(dir=folder, prefix="checkpoint-bench-") as root:
        ranks = [
            context.Process(
                target=_rank_main, args=(job, r, world, barrier, queue, store.port, root, sizes)
            )
            for r in range(world)
        ]
        for process in ranks:
            process.start()
        found = dict(queue.get() for _ in ranks)
        for process in ranks:
            process.join()
    return [found[rank] for rank in range(world)]


def _rank_main(
    job: Callable[..., Times],
    rank: int,
    world: int,
    barrier: Any,
    queue: Any,
    port: int,
    root: str,
    sizes: list[int],
) -> None:
    torch.set_num_threads(1)
    coordinator: Coordinator = Solo()
    if world > 1:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        coordinator = StoreCoordinator(store, rank, world, 300)
    queue.put((rank, job(rank, world, barrier, coordinator, Path(root), *sizes)))


if __name__ == "__main__":
    main()
