# SPDX-License-Identifier: Apache-2.0
"""Restarts by the launcher (`torchrun --max-restarts`), also with fewer or more processes.

The first save is recorded in the launcher's store, which outlives the processes but not the
launcher. So a restart continues from a checkpoint that this job has saved, even without --load, and
never from a checkpoint of an earlier job in the same folder.

The launcher of each machine counts only restarts after failures that it has detected, not after a
machine has joined or left. Its count may thus differ between ranks, or repeat, so store keys with
this count could belong to another start. `agree_on_start` gives each start a unique number.

This module is separate from `launcher` because it imports torch; entry points import `launcher`
before they parse options.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from megatron.cli.errors import ExitCode, PeerLost, RunStopped, one_line
from megatron.cli.launch import Launch
from megatron.training.config.resolve import ResolvedRun

#: Additional seconds that other ranks wait for rank 0's list of missing ranks.
ANSWER_SECONDS = 5.0


class RestartRecord:
    """Records whether this job has saved a checkpoint in any of its starts.

    Args:
        launch: this process's launch.
        timeout_seconds: how long to wait for the store.
    """

    def __init__(self, launch: Launch, *, timeout_seconds: float) -> None:
        self._store: dist.Store | None = None
        self._link = launch.link
        if launch.launcher_serves:
            self._store = launch.open_store(timeout_seconds=timeout_seconds, of_job=True)
        # Read before any save of this start, so that all ranks read the same value.
        self.resumes = self._is_set()
        """Whether this start resumes from a checkpoint of an earlier start."""

    def _is_set(self) -> bool:
        return self._store is not None and self._store.check(["saved"])

    def saved(self) -> None:
        """Record that there is a checkpoint."""
        # A lost launcher restarts nothing.
        with contextlib.suppress(dist.DistNetworkError):
            if self._store is not None and not self._link.is_lost():
                self._store.set("saved", "1")


def resume_own_checkpoint(run: ResolvedRun) -> ResolvedRun:
    """Return a run that loads its own checkpoints in place of its original source."""
    checkpoint = run.config.checkpoint
    chosen = replace(
        checkpoint,
        load=checkpoint.save,
        load_optim=checkpoint.save_optim,
        schedule_on_load="continue",
        finetune=False,
    )
    return replace(run, config=replace(run.config, checkpoint=chosen))


def agree_on_start(
    launch: Launch,
    store: dist.Store,
    *,
    timeout_seconds: float,
    rank0_store: tuple[str, int] | None = None,
) -> Launch:
    """Return the launch with the number of this start, from 0, and the address of rank 0's store.

    Every other rank writes a random name to the store, and rank 0 answers under that name, because
    the store may still contain keys of earlier starts. If the launcher serves no store, there are
    no such keys, and the number is rank 0's count of restarts.

    Args:
        store: a client whose keys all ranks share.
        timeout_seconds: how long to wait for the other ranks.
        rank0_store: address of a store that rank 0 serves in addition to the launcher's; only set
            on rank 0.

    Raises:
        PeerLost: a rank has not started within that time.
        RunStopped: the store was lost while the ranks started.
    """
    try:
        return _exchange_attempt(launch, store, timeout_seconds, rank0_store)
    except dist.DistNetworkError as error:
        # The launcher watch may notice the same loss later than a read of the store.
        server = "the launcher" if launch.launcher_serves else "rank 0"
        code = ExitCode.LAUNCHER_LOST if launch.launcher_serves else ExitCode.PEER_LOST
        text = f"the store was lost while the ranks started ({one_line(error)[:120]})"
        raise RunStopped(code, f"{text}: {server} is gone") from None


def _exchange_attempt(
    launch: Launch,
    store: dist.Store,
    timeout_seconds: float,
    rank0_store: tuple[str, int] | None,
) -> Launch:
    keys = dist.PrefixStore("megatron/starts", store)
    if launch.rank:
        return _receive_attempt(launch, keys, timeout_seconds)
    number = keys.add("count", 1) - 1 if launch.launcher_serves else launch.attempt
    names: dict[int, str] = {}
    waiting = set(range(1, launch.world_size))
    deadline = time.monotonic() + timeout_seconds
    while waiting:
        for rank in sorted(waiting):
            if keys.check([f"knows/{number}/{rank}"]):
                waiting.remove(rank)
            elif keys.check([f"name/{rank}"]):
                name = keys.get(f"name/{rank}").decode()
                if names.get(rank) != name:
                    names[rank] = name
                    keys.set(f"number/{name}", json.dumps({"number": number, "own": rank0_store}))
        if waiting and time.monotonic() > deadline:
            text = _missing(sorted(waiting), launch.world_size, timeout_seconds)
            raise PeerLost(text)
        time.sleep(0.002 if waiting else 0.0)
    return replace(launch, attempt=number, rank0_store=rank0_store)


def _receive_attempt(launch: Launch, keys: dist.Store, timeout_seconds: float) -> Launch:
    """Return the launch with rank 0's answer."""
    name = uuid.uuid4().hex
    keys.set(f"name/{launch.rank}", name)
    try:
        keys.wait([f"number/{name}"], timedelta(seconds=timeout_seconds + ANSWER_SECONDS))
    except dist.DistStoreError:
        raise PeerLost(
            f"rank 0 has not started within {timeout_seconds:g} seconds, or has not heard from "
            f"rank {launch.rank}: see its log, and its WORLD_SIZE ({launch.world_size} here)"
        ) from None
    message = json.loads(keys.get(f"number/{name}"))
    keys.set(f"knows/{message['number']}/{launch.rank}", "1")
    rank0_store = message["own"]
    return replace(
        launch,
        attempt=message["number"],
        rank0_store=None if rank0_store is None else tuple(rank0_store),
    )


def _missing(ranks: Sequence[int], world_size: int, seconds: float) -> str:
    """Return an error text about ranks that have not started."""
    rank_list = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    noun, verb = ("ranks", "have") if len(ranks) > 1 else ("rank", "has")
    return (
        f"{noun} {rank_list} of {world_size} {verb} not started within {seconds:g} seconds: see "
        "why in their logs, and that WORLD_SIZE is the number of processes started"
    )
