# SPDX-License-Identifier: Apache-2.0
"""Which rank caused a failed collective: dead, stopped, silent, or failed with a message.

Every rank writes its identity and its heartbeats (where it is, and that it is alive) to the
launcher's store; the store is read only when something has gone wrong (`Peers.states`). A rank of
the same machine is also looked up in the process table, which shows its state at once. The report
of a run that hangs lists where every rank is, and which one is missing where.
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

from megatron.cli.error_reports import Claims
from megatron.cli.errors import one_line
from megatron.training.failures.hang_files import CollectiveLog, HangFiles, describe
from megatron.training.failures.launcher import process_state

#: After this long in a collective a heartbeat names who takes part in it, in seconds.
LONG_WAIT_SECONDS = 2.0


@dataclass(frozen=True)
class Identity:
    """Where a rank runs."""

    host: str
    pid: int


@dataclass(frozen=True)
class Wait:
    """A collective that a rank waits in.

    Args:
        group: its name.
        number: among those of the group; 0 for what is between two ranks.
        text: which it is.
        seconds: for how long.
        ranks: who takes part, once the wait is long.
    """

    group: str
    number: int
    text: str
    seconds: float
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A heartbeat: the progress that a rank reports.

    Args:
        count: of beats.
        iteration: that it works on.
        collectives: that it has come to.
        last: the last of them.
        at: when, by the clock of its machine.
        in_group: collectives by group.
        wait: where it waits.
    """

    count: int
    iteration: int
    collectives: int = 0
    last: str = "no collective yet"
    at: float | None = None
    in_group: dict[str, int]
    wait: Wait | None = None

    @staticmethod
    def now(count: int, iteration: int, log: CollectiveLog, *, final: bool = False) -> Beat:
        """Return that of this rank.

        Args:
            final: name those who take part in a collective however short the wait.
        """
        entry, wait = log.stuck(), None
        if entry is not None:
            seconds = (entry.ended or time.monotonic()) - entry.waited
            ranks = entry.record.ranks if final or seconds > LONG_WAIT_SECONDS else ()
            text = describe(entry.record)
            wait = Wait(entry.record.group, entry.number, text, round(seconds, 1), tuple(ranks))
        return Beat(
            count=count,
            iteration=iteration,
            collectives=log.count,
            last=log.name,
            at=time.time(),
            in_group=dict(log.in_group),
            wait=wait,
        )

    def to_text(self) -> str:
        """Return the heartbeat as stored text."""
        wait = None if self.wait is None else list(vars(self.wait).values())
        head = [self.count, self.iteration, self.collectives, self.last]
        return json.dumps([*head, self.at, self.in_group, wait])

    @staticmethod
    def of(text: str) -> Beat:
        """Parse a stored heartbeat; missing trailing values are unknown."""
        values = [*json.loads(text), *[None] * 7][:7]
        count, iteration, collectives, last, at, in_group, wait = values
        return Beat(
            count=count,
            iteration=iteration,
            collectives=collectives or 0,
            last=last or "no collective yet",
            at=at,
            in_group=in_group or {},
            wait=None if wait is None else Wait(*wait[:4], tuple(wait[4])),
        )


@dataclass(frozen=True, kw_only=True)
class RankState:
    """State of one rank.

    Args:
        state: of its process, or what it has reported of its end.
        beat: its last one; None if it has none.
        age: of that, in seconds.
    """

    rank: int
    host: str
    pid: int | None
    state: str
    beat: Beat | None
    age: float | None


class Peers:
    """Reads what ranks have written, with a client of the store that no other thread uses.

    Args:
        store: the client.
        rank, world_size: of the run.
        host: this rank's machine.
        beat_seconds: time between beats.
    """

    def __init__(
        self, store: dist.Store, *, rank: int, world_size: int, host: str, beat_seconds: float
    ) -> None:
        self.store = store
        self._rank, self._world_size = rank, world_size
        self._host, self._beat_seconds = host, beat_seconds

    def get(self, key: str) -> str | None:
        """Return the value of a key; None if the key does not exist."""
        return self.store.get(key).decode() if self.store.check([key]) else None

    def others(self) -> list[int]:
        """Return the other ranks but those that have left in good order."""
        ranks = (rank for rank in range(self._world_size) if rank != self._rank)
        return [rank for rank in ranks if not self.store.check([f"left/{rank}"])]

    def identity(self, rank: int) -> Identity | None:
        """Return where a rank runs; None if it has not reported it."""
        text = self.get(f"peer/{rank}")
        return None if text is None else Identity(**json.loads(text))

    def beats(self) -> dict[int, str | None]:
        """Return the last beats of the others."""
        return {rank: self.get(f"beat/{rank}") for rank in self.others()}

    def failures(self) -> list[str]:
        """Quote ranks that have failed with an error."""
        texts = {rank: self.get(f"failure/{rank}") for rank in self.others()}
        return [f"rank {rank} failed: {text}" for rank, text in texts.items() if text]

    def given_up(self) -> str | None:
        """Return what another rank has found wrong before it ended; None if none has."""
        texts = (self.get(f"gave_up/{rank}") for rank in self.others())
        return next((text for text in texts if text), None)

    def state_here(self, rank: int) -> str | None:
        """Name a rank of this machine whose process has ended or is stopped; else None."""
        peer = self.identity(rank)
        if peer is None or peer.host != self._host:
            return None
        state = process_state(peer.pid)
        named = f"rank {rank} (process {peer.pid} on {peer.host}) is {state}"
        return None if state == "running" else named

    def gone_here(self) -> list[str]:
        """Name ranks of this machine whose process has ended or is stopped."""
        descriptions = (self.state_here(rank) for rank in self.others())
        return [text for text in descriptions if text is not None]

    def silent(self, before: dict[int, str | None]) -> list[str]:
        """Name the ranks without a new heartbeat since `before`."""
        return [
            f"rank {rank} is silent since iteration {Beat.of(now).iteration}"
            for rank, now in self.beats().items()
            if now is not None and now == before.get(rank)
        ]

    def states(self, own: Beat) -> list[RankState]:
        """Return the state of every rank.

        Args:
            own: what this one would report now.
        """
        return [
            self._state(rank, own if rank == self._rank else None)
            for rank in range(self._world_size)
        ]

    def _state(self, rank: int, beat: Beat | None) -> RankState:
        if beat is None and (text := self.get(f"beat/{rank}")) is not None:
            beat = Beat.of(text)
        peer = self.identity(rank)
        age = None if beat is None or beat.at is None else max(0.0, time.time() - beat.at)
        if failure := self.get(f"failure/{rank}"):
            state = f"failed: {failure}"
        elif self.store.check([f"left/{rank}"]):
            state = "has left"
        elif peer is None:
            state = "never came"
        elif peer.host == self._host and (process := process_state(peer.pid)) != "running":
            state = process
        else:
            quiet = age is None or age > 3.0 * self._beat_seconds
            state = "silent" if quiet else "running"
        return RankState(
            rank=rank,
            host="?" if peer is None else peer.host,
            pid=None if peer is None else peer.pid,
            state=state,
            beat=beat,
            age=age,
        )


_HEADINGS = ("rank", "machine", "process", "state", "iteration", "last beat", "where")


def hang_report(reason: str, states: Sequence[RankState], *, writer: int, files: str) -> str:
    """Return the report as text.

    Args:
        reason: what is wrong, in one line.
        states: of all ranks.
        writer: the rank that writes it.
        files: where each rank leaves more.
    """
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    rows = [_HEADINGS, *(_row(state) for state in states)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    missing = _missing(states) or ["No rank is known to be missing in a collective."]
    return "\n".join(
        [
            f"{when}, written by rank {writer}",
            reason,
            "",
            *table,
            "",
            *missing,
            "",
            f"Stacks of all threads and the last collectives of each rank: {files}",
            "",
        ]
    )


def _row(state: RankState) -> tuple[str, ...]:
    beat = state.beat
    return (
        str(state.rank),
        state.host,
        "?" if state.pid is None else str(state.pid),
        state.state,
        "?" if beat is None else str(beat.iteration),
        "none" if state.age is None else f"{state.age:.1f} s ago",
        "?" if beat is None else _where(beat.wait, beat.last, beat.collectives),
    )


def _where(wait: Wait | None, last: str, count: int) -> str:
    if wait is None:
        return f"behind its collective {count}: {last}" if count else last
    return f"{wait.seconds:.1f} s in {wait.text}"


def _missing(states: Sequence[RankState]) -> list[str]:
    """Say who waits in which collective, and who of its group has not come to it."""
    states_by_rank = {state.rank: state for state in states}
    waits = {
        state.rank: state.beat.wait
        for state in states
        if state.beat is not None and state.beat.wait is not None
    }
    lines = [
        f"Rank {rank} waits in {wait.text}." for rank, wait in waits.items() if not wait.number
    ]
    collectives = {(w.group, w.number, w.ranks): w for w in waits.values() if w.number and w.ranks}
    for (group, number, ranks), wait in collectives.items():
        present = [
            r for r in ranks if r in waits and (waits[r].group, waits[r].number) == (group, number)
        ]
        absent = [
            r for r in ranks if r not in present and _come(states_by_rank.get(r), group) < number
        ]
        if absent:
            verb = "waits" if len(present) == 1 else "wait"
            lines.append(
                f"{_ranks(present).capitalize()} {verb} in {wait.text}, number {number} of that "
                f"group, and {_ranks(absent)} had not come to it at the last beat."
            )
    return lines


def _come(state: RankState | None, group: str) -> int:
    """Return how many collectives of a group a rank has come to."""
    return 0 if state is None or state.beat is None else state.beat.in_group.get(group, 0)


def _ranks(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:16])) + (", …" if len(ranks) > 16 else "")
    return f"rank{'s' * (len(ranks) > 1)} {text}"


#: How long the thread that beats looks for the rank to blame, in seconds.
GUARD_SECONDS = 5.0

#: How long a rank whose store the others read waits for their end, in seconds.
OUTLAST_SECONDS = 5.0


@dataclass(frozen=True)
class Diagnosis:
    """Why other ranks have failed.

    Args:
        text: one line that names them.
        is_reported: whether they have reported it themselves.
    """

    text: str
    is_reported: bool = False


@dataclass(frozen=True)
class Guard:
    """What the thread that beats does if the others hang.

    Args:
        seconds: without a new collective or iteration.
        lose: ends the process because of other ranks.
    """

    seconds: float
    lose: Callable[[Diagnosis], None]


class PeerWatch:
    """Sends heartbeats to the other ranks, and detects ranks that have failed.

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
        identity = Identity(socket.gethostname(), os.getpid())
        main_peers, thread_peers = (
            Peers(
                open_store(),
                rank=rank,
                world_size=world_size,
                host=identity.host,
                beat_seconds=beat_seconds,
            )
            for _ in range(2)
        )
        self._peers = main_peers
        self.claims = Claims(main_peers.store)
        """Which rank prints what."""
        self._left, self._stop = threading.Event(), threading.Event()
        self._leaving = threading.Lock()
        self._guard: Guard | None = None
        self.iteration = 0
        """The iteration this rank is working on; set by the loop, carried by the beat."""
        self.collectives = CollectiveLog(lambda: self.iteration)
        """The collectives that it has come to; carried by the beat too."""
        self._alike: frozenset[int] = frozenset(range(world_size))
        self._pipeline: tuple[int, ...] = ()
        main_peers.store.set(f"peer/{rank}", json.dumps(asdict(identity)))
        self._thread = threading.Thread(
            target=self._beat, args=(thread_peers,), name="peer-watch", daemon=True
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
        if diagnosis := self._diagnose(peers, GUARD_SECONDS):
            self._leave_evidence(peers, diagnosis.text, None, is_reported=diagnosis.is_reported)
            guard.lose(diagnosis)
        elif diagnosis := self._behind(peers):  # it may come yet
            self._leave_evidence(peers, diagnosis.text, None, ends=False)

    def join_pipeline(self, pipeline: Sequence[int], alike: Sequence[int]) -> None:
        """Register the pipeline, whose stages run different collectives.

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
        """Stop the heartbeats and mark this rank as finished."""
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
        """Return a reference to the hang report, to end a line about a lost rank."""
        return "" if self._files is None else f"; see {self._files.report}"

    def leave_evidence(
        self, reason: str, error: BaseException | None = None, *, is_reported: bool = False
    ) -> None:
        """Leave what this rank knows in files, and have every rank that still beats do so too; the
        first of them also writes the report of all ranks.

        Args:
            reason: what is wrong, in one line.
            error: what has brought the calling thread here.
            is_reported: the rank at fault has reported itself what is wrong: no report is needed.
        """
        self._leave_evidence(self._peers, reason, error, is_reported=is_reported)

    def _leave_evidence(
        self,
        peers: Peers,
        reason: str,
        error: BaseException | None,
        *,
        is_reported: bool = False,
        ends: bool = True,
    ) -> None:
        with contextlib.suppress(Exception):
            if ends:  # so that the others do not blame this one
                peers.store.set(f"gave_up/{self._rank}", reason)
        if self._leave_once(reason, error):
            self._share_evidence(peers, reason, report=not is_reported)
        if ends and is_reported:  # the launcher ends that rank as soon as this one has ended
            Claims(peers.store).wait_until_printed()

    def _share_evidence(self, peers: Peers, reason: str, *, report: bool) -> None:
        with contextlib.suppress(Exception):
            peers.store.set("stacks", reason)
            if self._files is not None and report and peers.store.add("hang_report", 1) == 1:
                heartbeat = Beat.now(0, self.iteration, self.collectives, final=True)
                states = peers.states(heartbeat)
                files = self._files.files
                self._files.write_report(
                    hang_report(reason, states, writer=self._rank, files=files)
                )

    def _leave_once(self, reason: str, error: BaseException | None) -> bool:
        """Write this rank's files, the first time; return whether that was now."""
        with self._leaving:
            is_first = not self._left.is_set()
            self._left.set()
            if is_first and self._files is not None:
                self._files.write(reason, error, self.collectives)
        return is_first

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
                    return Diagnosis("; ".join(failures), is_reported=True)
                if text := peers.given_up():  # it has ended, but it is not to blame
                    return Diagnosis(text, is_reported=True)
                problems = peers.gone_here()
                if not problems and time.monotonic() - since > 3.0 * self._beat_seconds:
                    problems = peers.silent(before)
                if problems:
                    return Diagnosis("; ".join(problems))
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
            return Diagnosis(f"rank {rank} failed: {failure}", is_reported=True)
        if text := peers.get(f"gave_up/{rank}"):
            return Diagnosis(text, is_reported=True)
        state = peers.state_here(rank)
        return Diagnosis(state) if state is not None and state.endswith(" is dead") else None

    def behind(self) -> Diagnosis | None:
        """Name the ranks that live but have not come to the collective that this rank waits in.

        Heartbeats report how far a rank is; that is at most as old as the time between two of them.
        Returns None if all have come as far as this rank. Of another pipeline stage only the
        iteration shows that; where it does not, it gives where each stage of this rank's pipeline
        is.
        """
        return self._behind(self._peers)

    def _behind(self, peers: Peers) -> Diagnosis | None:
        position = (self.iteration, self.collectives.count)
        try:
            states = {rank: Beat.of(text) for rank, text in peers.beats().items() if text}
        except Exception:  # a store that is gone tells nothing
            return None
        late = [
            f"rank {rank} is still in iteration {beat.iteration} behind its collective "
            f"{beat.collectives} ({beat.last})"
            for rank, beat in states.items()
            if (
                (beat.iteration, beat.collectives) < position
                if rank in self._alike
                else beat.iteration < position[0]
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
