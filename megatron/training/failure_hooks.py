# SPDX-License-Identifier: Apache-2.0
"""Hooks of a session for slow ranks, bad steps and different replicas.

Slow ranks (`--log-straggler`): a step takes equally long on every rank, because each rank waits for
the slowest one in its collectives. So the measure is the time of a step minus the time in
collectives, by the clock on a CPU and by stream events on a GPU.
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
from megatron.core.dist_checkpointing import TensorChunk, optimizer_chunks, weight_chunks
from megatron.core.process_groups import DENSE_AXES, Group, RankGrid
from megatron.training.checkpointing.find import load_newest
from megatron.training.fault_tolerance.faults import (
    FaultLog,
    Faults,
    SuspectStepFile,
)
from megatron.training.fault_tolerance.replica_check import ReplicaCheck
from megatron.training.hooks import Progress, StepReport, TrainingHooks
from megatron.training.monitoring.metrics import Metrics
from megatron.training.observation import Observation
from megatron.training.restore import load_session
from megatron.training.save_hooks import Saves
from megatron.training.session import Session


class _Event:
    """A time stamp on a CPU, with the interface of a CUDA event."""

    def __init__(self) -> None:
        self.timestamp = 0.0

    def record(self) -> None:
        self.timestamp = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return 1000.0 * (end.timestamp - self.timestamp)


class WaitClock:
    """An observer of process groups that measures the time in which a rank waits in collectives.

    Args:
        device: the run's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._device = device
        self._in_step = False
        self._waits: list[tuple[Any, Any]] = []
        self._steps: list[tuple[Any, Any]] = []

    def _record_event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True) if self._gpu else _Event()
        event.record()
        return event

    def __call__(self, record: object) -> WaitClock | None:
        """Return the context for the caller's wait in a collective; None outside a step."""
        return self if self._in_step else None

    def __enter__(self) -> None:
        self._begun = self._record_event()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Record one wait."""
        self._waits.append((self._begun, self._record_event()))

    def begin_step(self) -> None:
        """Record the start of a step."""
        self._in_step, self._step_begun = True, self._record_event()

    def end_step(self) -> None:
        """Record the end of a step."""
        self._in_step = False
        self._steps.append((self._step_begun, self._record_event()))

    def compute_seconds(self) -> float:
        """Return the mean compute time of the steps since the last call; 0.0 without steps."""
        if self._gpu:
            torch.cuda.synchronize(self._device)
        steps = sum(begin.elapsed_time(end) for begin, end in self._steps)
        waits = sum(begin.elapsed_time(end) for begin, end in self._waits)
        count = len(self._steps)
        self._steps.clear()
        self._waits.clear()
        return max(0.0, steps - waits) / 1000.0 / count if count else 0.0


def slow_ranks(
    seconds: Sequence[float], factor: float, comparable_ranks: Sequence[Sequence[int]]
) -> dict[int, float]:
    """Return {rank: median} of ranks slower than `factor` times the median, the slowest first.

    The lower median is used, so that one of two ranks can be slow.

    Args:
        comparable_ranks: groups of ranks with equal work, each with its own median.
    """
    medians = {}
    for ranks in comparable_ranks:
        median = statistics.median_low([seconds[rank] for rank in ranks])
        medians.update({rank: median for rank in ranks if 0.0 < factor * median < seconds[rank]})
    slow = sorted(medians, key=lambda rank: -seconds[rank] / medians[rank])
    return {rank: medians[rank] for rank in slow}


def straggler_text(
    seconds: Sequence[float],
    medians: Mapping[int, float],
    host_of: Callable[[int], str],
    *,
    has_stages: bool,
) -> str:
    """Return a line about the slow ranks.

    Args:
        seconds: compute time of every rank per step.
        medians: {slow rank: median}, the slowest first.
        has_stages: whether a rank is compared with the ranks of its pipeline stage.
    """
    slow = list(medians)
    stage_text = "of its stage " if has_stages else ""
    descriptions = ", ".join(
        f"rank {rank} on {host_of(rank)} computes {seconds[rank] / medians[rank]:.1f} times as "
        f"long as the median {stage_text}({1000.0 * seconds[rank]:.1f} ms a step, median "
        f"{1000.0 * medians[rank]:.1f} ms)"
        for rank in slow[:4]
    )
    return f"straggler: {descriptions}" + (f", and {len(slow) - 4} more" if len(slow) > 4 else "")


class StragglerReport(TrainingHooks):
    """Compares the ranks' compute times at every log line, with a gather of one number per rank.

    Args:
        clock: this rank's clock.
        world: all ranks.
        device: the run's device.
        factor: a rank is slow above this multiple of the median.
        host_of: returns a rank's machine.
        say: prints one line.
        metrics: records the seconds per step and the median of slow ranks.
        comparable_ranks: groups of ranks with equal work.
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
        metrics: Metrics,
        comparable_ranks: Sequence[Sequence[int]],
    ) -> None:
        self._comparable_ranks, self._metrics = comparable_ranks, metrics
        self._clock, self._world, self._device, self._factor = clock, world, device, factor
        self._host_of, self._say = host_of, say

    def on_step_begin(self, iteration: int) -> None:
        """Start the clock."""
        self._iteration = iteration
        self._clock.begin_step()

    def on_step_computed(self, progress: Progress, outcome: StepReport, loss_limit: float) -> None:
        """Stop the clock."""
        self._clock.end_step()

    def on_log(self) -> None:
        """Compare the ranks' times since the last call; every rank calls it."""
        local_seconds = torch.tensor(
            [self._clock.compute_seconds()], dtype=torch.float64, device=self._device
        )
        seconds = all_gather(local_seconds, self._world).tolist()
        if medians := slow_ranks(seconds, self._factor, self._comparable_ranks):
            has_stages = len(self._comparable_ranks) > 1
            self._say(straggler_text(seconds, medians, self._host_of, has_stages=has_stages))
            slow = {str(rank): [seconds[rank], median] for rank, median in medians.items()}
            numbers = {"slow_ranks": float(len(slow)), "seconds_and_median_by_rank": slow}
            self._metrics.write("straggler", self._iteration, numbers)


def arm_stop(session: Session) -> None:
    """Enable signals and the time limit to stop the run with a save."""
    failures, save = session.run.config.failures, session.run.config.checkpoint.save
    minutes = failures.exit_duration_in_mins
    # Without a save folder, finishing the step would gain nothing.
    orderly = failures.exit_signal_handler and save is not None
    session.context.stop.arm(
        grace_seconds=failures.exit_grace_seconds if orderly else None,
        limit_seconds=None if minutes is None else 60.0 * minutes,
    )


def failure_hooks(
    session: Session, observation: Observation, saves: Saves | None
) -> list[TrainingHooks]:
    """Return the hooks for slow ranks, bad steps, failed saves and different replicas, in the order
    in which the loop calls them.

    Args:
        observation: prints lines and records events.
        saves: writes checkpoints; None without --save.
    """
    say, metrics, context = observation.display.log, observation.metrics, session.context
    save = session.run.config.checkpoint.save
    # Only rank 0 writes to the save folder.
    folder = save if context.coordinator.rank == 0 else None
    log = FaultLog(folder, record=metrics.write, warn=say)
    host_of = _own_host if context.watch is None else context.watch.host_of
    suspect_file = None
    if save is not None:
        suspect_file = SuspectStepFile(save, context.coordinator, say=say, log=log)
    faults = Faults(
        config=session.run.config,
        say=say,
        log=log,
        host_of=host_of,
        save=None if saves is None else saves.finish,
        suspect_file=suspect_file,
        roll_back=lambda: roll_back(session, saves),
    )
    candidates = [
        straggler_report(session, host_of, say=say, metrics=metrics),
        faults,
        saves,
        replica_check(session, host_of, say=say, log=log),
    ]
    return [hooks for hooks in candidates if hooks is not None]


def _own_host(rank: int) -> str:
    """Return the machine of a single process."""
    return socket.gethostname()


def straggler_report(
    session: Session,
    host_of: Callable[[int], str],
    *,
    say: Callable[[str], None],
    metrics: Metrics,
) -> StragglerReport | None:
    """Return the straggler detector; None if the options do not enable it."""
    failures, context = session.run.config.failures, session.context
    if not failures.log_straggler or session.run.world_size == 1:
        return None
    clock = WaitClock(context.device)
    context.groups.observers.append(clock)
    return StragglerReport(
        clock,
        context.groups["world"],
        device=context.device,
        factor=failures.straggler_factor,
        host_of=host_of,
        say=say,
        metrics=metrics,
        comparable_ranks=_comparable_ranks(context.groups.grid),
    )


def _comparable_ranks(grid: RankGrid) -> list[list[int]]:
    """Return groups of ranks with equal work: the pipeline stages, if stages have several ranks."""
    stages = grid.ranks(tuple(axis for axis in DENSE_AXES if axis != "pp"))
    return stages if len(stages[0]) > 1 else [list(range(grid.world_size))]


def roll_back(session: Session, saves: Saves | None) -> Progress | None:
    """Load weights and optimizer of the last checkpoint in the save folder; every rank calls this.

    Returns the checkpoint's progress, None without a checkpoint. The log window is unchanged.
    """
    checkpoint = session.run.config.checkpoint
    if saves is not None:
        saves.wait()
    if checkpoint.save is None:
        return None

    def load(folder: Path) -> Progress | None:
        # A pending weight all-gather would overwrite the loaded weights.
        session.step.engine.complete_weights()
        return load_session(session, folder)

    window = session.window.to_json()
    loaded = load_newest(
        checkpoint.save, load, session.context.coordinator, fall_back=checkpoint.load_fallback
    )
    if loaded is None:
        return None
    session.step.engine.start_param_sync()
    session.window.restore(window)
    return loaded[1] or Progress()


def replica_check(
    session: Session,
    host_of: Callable[[int], str],
    *,
    say: Callable[[str], None],
    log: FaultLog,
) -> ReplicaCheck | None:
    """Return the replica check, and log it; None if the options do not enable it."""
    interval = session.run.config.failures.check_weight_hash_across_dp_replicas_interval
    if interval is None:
        return None

    def chunks() -> list[TensorChunk]:
        optimizer = optimizer_chunks(session.optimizer, scalars=False)
        return weight_chunks(session.model.store) + optimizer

    check = ReplicaCheck(
        chunks,
        session.context.groups["world"],
        interval=interval,
        device=session.context.device,
        coordinator=session.context.coordinator,
        host_of=host_of,
        complete=session.step.engine.complete_weights,
        log=log,
    )
    say(check.line())
    return check
