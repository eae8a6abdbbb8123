# SPDX-License-Identifier: Apache-2.0
"""Profiles of a run: Chrome traces by torch, a capture range for Nsight, and memory snapshots."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron.core.untrusted_files import replacing
from megatron.training.config import ProfilingConfig

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
        first_iteration, last_iteration = (
            self._config.profile_step_start + 1,
            self._config.profile_step_end,
        )
        path = (
            self._folder()
            / f"trace_rank{self._rank}_iterations{first_iteration}-{last_iteration}.json"
        )
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
