# SPDX-License-Identifier: Apache-2.0
"""Restarts by the launcher (`torchrun --max-restarts`), also with fewer or more processes.

Saves are recorded in the launcher's store, which outlives the processes but not the launcher. So a
restart continues from what this very job has saved, also without --load, and never from what an
earlier job left in the same folder.

The launcher of each machine counts the restarts after a failure that it has seen itself, and none
for a machine that has joined or left. Its count may thus differ between ranks, or repeat; keys with
it would then belong to another start. `agree_on_start` gives each start a number of its own.

Apart from `launcher`, which an entry point imports before its options are read, because it imports
torch.
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

from megatron.cli.errors import PeerLost
from megatron.cli.launch import Launch
from megatron.training.config.resolve import ResolvedRun

#: How much longer than rank 0 the others wait, in seconds, to hear from it who has not come.
ANSWER_SECONDS = 5.0


class RestartRecord:
    """Whether this job has saved a checkpoint, over all its starts.

    Args:
        launch: of this process.
        timeout_seconds: how long to wait for the store.
    """

    def __init__(self, launch: Launch, *, timeout_seconds: float) -> None:
        self._store: dist.Store | None = None
        self._link = launch.link
        if launch.launcher_serves:
            self._store = launch.open_store(timeout_seconds=timeout_seconds, of_job=True)
        # Read before anybody can have saved in this start: the same on every rank.
        self.going_on = self._is_set()
        """Whether this start goes on from what an earlier one has saved."""

    def _is_set(self) -> bool:
        return self._store is not None and self._store.check(["saved"])

    def saved(self) -> None:
        """Note that there is a checkpoint."""
        # A launcher that is gone starts nothing again.
        with contextlib.suppress(dist.DistNetworkError):
            if self._store is not None and not self._link.is_lost():
                self._store.set("saved", "1")


def going_on(run: ResolvedRun) -> ResolvedRun:
    """Return a run that loads what it has saved, whatever it was started from."""
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
    """Return the launch with a number of this start that all its ranks share, counted from 0, and
    with the address of rank 0's store.

    Rank 0 gives both to every other rank by the name that this one has made up for itself, as the
    store may still hold what ranks of earlier starts left there. Where the launcher serves no store
    nothing is left of those, and the number is rank 0's count of restarts.

    Args:
        store: a client whose keys are everybody's.
        timeout_seconds: how long to wait for the others.
        rank0_store: where rank 0 serves a store next to the launcher's; known to rank 0 alone.

    Raises:
        PeerLost: a rank has not come within that time.
    """
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
    """Return what rank 0 tells another rank."""
    name = uuid.uuid4().hex
    keys.set(f"name/{launch.rank}", name)
    try:
        keys.wait([f"number/{name}"], timedelta(seconds=timeout_seconds + ANSWER_SECONDS))
    except dist.DistStoreError:
        text = f"rank 0 has not started within {timeout_seconds:g} seconds, or knows no rank"
        raise PeerLost(
            f"{text} {launch.rank}: see its log, and its WORLD_SIZE ({launch.world_size} here)"
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
    """Name ranks that have not come."""
    rank_list = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    have = f"rank{'s' if len(ranks) > 1 else ''} {rank_list} of {world_size} ha"
    have += "ve" if len(ranks) > 1 else "s"
    return (
        f"{have} not started within {seconds:g} seconds: see why in their logs, and that WORLD_SIZE"
        " is the number of processes started"
    )
