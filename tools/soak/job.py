# SPDX-License-Identifier: Apache-2.0
"""One start of the run: wait for the moment, kill, and end the survivors like a launcher."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from megatron.cli.errors import ExitCode
from megatron.training.monitoring.metrics import read_metrics
from tests.functional_tests import small_run
from tests.support.launchers import Launched, launched
from tests.support.ranks import Outcome
from tools.soak.choices import Kill
from tools.soak.folder import Snapshot, look, under_way
from tools.soak.pace import Measured, SaveClock
from tools.soak.power_cut import Durable, cut_power
from tools.soak.slow_disk import plant as plant_disk

#: Seconds that a start may take, or a run until its next save, on a busy machine.
PATIENCE_SECONDS = 120.0
#: Seconds within which processes that lost a peer or their trainer have to be gone.
GRACE_SECONDS = 30.0
#: How often a launcher looks at its processes, in seconds.
LAUNCHER_SECONDS = 0.1
#: How ranks may end that were told to; before they listen, the signal itself ends them.
ENDS = frozenset({ExitCode.OK, ExitCode.PEER_LOST, ExitCode.TERMINATED, -signal.SIGTERM})
#: How they may if another one is dead.
ENDS_OF_SURVIVORS = ENDS | {ExitCode.SAVE_FAILED, -signal.SIGKILL}
#: How they may without a launcher: one that has nothing to save yet is dead for another that has.
ENDS_OF_ORPHANS = frozenset(
    {ExitCode.OK, ExitCode.LAUNCHER_LOST, ExitCode.PEER_LOST, ExitCode.SAVE_FAILED}
)


class SoakFailure(Exception):
    """The program broke a promise.

    Args:
        kind: "lost" a checkpoint, "inexact" resume, or "hung" or failed otherwise.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class Struck:
    """A kill that has met a run.

    Args:
        before, after: the folder when the last signal was sent, and when it had worked.
        stage: of the save that was under way both times; "" if none was.
        iteration: the last that was logged.
    """

    before: Snapshot
    after: Snapshot
    stage: str
    iteration: int


def _soak_rank(
    rank: int,
    world: int,
    port: int,
    argv: list[str],
    *,
    root: str,
    disk_seconds: float,
    journal: str,
    plant: str | None,
) -> NoReturn:
    """Be a rank on a slow disk, with a defect if one is to be planted."""
    plant_disk(root, disk_seconds, journal=journal)
    if plant is not None:
        module, function = plant.split(":")
        getattr(importlib.import_module(module), function)(rank)
    small_run.launched_rank(rank, world, port, argv)


@contextlib.contextmanager
def job(
    argv: list[str],
    *,
    ranks: int,
    root: Path,
    measured: Measured,
    disk_seconds: float,
    plant: str | None,
    logs: Path,
) -> Iterator[Job]:
    """Start the ranks; on exit, end the ranks and keep their logs."""
    start, durable = look(root), Durable.everything(root)
    journal = logs.with_name(f"{logs.name}_syncs.jsonl")
    process = partial(
        _soak_rank,
        root=str(root),
        disk_seconds=disk_seconds,
        journal=str(journal),
        plant=plant,
    )
    with launched(process, argv, ranks=ranks) as started:
        running_job = Job(started, root, start=start, measured=measured)
        try:
            yield running_job
            if running_job.power_fails:
                durable.read(journal)
                cut_power(root, durable)
        finally:
            for rank in range(ranks):
                logs.with_name(f"{logs.name}_rank_{rank}.txt").write_text(started.log(rank))


class Job:
    """Running ranks.

    Args:
        ranks: the processes, and their launcher.
        root: their save folder.
        start: the folder before the start.
        measured: durations, extended by this run.
    """

    def __init__(self, ranks: Launched, root: Path, *, start: Snapshot, measured: Measured) -> None:
        self._ranks, self.root, self.start, self._measured = ranks, root, start, measured
        self._metrics = root / "metrics.jsonl"
        self._old_metrics = self._metrics.stat().st_ino if self._metrics.exists() else 0
        self._began = time.monotonic()
        self._first_step: float | None = None
        self._clock = SaveClock(measured)
        self._family: set[int] = set()
        self.power_fails = False
        self.now = start

    # --- looking ----------------------------------------------------------------------------------

    def log(self) -> str:
        """Return what all ranks have printed."""
        return "".join(self._ranks.log(rank) for rank in range(len(self._ranks.processes)))

    def iteration(self) -> int:
        """Return the last iteration that is in the metrics, 0 if none is."""
        events = read_metrics(self._metrics) if self._metrics.exists() else []
        return max((e["iteration"] for e in events if e["kind"] == "train"), default=0)

    def running(self) -> bool:
        """Return whether any rank exists. Raises SoakFailure if a rank failed without a kill."""
        codes = [process.exitcode for process in self._ranks.processes]
        if bad := {rank: code for rank, code in enumerate(codes) if code}:
            raise SoakFailure(
                "hung", f"ranks ended by themselves, with {bad}\n{self.log()[-3000:]}"
            )
        return None in codes

    def stage(self, now: Snapshot) -> str:
        """Return what stage a save of this start is in; "" before the first step, when what earlier
        starts have left is swept."""
        return "" if self._first_step is None else under_way(now, self.start)

    def observe(self) -> None:
        """Look at the folder; measure the start, and saves that begin and end."""
        if self._first_step is None and self._steps():
            self._first_step = time.monotonic()
            self._measured.start.append(self._first_step - self._began)
        self.now = look(self.root)
        if self._first_step is not None:
            folders = self.now.saves(self.start)
            self._clock.observe(folders, self.stage(self.now), time.monotonic())

    def _steps(self) -> bool:
        """Return whether this start has logged a step: it begins with a new metrics file."""
        fresh = self._metrics.exists() and self._metrics.stat().st_ino != self._old_metrics
        return fresh and self.iteration() > max(self.start.newest, 0)

    def wait(self, arrived: Callable[[], bool], what: str) -> bool:
        """Wait for a condition; return whether it became true before the end of the run.

        Raises:
            SoakFailure: if neither happened in time.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            self.observe()
            if arrived():
                return True
            if not self.running():
                return False
            if time.monotonic() > deadline:
                raise SoakFailure("hung", f"{what} never came\n{self.log()[-3000:]}")
            time.sleep(0.002)

    def wait_for(self, kill: Kill) -> bool:
        """Wait for the moment of a kill; return False if the run ended before."""
        if kill.moment == "start":
            base, span = self._began, self._measured.of("start")
        elif kill.moment == "training":
            if not self.wait(lambda: self._first_step is not None, "the first step"):
                return False
            assert self._first_step is not None
            base = self._first_step
            span = self._measured.of("between") * (1 + kill.skip)
        else:
            times = self._clock.begins if kill.moment == "save" else self._clock.commits
            seen = len(times) + kill.skip
            if not self.wait(lambda: len(times) > seen, f"a {kill.moment}"):
                return False
            base, span = times[-1], self._measured.of(kill.moment)
        return self.wait(lambda: time.monotonic() >= base + kill.offset * span, "the moment")

    # --- killing ----------------------------------------------------------------------------------

    def strike(self, kill: Kill) -> Struck | None:
        """Send a kill's signals; return how it met the run, or None if the victim is not there.

        Raises:
            SoakFailure: survivors or writer processes stay, or a rank ends in a wrong way.
        """
        processes = self._ranks.processes
        self._family |= _children([process.pid for process in processes])
        if kill.of_writer:
            rank = int(kill.victim.split()[1])
            victims = sorted(_children([processes[rank].pid]))
        elif kill.victim in ("all", "machine"):
            victims = [process.pid for process in processes]
            if kill.of_machine:
                victims += sorted(self._family)
        elif kill.of_launcher:
            victims = [self._ranks.launchers.processes[0].pid]
        else:
            victims = [processes[int(kill.victim.split()[1])].pid]
        if not victims:
            return None
        if kill.how in ("TERM+KILL", "STOP+KILL"):
            _send(victims, signal.SIGTERM if kill.how == "TERM+KILL" else signal.SIGSTOP)
            longest = self._measured.of("save") + 0.5 * self._measured.of("between")
            time.sleep(kill.delay * (longest if kill.how == "TERM+KILL" else 0.3))
        before = look(self.root)
        _send(victims, signal.SIGTERM if kill.how == "TERM" else signal.SIGKILL)
        if kill.how != "TERM":
            _wait_for_end(victims, "victims of SIGKILL")
        after = look(self.root)
        iteration = self.iteration()
        if not kill.of_writer:
            self._end_the_others(kill)
        self.power_fails = kill.of_machine
        stage = self.stage(before)
        inside = stage if kill.of_writer or self.stage(after) else ""
        return Struck(before=before, after=after, stage=inside, iteration=iteration)

    def _end_the_others(self, kill: Kill) -> None:
        """Wait for the ends that follow, as the launcher does: it tells survivors to end."""
        processes = self._ranks.processes
        deadline = time.monotonic() + GRACE_SECONDS
        while not any(p.exitcode for p in processes) and time.monotonic() < deadline:
            if all(p.exitcode == 0 for p in processes):
                break
            time.sleep(0.002)
        time.sleep(LAUNCHER_SECONDS)
        is_notified = kill.launcher or kill.how == "TERM" or self._first_step is None
        if is_notified and not kill.of_launcher:
            _send([p.pid for p in processes if p.exitcode is None], signal.SIGTERM)
        outcomes = self._ranks.outcomes(timeout=GRACE_SECONDS)
        for process in processes:
            process.join(2.0)
        codes = [process.exitcode for process in processes]
        if None in codes:
            raise SoakFailure(
                "hung", f"{_describe_outcomes(outcomes)} do not end\n{self.log()[-3000:]}"
            )
        fine = ENDS if kill.how == "TERM" else ENDS_OF_SURVIVORS
        if kill.of_launcher:
            fine = ENDS_OF_ORPHANS
        if wrong := {rank: code for rank, code in enumerate(codes) if code not in fine}:
            raise SoakFailure("hung", f"ranks ended with {wrong}\n{self.log()[-3000:]}")
        _wait_for_end(sorted(self._family), "writer processes of dead trainers")

    def finish(self) -> None:
        """Wait for the run's own end. Raises SoakFailure if it is not a good one."""
        self.wait(lambda: False, "the end of the run")
        _wait_for_end(sorted(self._family), "writer processes of finished trainers")


def _describe_outcomes(outcomes: Sequence[Outcome]) -> str:
    return f"ranks {[o.rank for o in outcomes if o.exit_code is None]}"


def _send(pids: Sequence[int | None], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            assert pid is not None
            os.kill(pid, number)


def _children(parents: Sequence[int | None]) -> set[int]:
    """Return the children of all threads of processes."""
    pids: set[int] = set()
    for parent in parents:
        for file in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                pids |= {int(word) for word in file.read_text().split()}
    return pids


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _wait_for_end(pids: Sequence[int], what: str) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    while left := [pid for pid in pids if _alive(pid)]:
        if time.monotonic() > deadline:
            raise SoakFailure("hung", f"{what} are still there: {left}")
        time.sleep(0.002)
