# SPDX-License-Identifier: Apache-2.0
"""Saving a run: immediately or in the background, handling of failures, and retention.

A save at an interval may run in the background (`--async-save`) and may fail: the failure is logged
and counted, and by default training continues to the next save. The last save of a run is written
synchronously, and its failure is the run's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megatron.cli.errors import ExitCode, PeerLost, RunStopped
from megatron.core.dist_checkpointing import (
    AsyncSaver,
    CheckpointError,
    Coordinator,
    SaveFolderLock,
    TensorChunk,
    checkpoint_folder,
    optimizer_chunks,
    prune_checkpoints,
    save_checkpoint,
    weight_chunks,
)
from megatron.core.dist_checkpointing.run_folder import check_save_folder_lock
from megatron.training.checkpointing.state import run_extra
from megatron.training.hooks import Progress, StepReport, TrainingHooks
from megatron.training.monitoring.metrics import Metrics
from megatron.training.session import Session, hook_chunks

#: Seconds that a run which stops because of a fault waits for the save in progress.
LAST_WAIT_SECONDS = 60.0

#: Seconds a writer process may be silent; at most half the timeout of collectives.
SILENT_SECONDS = 120.0

#: Waits for the previous save that exceed this many seconds are logged.
LONG_SECONDS = 1.0


class Saves(TrainingHooks):
    """Saves the state of a session.

    Args:
        session: a session with --save.
        saver: writes in the background; None saves synchronously.
        on_failure: what to do if a save at an interval fails.
        say: logs one line.
        metrics: records events.
    """

    def __init__(
        self,
        session: Session,
        saver: AsyncSaver | None,
        *,
        on_failure: Literal["continue", "stop"],
        say: Callable[[str], None],
        metrics: Metrics,
    ) -> None:
        self._session, self._saver = session, saver
        self._on_failure, self._say, self._metrics = on_failure, say, metrics
        root = session.run.config.checkpoint.save
        assert root is not None
        self._root = root
        self._failure: str | None = None

    def begin(self, progress: Progress) -> None:
        """Save the current state, in the background with --async-save. Every rank calls this.

        Raises:
            RunStopped: this save or the previous one failed, and failures end the run.
        """
        if self._saver is None:
            self._write(progress)
        else:
            start = time.perf_counter()
            if not self._saver.wait(LONG_SECONDS):
                self._say(
                    "the previous save is still in progress when iteration "
                    f"{progress.iteration} is to be saved: waiting for it, because saves take "
                    "longer than --save-interval"
                )
                self.wait()
            self.poll(progress)
            self._session.step.engine.complete_weights()
            self._saver.save(progress.iteration, self._extra(progress))
            blocked = time.perf_counter() - start
            self._metrics.write("save", progress.iteration, {"blocked_seconds": blocked})
        self._stop_on_failure()

    def finish(self, progress: Progress) -> None:
        """Save the current state synchronously. Every rank calls this.

        Raises:
            RunStopped: the save failed.
        """
        self.wait()
        self.poll(progress)
        self._write(progress, is_last=True)

    def on_step_end(self, progress: Progress, outcome: StepReport) -> None:
        """Log finished background saves."""
        self.poll(progress)

    def wait(self) -> None:
        """Wait for the save in progress: required before looking for the newest checkpoint."""
        if self._saver is not None:
            self._saver.wait()

    def poll(self, progress: Progress) -> None:
        """Log finished background saves."""
        if self._saver is None:
            return
        for report in self._saver.finished():
            for line in report.lines:
                self._say(line)
            if report.error is not None:
                self._failed(progress, report.iteration, report.error)
                continue
            self._session.context.stop.note("save", report.seconds)
            self._metrics.write("save", report.iteration, {"seconds": report.seconds})
            if report.written:
                self._say(f"saved {report.folder} in the background within {report.seconds:.1f} s")

    def _write(self, progress: Progress, *, is_last: bool = False) -> None:
        """Save synchronously."""
        context = self._session.context
        self._session.step.engine.complete_weights()
        start = time.perf_counter()
        try:
            self._check_lock()
            was_there = checkpoint_folder(self._root, progress.iteration).is_dir()
            folder = save_checkpoint(
                self._root,
                progress.iteration,
                session_chunks(self._session),
                self._extra(progress),
                coordinator=context.coordinator,
                existing="skip",
            )
        except CheckpointError as error:
            if is_last:
                raise RunStopped(ExitCode.SAVE_FAILED, f"saving failed: {error}") from error
            self._failed(progress, progress.iteration, str(error))
            return
        context.stop.note("save", time.perf_counter() - start)
        context.restarts.saved()
        if not was_there:
            self._say(f"saved {folder}")
        if context.coordinator.rank == 0 and (keep := retention(self._session)) is not None:
            prune_checkpoints(self._root, say=context.coordinator.say, **keep)

    def _check_lock(self) -> None:
        """Check that this run still holds the lock of the save folder. Raises CheckpointError on
        all ranks."""
        coordinator = self._session.context.coordinator

        def check() -> None:
            if coordinator.rank == 0:
                check_save_folder_lock(self._root)

        coordinator.begin("checking the lock of the save folder")
        coordinator.agree("lock", check, lambda answers: None)

    def _extra(self, progress: Progress) -> dict[str, Any]:
        session = self._session
        return run_extra(
            optimizer=session.optimizer,
            with_optimizer=session.run.config.checkpoint.save_optim,
            progress=progress,
            window=session.window,
            metadata=session.metadata,
        )

    def _failed(self, progress: Progress, iteration: int, text: str) -> None:
        """Log and count a failed save."""
        progress.failed_saves += 1
        self._failure = text
        count = progress.failed_saves
        self._metrics.write("save", iteration, {"failed_saves": float(count)})
        retry = "; the next save is tried at --save-interval"
        self._say(
            f"WARNING: saving at iteration {iteration} failed ({count} so far): {text}"
            f"{retry if self._on_failure == 'continue' else ''}"
        )

    def _stop_on_failure(self) -> None:
        """End the run if a save has failed and --on-failed-save is stop; all ranks call this
        together."""
        if self._failure is not None and self._on_failure == "stop":
            raise RunStopped(
                ExitCode.SAVE_FAILED,
                f"saving failed: {self._failure}; --on-failed-save stop ends the run",
            )


def session_chunks(session: Session) -> list[TensorChunk]:
    """Return this rank's shards of weights, optimizer state and hook state; `run_extra` contains
    the number of updates and the loss scale."""
    chunks = weight_chunks(session.model.store)
    if session.run.config.checkpoint.save_optim:
        chunks += optimizer_chunks(session.optimizer, scalars=False)
    return chunks + hook_chunks(session)


def retention(session: Session) -> dict[str, int | None] | None:
    """Return the arguments of retention; None keeps every checkpoint."""
    chosen = session.run.config.checkpoint
    if chosen.save_keep_last is None and chosen.save_retain_interval is None:
        return None
    return {
        "keep_last": chosen.save_keep_last or 1,
        "retain_interval": chosen.save_retain_interval,
    }


@contextlib.contextmanager
def locked_save_folder(save: str | None, coordinator: Coordinator) -> Iterator[None]:
    """Lock the save folder for this run, and check before the first step that it is writable. If a
    user error ends the run before anything is written, no trace of the lock remains.

    Raises:
        ValueError: the folder is not writable, or another run has locked it.
    """
    locks: list[SaveFolderLock] = []

    def lock() -> None:
        if coordinator.rank == 0 and save is not None:
            locks.append(SaveFolderLock(save))
            if removed_names := [path.name for path in locks[0].removed_paths]:
                coordinator.say(f"{save}: removed unfinished files: {', '.join(removed_names)}")

    if save is not None:
        coordinator.begin("locking the save folder")
        try:
            coordinator.agree("lock", lock, lambda answers: None)
        except CheckpointError as error:
            raise ValueError(f"--save {save}: {error}") from error
    try:
        yield
    except ValueError:
        for folder_lock in locks:
            folder_lock.abandon()
        raise
    finally:
        for folder_lock in locks:
            folder_lock.close()


@contextlib.contextmanager
def saving(
    session: Session, *, say: Callable[[str], None], metrics: Metrics
) -> Iterator[Saves | None]:
    """Yield the `Saves` of a session; None without --save. No save is in progress after a normal
    exit."""
    chosen, context = session.run.config.checkpoint, session.context
    if chosen.save is None:
        yield None
        return
    if not chosen.save_optim:
        say(
            "checkpoints are saved without optimizer state (--no-save-optim): resume from "
            "them with --no-load-optim"
        )
    open_saves = partial(Saves, session, on_failure=chosen.on_failed_save, say=say, metrics=metrics)
    if not chosen.async_save:
        yield open_saves(None)
        return
    assert context.background is not None
    minutes = session.run.config.parallel.distributed_timeout_minutes
    saver = AsyncSaver(
        Path(chosen.save),
        session_chunks(session),
        coordinator=context.background,
        keep=retention(session),
        folder_locked=True,
        timeout_seconds=min(SILENT_SECONDS, 30.0 * minutes),
        on_commit=context.restarts.saved,
    )
    say(
        f"saves in the background: {saver.staging.bytes / 2**20:,.1f} MiB of host memory on this "
        "rank, one writer process per rank"
    )
    session.step.before_update = saver.synchronize_staging
    try:
        yield open_saves(saver)
    except RunStopped as stopped:
        # All ranks stop here together, so the save in progress is given time to complete.
        lost = isinstance(stopped, PeerLost)
        saver.abandon() if lost or not saver.wait(LAST_WAIT_SECONDS) else saver.close()
        raise
    except BaseException:
        saver.abandon()
        raise
    saver.close()
