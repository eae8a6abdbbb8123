# SPDX-License-Identifier: Apache-2.0
"""What a session does about faults: who ends it, what a bad step leads to, where it rolls back.

Straggler detection (`--log-straggler`): a step takes equally long on every rank, since each waits
for the slowest in its collectives. So the measure is the time of a step without that spent waiting,
taken where the waiting is done: by the clock on a CPU, by events of the stream on a GPU.

It also compares replicas, and reports the differences.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megatron.core.comm import all_gather
from megatron.core.dist_checkpointing import optimizer_chunks, weight_chunks
from megatron.core.process_groups import DENSE_AXES, Group, RankGrid
from megatron.training.failures.faults import FaultLog, FaultRecord, Faults, Suspect, SuspectStep
from megatron.training.failures.replica_check import Difference, ReplicaCheck
from megatron.training.hooks import TrainingHooks
from megatron.training.monitoring.metrics import Metrics
from megatron.training.monitoring.step_window import StepOutcome
from megatron.training.newest_checkpoint import load_newest
from megatron.training.progress_state import Progress
from megatron.training.saves import Saves
from megatron.training.session import Session, load_session


class _Event:
    """A moment on a CPU, with the interface of a GPU's."""

    def __init__(self) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return 1000.0 * (end.at - self.at)


class WaitClock:
    """An observer of process groups, and the context that a rank waits in: it adds up the time.

    Args:
        device: where the run computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._device = device
        self._in_step = False
        self._waits: list[tuple[Any, Any]] = []
        self._steps: list[tuple[Any, Any]] = []

    def _moment(self) -> Any:
        event = torch.cuda.Event(enable_timing=True) if self._gpu else _Event()
        event.record()
        return event

    def __call__(self, record: object) -> WaitClock | None:
        """Ask to be entered while the caller waits for a collective of a step."""
        return self if self._in_step else None

    def __enter__(self) -> None:
        self._begun = self._moment()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Note one wait."""
        self._waits.append((self._begun, self._moment()))

    def begin_step(self) -> None:
        """Note that a step begins."""
        self._in_step, self._step_begun = True, self._moment()

    def end_step(self) -> None:
        """Note that it has been carried out."""
        self._in_step = False
        self._steps.append((self._step_begun, self._moment()))

    def compute_seconds(self) -> float:
        """Return the mean time that a step since the last call has computed; 0.0 without one."""
        if self._gpu:
            torch.cuda.synchronize(self._device)
        steps = sum(begin.elapsed_time(end) for begin, end in self._steps)
        waits = sum(begin.elapsed_time(end) for begin, end in self._waits)
        count = len(self._steps)
        self._steps.clear()
        self._waits.clear()
        return max(0.0, steps - waits) / 1000.0 / count if count else 0.0


def slow_ranks(
    seconds: Sequence[float], factor: float, *, alike: Sequence[Sequence[int]] | None = None
) -> dict[int, float]:
    """Return the medians of the ranks whose time is above `factor` of them, the slowest first.

    The lower median, so that of two ranks one can be slow.

    Args:
        alike: ranks that are to take the same time, each with its own median; None is all.
    """
    medians = {}
    for ranks in [range(len(seconds))] if alike is None else alike:
        middle = statistics.median_low([seconds[rank] for rank in ranks])
        medians.update({rank: middle for rank in ranks if 0.0 < factor * middle < seconds[rank]})
    slow = sorted(medians, key=lambda rank: -seconds[rank] / medians[rank])
    return {rank: medians[rank] for rank in slow}


def straggler_text(
    seconds: Sequence[float],
    factor: float,
    host_of: Callable[[int], str],
    *,
    alike: Sequence[Sequence[int]] | None = None,
) -> str | None:
    """Name the ranks that `slow_ranks` returns; None if there are none."""
    medians = slow_ranks(seconds, factor, alike=alike)
    if not medians:
        return None
    slow = list(medians)
    of = "of its stage " if alike is not None and len(alike) > 1 else ""
    shown = ", ".join(
        f"rank {rank} on {host_of(rank)} computes {seconds[rank] / medians[rank]:.1f} times as "
        f"long as the median {of}({1000.0 * seconds[rank]:.1f} ms a step, median "
        f"{1000.0 * medians[rank]:.1f} ms)"
        for rank in slow[:4]
    )
    return f"straggler: {shown}" + (f", and {len(slow) - 4} more" if len(slow) > 4 else "")


class StragglerReport(TrainingHooks):
    """Compare ranks at every log line: one gather of a number.

    Args:
        clock: of this rank.
        world: all ranks.
        device: where the run computes.
        factor: how many medians make a rank slow.
        host_of: returns a rank's machine.
        say: shows one line.
        record: keeps of an iteration, by rank, its seconds a step and the median's.
        alike: ranks that compute the same; None is all.
    """

    def __init__(
        self,
        clock: WaitClock,
        world: Group,
        *,
        device: torch.device,
        factor: float,
        host_of: Callable[[int], str],
        say: Callable[[str], None],
        record: Callable[[int, dict[str, list[float]]], None],
        alike: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._alike, self._record = alike, record
        self._clock, self._world, self._device, self._factor = clock, world, device, factor
        self._host_of, self._say = host_of, say

    def on_step_begin(self, iteration: int) -> None:
        """Start the clock."""
        self._iteration = iteration
        self._clock.begin_step()

    def on_step_computed(self, progress: Progress, outcome: StepOutcome, loss_limit: float) -> None:
        """Stop the clock."""
        self._clock.end_step()

    def on_log(self) -> None:
        """Compare the ranks' times since the last call; every rank calls it."""
        own = torch.tensor(
            [self._clock.compute_seconds()], dtype=torch.float64, device=self._device
        )
        seconds = all_gather(own, self._world).tolist()
        if text := straggler_text(seconds, self._factor, self._host_of, alike=self._alike):
            self._say(text)
            medians = slow_ranks(seconds, self._factor, alike=self._alike)
            slow = {str(rank): [seconds[rank], middle] for rank, middle in medians.items()}
            self._record(self._iteration, slow)


def arm_stop(session: Session) -> None:
    """Let signals and the limit of time end the run in order from here on."""
    failures, save = session.run.config.failures, session.run.config.checkpoint.save
    minutes = failures.exit_duration_in_mins
    # Without a checkpoint there is nothing to be gained by going on for a step.
    orderly = failures.exit_signal_handler and save is not None
    session.place.stop.arm(
        grace_seconds=failures.exit_grace_seconds if orderly else None,
        limit_seconds=None if minutes is None else 60.0 * minutes,
    )


def session_faults(
    session: Session,
    *,
    say: Callable[[str], None],
    metrics: Metrics,
    saves: Saves | None,
) -> Faults:
    """Return what a session does about bad steps.

    Args:
        say: shows one line.
        metrics: where events are kept.
        saves: writes checkpoints; None without --save.
    """
    config, place = session.run.config, session.place
    folder, log = config.checkpoint.save, fault_log(session, say=say, metrics=metrics)

    def record(noted: Suspect, verdict: str, hosts: Mapping[int, str], *, loss: float) -> None:
        values = (*noted.values, loss)
        log.add(FaultRecord(noted.iteration, noted.kind, verdict, hosts, values=values))

    suspect = None
    if folder is not None:
        suspect = SuspectStep(folder, place.coordinator, say=say, record=record)
    return Faults(
        config=config,
        say=say,
        log=log,
        host_of=host_names(session),
        save=None if saves is None else saves.finish,
        judge=None if suspect is None else suspect.judge,
        acquit=(lambda iteration, loss: None) if suspect is None else suspect.acquit,
        roll_back=lambda: roll_back(session, saves),
    )


def failure_hooks(
    session: Session,
    *,
    say: Callable[[str], None],
    metrics: Metrics,
    saves: Saves | None,
) -> list[TrainingHooks]:
    """Return what a session does about slow ranks, bad steps, failed saves and replicas that
    differ, in the order in which the loop is to call it.

    Args:
        say: shows one line.
        metrics: where events are kept.
        saves: writes checkpoints; None without --save.
    """
    found = [
        straggler_report(session, say=say, metrics=metrics),
        session_faults(session, say=say, metrics=metrics, saves=saves),
        saves,
        replica_hooks(session, say=say, metrics=metrics),
    ]
    return [hooks for hooks in found if hooks is not None]


def fault_log(session: Session, *, say: Callable[[str], None], metrics: Metrics) -> FaultLog:
    """Return where a session keeps faults: rank 0 writes the lines of the save folder."""
    folder = session.run.config.checkpoint.save if session.place.coordinator.rank == 0 else None
    return FaultLog(folder, record=metrics.write, warn=say)


def host_names(session: Session) -> Callable[[int], str]:
    """Return a function that names the machine of a rank."""
    watch = session.place.watch
    return (lambda rank: socket.gethostname()) if watch is None else watch.host_of


def straggler_report(
    session: Session, *, say: Callable[[str], None], metrics: Metrics
) -> StragglerReport | None:
    """Return what names slow ranks; None if the options do not ask for it.

    Args:
        say: shows one line.
        metrics: where slow ranks are kept.
    """
    failures, place = session.run.config.failures, session.place
    if not failures.log_straggler or session.run.world_size == 1:
        return None
    clock = WaitClock(place.device)
    place.groups.observers.append(clock)

    def record(iteration: int, slow: dict[str, list[float]]) -> None:
        count = float(len(slow))
        numbers = {"slow_ranks": count, "seconds_and_median_by_rank": slow}
        metrics.write("straggler", iteration, numbers)

    return StragglerReport(
        clock,
        place.groups["world"],
        device=place.device,
        factor=failures.straggler_factor,
        host_of=host_names(session),
        say=say,
        record=record,
        alike=_alike(place.groups.grid),
    )


def _alike(grid: RankGrid) -> list[list[int]]:
    """Return the ranks that compute the same: those of a pipeline stage, if it has several."""
    stages = grid.ranks(tuple(axis for axis in DENSE_AXES if axis != "pp"))
    return stages if len(stages[0]) > 1 else [list(range(grid.world_size))]


def roll_back(session: Session, saves: Saves | None) -> Progress | None:
    """Load weights and optimizer of the last checkpoint in the save folder; every rank calls this.

    Returns the checkpoint's progress, None if there is none. The log window stays as it is.
    """
    place, folder = session.place, session.run.config.checkpoint.save
    if saves is not None:
        saves.wait()
    if folder is None:
        return None

    def load(checkpoint: Path) -> Progress | None:
        # What is under way would write over what is loaded.
        session.step.engine.complete_weights()
        return load_session(session, checkpoint)

    window = session.window.to_json()
    found = load_newest(
        folder, load, place.coordinator, fall_back=session.run.config.checkpoint.load_fallback
    )
    if found is None:
        return None
    session.step.engine.start_param_sync()
    session.window.restore(window)
    return found[1] or Progress()


class ReplicaHooks(TrainingHooks):
    """Compares replicas at an interval, before a save of them.

    Args:
        check: compares them after the step of a number, and raises RunStopped if they differ.
        interval: in iterations.
    """

    def __init__(self, check: Callable[[int], None], interval: int) -> None:
        self._check, self._interval = check, interval

    def on_step_end(self, progress: Progress, outcome: StepOutcome) -> None:
        """Compare them if it is time."""
        if progress.iteration % self._interval == 0:
            self._check(progress.iteration)


def replica_hooks(
    session: Session, *, say: Callable[[str], None], metrics: Metrics
) -> ReplicaHooks | None:
    """Return what compares replicas, and log it; None if the options do not ask for it.

    Args:
        say: shows one line.
        metrics: where a difference is kept.
    """
    interval = session.run.config.failures.check_weight_hash_across_dp_replicas_interval
    if interval is None:
        return None
    place = session.place

    log, host_of = fault_log(session, say=say, metrics=metrics), host_names(session)

    def record(iteration: int, found: Sequence[Difference]) -> None:
        tensors = [name for one in found for name in one.tensors]
        log.add(
            FaultRecord(
                iteration,
                "replicas",
                "persistent" if all(one.is_clear for one in found) else "undecided",
                {rank: host_of(rank) for one in found for rank in one.blamed},
                tensors=tensors,
                numbers={"tensors": float(len(tensors))},
            )
        )

    check = ReplicaCheck(
        lambda: weight_chunks(session.model.store) + optimizer_chunks(session.optimizer),
        place.groups["world"],
        device=place.device,
        coordinator=place.coordinator,
        host_of=host_of,
        complete=session.step.engine.complete_weights,
        record=record,
    )
    say(check.line(interval))
    return ReplicaHooks(check, interval)
