# SPDX-License-Identifier: Apache-2.0
"""Which rank is to blame when a collective fails: dead, stopped, silent, or failed with a message.

Every rank writes down who it is and beats in the launcher's store; that is read only when something
has gone wrong (`peer_states`).
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

import torch.distributed as dist

from megatron.training.errors import one_line
from megatron.training.failures.collective_log import CollectiveLog
from megatron.training.failures.hang_files import HangFiles
from megatron.training.failures.hang_report import hang_report
from megatron.training.failures.peer_states import Beat, Identity, Peers

#: How long the thread that beats looks for the rank to blame, in seconds.
GUARD_SECONDS = 5.0

#: How long a rank whose store the others read waits for their end, in seconds.
OUTLAST_SECONDS = 5.0


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with the other ranks.

    Args:
        text: one line that names them.
        told: whether they have said so themselves.
    """

    text: str
    told: bool = False


@dataclass(frozen=True)
class Guard:
    """What the thread that beats does if the others stand still.

    Args:
        seconds: without a new collective or iteration.
        lose: ends the process because of other ranks.
    """

    seconds: float
    lose: Callable[[Diagnosis], None]


class PeerWatch:
    """Tells the other ranks that this one lives, and finds out which of them does not.

    Args:
        open_store: makes a client of the run's store; called once here and once for the thread
            that beats, as a client must not be shared.
        rank, world_size: of the run.
        beat_seconds: time between beats.
        files: what this process leaves when a run is stuck; None for nothing.
        servers: stores that this process serves, if it does: they live as long as the watch.
        serves: asked at a good end, whether the others read one of them.
    """

    def __init__(
        self,
        open_store: Callable[[], dist.Store],
        *,
        rank: int,
        world_size: int,
        beat_seconds: float = 1.0,
        files: HangFiles | None = None,
        servers: Sequence[dist.Store | None] = (),
        serves: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rank, self._beat_seconds, self._files = rank, beat_seconds, files
        self._servers, self._serves = servers, serves
        me = Identity(socket.gethostname(), os.getpid())
        mine, beating = (
            Peers(
                open_store(),
                rank=rank,
                world_size=world_size,
                host=me.host,
                beat_seconds=beat_seconds,
            )
            for _ in range(2)
        )
        self._peers = mine
        self._left, self._stop = threading.Event(), threading.Event()
        self._leaving = threading.Lock()
        self._guard: Guard | None = None
        self.iteration = 0
        """The iteration this rank is working on; set by the loop, carried by the beat."""
        self.collectives = CollectiveLog(lambda: self.iteration)
        """The collectives that it has come to; carried by the beat too."""
        self._alike: frozenset[int] = frozenset(range(world_size))
        self._pipeline: tuple[int, ...] = ()
        mine.store.set(f"peer/{rank}", json.dumps(asdict(me)))
        self._thread = threading.Thread(
            target=self._beat, args=(beating,), name="peer-watch", daemon=True
        )
        self._thread.start()

    def _beat(self, peers: Peers) -> None:
        count = 0
        seen, since, looked = (0, 0), time.monotonic(), False
        while True:
            count += 1
            try:
                state = Beat.now(count, self.iteration, self.collectives)
                peers.store.set(f"beat/{self._rank}", state.to_text())
                if not self._left.is_set() and peers.store.check(["stacks"]):
                    self._leave_once(peers.store.get("stacks").decode(), None)
                if self.iteration and self._files is not None:
                    self._files.beat()
                if seen != (now := (state.iteration, state.collectives)):
                    seen, since, looked = now, time.monotonic(), False
                guard = self._guard
                if guard is not None and not looked and time.monotonic() - since > guard.seconds:
                    looked = True
                    self._look_around(peers, guard)
            except Exception:  # the server is gone: the run is over, and the loop will notice
                return
            if self._stop.wait(self._beat_seconds):
                return

    def _look_around(self, peers: Peers, guard: Guard) -> None:
        """See who is to blame for a main thread that has come to nothing new for long."""
        if found := self._diagnose(peers, GUARD_SECONDS):
            self._leave_evidence(peers, found.text, None, told=found.told)
            guard.lose(found)
        elif found := self._behind(peers):  # it may come yet
            self._leave_evidence(peers, found.text, None, ends=False)

    def join_pipeline(self, pipeline: Sequence[int], alike: Sequence[int]) -> None:
        """Take note that stages come to different collectives.

        Args:
            pipeline: the ranks of this one's pipeline.
            alike: the ranks of this one's stage.
        """
        self._pipeline, self._alike = tuple(pipeline), frozenset(alike)

    def guard(self, seconds: float, lose: Callable[[Diagnosis], None]) -> None:
        """Look for lost ranks from the thread that beats, too, where the main thread may wait in a
        collective that never fails.

        Args:
            seconds: without a new collective or iteration, after which to look.
            lose: called on that thread if a rank is lost; ends the process.
        """
        self._guard = Guard(seconds, lose)

    def close(self) -> None:
        """Leave in good order: stop beating, and be missed by nobody."""
        self._stop.set()
        with contextlib.suppress(Exception):  # the others' store may have ended before this rank
            self._peers.store.set(f"left/{self._rank}", "1")
        self._thread.join(timeout=5.0)
        if self._serves():
            self._outlast()
        self.tidy()

    def _outlast(self) -> None:
        """Wait until the others have left: they may not have read the last they agreed on."""
        deadline = time.monotonic() + OUTLAST_SECONDS
        with contextlib.suppress(Exception):
            while time.monotonic() < deadline:
                if all(self._peers.state_here(rank) for rank in self._peers.others()):
                    return
                time.sleep(0.01)

    def tidy(self) -> None:
        """Remove what is only of use while this process runs, however it ends."""
        if self._files is not None:
            self._files.close()

    @property
    def pointer(self) -> str:
        """Return what a line about a lost rank ends with: where there is more."""
        return "" if self._files is None else f"; see {self._files.report}"

    def leave_evidence(
        self, reason: str, error: BaseException | None = None, *, told: bool = False
    ) -> None:
        """Leave what this rank knows in files, and have every rank that still beats do so too; the
        first of them also writes the report of all ranks.

        Args:
            reason: what is wrong, in one line.
            error: what has brought the calling thread here.
            told: the rank to blame has said itself what is wrong: no report is needed.
        """
        self._leave_evidence(self._peers, reason, error, told=told)

    def _leave_evidence(
        self,
        peers: Peers,
        reason: str,
        error: BaseException | None,
        *,
        told: bool = False,
        ends: bool = True,
    ) -> None:
        with contextlib.suppress(Exception):
            if ends:  # so that the others do not blame this one
                peers.store.set(f"gave_up/{self._rank}", reason)
        if not self._leave_once(reason, error):
            return
        with contextlib.suppress(Exception):
            peers.store.set("stacks", reason)
            if self._files is not None and not told and peers.store.add("hang_report", 1) == 1:
                own = Beat.now(0, self.iteration, self.collectives, final=True)
                states = peers.states(own)
                files = self._files.files
                self._files.write_report(
                    hang_report(reason, states, writer=self._rank, files=files)
                )

    def _leave_once(self, reason: str, error: BaseException | None) -> bool:
        """Write this rank's files, the first time; return whether that was now."""
        with self._leaving:
            first = not self._left.is_set()
            self._left.set()
            if first and self._files is not None:
                self._files.write(reason, error, self.collectives)
        return first

    def report_failure(self, error: BaseException) -> None:
        """Leave the text of this rank's error for the others to quote; never fails itself."""
        try:
            self._peers.store.set(f"failure/{self._rank}", one_line(error)[:500])
        except Exception:  # nothing left to tell
            return

    def host_of(self, rank: int) -> str:
        """Return the machine that a rank runs on."""
        peer = self._peers.identity(rank)
        return "an unknown machine" if peer is None else peer.host

    def claim(self, text: str) -> bool:
        """Return True on the first rank that wants to print `text`, False on all later ones."""
        try:
            return self._peers.store.add(f"said/{text[:200]}", 1) == 1
        except Exception:  # without a store better twice than never
            return True

    def diagnose(self, limit_seconds: float) -> Diagnosis | None:
        """Name the ranks that are gone, looking for at most `limit_seconds`.

        Returns None if every rank is alive and going, and after `close`.
        """
        if self._stop.is_set():
            return None
        return self._diagnose(self._peers, limit_seconds)

    def _diagnose(self, peers: Peers, limit_seconds: float) -> Diagnosis | None:
        deadline = time.monotonic() + limit_seconds
        try:
            before = peers.beats()
            since = time.monotonic()
            while True:
                if failures := peers.failures():
                    return Diagnosis("; ".join(failures), told=True)
                if text := peers.given_up():  # it has ended, but it is not to blame
                    return Diagnosis(text, told=True)
                found = peers.gone_here()
                if not found and time.monotonic() - since > 3.0 * self._beat_seconds:
                    found = peers.silent(before)
                if found:
                    return Diagnosis("; ".join(found))
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.05)
        except Exception as error:
            if self._stop.is_set():  # closed since: the others may end, and the store with them
                return None
            text = f"the store that all ranks share is gone ({one_line(error)[:120]})"
            return Diagnosis(text)

    def look_at(self, rank: int) -> Diagnosis | None:
        """Return what is wrong with one rank; None if nothing is known to be."""
        peers = self._peers
        if failure := peers.get(f"failure/{rank}"):
            return Diagnosis(f"rank {rank} failed: {failure}", told=True)
        if text := peers.get(f"gave_up/{rank}"):
            return Diagnosis(text, told=True)
        state = peers.state_here(rank)
        return Diagnosis(state) if state is not None and state.endswith(" is dead") else None

    def behind(self) -> Diagnosis | None:
        """Name the ranks that live but have not come to the collective that this rank waits in.

        Beats say how far a rank is; that is at most as old as the time between two of them. Returns
        None if all have come as far as this rank. Of another pipeline stage only the iteration
        tells that; where it does not, it says where each stage of this rank's pipeline is.
        """
        return self._behind(self._peers)

    def _behind(self, peers: Peers) -> Diagnosis | None:
        mine = (self.iteration, self.collectives.count)
        try:
            states = {rank: Beat.of(text) for rank, text in peers.beats().items() if text}
        except Exception:  # a store that is gone tells nothing
            return None
        late = [
            f"rank {rank} is still in iteration {beat.iteration} behind its collective "
            f"{beat.collectives} ({beat.last})"
            for rank, beat in states.items()
            if (
                (beat.iteration, beat.collectives) < mine
                if rank in self._alike
                else beat.iteration < mine[0]
            )
        ]
        if late:
            return Diagnosis("; ".join(late))
        stages = [
            f"rank {rank} has come to {states[rank].last}"
            for rank in self._pipeline
            if rank in states
        ]
        return Diagnosis(f"stages wait for one another: {', '.join(stages)}") if stages else None
