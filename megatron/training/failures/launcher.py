# SPDX-License-Identifier: Apache-2.0
"""The launcher (torchrun): seeing that it is gone, and its restarts (`--max-restarts`).

torchrun ends its processes when it is asked to end, but not when it is killed. They would go on for
ever, and nobody would start them again. A process that no launcher has started has none to lose: a
shell that ends leaves it alone.

A restart may be with fewer or more processes. Saves are recorded in the launcher's store, which
outlives the processes but not the launcher. So a restart continues from what this very job has
saved, also without --load, and never from what an earlier job left in the same folder.

The launcher of each machine counts the restarts after a failure that it has seen itself, and none
for a machine that has joined or left. Its count may thus differ between ranks, or repeat; keys with
it would then belong to another start. `agree_on_start` gives each start a number of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron.cli.errors import PeerLost
from megatron.cli.launch import Launch
from megatron.training.config.resolve import Run

#: Time between looks where nothing wakes the thread, in seconds.
LOOK_SECONDS = 0.5

#: How long to wait for the end of a process whose store is gone, in seconds.
SAME_SECONDS = 0.5

#: What tells the processes of one launcher from others.
_OWN = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "RANK")


def launcher_of(
    environment: Mapping[str, str], pid: int, *, proc: Path = Path("/proc")
) -> int | None:
    """Return the process id of the launcher; None if no launcher has started this process.

    It sets variables for those it starts, so it is the nearest ancestor without them: a script
    between the two has them.

    Args:
        environment: of this process.
        pid: of its parent.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    own = {f"{name}={environment[name]}".encode() for name in _OWN if name in environment}
    try:
        while pid > 1 and own <= set((proc / str(pid) / "environ").read_bytes().split(b"\0")):
            pid = int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):  # of another user, or no such file: the parent it is
        pass
    return pid


class LauncherWatch:
    """Waits on a thread for the end of the launcher.

    Args:
        launch: of this process.
        pid: of the launcher, None without one.
        lose: called with what is gone; the store of a launcher may go with it, as a second thing.
    """

    def __init__(self, launch: Launch, pid: int | None, lose: Callable[[str], None]) -> None:
        self._launch, self._pid, self._lose = launch, pid, lose
        self._process: int | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        if pid is None:
            return
        try:
            self._process = os.pidfd_open(pid)
        except ProcessLookupError:
            self._lose(self._named)
            return
        except (AttributeError, OSError):  # no Linux, or an old one
            self._process = None
        self._thread = threading.Thread(target=self._watch, name="launcher-watch", daemon=True)
        self._thread.start()

    @property
    def _named(self) -> str:
        return f"the launcher (process {self._pid} on {socket.gethostname()}) is gone"

    def watch_store(self, connection: socket.socket) -> None:
        """Also wait for the end of the store that the launcher serves.

        Args:
            connection: to its server, on which nothing is ever sent.
        """
        # A machine that is gone closes no connection: its kernel is asked, which also answers for
        # a process that is stopped.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 2)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connection.setblocking(False)
        self._launch.link.connection = connection

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        self._launch.link.close()
        if self._process is not None:
            os.close(self._process)
            self._process = None

    def _watch(self) -> None:
        alive, link = True, self._launch.link
        while alive or link.connection is not None:
            waits = select.poll()
            for end in (self._process if alive else None, link.connection):
                if end is not None:
                    waits.register(end, select.POLLIN)
            waits.poll(1000.0 * LOOK_SECONDS)
            if self._closed.is_set():
                return
            lost = link.connection is not None and link.is_lost()
            # First what others do not see. A process that is killed closes its connections before
            # it is gone.
            if alive and self._process_is_gone(SAME_SECONDS if lost else 0.0):
                alive = False
                self._lose(self._named)
            if lost:
                link.close()
                place = f"{self._launch.address}:{self._launch.port}"
                self._lose(f"the launcher that serves the store at {place} is gone")

    def _process_is_gone(self, within_seconds: float) -> bool:
        assert self._pid is not None
        if self._process is None:
            return process_state(self._pid) == "dead"
        ends = select.poll()
        ends.register(self._process, select.POLLIN)
        return bool(ends.poll(1000.0 * within_seconds))


def process_state(pid: int) -> str:
    """Return `running`, `stopped` or `dead` for a process of this machine."""
    try:
        # The state is the first word after the command's closing parenthesis.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return "dead"
        return _state_by_signal(pid)
    except (OSError, IndexError):
        return "running"
    return {"Z": "dead", "X": "dead", "T": "stopped", "t": "stopped"}.get(state, "running")


def _state_by_signal(pid: int) -> str:
    """Return the state of a process where there is no /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "dead"
    except PermissionError:
        pass
    return "running"


#: How much longer than rank 0 the others wait, in seconds, to hear from it who has not come.
ANSWER_SECONDS = 5.0


class RestartNote:
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


def going_on(run: Run) -> Run:
    """Return a run that loads what it has saved, whatever it was started from."""
    checkpoint = run.config.checkpoint
    chosen = replace(checkpoint, load=checkpoint.save, load_optim=True, finetune=False)
    return replace(run, config=replace(run.config, checkpoint=chosen))


def agree_on_start(
    launch: Launch,
    store: dist.Store,
    *,
    timeout_seconds: float,
    own: tuple[str, int] | None = None,
) -> Launch:
    """Return the launch with a number of this start that all its ranks share, counted from 0, and
    with the address of rank 0's store.

    Rank 0 gives both to every other rank by the name that this one has made up for itself, as the
    store may still hold what ranks of earlier starts left there. Where the launcher serves no store
    nothing is left of those, and the number is rank 0's count of restarts.

    Args:
        store: a client whose keys are everybody's.
        timeout_seconds: how long to wait for the others.
        own: where rank 0 serves a store next to the launcher's; known to rank 0 alone.

    Raises:
        PeerLost: a rank has not come within that time.
    """
    keys = dist.PrefixStore("megatron/starts", store)
    if launch.rank:
        return _told(launch, keys, timeout_seconds)
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
                    keys.set(f"number/{name}", json.dumps({"number": number, "own": own}))
        if waiting and time.monotonic() > deadline:
            text = _missing(sorted(waiting), launch.world_size, timeout_seconds)
            raise PeerLost(text)
        time.sleep(0.002 if waiting else 0.0)
    return replace(launch, attempt=number, own=own)


def _told(launch: Launch, keys: dist.Store, timeout_seconds: float) -> Launch:
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
    told = json.loads(keys.get(f"number/{name}"))
    keys.set(f"knows/{told['number']}/{launch.rank}", "1")
    own = told["own"]
    return replace(launch, attempt=told["number"], own=None if own is None else tuple(own))


def _missing(ranks: Sequence[int], world_size: int, seconds: float) -> str:
    """Name ranks that have not come."""
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    have = f"rank{'s' if len(ranks) > 1 else ''} {shown} of {world_size} ha"
    have += "ve" if len(ranks) > 1 else "s"
    return (
        f"{have} not started within {seconds:g} seconds: see why in their logs, and that WORLD_SIZE"
        " is the number of processes started"
    )
