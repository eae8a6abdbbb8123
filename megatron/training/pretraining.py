# SPDX-License-Identifier: Apache-2.0
"""A training run from resolved options to the last checkpoint.

Order: save folder → data → model → engine and optimizer → checkpoint → loop.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.training.config.resolve import ResolvedRun
from megatron.training.data.data_sets import RunInputs, build_data_sets
from megatron.training.distributed_context import DistributedContext
from megatron.training.failure_hooks import arm_stop, failure_hooks
from megatron.training.fault_tolerance.faults import refuse_faulty_hosts
from megatron.training.hooks import Progress, TrainingHooks
from megatron.training.loop import TrainingLoop
from megatron.training.observation import Observation, observing
from megatron.training.restore import restore
from megatron.training.save_hooks import Saves, locked_save_folder, saving
from megatron.training.session import Session, build_session
from megatron.training.startup_report import GatheredBytes, start_lines
from megatron.training.train_steps import open_steps


def pretrain(run: ResolvedRun, context: DistributedContext, inputs: RunInputs) -> None:
    """Execute a run.

    Args:
        run: the run's options.
        context: process groups and coordination of this process.
        inputs: vocabulary and token files, already opened.

    Raises:
        ValueError: an option, a data file or a checkpoint that the user can fix.
        RunStopped: the run had to stop; the message says why.
    """
    with locked_save_folder(run.config.checkpoint.save, context.coordinator):
        refuse_faulty_hosts(run.config.checkpoint.save, context.coordinator)
        data = build_data_sets(run, inputs.vocabulary, token_files=inputs.token_files)
        session = build_session(run, context, inputs.vocabulary, data)
        progress, start = restore(session)
        session = keep_order(session, progress, inputs)
        run_loop(session, progress, start)


def keep_order(session: Session, progress: Progress, inputs: RunInputs) -> Session:
    """Return a session that keeps the sample order of the run's start, with enough samples for the
    remaining steps; record the order's lengths in `progress`.

    The order depends on the length of the run when it started. `progress` comes from a checkpoint
    or is new.
    """
    run, data = session.run, session.data
    stored = {} if run.config.data.reorder_samples else progress.order_lengths
    lengths = {name: stored.get(name) or length for name, length in data.order_lengths.items()}
    steps = max(run.train_iters - progress.iteration, 0)
    end = run.batch_sizes.samples(steps, begin=progress.consumed_samples)
    if lengths != data.order_lengths or end > run.train_samples:
        data = build_data_sets(
            run,
            inputs.vocabulary,
            token_files=inputs.token_files,
            order_lengths=lengths,
            train_samples=end,
        )
    progress.order_lengths = dict(data.order_lengths)
    return replace(session, data=data)


def run_loop(session: Session, progress: Progress, start: str) -> None:
    """Train from `progress` to the end.

    Args:
        start: log line that states the starting point.
    """
    context = session.context
    with (
        open_steps(session, consumed_samples=progress.consumed_samples) as steps,
        observing(session, progress) as observation,
        saving(session, say=observation.display.log, metrics=observation.metrics) as saves,
    ):
        display, metrics = observation.display, observation.metrics
        for line in (*start_lines(session, consumed_samples=progress.consumed_samples), start):
            display.log(line)
        if context.attempt:
            display.log(f"restart {context.attempt} by the launcher")
            metrics.write("start", progress.iteration, {"restarts": context.attempt})
        arm_stop(session)
        loop = TrainingLoop(
            session.run,
            steps,
            hooks=hooks_of(session, observation, saves),
            saves=saves,
            stop=context.stop,
            display=display,
            metrics=metrics,
        )
        loop.train(progress)


def hooks_of(
    session: Session, observation: Observation, saves: Saves | None
) -> list[TrainingHooks]:
    """Return the hooks of a run, in the order in which the loop calls them."""
    return [
        observation,
        GatheredBytes(session.step.engine, observation.display.log),
        *failure_hooks(session, observation, saves),
        *session.hooks,
    ]
