# SPDX-License-Identifier: Apache-2.0
"""Saving while training goes on.

    saver = AsyncSaver(root, chunks, coordinator=...)   plans once: the layout of a run is constant
    saver.save(iteration, extra)                        begins; returns at once
    ...forward, backward...
    saver.settle()                                      before the tensors change
    saver.finished()                                    what has become of saves, at any time

Every rank does so. A thread copies the state into shared memory and agrees with the other ranks; a
process of its own, without Python's lock of the trainer, digests, writes and commits
(`writer_process`). A checkpoint appears when the shards of all ranks are on disk. What fails is
reported, never raised: training goes on, and the next save begins from scratch.
"""

from __future__ import annotations

import contextlib
import json
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.chunk import TensorChunk
from megatron.core.dist_checkpointing.commit import checkpoint_folder, temporary_folder
from megatron.core.dist_checkpointing.coordinator import Coordinator
from megatron.core.dist_checkpointing.errors import CheckpointError, describe
from megatron.core.dist_checkpointing.inventory import sweep_temporary
from megatron.core.dist_checkpointing.manifest import check_json
from megatron.core.dist_checkpointing.planner import encode_plan, plan_shard
from megatron.core.dist_checkpointing.save import BLOCK_BYTES
from megatron.core.dist_checkpointing.staging import Staging
from megatron.core.dist_checkpointing.writer_client import WriterProcess

#: How far a writer process steps back behind trainers where it cannot ask for idle cores only.
NICENESS = 19


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What became of an asynchronous save, the same on every rank but for the times.

    Args:
        iteration: of the checkpoint.
        folder: where it is, or would be.
        error: why it failed; None if it did not.
        lines: what else to tell the user.
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
        plan = plan_shard(chunks, coordinator.rank)
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
            extra: JSON to keep beside the tensors; rank 0's is stored.

        Raises:
            ValueError: `extra` is no JSON.
        """
        begun = time.perf_counter()
        check_json(dict(extra), "extra")
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
        with contextlib.suppress(Exception):  # the first save will say so
            self._ensure_writer()
        self._idle.set()
        while (job := self._jobs.get()) is not None:
            self._done.put(self._carry_out(job))
            self._idle.set()
        self.writer.close()

    def _carry_out(self, job: _Job) -> SaveReport:
        """Save, and say how it went."""
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
            lines: take what to tell the user.

        Raises:
            CheckpointError: on all ranks alike.
        """
        ranks = self._coordinator
        temporary = temporary_folder(folder).name
        ranks.begin(f"saving {folder.name}")
        opened = ranks.agree("plan", self._begin, lambda told: self._open(told, job, temporary))
        self._told = True
        lines += opened["notes"]
        if "exists" in opened:
            lines.append(opened["exists"])
            return False
        try:
            ranks.agree(
                "write",
                lambda: self._write(opened["name"]),
                lambda written: self._commit(job, temporary, written),
            )
        except BaseException:
            if ranks.rank == 0:
                # If only the tracker failed, this has its final name by now and stays.
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
        save, and what is to be told of its writer."""
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
