# SPDX-License-Identifier: Apache-2.0
"""Gloo ranks for benchmarks: fresh processes of one thread each on this machine."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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
