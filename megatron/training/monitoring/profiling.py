# SPDX-License-Identifier: Apache-2.0
"""Profiles of a run's iterations: Chrome traces by torch, a window for Nsight, memory snapshots."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron.core.untrusted_files import replacing
from megatron.training.config import ProfilingConfig

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
    """Profile a run; yields what is to be told the iteration that begins.

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
