# SPDX-License-Identifier: Apache-2.0
"""Which rank is to blame when a collective fails: dead, stopped, silent, or failed with a message.

Every rank writes down who it is and beats in the launcher's store; that is read only when something
has gone wrong. A rank of the same machine is also looked up in the process table, which tells at
once; one elsewhere shows by its beat standing still.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from megatron.training.errors import one_line


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
    """

    def __init__(
        self,
        open_store: Callable[[], dist.Store],
        *,
        rank: int,
        world_size: int,
        beat_seconds: float = 1.0,
    ) -> None:
        self._store = open_store()
        self._rank = rank
        self._world_size = world_size
        self._beat_seconds = beat_seconds
        self._stop = threading.Event()
        self.iteration = 0
        """The iteration this rank is working on; set by the loop, carried by the beat."""
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
                store.set(f"beat/{self._rank}", json.dumps([count, self.iteration]))
            except Exception:  # the server is gone: the run is over, and the loop will notice
                return
            if self._stop.wait(self._beat_seconds):
                return

    def close(self) -> None:
        """Stop beating."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    def report_failure(self, error: BaseException) -> None:
        """Leave the text of this rank's error for the others to quote; never fails itself."""
        try:
            self._store.set(f"failure/{self._rank}", one_line(error)[:500])
        except Exception:  # nothing left to tell
            return

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

    def _others(self) -> list[int]:
        return [rank for rank in range(self._world_size) if rank != self._rank]

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
            if now is not None and now == before[rank]:
                found.append(f"rank {rank} is silent since iteration {json.loads(now)[1]}")
        return found
