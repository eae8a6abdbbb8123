# SPDX-License-Identifier: Apache-2.0
"""What a session does about faults: who ends it, what a bad step leads to, where it rolls back
to."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron.core.process_groups import DENSE_AXES, RankGrid
from megatron.training.checkpoint_io import load_run
from megatron.training.failures.fault_log import FaultLog, FaultRecord
from megatron.training.failures.faults import Faults
from megatron.training.failures.straggler import StragglerReport, WaitClock
from megatron.training.failures.suspect_step import Suspect, SuspectStep
from megatron.training.monitoring.metrics import Metrics
from megatron.training.monitoring.step_window import StepOutcome
from megatron.training.newest_checkpoint import load_newest
from megatron.training.progress_state import Progress
from megatron.training.saves import Saves
from megatron.training.session import Session

TakeStep = Callable[[float, float, float], StepOutcome]


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


def fault_log(session: Session, *, say: Callable[[str], None], metrics: Metrics) -> FaultLog:
    """Return where a session keeps faults: rank 0 writes the lines of the save folder."""
    folder = session.run.config.checkpoint.save if session.place.coordinator.rank == 0 else None
    return FaultLog(folder, record=metrics.write, warn=say)


def host_names(session: Session) -> Callable[[int], str]:
    """Return a function that names the machine of a rank."""
    watch = session.place.watch
    return (lambda rank: socket.gethostname()) if watch is None else watch.host_of


def timed_steps(
    session: Session, take_step: TakeStep, *, say: Callable[[str], None], metrics: Metrics
) -> tuple[TakeStep, Callable[[], None]]:
    """Return how to take steps, and what to do at a log line, so that slow ranks are named.

    Args:
        take_step: as it is without that; returned as it is if the options do not ask for it.
        say: shows one line.
        metrics: where slow ranks are kept.
    """
    failures, place = session.run.config.failures, session.place
    if not failures.log_straggler or session.run.world_size == 1:
        return take_step, lambda: None
    clock = WaitClock(place.device)
    place.groups.observers.append(clock)

    def timed(lr: float, weight_decay: float, loss_limit: float) -> StepOutcome:
        with clock.step():
            return take_step(lr, weight_decay, loss_limit)

    def record(slow: dict[str, list[float]]) -> None:
        assert place.watch is not None
        count = float(len(slow))
        numbers = {"slow_ranks": count, "seconds_and_median_by_rank": slow}
        metrics.write("straggler", place.watch.iteration, numbers)

    report = StragglerReport(
        clock,
        place.groups["world"],
        device=place.device,
        factor=failures.straggler_factor,
        host_of=host_names(session),
        say=say,
        record=record,
        alike=_alike(place.groups.grid),
    )
    return timed, report


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
        return load_run(
            checkpoint,
            store=session.model.store,
            optimizer=session.optimizer,
            window=session.window,
            facts=session.facts,
            coordinator=place.coordinator,
        )

    window = session.window.to_json()
    found = load_newest(
        folder, load, place.coordinator, fall_back=session.run.config.checkpoint.load_fallback
    )
    if found is None:
        return None
    session.step.engine.start_param_sync()
    session.window.restore(window)
    return found[1] or Progress()
