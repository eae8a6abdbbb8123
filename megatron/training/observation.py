# SPDX-License-Identifier: Apache-2.0
"""Observe a training run: display, metrics writers, profiler and scheduled garbage collection.

Python's cyclic garbage collector can run on a schedule, so that all ranks pause in the same
iterations. Otherwise it runs at a different time on each rank, and all other ranks wait for that
rank at the next collective.

Profiles are Chrome traces by torch, a capture range for Nsight, and memory snapshots.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.cli.standard_streams import errors_of_streams
from megatron.core.comm import all_reduce
from megatron.core.device import peak_memory_bytes
from megatron.core.untrusted_files import replacing
from megatron.training.config import LoggingConfig, ProfilingConfig
from megatron.training.hooks import Progress, TrainingHooks
from megatron.training.monitoring.log_line import Display, open_display
from megatron.training.monitoring.metrics import (
    Metrics,
    MetricsWriter,
    TrackedRun,
    mlflow_writer,
    open_metrics,
    wandb_writer,
    without_secrets,
)
from megatron.training.session import Session


def run_metrics(
    config: LoggingConfig,
    *,
    options: Mapping[str, Any],
    resume_iteration: int,
    warn: Callable[[str], None],
    now: datetime.datetime,
    rewritten_kinds: Collection[str] = (),
) -> tuple[Metrics, str]:
    """Open the metrics file and every other writer that the options enable.

    Args:
        config: resolved logging options.
        options: all options by flag name, for the trackers.
        resume_iteration: iteration the run resumes from.
        warn: prints one line; secrets are masked first.
        now: time for the name of the default folder.
        rewritten_kinds: kinds of events at `resume_iteration` that the resumed run writes again.

    Returns:
        The writers, and the path of the metrics file.
    """
    default = Path("runs", f"{now:%Y-%m-%dT%H-%M-%S}-{os.getpid()}", "metrics.jsonl")
    path = config.metrics_file or str(default)
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
        rewritten_kinds=rewritten_kinds,
        trackers=trackers,
    )
    return metrics, path


@contextlib.contextmanager
def scheduled_collection(scheduled: bool, interval: int) -> Iterator[Callable[[int], None]]:
    """Disable the automatic garbage collector and collect every `interval` iterations instead.

    Args:
        scheduled: False leaves the automatic collector on.
        interval: iterations between collections; 0 = none.

    Yields a function to call before each iteration.
    """
    if not scheduled:
        yield lambda iteration: None  # the automatic collector stays on
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


class Observation(TrainingHooks):
    """Profiles, collects garbage, and records the end of a run.

    Args:
        session: the training session.
        callbacks: each is called with the iteration number before the iteration.
        display: lines and the progress bar; silent on all ranks except the last.
        metrics: metrics writers; empty on all ranks except the last.
    """

    def __init__(
        self,
        session: Session,
        callbacks: Sequence[Callable[[int], None]],
        *,
        display: Display,
        metrics: Metrics,
    ) -> None:
        self._session, self._callbacks = session, callbacks
        self.display, self.metrics = display, metrics
        self._reported_streams: set[str] = set()

    def on_step_begin(self, iteration: int) -> None:
        """Call the callbacks, record broken output streams, and publish this rank's iteration."""
        for callback in self._callbacks:
            callback(iteration)
        # If stdout and stderr are the same broken pipe, metrics are the only way to report it.
        for name, error in errors_of_streams().items():
            if name not in self._reported_streams:
                self._reported_streams.add(name)
                values = {f"{name}_errno": float(error.errno or 0)}
                self.metrics.write("output", iteration, values)
        if self._session.context.watch is not None:
            self._session.context.watch.iteration = iteration

    def on_train_end(self, progress: Progress) -> None:
        """Record the peak memory and the statistics of recomputed steps."""
        context = self._session.context
        peak = torch.tensor(
            peak_memory_bytes(context.device), dtype=torch.float64, device=context.device
        )
        max_peak = all_reduce(peak, context.groups["world"], op="max")
        numbers, line = self._session.step.replayer.stats()
        values = {"peak_memory_bytes": float(max_peak), **numbers}
        self.metrics.write("end", progress.iteration, values)
        if line is not None:
            self.display.log(line)


@contextlib.contextmanager
def observing(session: Session, progress: Progress) -> Iterator[Observation]:
    """Open display, metrics and profiler of a run that starts at `progress`; close them on exit.

    Raises:
        ValueError: the device does not support a profiling option.
    """
    config, context = session.run.config, session.context
    # The last rank prints and records, as in Megatron: the last pipeline stage has the loss.
    is_log_rank = context.groups.rank == session.run.world_size - 1
    display = open_display(
        config.logging.progress,
        enabled=is_log_rank,
        total=session.run.train_iters,
        completed=progress.iteration,
    )
    training = config.training
    collection = scheduled_collection(training.manual_gc, training.manual_gc_interval)

    def warn(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    profiler_context = profiling(
        config.profiling,
        rank=context.groups.rank,
        device=context.device,
        # A profiled rank may not be the rank that logs.
        log=display.log if is_log_rank else warn,
        wait_for_communication=session.step.engine.wait,
    )
    with contextlib.ExitStack() as stack:
        profile = stack.enter_context(profiler_context)
        metrics, path = Metrics({}, warn), None
        if is_log_rank:
            metrics, path = run_metrics(
                config.logging,
                options=session.metadata.config,
                resume_iteration=progress.iteration,
                # an earlier start may have run the pending validation and crashed before its save
                rewritten_kinds=("validation",) if progress.validation_pending else (),
                warn=warn,
                now=datetime.datetime.now(),
            )
        stack.callback(metrics.close)
        stack.enter_context(display)
        collect = stack.enter_context(collection)
        if config.logging.metrics_file is None:
            display.log(f"metrics in {path}")
        yield Observation(session, (collect, profile), display=display, metrics=metrics)


#: Maximum number of allocations in the memory history.
HISTORY_ENTRIES = 100_000


class Profiler:
    """Profiles the iterations that the options select; used through `profiling`.

    Args:
        config: resolved profiling options.
        rank: rank of this process, for file names.
        device: compute device.
        log: prints one line.
        wait_for_communication: waits for pending collectives. On gloo, torch's profiler crashes if
            it starts or stops while a collective is pending.
    """

    def __init__(
        self,
        config: ProfilingConfig,
        rank: int,
        *,
        device: torch.device,
        log: Callable[[str], None],
        wait_for_communication: Callable[[], None],
    ) -> None:
        self._config, self._rank, self._device, self._log = config, rank, device, log
        self._wait_for_communication = wait_for_communication
        self._running: Any = None

    def on_iteration(self, iteration: int) -> None:
        """Start or stop the profile at the window's edges; called before iteration `iteration`,
        counted from 1."""
        completed = iteration - 1
        inside = self._config.profile_step_start <= completed < self._config.profile_step_end
        if inside and self._running is None:
            self._wait_for_communication()
            self._start()
        elif not inside and self._running is not None:
            self._wait_for_communication()
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
        """Stop a running profile and write it."""
        profile, self._running = self._running, None
        if profile is None:
            return
        profile.stop()
        if not self._config.use_pytorch_profiler:
            return
        begin, end = self._config.profile_step_start + 1, self._config.profile_step_end
        path = self._folder() / f"trace_rank{self._rank}_iterations{begin}-{end}.json"
        _write(path, lambda draft: profile.export_chrome_trace(str(draft)), "profile", self._log)

    def _folder(self) -> Path:
        assert self._config.profile_dir is not None, "the run must be resolved"
        return Path(self._config.profile_dir)

    def write_memory(self) -> None:
        """Write the memory history."""
        base_path = Path(
            self._config.memory_snapshot_path or self._folder() / "memory_snapshot.pickle"
        )
        path = base_path.with_name(f"{base_path.stem}_rank{self._rank}{base_path.suffix}")
        _write(
            path, lambda draft: torch.cuda.memory._dump_snapshot(str(draft)), "memory", self._log
        )


def _write(
    path: Path, write: Callable[[Path], object], label: str, log: Callable[[str], None]
) -> None:
    """Write a file; log an error instead of raising, so that a full disk does not stop the run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft:
            write(draft)
        log(f"{label} in {path}")
    except (OSError, RuntimeError) as error:
        log(f"{label}: cannot write {path}: {' '.join(str(error).split())}; training continues")


def check_device(config: ProfilingConfig, device: torch.device) -> None:
    """Raise ValueError for options that the device does not support."""
    if device.type == "cuda":
        return
    if config.profile and not config.use_pytorch_profiler:
        raise ValueError(
            "--profile alone marks iterations for Nsight, which profiles GPUs only: add "
            "--use-pytorch-profiler to profile on a CPU"
        )
    if config.record_memory_history:
        raise ValueError(
            "--record-memory-history records GPU memory: drop it on a CPU, where the log line "
            "shows the memory in use"
        )


@contextlib.contextmanager
def profiling(
    config: ProfilingConfig,
    *,
    rank: int,
    device: torch.device,
    log: Callable[[str], None],
    wait_for_communication: Callable[[], None] = lambda: None,
) -> Iterator[Callable[[int], None]]:
    """Profile a run; yields a function to call before each iteration.

    Args:
        wait_for_communication: waits for pending collectives.

    Raises:
        ValueError: the device does not support the options.
    """
    check_device(config, device)
    if rank not in config.profile_ranks or not (config.profile or config.record_memory_history):
        yield lambda iteration: None
        return
    profiler = Profiler(
        config, rank, device=device, log=log, wait_for_communication=wait_for_communication
    )
    if config.record_memory_history:
        torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES)
    try:
        yield profiler.on_iteration if config.profile else lambda iteration: None
        wait_for_communication()
    finally:
        profiler.stop()
        if config.record_memory_history:
            profiler.write_memory()
            torch.cuda.memory._record_memory_history(enabled=None)
