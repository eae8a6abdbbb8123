# SPDX-License-Identifier: Apache-2.0
"""Hooks of a session for slow ranks, bad steps and different replicas."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

from megatron.core.dist_checkpointing import TensorChunk, optimizer_chunks, weight_chunks
from megatron.core.process_groups import DENSE_AXES, RankGrid
from megatron.training.checkpointing.find import load_newest
from megatron.training.fault_tolerance.faults import (
    FaultLog,
    Faults,
    SuspectStepFile,
)
from megatron.training.fault_tolerance.replica_check import ReplicaCheck
from megatron.training.fault_tolerance.stragglers import StragglerReport, WaitClock
from megatron.training.hooks import Progress, TrainingHooks
from megatron.training.monitoring.metrics import Metrics
from megatron.training.observation import Observation
from megatron.training.restore import load_session
from megatron.training.save_hooks import Saves
from megatron.training.session import Session


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
