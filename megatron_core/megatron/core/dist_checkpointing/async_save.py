# SPDX-License-Identifier: Apache-2.0
"""Asynchronous saves: checkpoints written while training continues.

    saver = AsyncSaver(root, chunks, coordinator=...)   plans once: a run's layout is constant
    saver.save(iteration, extra)                        starts a save; returns at once
    ...forward, backward...
    saver.synchronize_staging()                         before the tensors change
    saver.finished()                                    reports of finished saves, at any time

Every rank makes these calls. `StagingBuffer` copies exactly the bytes that a rank writes, in their
layout on disk, into shared memory that is allocated once. On the CPU a thread copies without
holding the trainer's GIL; on a GPU a separate stream copies into pinned memory. In both cases the
tensors must not change before `synchronize_staging` has returned.

The thread coordinates with the other ranks as a synchronous save does (`save.CoordinatedSave`).
`WriterProcess` starts, commands and monitors a separate process (`writer_process`), which takes the
steps of the save (`SaveSteps`), so digests and writes do not need the trainer's GIL. A
checkpoint appears when the shards of all ranks are on disk. A failure is reported, never raised:
training continues, and the next save starts from scratch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.core.boxes import TensorChunk
from megatron.core.device import (
    current_stream,
    new_event,
    new_stream,
    on_stream,
    pin_in_place,
    runs_ahead,
    unpin_in_place,
)
from megatron.core.dist_checkpointing.coordinator import Coordinator
from megatron.core.dist_checkpointing.manifest import check_extra
from megatron.core.dist_checkpointing.run_folder import checkpoint_folder, remove_temporary
from megatron.core.dist_checkpointing.safetensors_file import as_bytes
from megatron.core.dist_checkpointing.save import BLOCK_BYTES, CoordinatedSave
from megatron.core.dist_checkpointing.save_plan import (
    RankShard,
    check_updates_complete,
    plan_shard,
)
from megatron.core.dist_checkpointing.shard_format import CheckpointError, describe
from megatron.core.dist_checkpointing.writer_process import receive, send

#: Chunks of at least this many bytes are copied one by one. Smaller chunks are gathered, many per
#: system call: 5,000 chunks of 16 bytes take 0.6 ms gathered and 5 ms one by one.
MIN_SINGLE_COPY_BYTES = 64 << 10

#: Buffers that the kernel accepts in one call (IOV_MAX).
MAX_GATHERED_BUFFERS = 1024


class StagingBuffer:
    """Shared memory with one rank's shard.

    Args:
        shard: the shard; each `begin` starts a copy of its tensors.
    """

    def __init__(self, shard: RankShard) -> None:
        self.bytes, self._header_bytes = shard.plan.total_bytes, shard.plan.header_bytes
        self.fd = _shared_memory()
        try:
            os.ftruncate(self.fd, self.bytes)
            self._map = mmap.mmap(self.fd, self.bytes)
        except OSError as error:
            raise ValueError(
                f"saving in the background needs {self.bytes} bytes of shared memory, which "
                f"the machine refuses ({error.strerror}): raise its limits, or save "
                "synchronously"
            ) from error
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        os.pwrite(self.fd, shard.header, 0)
        devices = {chunk.tensor.device for chunk in shard.source_chunks} - {torch.device("cpu")}
        self._device = devices.pop() if devices else torch.device("cpu")
        if self._on_gpu:
            pin_in_place(self._memory)
        self._stream, self._copied = new_stream(self._device), new_event(self._device)
        self._from_device: list[Callable[[], object]] = []
        self._from_host: list[Callable[[], object]] = []
        self._list_copies(shard)
        self._settled = threading.Event()
        self._settled.set()

    @property
    def _on_gpu(self) -> bool:
        return runs_ahead(self._device)

    def prefault(self) -> None:
        """Fault in all pages, so that the first copy is as fast as later copies."""
        size = self.bytes - self._header_bytes
        ctypes.memset(self._memory.data_ptr() + self._header_bytes, 0, size)

    def begin(self) -> None:
        """Start a copy, on the trainer's thread; copies from a GPU are enqueued on a stream."""
        self._settled.clear()
        if not self._on_gpu:
            return
        self._stream.wait_stream(current_stream(self._device))
        with on_stream(self._stream):
            for copy in self._from_device:
                copy()
        self._copied.record(self._stream)

    def complete_copy(self) -> None:
        """Complete the copy, on another thread; always called after `begin`."""
        try:
            for copy in self._from_host:
                copy()
        finally:
            self._settled.set()
        if self._on_gpu:
            self._copied.synchronize()

    def release(self) -> None:
        """Unblock `synchronize_staging`, even if the copy failed."""
        self._settled.set()

    def synchronize_staging(self) -> None:
        """Wait until the tensors may change.

        On a GPU the current stream waits, not the host: only work that is enqueued on that stream
        afterwards may change the tensors.
        """
        if self._on_gpu:
            current_stream(self._device).wait_event(self._copied)
        self._settled.wait()

    def close(self) -> None:
        """Close the descriptor; the memory is freed with its last mapping."""
        if self.fd >= 0:
            if self._on_gpu:
                unpin_in_place(self._memory)
            os.close(self.fd)
            self.fd = -1

    def _list_copies(self, shard: RankShard) -> None:
        """List the copies that fill the memory; adjacent small chunks share one copy."""
        sources: list[memoryview] = []
        for chunk, planned in zip(shard.source_chunks, shard.plan.chunks, strict=True):
            source, size = chunk.tensor.detach(), planned.end - planned.begin
            on_host = not runs_ahead(source.device)
            if on_host and source.is_contiguous() and size < MIN_SINGLE_COPY_BYTES:
                sources.append(as_bytes(source))
                continue
            self._from_host += self._gathers(sources, planned.begin)
            sources = []
            target = self._memory[planned.begin : planned.end]
            if on_host and source.is_contiguous():
                copy_bytes = partial(ctypes.memmove, target.data_ptr(), source.data_ptr(), size)
                self._from_host.append(copy_bytes)
            elif size:
                target = target.view(source.dtype).view(source.shape)
                copy = partial(target.copy_, source, non_blocking=True)
                (self._from_host if on_host else self._from_device).append(copy)
        self._from_host += self._gathers(sources, shard.plan.total_bytes)

    def _gathers(self, sources: Sequence[memoryview], end: int) -> Iterator[Callable[[], object]]:
        """Yield calls that write adjacent chunks; the last chunk ends at byte `end`."""
        begin = end - sum(map(len, sources))
        for i in range(0, len(sources), MAX_GATHERED_BUFFERS):
            batch = sources[i : i + MAX_GATHERED_BUFFERS]
            yield partial(self._gather, batch, begin)
            begin += sum(map(len, batch))

    def _gather(self, batch: Sequence[memoryview], begin: int) -> None:
        num_bytes = sum(map(len, batch))
        if os.pwritev(self.fd, batch, begin) != num_bytes:
            raise OSError(f"shared memory took less than {num_bytes} bytes")


def _shared_memory() -> int:
    """Return a descriptor of anonymous shared memory."""
    if sys.platform == "linux":
        return os.memfd_create("megatron-checkpoint", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


#: Seconds within which a new writer process must report that it runs; it imports little.
START_SECONDS = 60.0


class WriterProcess:
    """A child process that writes shards (`writer_process`); restarted after it has died.

    The kernel kills the child when the thread that started it ends (PR_SET_PDEATHSIG), so all calls
    except `kill` come from the saver's thread.

    Args:
        memory_fd: descriptor of the shared memory with the shard.
        root: folder of all checkpoints.
        timeout_seconds: a writer without a heartbeat for this long is killed.
        niceness: niceness of the child relative to the trainer, 0 to 19.
    """

    def __init__(
        self, memory_fd: int, root: Path, *, timeout_seconds: float, niceness: int
    ) -> None:
        self._memory_fd, self._root = memory_fd, root
        self._timeout_seconds, self._niceness = timeout_seconds, niceness
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._killed = False
        self.starts = 0
        """Number of writer processes started so far."""

    @property
    def pid(self) -> int | None:
        """The child's process id, None without a child."""
        return None if self._process is None else self._process.pid

    def ensure_running(self) -> bool:
        """Start a writer if none is running. Return whether one was started.

        Raises:
            CheckpointError: the writer cannot be started, or `kill` has been called.
        """
        if self._killed:
            raise CheckpointError("the run is ending: no further save starts")
        if self._process is not None and self._process.poll() is None:
            return False
        self.close()
        parent_socket, child_socket = socket.socketpair()
        # The child gets this process's sys.path, but does not import its main module.
        program = (
            f"import sys; sys.path[:] = {json.dumps(sys.path)}; "
            "from megatron.core.dist_checkpointing.writer_process import main; "
            f"main({child_socket.fileno()}, {self._memory_fd}, {str(self._root)!r}, "
            f"niceness={self._niceness})"
        )
        try:
            with child_socket:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", program],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(child_socket.fileno(), self._memory_fd),
                )
            self._socket = parent_socket
            self.starts += 1
            self._answer(START_SECONDS, "start")
        except OSError as error:
            raise CheckpointError(f"cannot start a writer process: {error.strerror}") from error
        return True

    def call(self, command: str, **arguments: Any) -> Any:
        """Execute a command in the writer process and return its result.

        Raises:
            CheckpointError: the command failed, or the writer died or did not answer.
        """
        assert self._socket is not None, "call ensure_running() first"
        try:
            send(self._socket, {"do": command, "with": arguments})
        except OSError:
            raise CheckpointError(self._wait_for_exit(command)) from None
        return self._answer(self._timeout_seconds, command)

    def _answer(self, seconds: float, command: str) -> Any:
        assert self._socket is not None
        self._socket.settimeout(seconds)
        try:
            while "beat" in (answer := receive(self._socket)):
                pass  # each heartbeat restarts the timeout: a slow disk is not a failure
        except TimeoutError:
            pid = self.pid
            self.close()
            raise CheckpointError(
                f"the writer process {pid} did not respond for {seconds:g} s in {command!r} "
                "and was killed"
            ) from None
        except (OSError, EOFError):
            raise CheckpointError(self._wait_for_exit(command)) from None
        if "error" in answer:
            raise CheckpointError(answer["error"])
        return answer["value"]

    def exit_reason(self) -> str | None:
        """Return how the writer ended since its last command; None if it is running."""
        if self._process is None or self._process.poll() is None:
            return None
        return self._wait_for_exit(None)

    def _wait_for_exit(self, command: str | None) -> str:
        """Reap the writer and return how it ended; `command` is None between commands."""
        assert self._process is not None
        pid, code = self._process.pid, self._process.wait()
        self.close()
        ending = f"ended with code {code}"
        if code < 0:
            with contextlib.suppress(ValueError):
                ending = f"was ended by {signal.Signals(-code).name}"
        when = "between saves" if command is None else f"during {command!r}"
        return f"the writer process {pid} {ending} {when}"

    def kill(self) -> None:
        """Kill the writer permanently, from any thread; the command in progress fails."""
        self._killed = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the writer, even during a command."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.0 if self._process.poll() is not None else 1.0)
            if self._process.poll() is None:
                self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(5.0)  # a process blocked in the kernel may end later
            self._process = None


#: Niceness of a writer process, in case SCHED_IDLE is not permitted.
NICENESS = 19


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """The outcome of an asynchronous save.

    Ranks may differ in `seconds`, and in lines about work after the commit.

    Args:
        iteration: the checkpoint's iteration.
        folder: the checkpoint's folder, whether or not it was written.
        error: why the save failed; None if it succeeded.
        lines: further lines to report to the user.
        written: whether there is a new checkpoint. False if the save failed or the step had already
            been saved.
        seconds: time from the call of `AsyncSaver.save` to the end of the save, including retention
            and the wait for the previous save.
    """

    iteration: int
    folder: Path
    error: str | None
    lines: tuple[str, ...]
    written: bool
    seconds: float


@dataclass(frozen=True)
class _Job:
    """A save in progress, as passed to the saver's thread."""

    iteration: int
    extra: str
    start_time: float


class AsyncSaver:
    """Saves a run's state while it trains.

    Args:
        root: folder of all checkpoints of a run, on a file system that all ranks share.
        chunks: this rank's boxes of the logical tensors. Their memory must not move.
        coordinator: connects the ranks; used only by this saver's thread.
        block_bytes: bytes per digest, a multiple of 16.
        keep: keyword arguments of `prune_checkpoints` after each save; None removes nothing.
        folder_locked: whether the run has a `SaveFolderLock` on `root`. A save fails if the lock
            file is gone.
        on_commit: called on every rank, by the saver's thread, after a commit.
        timeout_seconds: a writer process without a heartbeat for this long is killed.

    Raises:
        ValueError: a chunk cannot be saved.
    """

    def __init__(
        self,
        root: Path | str,
        chunks: Sequence[TensorChunk],
        *,
        coordinator: Coordinator,
        block_bytes: int = BLOCK_BYTES,
        keep: Mapping[str, Any] | None = None,
        folder_locked: bool = False,
        on_commit: Callable[[], object] = lambda: None,
        timeout_seconds: float = 120.0,
    ) -> None:
        if streamed_name := next((c.name for c in chunks if c.byte_stream is not None), None):
            raise ValueError(f"{streamed_name} is streamed in pieces: save it with save_checkpoint")
        self._root, self._coordinator = Path(root), coordinator
        self._keep, self._on_commit = keep, on_commit
        self._shard = plan_shard(chunks, coordinator.rank)
        self._plan = self._shard.plan.encode()
        self.staging = StagingBuffer(self._shard)
        self.writer = WriterProcess(
            self.staging.fd, self._root, timeout_seconds=timeout_seconds, niceness=NICENESS
        )
        self._coordinated_save = CoordinatedSave(
            root=self._root,
            coordinator=coordinator,
            execute=lambda step, **arguments: self.writer.call(step, **arguments),
            block_bytes=block_bytes,
            digests=True,
            skip_existing=True,
            folder_locked=folder_locked,
        )
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[SaveReport] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint-saver", daemon=True)
        self._thread.start()

    # --- the trainer's thread ---------------------------------------------------------------------

    def save(self, iteration: int, extra: Mapping[str, Any]) -> None:
        """Start a save, after waiting for the previous save. Every rank calls this.

        The tensors must not change before `synchronize_staging` has returned.

        Args:
            iteration: the step that the state belongs to.
            extra: JSON to store in addition to the tensors; rank 0's is stored.

        Raises:
            ValueError: `extra` is no JSON or too large, or updates by other ranks are pending.
        """
        start_time = time.perf_counter()
        check_extra(extra)
        check_updates_complete(self._shard)
        text = json.dumps(extra) if self._coordinator.rank == 0 else "{}"
        self.wait()
        self._idle.clear()
        self.staging.begin()
        self._jobs.put(_Job(iteration, text, start_time))

    def synchronize_staging(self) -> None:
        """Wait until the state has been copied; call it before any tensor changes."""
        self.staging.synchronize_staging()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the save in progress, if any, has succeeded or failed.

        Returns False if it is still in progress after `timeout_seconds`.
        """
        return self._idle.wait(timeout_seconds)

    def finished(self) -> list[SaveReport]:
        """Return the reports of saves that finished since the last call."""
        reports = []
        with contextlib.suppress(queue.Empty):
            while True:
                reports.append(self._reports.get_nowait())
        return reports

    def close(self) -> None:
        """Wait for the save in progress, then end writer process and thread."""
        if self._thread.is_alive():
            self.wait()
            self._jobs.put(None)
            self._thread.join()
        self.staging.close()

    def abandon(self) -> None:
        """End without waiting: the save in progress is lost, earlier checkpoints are intact."""
        self.writer.kill()

    # --- the saver's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        """Execute saves, one after the other."""
        self.staging.prefault()
        with contextlib.suppress(Exception):  # the first save will report the error
            self._ensure_writer()
        self._idle.set()
        while (job := self._jobs.get()) is not None:
            self._reports.put(self._run_job(job))
            self._idle.set()
        self.writer.close()

    def _run_job(self, job: _Job) -> SaveReport:
        """Save, and report the outcome."""
        folder = checkpoint_folder(self._root, job.iteration)
        lines: list[str] = []
        error, written = None, False
        try:
            written = self._save(job, folder, lines)
        except CheckpointError as exception:
            error = str(exception)
        except Exception as exception:  # no failed save is fatal for the run
            error = describe(exception)
        finally:
            self.staging.release()
        return SaveReport(
            iteration=job.iteration,
            folder=folder,
            error=error,
            lines=tuple(lines),
            written=written,
            seconds=time.perf_counter() - job.start_time,
        )

    def _save(self, job: _Job, folder: Path, lines: list[str]) -> bool:
        """Agree, write and commit; return whether there is a new checkpoint.

        Args:
            lines: list that receives lines to report to the user.

        Raises:
            CheckpointError: on all ranks.
        """
        ranks = self._coordinator
        if not self._coordinated_save.run(
            job.iteration, json.loads(job.extra), self._prepare, say=lines.append
        ):
            return False
        try:
            self._on_commit()
            if ranks.rank == 0 and self._keep is not None:
                for line in self.writer.call("prune", keep=self._keep):
                    ranks.say(line)
        except Exception as error:  # the checkpoint is committed nevertheless
            lines.append(f"{folder.name} is saved, but: {describe(error)}")
            if ranks.rank == 0 and self._keep is not None:
                # No save is in progress here, so temporary folders are remains of a removal.
                with contextlib.suppress(OSError):
                    remove_temporary(self._root)
        return True

    def _prepare(self) -> tuple[str, str]:
        """Complete the copy; return this rank's plan, and a line about a writer process that ended
        since the last save, else ""."""
        self.staging.complete_copy()
        ending = self.writer.exit_reason()
        self._ensure_writer()
        if ending is None:
            return self._plan, ""
        return self._plan, f"rank {self._coordinator.rank}: {ending}; a new one was started"

    def _ensure_writer(self) -> None:
        """Start a writer if none is running, and send it this rank's plan and, on rank 0, all
        plans."""
        if not self.writer.ensure_running():
            return
        try:
            self.writer.call("shard", plan=self._plan)
            if plans := self._coordinated_save.plans:
                self.writer.call("plans", texts=plans)
        except CheckpointError:
            self.writer.close()
            raise
