# SPDX-License-Identifier: Apache-2.0
"""Asynchronous saves: checkpoints written while training continues.

    saver = AsyncSaver(root, chunks, coordinator=...)   plans once: the layout of a run is constant
    saver.save(iteration, extra)                        begins; returns at once
    ...forward, backward...
    saver.settle()                                      before the tensors change
    saver.finished()                                    the outcome of saves, at any time

Every rank does so. `Staging` copies exactly the bytes that a rank writes, in their layout on disk,
into shared memory that is allocated once. On the CPU a thread copies, without the trainer's GIL;
on a GPU the copies are put on a stream of their own, into pinned memory. Either way the tensors may
not change before `settle` has returned.

The thread coordinates with the other ranks. A separate process (`writer_process`), which
`WriterProcess` starts, commands and watches, digests, writes and commits without the trainer's GIL.
A checkpoint appears when the shards of all ranks are on disk. A failure is reported, never raised:
training continues, and the next save begins from scratch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import queue
import shutil
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
from megatron.core.dist_checkpointing.errors import CheckpointError, describe
from megatron.core.dist_checkpointing.manifest import check_extra
from megatron.core.dist_checkpointing.run_folder import (
    checkpoint_folder,
    sweep_temporary,
    temporary_folder,
)
from megatron.core.dist_checkpointing.save import BLOCK_BYTES
from megatron.core.dist_checkpointing.shards import (
    ShardPlan,
    as_bytes,
    check_arrived,
    encode_plan,
    plan_shard,
)
from megatron.core.dist_checkpointing.writer_process import receive, send

#: From here on a chunk is copied by itself. Smaller ones are gathered by one system call for many:
#: 5,000 of 16 bytes take 0.6 ms like that, one by one 5 ms.
LARGE_BYTES = 64 << 10

#: Buffers that the kernel takes in one call (IOV_MAX).
MOST_BUFFERS = 1024


class Staging:
    """Shared memory with one rank's shard.

    Args:
        plan: what the shard holds; its tensors are copied whenever `begin` is called.
    """

    def __init__(self, plan: ShardPlan) -> None:
        self.bytes, self._header_bytes = plan.total_bytes, len(plan.header)
        self.fd = _shared_memory()
        try:
            os.ftruncate(self.fd, self.bytes)
            self._map = mmap.mmap(self.fd, self.bytes)
        except OSError as error:
            raise ValueError(
                f"saving in the background needs {self.bytes} bytes of shared memory, which the "
                f"machine refuses ({error.strerror}): raise its limits, or save at once"
            ) from error
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        os.pwrite(self.fd, plan.header, 0)
        devices = {chunk.tensor.device for chunk in plan.held} - {torch.device("cpu")}
        self._device = devices.pop() if devices else torch.device("cpu")
        if self._on_gpu:
            pin_in_place(self._memory)
        self._stream, self._copied = new_stream(self._device), new_event(self._device)
        self._from_device: list[Callable[[], object]] = []
        self._from_host: list[Callable[[], object]] = []
        self._list_copies(plan)
        self._settled = threading.Event()
        self._settled.set()

    @property
    def _on_gpu(self) -> bool:
        return runs_ahead(self._device)

    def touch(self) -> None:
        """Have the kernel find all pages, so that the first copy is as fast as the others."""
        size = self.bytes - self._header_bytes
        ctypes.memset(self._memory.data_ptr() + self._header_bytes, 0, size)

    def begin(self) -> None:
        """Begin a copy, on the trainer's thread: what lies on a GPU is in its stream then."""
        self._settled.clear()
        if not self._on_gpu:
            return
        self._stream.wait_stream(current_stream(self._device))
        with on_stream(self._stream):
            for copy in self._from_device:
                copy()
        self._copied.record(self._stream)

    def carry_out(self) -> None:
        """Complete the copy, on another thread; always called after `begin`."""
        try:
            for copy in self._from_host:
                copy()
        finally:
            self._settled.set()
        if self._on_gpu:
            self._copied.synchronize()

    def release(self) -> None:
        """Hold nobody up any longer, whatever became of the copy."""
        self._settled.set()

    def settle(self) -> None:
        """Return when the tensors may change: on a GPU, by work that is put on the current stream
        from now on."""
        if self._on_gpu:
            current_stream(self._device).wait_event(self._copied)
        self._settled.wait()

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last mapping."""
        if self.fd >= 0:
            if self._on_gpu:
                unpin_in_place(self._memory)
            os.close(self.fd)
            self.fd = -1

    def _list_copies(self, plan: ShardPlan) -> None:
        """Find out what fills the memory, small neighbours together."""
        small: list[memoryview] = []
        for chunk, planned in zip(plan.held, plan.chunks, strict=True):
            source, size = chunk.tensor.detach(), planned.end - planned.begin
            on_host = not runs_ahead(source.device)
            if on_host and source.is_contiguous() and size < LARGE_BYTES:
                small.append(as_bytes(source))
                continue
            self._from_host += self._gathers(small, planned.begin)
            small = []
            target = self._memory[planned.begin : planned.end]
            if on_host and source.is_contiguous():
                move = partial(ctypes.memmove, target.data_ptr(), source.data_ptr(), size)
                self._from_host.append(move)
            elif size:
                target = target.view(source.dtype).view(source.shape)
                copy = partial(target.copy_, source, non_blocking=True)
                (self._from_host if on_host else self._from_device).append(copy)
        self._from_host += self._gathers(small, plan.total_bytes)

    def _gathers(self, small: Sequence[memoryview], end: int) -> Iterator[Callable[[], object]]:
        """Yield calls that write neighbours, the last of which ends at byte `end`."""
        begin = end - sum(map(len, small))
        for i in range(0, len(small), MOST_BUFFERS):
            batch = small[i : i + MOST_BUFFERS]
            yield partial(self._gather, batch, begin)
            begin += sum(map(len, batch))

    def _gather(self, batch: Sequence[memoryview], begin: int) -> None:
        wanted = sum(map(len, batch))
        if os.pwritev(self.fd, batch, begin) != wanted:
            raise OSError(f"shared memory took less than {wanted} bytes")


def _shared_memory() -> int:
    """Return the descriptor of memory that has no name in any folder."""
    if sys.platform == "linux":
        return os.memfd_create("megatron-checkpoint", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


#: How long a new writer may take to report that it runs, in seconds: it imports little.
START_SECONDS = 60.0


class WriterProcess:
    """A child that writes shards (`writer_process`), started again after it has died.

    A kernel ends the child together with the thread that started it, so all calls come from one
    thread, that of the saver, but for `kill`.

    Args:
        memory_fd: shared memory that holds the shard.
        root: folder of all checkpoints.
        timeout_seconds: after which a writer that gives no sign of life is killed.
        niceness: its scheduling priority below the trainer's, 0 to 19.
    """

    def __init__(
        self, memory_fd: int, root: Path, *, timeout_seconds: float, niceness: int
    ) -> None:
        self._memory_fd, self._root = memory_fd, root
        self._timeout_seconds, self._niceness = timeout_seconds, niceness
        self._process: subprocess.Popen[bytes] | None = None
        self._end: socket.socket | None = None
        self._ended = False
        self.starts = 0
        """How many have been started."""

    @property
    def pid(self) -> int | None:
        """The child's process, None if there is none."""
        return None if self._process is None else self._process.pid

    def ensure(self) -> bool:
        """Start a writer if there is none. Returns whether one was started.

        Raises:
            CheckpointError: it cannot be started, or shall not be.
        """
        if self._ended:
            raise CheckpointError("the run is ending: nothing is saved any more")
        if self._process is not None and self._process.poll() is None:
            return False
        self.close()
        ours, theirs = socket.socketpair()
        # Its modules are found where this process has found them, without its main module.
        call = (
            f"import sys; sys.path[:] = {json.dumps(sys.path)}; "
            "from megatron.core.dist_checkpointing.writer_process import main; "
            f"main({theirs.fileno()}, {self._memory_fd}, {str(self._root)!r}, "
            f"niceness={self._niceness})"
        )
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", call],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), self._memory_fd),
                )
            self._end = ours
            self.starts += 1
            self._answer(START_SECONDS, "start")
        except OSError as error:
            raise CheckpointError(f"cannot start a writer process: {error.strerror}") from error
        return True

    def call(self, do: str, **arguments: Any) -> Any:
        """Return what an order results in.

        Raises:
            CheckpointError: it failed, or the writer died or gave no answer.
        """
        assert self._end is not None, "ensure() comes first"
        try:
            send(self._end, {"do": do, "with": arguments})
        except OSError:
            raise CheckpointError(self._death(do)) from None
        return self._answer(self._timeout_seconds, do)

    def _answer(self, seconds: float, do: str) -> Any:
        assert self._end is not None
        self._end.settimeout(seconds)
        try:
            while "beat" in (answer := receive(self._end)):
                pass  # a slow disk is no dead one
        except TimeoutError:
            pid = self.pid
            self.close()
            raise CheckpointError(
                f"the writer process {pid} gave no sign of life for {seconds:g} s in {do!r} and "
                "was ended"
            ) from None
        except (OSError, EOFError):
            raise CheckpointError(self._death(do)) from None
        if "error" in answer:
            raise CheckpointError(answer["error"])
        return answer["value"]

    def end_of_last(self) -> str | None:
        """Say how the writer ended if it has since its last order; None if it has not."""
        if self._process is None or self._process.poll() is None:
            return None
        return self._death(None)

    def _death(self, do: str | None) -> str:
        """Say how the writer ended, during an order or between two."""
        assert self._process is not None
        pid, code = self._process.pid, self._process.wait()
        self.close()
        how = f"with code {code}"
        if code < 0:
            with contextlib.suppress(ValueError):
                how = f"by {signal.Signals(-code).name}"
        when = "between saves" if do is None else f"during {do!r}"
        return f"the writer process {pid} was ended {how} {when}"

    def kill(self) -> None:
        """End the writer at once and for good, from any thread: the order under way fails."""
        self._ended = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the writer, whatever it is doing."""
        if self._end is not None:
            self._end.close()
            self._end = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.0 if self._process.poll() is not None else 1.0)
            if self._process.poll() is None:
                self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(5.0)  # one that hangs in the kernel ends when that lets go
            self._process = None


#: The niceness of a writer process where it cannot ask for idle cores only.
NICENESS = 19


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What became of an asynchronous save, the same on every rank but for the times.

    Args:
        iteration: of the checkpoint.
        folder: where it is, or would be.
        error: why it failed; None if it did not.
        lines: what else to report to the user.
        written: whether there is a new checkpoint; else it failed or the step was there already.
        seconds: from its begin to its commit.
    """

    iteration: int
    folder: Path
    error: str | None
    lines: tuple[str, ...]
    written: bool
    seconds: float


@dataclass(frozen=True)
class _Job:
    """A save that has begun: what the thread needs of it."""

    iteration: int
    extra: str
    begun: float


class AsyncSaver:
    """Saves one run's state while it trains.

    Args:
        root: folder of all checkpoints of a run, on a file system that all ranks share.
        chunks: what this rank holds. The tensors must stay where they are in memory.
        coordinator: connects the ranks; used by a thread of this saver, and by nobody else.
        block_bytes: bytes under one digest, a multiple of 16.
        keep: what `prune_checkpoints` is to keep after each save; None removes nothing.
        claimed: the run has a `SaveFolderClaim` on `root`; a save fails if that is gone.
        on_commit: called on every rank, by a thread of this saver, when a checkpoint is there.
        timeout_seconds: after which a writer process that gives no sign of life is killed.

    Raises:
        ValueError: chunks that cannot be saved.
    """

    def __init__(
        self,
        root: Path | str,
        chunks: Sequence[TensorChunk],
        *,
        coordinator: Coordinator,
        block_bytes: int = BLOCK_BYTES,
        keep: Mapping[str, Any] | None = None,
        claimed: bool = False,
        on_commit: Callable[[], object] = lambda: None,
        timeout_seconds: float = 120.0,
    ) -> None:
        if unready := next((c.name for c in chunks if c.pieces is not None), None):
            raise ValueError(f"{unready} comes in pieces: save it with save_checkpoint")
        self._root, self._coordinator = Path(root), coordinator
        self._block_bytes, self._keep, self._on_commit = block_bytes, keep, on_commit
        self._claimed = claimed
        self._held = plan = plan_shard(chunks, coordinator.rank)
        self._shard = (plan.file, len(plan.header), [chunk.end for chunk in plan.chunks])
        self._plan = json.dumps(encode_plan(plan), separators=(",", ":"))
        self._told = False  # rank 0 knows the plan
        self._plans: list[str] = []  # of all ranks, on rank 0
        self.staging = Staging(plan)
        self.writer = WriterProcess(
            self.staging.fd, self._root, timeout_seconds=timeout_seconds, niceness=NICENESS
        )
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[SaveReport] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint-saver", daemon=True)
        self._thread.start()

    # --- the trainer's thread ---------------------------------------------------------------------

    def save(self, iteration: int, extra: Mapping[str, Any]) -> None:
        """Begin to save; first wait for the save before this one. Every rank calls this.

        The tensors must not change before `settle` has returned.

        Args:
            iteration: the step that the state belongs to.
            extra: JSON to keep in addition to the tensors; rank 0's is stored.

        Raises:
            ValueError: `extra` is no JSON, or too much of it, or updates of other ranks have not
                arrived.
        """
        begun = time.perf_counter()
        check_extra(extra)
        check_arrived(self._held)
        text = json.dumps(extra) if self._coordinator.rank == 0 else ""
        self.wait()
        self._idle.clear()
        self.staging.begin()
        self._jobs.put(_Job(iteration, text, begun))

    def settle(self) -> None:
        """Wait until the state has been copied: call it before anything changes a tensor."""
        self.staging.settle()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait for the save that is under way, if one is, however it ends.

        Returns whether none is under way any more.
        """
        return self._idle.wait(timeout_seconds)

    def finished(self) -> list[SaveReport]:
        """Return what became of saves since this was last asked."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._done.get_nowait())
        return found

    def close(self) -> None:
        """Wait for the save that is under way, and end writer and thread."""
        if self._thread.is_alive():
            self.wait()
            self._jobs.put(None)
            self._thread.join()
        self.staging.close()

    def abandon(self) -> None:
        """End without waiting: what is being saved is lost, what has been saved is not."""
        self.writer.kill()

    # --- the saver's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        """Carry out saves, one after the other."""
        self.staging.touch()
        with contextlib.suppress(Exception):  # the first save will report it
            self._ensure_writer()
        self._idle.set()
        while (job := self._jobs.get()) is not None:
            self._done.put(self._carry_out(job))
            self._idle.set()
        self.writer.close()

    def _carry_out(self, job: _Job) -> SaveReport:
        """Save, and report the outcome."""
        folder = checkpoint_folder(self._root, job.iteration)
        lines: list[str] = []
        error, written = None, False
        try:
            written = self._save(job, folder, lines)
        except CheckpointError as failed:
            error = str(failed)
        except Exception as failed:  # never fatal for the run, whatever it is
            error = describe(failed)
        finally:
            self.staging.release()
        return SaveReport(
            iteration=job.iteration,
            folder=folder,
            error=error,
            lines=tuple(lines),
            written=written,
            seconds=time.perf_counter() - job.begun,
        )

    def _save(self, job: _Job, folder: Path, lines: list[str]) -> bool:
        """Agree, write and commit; return whether there is a new checkpoint.

        Args:
            lines: take what to report to the user.

        Raises:
            CheckpointError: on all ranks alike.
        """
        ranks = self._coordinator
        temporary = temporary_folder(folder).name
        ranks.begin(f"saving {folder.name}")
        try:
            opened = ranks.agree("plan", self._begin, lambda told: self._open(told, job, temporary))
            self._told = True
            lines += opened["notes"]
            if "exists" in opened:
                lines.append(opened["exists"])
                return False
            ranks.agree(
                "write",
                lambda: self._write(opened["name"]),
                lambda written: self._commit(job, temporary, written),
            )
        except BaseException:
            if ranks.rank == 0:
                # A writer that died may have made it. If only the tracker failed, this has its
                # final name by now and stays.
                shutil.rmtree(self._root / temporary, ignore_errors=True)
            raise
        try:
            self._on_commit()
            if ranks.rank == 0 and self._keep is not None:
                for line in self.writer.call("prune", keep=self._keep):
                    ranks.say(line)
        except Exception as error:  # the checkpoint is there all the same
            lines.append(f"{folder.name} is saved, but: {describe(error)}")
            if ranks.rank == 0 and self._keep is not None:
                # No save is under way here: what is there is left of a removal.
                with contextlib.suppress(OSError):
                    sweep_temporary(self._root)
        return True

    def _begin(self) -> list[str]:
        """Complete the copy; return this rank's plan, or nothing if rank 0 has it from an earlier
        save, and what is to be reported of its writer."""
        self.staging.carry_out()
        lost = self.writer.end_of_last()
        self._ensure_writer()
        note = "" if lost is None else f"rank {self._coordinator.rank}: {lost}; there is a new one"
        return ["" if self._told else self._plan, note]

    def _ensure_writer(self) -> None:
        """See that there is a writer that knows this rank's shard and, on rank 0, all plans."""
        if not self.writer.ensure():
            return
        try:
            _, header_bytes, ends = self._shard
            self.writer.call("shard", begin=header_bytes, ends=ends)
            if self._plans:
                self.writer.call("plans", texts=self._plans)
        except CheckpointError:
            self.writer.close()
            raise

    def _open(self, told: list[list[str]], job: _Job, temporary: str) -> dict[str, Any]:
        """Compare the plans if they are new, and make the temporary folder; on rank 0."""
        if any(plan for plan, _ in told):
            known = self._plans or [""] * len(told)
            plans = [new or old for (new, _), old in zip(told, known, strict=True)]
            self.writer.call("plans", texts=plans)
            self._plans = plans
        opened = self.writer.call(
            "open", iteration=job.iteration, name=temporary, claimed=self._claimed
        )
        return {"name": temporary, "notes": [note for _, note in told if note], **opened}

    def _write(self, name: str) -> str:
        """Write this rank's shard."""
        file, _, ends = self._shard
        if not ends:
            return json.dumps({"header_xxh3": "", "xxh3": []})
        path = str(self._root / name / file)
        return self.writer.call("write", path=path, block_bytes=self._block_bytes)

    def _commit(self, job: _Job, temporary: str, written: list[str]) -> None:
        """Make the checkpoint appear; on rank 0."""
        self.writer.call(
            "commit",
            temporary=temporary,
            iteration=job.iteration,
            written=written,
            block_bytes=self._block_bytes,
            extra=job.extra,
        )
