# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of the rank that caused a failed collective: dead, stopped, silent, or failed.

Every rank writes its identity and its heartbeats (liveness and progress) to the launcher's store;
other ranks read them only after a failure (`Peers.states`). A rank of the same machine is also
looked up in the process table, which shows its state at once. The report of a hanging run lists the
progress of every rank, and the ranks that are missing in a collective.
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
from megatron.training.fault_tolerance.hang_files import CollectiveLog, HangFiles, describe
from megatron.training.fault_tolerance.launcher import process_state

#: A heartbeat lists a collective's ranks after waiting this many seconds in it.
LONG_WAIT_SECONDS = 2.0


@dataclass(frozen=True)
class Identity:
    """Machine and process of a rank."""

    host: str
    pid: int


@dataclass(frozen=True)
class Wait:
    """A collective that a rank waits in.

    Args:
        group: name of the process group.
        number: position among the group's collectives; 0 for point-to-point.
        text: description of the collective.
        seconds: duration of the wait.
        ranks: the group's ranks, if the wait is long.
    """

    group: str
    number: int
    text: str
    seconds: float
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A heartbeat: the progress that a rank reports.

    Args:
        count: number of heartbeats so far.
        iteration: current iteration.
        collectives: number of collectives entered so far.
        last_collective: description of the last collective.
        timestamp: time by the clock of the rank's machine.
        collectives_by_group: number of collectives by process group.
        wait: the collective that the rank waits in; None if it does not wait.
    """

    count: int
    iteration: int
    collectives: int = 0
    last_collective: str = "no collective yet"
    timestamp: float | None = None
    collectives_by_group: dict[str, int]
    wait: Wait | None = None

    @staticmethod
    def now(count: int, iteration: int, log: CollectiveLog, *, final: bool = False) -> Heartbeat:
        """Return this rank's current heartbeat.

        Args:
            final: list the ranks of a collective even after a short wait.
        """
        entry, wait = log.stuck(), None
        if entry is not None:
            seconds = (entry.ended_at or time.monotonic()) - entry.waited_since
            ranks = entry.record.ranks if final or seconds > LONG_WAIT_SECONDS else ()
            text = describe(entry.record)
            wait = Wait(entry.record.group, entry.number, text, round(seconds, 1), tuple(ranks))
        return Heartbeat(
            count=count,
            iteration=iteration,
            collectives=log.count,
            last_collective=log.name,
            timestamp=time.time(),
            collectives_by_group=dict(log.collectives_by_group),
            wait=wait,
        )

    def to_text(self) -> str:
        """Return the heartbeat as stored text."""
        wait = None if self.wait is None else list(vars(self.wait).values())
        head = [self.count, self.iteration, self.collectives, self.last_collective]
        return json.dumps([*head, self.timestamp, self.collectives_by_group, wait])

    @staticmethod
    def of(text: str) -> Heartbeat:
        """Parse a stored heartbeat; missing trailing values get defaults."""
        values = [*json.loads(text), *[None] * 7][:7]
        count, iteration, collectives, last_collective, timestamp, collectives_by_group, wait = (
            values
        )
        return Heartbeat(
            count=count,
            iteration=iteration,
            collectives=collectives or 0,
            last_collective=last_collective or "no collective yet",
            timestamp=timestamp,
            collectives_by_group=collectives_by_group or {},
            wait=None if wait is None else Wait(*wait[:4], tuple(wait[4])),
        )


@dataclass(frozen=True, kw_only=True)
class RankState:
    """State of one rank.

    Args:
        state: state of its process, or the end that it has reported.
        heartbeat: its last heartbeat; None without one.
        age: age of that heartbeat, in seconds.
    """

    rank: int
    host: str
    pid: int | None
    state: str
    heartbeat: Heartbeat | None
    age: float | None


class Peers:
    """Reads the entries of other ranks in the store.

    Args:
        store: a client that no other thread uses.
        rank, world_size: this rank, and the number of ranks.
        host: this rank's machine.
        heartbeat_seconds: time between heartbeats.
    """

    def __init__(
        self, store: dist.Store, *, rank: int, world_size: int, host: str, heartbeat_seconds: float
    ) -> None:
        self.store = store
        self._rank, self._world_size = rank, world_size
        self._host, self._heartbeat_seconds = host, heartbeat_seconds

    def get(self, key: str) -> str | None:
        """Return the value of a key; None if the key does not exist."""
        return self.store.get(key).decode() if self.store.check([key]) else None

    def other_ranks(self) -> list[int]:
        """Return the other ranks, except ranks that have finished successfully."""
        ranks = (rank for rank in range(self._world_size) if rank != self._rank)
        return [rank for rank in ranks if not self.store.check([f"left/{rank}"])]

    def identity(self, rank: int) -> Identity | None:
        """Return a rank's machine and process; None before it has reported them."""
        text = self.get(f"peer/{rank}")
        return None if text is None else Identity(**json.loads(text))

    def heartbeats(self) -> dict[int, str | None]:
        """Return the last heartbeat of each other rank, as stored text."""
        return {rank: self.get(f"beat/{rank}") for rank in self.other_ranks()}

    def failures(self) -> list[str]:
        """Return the errors that other ranks have reported."""
        texts = {rank: self.get(f"failure/{rank}") for rank in self.other_ranks()}
        return [f"rank {rank} failed: {text}" for rank, text in texts.items() if text]

    def peer_diagnosis(self) -> str | None:
        """Return the diagnosis that another rank reported before it ended; else None."""
        texts = (self.get(f"gave_up/{rank}") for rank in self.other_ranks())
        return next((text for text in texts if text), None)

    def local_process_state(self, rank: int) -> str | None:
        """Describe a rank of this machine whose process is dead or stopped; else None."""
        peer = self.identity(rank)
        if peer is None or peer.host != self._host:
            return None
        state = process_state(peer.pid)
        description = f"rank {rank} (process {peer.pid} on {peer.host}) is {state}"
        return None if state == "running" else description

    def dead_local_ranks(self) -> list[str]:
        """Describe the ranks of this machine whose process is dead or stopped."""
        descriptions = (self.local_process_state(rank) for rank in self.other_ranks())
        return [text for text in descriptions if text is not None]

    def silent_ranks(self, previous: dict[int, str | None]) -> list[str]:
        """Name the ranks without a new heartbeat since `previous`."""
        return [
            f"rank {rank} is silent since iteration {Heartbeat.of(now).iteration}"
            for rank, now in self.heartbeats().items()
            if now is not None and now == previous.get(rank)
        ]

    def states(self, local_heartbeat: Heartbeat) -> list[RankState]:
        """Return the state of every rank.

        Args:
            local_heartbeat: this rank's current heartbeat.
        """
        return [
            self._state(rank, local_heartbeat if rank == self._rank else None)
            for rank in range(self._world_size)
        ]

    def _state(self, rank: int, heartbeat: Heartbeat | None) -> RankState:
        if heartbeat is None and (text := self.get(f"beat/{rank}")) is not None:
            heartbeat = Heartbeat.of(text)
        peer = self.identity(rank)
        age = (
            None
            if heartbeat is None or heartbeat.timestamp is None
            else max(0.0, time.time() - heartbeat.timestamp)
        )
        if failure := self.get(f"failure/{rank}"):
            state = f"failed: {failure}"
        elif self.store.check([f"left/{rank}"]):
            state = "has left"
        elif peer is None:
            state = "never came"
        elif peer.host == self._host and (process := process_state(peer.pid)) != "running":
            state = process
        else:
            is_silent = age is None or age > 3.0 * self._heartbeat_seconds
            state = "silent" if is_silent else "running"
        return RankState(
            rank=rank,
            host="?" if peer is None else peer.host,
            pid=None if peer is None else peer.pid,
            state=state,
            heartbeat=heartbeat,
            age=age,
        )


_HEADINGS = ("rank", "machine", "process", "state", "iteration", "last beat", "where")


def hang_report(reason: str, states: Sequence[RankState], *, writer: int, files: str) -> str:
    """Return the hang report as text.

    Args:
        reason: the problem, in one line.
        states: the state of every rank.
        writer: the rank that writes the report.
        files: pattern of the ranks' diagnostic files.
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
    heartbeat = state.heartbeat
    return (
        str(state.rank),
        state.host,
        "?" if state.pid is None else str(state.pid),
        state.state,
        "?" if heartbeat is None else str(heartbeat.iteration),
        "none" if state.age is None else f"{state.age:.1f} s ago",
        "?"
        if heartbeat is None
        else _where(heartbeat.wait, heartbeat.last_collective, heartbeat.collectives),
    )


def _where(wait: Wait | None, last_collective: str, count: int) -> str:
    if wait is None:
        return f"after its collective {count}: {last_collective}" if count else last_collective
    return f"{wait.seconds:.1f} s in {wait.text}"


def _missing(states: Sequence[RankState]) -> list[str]:
    """Describe each collective in which ranks wait, and the ranks that have not entered it."""
    states_by_rank = {state.rank: state for state in states}
    waits = {
        state.rank: state.heartbeat.wait
        for state in states
        if state.heartbeat is not None and state.heartbeat.wait is not None
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
            r
            for r in ranks
            if r not in present and _num_entered(states_by_rank.get(r), group) < number
        ]
        if absent:
            verb = "waits" if len(present) == 1 else "wait"
            lines.append(
                f"{_ranks(present).capitalize()} {verb} in {wait.text}, number {number} of that "
                f"group, and {_ranks(absent)} had not come to it at the last beat."
            )
    return lines


def _num_entered(state: RankState | None, group: str) -> int:
    """Return how many collectives of a group a rank has entered."""
    return (
        0
        if state is None or state.heartbeat is None
        else state.heartbeat.collectives_by_group.get(group, 0)
    )


def _ranks(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:16])) + (", …" if len(ranks) > 16 else "")
    return f"rank{'s' * (len(ranks) > 1)} {text}"


#: Seconds that the heartbeat thread looks for the rank at fault.
GUARD_SECONDS = 5.0

#: Seconds that a rank that serves the store waits for the end of the other ranks.
SERVER_SECONDS = 5.0


@dataclass(frozen=True)
class Diagnosis:
    """A description of failed ranks.

    Args:
        text: one line that names the ranks.
        is_reported: whether the failed ranks have reported the error.
    """

    text: str
    is_reported: bool = False


@dataclass(frozen=True)
class HangGuard:
    """The heartbeat thread's reaction to a hang.

    Args:
        seconds: time without a new collective or iteration.
        lose: ends the process because of other ranks.
    """

    seconds: float
    lose: Callable[[Diagnosis], None]


class PeerWatch:
    """Sends heartbeats to the other ranks, and detects ranks that have failed.

    Args:
        open_store: creates a client of the run's store; called once for the main thread and once
            for the heartbeat thread, because threads must not share a client.
        rank, world_size: this rank, and the number of ranks.
        heartbeat_seconds: time between heartbeats.
        files: this process's diagnostic files; None writes none.
        servers: stores that this process serves; the watch keeps them alive.
        serves: called after success, returns whether other ranks read one of these stores.
    """

    def __init__(
        self,
        open_store: Callable[[], dist.Store],
        *,
        rank: int,
        world_size: int,
        heartbeat_seconds: float = 1.0,
        files: HangFiles | None = None,
        servers: Sequence[dist.Store | None] = (),
        serves: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rank, self._heartbeat_seconds, self._files = rank, heartbeat_seconds, files
        self._servers, self._serves = servers, serves
        identity = Identity(socket.gethostname(), os.getpid())
        main_peers, thread_peers = (
            Peers(
                open_store(),
                rank=rank,
                world_size=world_size,
                host=identity.host,
                heartbeat_seconds=heartbeat_seconds,
            )
            for _ in range(2)
        )
        self._peers = main_peers
        self.claims = Claims(main_peers.store)
        """Decides which rank prints a line."""
        self._files_written, self._stop = threading.Event(), threading.Event()
        self._files_lock = threading.Lock()
        self._guard: HangGuard | None = None
        self.iteration = 0
        """This rank's current iteration; the loop sets it, heartbeats report it."""
        self.collectives = CollectiveLog(lambda: self.iteration)
        """This rank's collectives; heartbeats report them."""
        self._stage_ranks: frozenset[int] = frozenset(range(world_size))
        self._pipeline: tuple[int, ...] = ()
        main_peers.store.set(f"peer/{rank}", json.dumps(asdict(identity)))
        self._thread = threading.Thread(
            target=self._send_heartbeats, args=(thread_peers,), name="peer-watch", daemon=True
        )
        self._thread.start()

    def _send_heartbeats(self, peers: Peers) -> None:
        count = 0
        position, since, diagnosed = (0, 0), time.monotonic(), False
        while True:
            count += 1
            try:
                state = Heartbeat.now(count, self.iteration, self.collectives)
                peers.store.set(f"beat/{self._rank}", state.to_text())
                if not self._files_written.is_set() and peers.store.check(["stacks"]):
                    self._write_files_once(peers.store.get("stacks").decode(), None)
                if self.iteration and self._files is not None:
                    self._files.heartbeat()
                if position != (now := (state.iteration, state.collectives)):
                    position, since, diagnosed = now, time.monotonic(), False
                guard = self._guard
                if guard is not None and not diagnosed and time.monotonic() - since > guard.seconds:
                    diagnosed = True
                    self._diagnose_stall(peers, guard)
            except Exception:  # the store is gone: the run is over, and the loop will detect it
                return
            if self._stop.wait(self._heartbeat_seconds):
                return

    def _diagnose_stall(self, peers: Peers, guard: HangGuard) -> None:
        """Diagnose the rank at fault after a long time without progress of the main thread."""
        if diagnosis := self._diagnose(peers, GUARD_SECONDS):
            self._write_diagnostics(peers, diagnosis.text, None, is_reported=diagnosis.is_reported)
            guard.lose(diagnosis)
        elif diagnosis := self._diagnose_lagging(peers):  # the lagging rank may still arrive
            self._write_diagnostics(peers, diagnosis.text, None, ends=False)

    def join_pipeline(self, pipeline: Sequence[int], stage_ranks: Sequence[int]) -> None:
        """Register the pipeline, whose stages run different collectives.

        Args:
            pipeline: the ranks of this rank's pipeline.
            stage_ranks: the ranks of this rank's stage.
        """
        self._pipeline, self._stage_ranks = tuple(pipeline), frozenset(stage_ranks)

    def guard(self, seconds: float, lose: Callable[[Diagnosis], None]) -> None:
        """Also let the heartbeat thread detect lost ranks, because on a GPU the main thread may
        wait in a collective that never fails.

        Args:
            seconds: time without a new collective or iteration before the thread checks.
            lose: called on that thread if a rank is lost; ends the process.
        """
        self._guard = HangGuard(seconds, lose)

    def close(self) -> None:
        """Stop the heartbeats and mark this rank as finished."""
        self._stop.set()
        with contextlib.suppress(Exception):  # the store may have ended before this rank
            self._peers.store.set(f"left/{self._rank}", "1")
        self._thread.join(timeout=5.0)
        if self._serves():
            self._wait_for_other_ranks()
        self.cleanup()

    def _wait_for_other_ranks(self) -> None:
        """Wait until the other ranks have ended: they may still read the last agreement."""
        deadline = time.monotonic() + SERVER_SECONDS
        with contextlib.suppress(Exception):
            while time.monotonic() < deadline:
                if all(self._peers.local_process_state(rank) for rank in self._peers.other_ranks()):
                    return
                time.sleep(0.01)

    def cleanup(self) -> None:
        """Remove files that are only of use while this process runs."""
        if self._files is not None:
            self._files.close()

    @property
    def pointer(self) -> str:
        """Return a reference to the hang report, to end a line about a lost rank."""
        return "" if self._files is None else f"; see {self._files.report}"

    def write_diagnostics(
        self, reason: str, error: BaseException | None = None, *, is_reported: bool = False
    ) -> None:
        """Write this rank's diagnostic files, and request them from every live rank.

        The first rank that calls this also writes the report about all ranks.

        Args:
            reason: the problem, in one line.
            error: the exception of the calling thread.
            is_reported: the rank at fault has reported its error, so no report is needed.
        """
        self._write_diagnostics(self._peers, reason, error, is_reported=is_reported)

    def _write_diagnostics(
        self,
        peers: Peers,
        reason: str,
        error: BaseException | None,
        *,
        is_reported: bool = False,
        ends: bool = True,
    ) -> None:
        with contextlib.suppress(Exception):
            if ends:  # so that other ranks do not blame this rank
                peers.store.set(f"gave_up/{self._rank}", reason)
        if self._write_files_once(reason, error):
            self._request_diagnostics(peers, reason, report=not is_reported)
        if ends and is_reported:  # the launcher ends the failed rank when this rank ends
            Claims(peers.store).wait_until_printed()

    def _request_diagnostics(self, peers: Peers, reason: str, *, report: bool) -> None:
        with contextlib.suppress(Exception):
            peers.store.set("stacks", reason)
            if self._files is not None and report and peers.store.add("hang_report", 1) == 1:
                heartbeat = Heartbeat.now(0, self.iteration, self.collectives, final=True)
                states = peers.states(heartbeat)
                files = self._files.files
                self._files.write_report(
                    hang_report(reason, states, writer=self._rank, files=files)
                )

    def _write_files_once(self, reason: str, error: BaseException | None) -> bool:
        """Write this rank's files on the first call; return whether this was the first call."""
        with self._files_lock:
            is_first = not self._files_written.is_set()
            self._files_written.set()
            if is_first and self._files is not None:
                self._files.write(reason, error, self.collectives)
        return is_first

    def report_failure(self, error: BaseException) -> None:
        """Report this rank's error to the store for other ranks; never raises."""
        try:
            self._peers.store.set(f"failure/{self._rank}", one_line(error)[:500])
        except Exception:  # without a store there is nobody to report to
            return

    def host_of(self, rank: int) -> str:
        """Return a rank's machine."""
        peer = self._peers.identity(rank)
        return "an unknown machine" if peer is None else peer.host

    def diagnose(self, limit_seconds: float) -> Diagnosis | None:
        """Find failed ranks within at most `limit_seconds`.

        Returns None if every rank makes progress, and after `close`.
        """
        if self._stop.is_set():
            return None
        return self._diagnose(self._peers, limit_seconds)

    def _diagnose(self, peers: Peers, limit_seconds: float) -> Diagnosis | None:
        deadline = time.monotonic() + limit_seconds
        try:
            previous = peers.heartbeats()
            since = time.monotonic()
            while True:
                if failures := peers.failures():
                    return Diagnosis("; ".join(failures), is_reported=True)
                if (
                    text := peers.peer_diagnosis()
                ):  # that rank has ended, but another rank is at fault
                    return Diagnosis(text, is_reported=True)
                problems = peers.dead_local_ranks()
                if not problems and time.monotonic() - since > 3.0 * self._heartbeat_seconds:
                    problems = peers.silent_ranks(previous)
                if problems:
                    return Diagnosis("; ".join(problems))
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.05)
        except Exception as error:
            if self._stop.is_set():  # after `close` other ranks, and the store, may end
                return None
            text = f"the store that all ranks share is unreachable ({one_line(error)[:120]})"
            return Diagnosis(text)

    def diagnose_rank(self, rank: int) -> Diagnosis | None:
        """Return the known failure of one rank; else None."""
        peers = self._peers
        if failure := peers.get(f"failure/{rank}"):
            return Diagnosis(f"rank {rank} failed: {failure}", is_reported=True)
        if text := peers.get(f"gave_up/{rank}"):
            return Diagnosis(text, is_reported=True)
        state = peers.local_process_state(rank)
        return Diagnosis(state) if state is not None and state.endswith(" is dead") else None

    def diagnose_lagging(self) -> Diagnosis | None:
        """Find live ranks that have not entered the collective that this rank waits in.

        Heartbeats report the progress of each rank with a delay of at most one heartbeat. Ranks of
        other pipeline stages run different collectives, so only their iteration is compared. If no
        rank lags, returns the progress of each stage of this rank's pipeline, or None without one.
        """
        return self._diagnose_lagging(self._peers)

    def _diagnose_lagging(self, peers: Peers) -> Diagnosis | None:
        position = (self.iteration, self.collectives.count)
        try:
            states = {rank: Heartbeat.of(text) for rank, text in peers.heartbeats().items() if text}
        except Exception:  # the store is gone
            return None
        lagging = [
            (
                f"rank {rank} is still in iteration {heartbeat.iteration} after its collective "
                f"{heartbeat.collectives} ({heartbeat.last_collective})"
            )
            for rank, heartbeat in states.items()
            if (
                (heartbeat.iteration, heartbeat.collectives) < position
                if rank in self._stage_ranks
                else heartbeat.iteration < position[0]
            )
        ]
        if lagging:
            return Diagnosis("; ".join(lagging))
        stages = [
            f"rank {rank} has reached {states[rank].last_collective}"
            for rank in self._pipeline
            if rank in states
        ]
        return Diagnosis(f"stages wait for one another: {', '.join(stages)}") if stages else None
