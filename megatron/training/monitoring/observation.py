# SPDX-License-Identifier: Apache-2.0
"""What watches a run while it trains: display, metrics writers, profiler, garbage collection."""

from __future__ import annotations

import contextlib
import datetime
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron.training.garbage import scheduled_collection
from megatron.training.monitoring.metrics import Metrics
from megatron.training.monitoring.profiling import profiling
from megatron.training.monitoring.progress import Display, open_display
from megatron.training.monitoring.run_metrics import run_metrics
from megatron.training.progress_state import Progress
from megatron.training.session import Session
from megatron.training.standard_streams import errors_of_streams


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Where a run shows and records what it does.

    Args:
        display: lines and the progress bar; silent on all ranks but the last.
        metrics: the writers of numbers; none on those ranks.
        on_iteration: to be told the iteration that begins.
    """

    display: Display
    metrics: Metrics
    on_iteration: Callable[[int], None]


@contextlib.contextmanager
def observing(session: Session, progress: Progress) -> Iterator[Observation]:
    """Open what watches a run that goes on from `progress`, and close it at the end.

    Raises:
        ValueError: an option that cannot take effect here.
    """
    config, place = session.run.config, session.place
    # The last rank shows and records, as readers of Megatron's logs expect.
    shows = place.groups.rank == session.run.world_size - 1
    display = open_display(
        config.logging.progress, shows=shows, total=session.run.train_iters, done=progress.iteration
    )
    training = config.training
    collection = scheduled_collection(training.manual_gc, training.manual_gc_interval)

    def warn(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    profile = profiling(
        config.profiling,
        rank=place.groups.rank,
        device=place.device,
        # Profiling ranks need not be the one that shows.
        say=display.log if shows else warn,
        settle=session.step.engine.wait,
    )
    with contextlib.ExitStack() as stack:
        profiled = stack.enter_context(profile)
        metrics, path = Metrics({}, warn), None
        if shows:
            metrics, path = run_metrics(
                config.logging,
                options=session.facts.config,
                resume_iteration=progress.iteration,
                # one that is pending may have been made by a start that did not come to a save
                again=("validation",) if progress.validation_pending else (),
                warn=warn,
                now=datetime.datetime.now(),
            )
        stack.callback(metrics.close)
        stack.enter_context(display)
        collect = stack.enter_context(collection)
        if config.logging.metrics_file is None:
            display.log(f"metrics in {path}")

        broken: set[str] = set()

        def on_iteration(iteration: int) -> None:
            collect(iteration)
            profiled(iteration)
            # Where stdout and stderr are one pipe, nobody can be told in words.
            for name, error in errors_of_streams().items():
                if name not in broken:
                    broken.add(name)
                    metrics.write("output", iteration, {f"{name}_errno": float(error.errno or 0)})

        yield Observation(display=display, metrics=metrics, on_iteration=on_iteration)
