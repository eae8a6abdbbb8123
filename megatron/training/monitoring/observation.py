# SPDX-License-Identifier: Apache-2.0
"""What watches a run while it trains: display, metrics writers, profiler, garbage collection.

Metrics writers are opened from the run's options. Profiles of iterations are Chrome traces by
torch, a window for Nsight, and memory snapshots. Python's cyclic garbage collector runs on a
schedule, so that all ranks pause in the same iterations; otherwise it runs at a different moment on
each rank, and all others wait for that rank at the next collective.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.cli.standard_streams import errors_of_streams
from megatron.core.comm import all_reduce
from megatron.core.device import peak_memory_bytes
from megatron.core.untrusted_files import replacing
from megatron.training.config import LoggingConfig, ProfilingConfig
from megatron.training.hooks import TrainingHooks
from megatron.training.monitoring.log_line import Display, open_display
from megatron.training.monitoring.metrics import (
    Metrics,
    MetricsWriter,
    TrackedRun,
    open_metrics,
    without_secrets,
)
from megatron.training.monitoring.writers import mlflow_writer, wandb_writer
from megatron.training.progress_state import Progress
from megatron.training.session import Session


def new_metrics_file(now: datetime.datetime) -> str:
    """Return where a run that names no folder records: a folder of its own under runs/."""
    return str(Path("runs", f"{now:%Y-%m-%dT%H-%M-%S}-{os.getpid()}", "metrics.jsonl"))


def run_metrics(
    config: LoggingConfig,
    *,
    options: Mapping[str, Any],
    resume_iteration: int,
    warn: Callable[[str], None],
    now: datetime.datetime,
    again: Collection[str] = (),
) -> tuple[Metrics, str]:
    """Open every writer that a run's options ask for; the metrics file always.

    Args:
        config: of the run, resolved.
        options: all its options by flag name, for the trackers.
        resume_iteration: iteration the run goes on from.
        warn: prints one line; secrets are taken out of what it is given.
        now: names the folder of a run that has none.
        again: kinds of events of that iteration that the run is about to write once more.

    Returns:
        The writers, and the path of the metrics file.
    """
    path = config.metrics_file or new_metrics_file(now)
    tracked = TrackedRun(
        options=options, folder=Path(path).parent, resume_iteration=resume_iteration
    )
    trackers: dict[str, Callable[[], Callable[[], MetricsWriter]]] = {}
    if config.wandb_project is not None:
        trackers["W&B"] = lambda: wandb_writer(config, tracked)
    if config.mlflow_experiment is not None:
        trackers["MLflow"] = lambda: mlflow_writer(config, tracked)
    metrics = open_metrics(
        metrics_file=path,
        tensorboard_dir=config.tensorboard_dir,
        resume_iteration=resume_iteration,
        warn=without_secrets(warn),
        again=again,
        trackers=trackers,
    )
    return metrics, path


#: Allocations that the memory history keeps.
HISTORY_ENTRIES = 100_000


class Profiler:
    """Profiles the iterations that the options name; used through `profiling`.

    Args:
        config: resolved.
        rank: of this process, for file names.
        device: where it computes.
        say: shows one line.
        settle: waits for the communication under way. torch's profiler must be started and stopped
            without any: on gloo it crashes.
    """

    def __init__(
        self,
        config: ProfilingConfig,
        rank: int,
        *,
        device: torch.device,
        say: Callable[[str], None],
        settle: Callable[[], None],
    ) -> None:
        self._config, self._rank, self._device, self._say = config, rank, device, say
        self._settle = settle
        self._running: Any = None

    def on_iteration(self, iteration: int) -> None:
        """Start or stop, if the iteration that begins (from 1) is the first in or after the
        window."""
        done = iteration - 1
        inside = self._config.profile_step_start <= done < self._config.profile_step_end
        if inside and self._running is None:
            self._settle()
            self._start()
        elif not inside and self._running is not None:
            self._settle()
            self.stop()

    def _start(self) -> None:
        if not self._config.use_pytorch_profiler:
            torch.cuda.profiler.start()
            self._running = torch.cuda.profiler
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._running = torch.profiler.profile(activities=activities, record_shapes=True)
        self._running.start()

    def stop(self) -> None:
        """End the profile and write it, if one runs."""
        running, self._running = self._running, None
        if running is None:
            return
        running.stop()
        if not self._config.use_pytorch_profiler:
            return
        first, last = self._config.profile_step_start + 1, self._config.profile_step_end
        path = self._folder() / f"trace_rank{self._rank}_iterations{first}-{last}.json"
        _write(path, lambda draft: running.export_chrome_trace(str(draft)), "profile", self._say)

    def _folder(self) -> Path:
        assert self._config.profile_dir is not None, "the run must be resolved"
        return Path(self._config.profile_dir)

    def write_memory(self) -> None:
        """Write the memory history so far."""
        plain = Path(self._config.memory_snapshot_path or self._folder() / "memory_snapshot.pickle")
        path = plain.with_name(f"{plain.stem}_rank{self._rank}{plain.suffix}")
        _write(
            path, lambda draft: torch.cuda.memory._dump_snapshot(str(draft)), "memory", self._say
        )


def _write(
    path: Path, write: Callable[[Path], object], what: str, say: Callable[[str], None]
) -> None:
    """Write a file; a full disk costs the file, not the run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft:
            write(draft)
        say(f"{what} in {path}")
    except (OSError, RuntimeError) as error:
        say(f"{what}: cannot write {path}: {' '.join(str(error).split())}; training goes on")


def check_device(config: ProfilingConfig, device: torch.device) -> None:
    """Raise ValueError for what a device cannot do."""
    if device.type == "cuda":
        return
    if config.profile and not config.use_pytorch_profiler:
        raise ValueError(
            "--profile alone marks iterations for Nsight, which sees GPUs only: add "
            "--use-pytorch-profiler to profile on a CPU"
        )
    if config.record_memory_history:
        raise ValueError(
            "--record-memory-history is of a GPU's memory: drop it on a CPU, where the log line "
            "shows the memory in use"
        )


@contextlib.contextmanager
def profiling(
    config: ProfilingConfig,
    *,
    rank: int,
    device: torch.device,
    say: Callable[[str], None],
    settle: Callable[[], None] = lambda: None,
) -> Iterator[Callable[[int], None]]:
    """Profile a run; yields a function to call with the iteration that begins.

    Args:
        settle: waits for the communication under way.

    Raises:
        ValueError: the device has no such profile.
    """
    check_device(config, device)
    if rank not in config.profile_ranks or not (config.profile or config.record_memory_history):
        yield lambda iteration: None
        return
    profiler = Profiler(config, rank, device=device, say=say, settle=settle)
    if config.record_memory_history:
        torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES)
    try:
        yield profiler.on_iteration if config.profile else lambda iteration: None
        settle()
    finally:
        profiler.stop()
        if config.record_memory_history:
            profiler.write_memory()
            torch.cuda.memory._record_memory_history(enabled=None)


def _leave(iteration: int) -> None:
    """Leave the collector to itself."""


@contextlib.contextmanager
def scheduled_collection(scheduled: bool, interval: int) -> Iterator[Callable[[int], None]]:
    """Turn the automatic collector off for a run, and collect at its iterations instead.

    Args:
        scheduled: whether to do so at all.
        interval: iterations between collections; 0 = none.

    Yields a function to call with the iteration that begins.
    """
    if not scheduled:
        yield _leave
        return

    def begin(iteration: int) -> None:
        if interval and iteration % interval == 0:
            gc.collect()

    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield begin
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Where a run shows and records what it does.

    Args:
        display: lines and the progress bar; silent on all ranks but the last.
        metrics: the writers of numbers; none on those ranks.
        hooks: what is done about them in every iteration, and at the end.
    """

    display: Display
    metrics: Metrics
    hooks: TrainingHooks


class ObservationHooks(TrainingHooks):
    """Profiles, collects garbage and records the end of a run.

    Args:
        session: whose.
        watching: each is called with the iteration that begins.
        display, metrics: where the run shows and records.
    """

    def __init__(
        self,
        session: Session,
        watching: Sequence[Callable[[int], None]],
        *,
        display: Display,
        metrics: Metrics,
    ) -> None:
        self._session, self._watching = session, watching
        self._display, self._metrics = display, metrics
        self._broken: set[str] = set()

    def on_step_begin(self, iteration: int) -> None:
        """Let those who watch, and the other ranks, know where this one is."""
        for watch in self._watching:
            watch(iteration)
        # Where stdout and stderr are one pipe, nobody can be told in words.
        for name, error in errors_of_streams().items():
            if name not in self._broken:
                self._broken.add(name)
                values = {f"{name}_errno": float(error.errno or 0)}
                self._metrics.write("output", iteration, values)
        if self._session.place.watch is not None:
            self._session.place.watch.iteration = iteration

    def on_train_end(self, progress: Progress) -> None:
        """Record how much memory the run took, and what comparing its steps found."""
        place = self._session.place
        peak = torch.tensor(
            peak_memory_bytes(place.device), dtype=torch.float64, device=place.device
        )
        most = all_reduce(peak, place.groups["world"], op="max")
        numbers, line = self._session.step.replayer.stats()
        values = {"peak_memory_bytes": float(most), **numbers}
        self._metrics.write("end", progress.iteration, values)
        if line is not None:
            self._display.log(line)


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

        hooks = ObservationHooks(session, (collect, profiled), display=display, metrics=metrics)
        yield Observation(display=display, metrics=metrics, hooks=hooks)
