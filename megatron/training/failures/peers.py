# SPDX-License-Identifier: Apache-2.0
"""Which rank is to blame when a collective fails: dead, stopped, silent, or failed with a message.

Every rank writes down who it is and beats in the launcher's store; that is read only when something
has gone wrong. A rank of the same machine is also looked up in the process table, which tells at
once; one elsewhere shows by its beat standing still.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from megatron.training.errors import one_line
from megatron.training.failures.collective_log import LastCollective


@dataclass(frozen=True)
class Identity:
    """Where a rank runs."""

    host: str
    pid: int


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with the other ranks.

    Args:
        text: one line that names them.
        told: whether they have said so themselves.
    """

    text: str
    told: bool = False


def process_state(pid: int) -> str:
    """Return `running`, `stopped` or `dead` for a process of this machine."""
    try:
        # The state is the first word behind the command's closing parenthesis.
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


class PeerWatch:
    """Tells the other ranks that this one lives, and finds out which of them does not.

    Args:
        open_store: makes a client of the run's store; called once here and once for the thread
            that beats, as a client must not be shared.
        rank, world_size: of the run.
        beat_seconds: time between beats.
        dump: writes this process's stacks somewhere, given a reason and the error that is one.
    """

    def __init__(
        self,
        open_store: Callable[[], dist.Store],
        *,
        rank: int,
        world_size: int,
        beat_seconds: float = 1.0,
        dump: Callable[[str, BaseException | None], None] = lambda reason, error: None,
    ) -> None:
        self._store = open_store()
        self._rank = rank
        self._world_size = world_size
        self._beat_seconds = beat_seconds
        self._dump = dump
        self._dumped = threading.Event()
        self._stop = threading.Event()
        self.iteration = 0
        """The iteration this rank is working on; set by the loop, carried by the beat."""
        self.collectives = LastCollective()
        """The collective that it has come to; carried by the beat too."""
        self._alike: frozenset[int] = frozenset(range(world_size))
        self._pipeline: tuple[int, ...] = ()
        me = Identity(socket.gethostname(), os.getpid())
        self._store.set(f"peer/{rank}", json.dumps(asdict(me)))
        self._host = me.host
        self._thread = threading.Thread(
            target=self._beat, args=(open_store(),), name="peer-watch", daemon=True
        )
        self._thread.start()

    def _beat(self, store: dist.Store) -> None:
        count = 0
        while True:
            count += 1
            try:
                state = [count, self.iteration, self.collectives.count, self.collectives.name]
                store.set(f"beat/{self._rank}", json.dumps(state))
                if not self._dumped.is_set() and store.check(["stacks"]):
                    self._write_stacks_once(store.get("stacks").decode(), None)
            except Exception:  # the server is gone: the run is over, and the loop will notice
                return
            if self._stop.wait(self._beat_seconds):
                return

    def join_pipeline(self, pipeline: Sequence[int], alike: Sequence[int]) -> None:
        """Take note that stages come to different collectives.

        Args:
            pipeline: the ranks of this one's pipeline.
            alike: the ranks of this one's stage.
        """
        self._pipeline, self._alike = tuple(pipeline), frozenset(alike)

    def close(self) -> None:
        """Leave in good order: stop beating, and be missed by nobody."""
        with contextlib.suppress(Exception):  # the others' store may have ended before this rank
            self._store.set(f"left/{self._rank}", "1")
        self._stop.set()
        self._thread.join(timeout=5.0)

    def write_stacks(self, reason: str, error: BaseException | None = None) -> None:
        """Leave this rank's stacks in a file, and have every rank that still beats do so too."""
        if not self._dumped.is_set():
            self._write_stacks_once(reason, error)
            with contextlib.suppress(Exception):
                self._store.set("stacks", reason)

    def _write_stacks_once(self, reason: str, error: BaseException | None) -> None:
        if not self._dumped.is_set():
            self._dumped.set()
            self._dump(reason, error)

    def report_failure(self, error: BaseException) -> None:
        """Leave the text of this rank's error for the others to quote; never fails itself."""
        try:
            self._store.set(f"failure/{self._rank}", one_line(error)[:500])
        except Exception:  # nothing left to tell
            return

    def host_of(self, rank: int) -> str:
        """Return the machine that a rank runs on."""
        text = self._get(f"peer/{rank}")
        return "an unknown machine" if text is None else Identity(**json.loads(text)).host

    def claim(self, text: str) -> bool:
        """Return True on the first rank that wants to print `text`, False on all later ones."""
        try:
            return self._store.add(f"said/{text[:200]}", 1) == 1
        except Exception:  # without a store better twice than never
            return True

    def diagnose(self, limit_seconds: float) -> Diagnosis | None:
        """Name the ranks that are gone, looking for at most `limit_seconds`.

        Returns None if every rank is alive and going.
        """
        deadline = time.monotonic() + limit_seconds
        try:
            before = self._beats()
            since = time.monotonic()
            while True:
                if failures := self._failures():
                    return Diagnosis("; ".join(failures), told=True)
                found = self._gone_here()
                if not found and time.monotonic() - since > 3.0 * self._beat_seconds:
                    found = self._silent(before)
                if found:
                    return Diagnosis("; ".join(found))
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.05)
        except Exception as error:
            text = f"the store that all ranks share is gone ({one_line(error)[:120]})"
            return Diagnosis(text)

    def behind(self) -> Diagnosis | None:
        """Name the ranks that live but have not come to the collective that this rank waits in.

        Beats say how far a rank is; that is at most as old as the time between two of them. Returns
        None if all have come as far as this rank. Of another pipeline stage only the iteration
        tells that; where it does not, it says where each stage of this rank's pipeline is.
        """
        mine = (self.iteration, self.collectives.count)
        try:
            states = {rank: json.loads(text) for rank, text in self._beats().items() if text}
        except Exception:  # a store that is gone tells nothing
            return None
        late = [
            f"rank {rank} is still in iteration {state[1]} behind its collective {state[2]} "
            f"({state[3]})"
            for rank, state in states.items()
            if (tuple(state[1:3]) < mine if rank in self._alike else state[1] < mine[0])
        ]
        if late:
            return Diagnosis("; ".join(late))
        stages = [
            f"rank {rank} has come to {states[rank][3]}"
            for rank in self._pipeline
            if rank in states
        ]
        return Diagnosis(f"stages wait for one another: {', '.join(stages)}") if stages else None

    def _others(self) -> list[int]:
        """Return the other ranks but those that have left in good order."""
        ranks = (rank for rank in range(self._world_size) if rank != self._rank)
        return [rank for rank in ranks if not self._store.check([f"left/{rank}"])]

    def _get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _beats(self) -> dict[int, str | None]:
        return {rank: self._get(f"beat/{rank}") for rank in self._others()}

    def _failures(self) -> list[str]:
        texts = {rank: self._get(f"failure/{rank}") for rank in self._others()}
        return [f"rank {rank} failed: {text}" for rank, text in texts.items() if text]

    def _gone_here(self) -> list[str]:
        """Name ranks of this machine whose process has ended or is stopped."""
        found = []
        for rank in self._others():
            text = self._get(f"peer/{rank}")
            if text is None:
                continue
            peer = Identity(**json.loads(text))
            if peer.host == self._host:
                state = process_state(peer.pid)
                if state != "running":
                    found.append(f"rank {rank} (process {peer.pid} on {peer.host}) is {state}")
        return found

    def _silent(self, before: dict[int, str | None]) -> list[str]:
        """Name ranks whose beat has not moved."""
        found = []
        for rank, now in self._beats().items():
            if now is not None and now == before.get(rank):
                found.append(f"rank {rank} is silent since iteration {json.loads(now)[1]}")
        return found
