# SPDX-License-Identifier: Apache-2.0
"""A launcher that starts the processes again (`torchrun --max-restarts`): they go on by themselves,
also where they are fewer or more than before.

What was saved is noted in the launcher's store, which outlives the processes but not the launcher.
So a restart goes on from what this very job has saved, also without --load, and never from what
an earlier job left in the same folder.

The launcher of each machine counts the restarts after a failure that it has seen itself, and none
for a machine that has come or gone. Its count may so differ between ranks, or come twice; keys with
it would then be those of another start. `agree_on_start` gives each start a number of its own.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import replace

import torch.distributed as dist

from megatron.training.config.resolve import Run
from megatron.training.launch import Launch


class RestartNote:
    """Whether this job has saved a checkpoint, over all its starts.

    Args:
        launch: of this process.
        timeout_seconds: how long to wait for the store.
    """

    def __init__(self, launch: Launch, *, timeout_seconds: float) -> None:
        self._store: dist.Store | None = None
        if launch.launcher_serves:
            self._store = launch.open_store(timeout_seconds=timeout_seconds, of_job=True)
        # Read before anybody can have saved in this start: the same on every rank.
        self.going_on = self._is_set()
        """Whether this start goes on from what an earlier one has saved."""

    def _is_set(self) -> bool:
        return self._store is not None and self._store.check(["saved"])

    def saved(self) -> None:
        """Note that there is a checkpoint."""
        if self._store is not None:
            self._store.set("saved", "1")


def going_on(run: Run) -> Run:
    """Return a run that loads what it has saved, whatever it was started from."""
    checkpoint = run.config.checkpoint
    chosen = replace(checkpoint, load=checkpoint.save, load_optim=True, finetune=False)
    return replace(run, config=replace(run.config, checkpoint=chosen))


def agree_on_start(launch: Launch, store: dist.Store, *, timeout_seconds: float) -> Launch:
    """Return the launch with a number of this start that all its ranks share, counted from 0.

    Rank 0 gives it to every other rank by the name that this one has made up for itself, as the
    store may still hold what ranks of earlier starts left there. Where the launcher serves no store
    nothing is left of those, and the number is rank 0's count of restarts.

    Args:
        store: a client whose keys are everybody's.
        timeout_seconds: how long to wait for the others.

    Raises:
        RuntimeError: a rank has not come within that time.
    """
    keys = dist.PrefixStore("megatron/starts", store)
    if launch.rank:
        name = uuid.uuid4().hex
        keys.set(f"name/{launch.rank}", name)
        number = int(keys.get(f"number/{name}"))
        keys.set(f"knows/{number}/{launch.rank}", "1")
        return replace(launch, attempt=number)
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
                    keys.set(f"number/{name}", str(number))
        if waiting and time.monotonic() > deadline:
            raise RuntimeError(
                f"{len(waiting)} of {launch.world_size} ranks have not started within "
                f"{timeout_seconds:g} seconds, rank {min(waiting)} first: see why in its log"
            )
        time.sleep(0.002 if waiting else 0.0)
    return replace(launch, attempt=number)
