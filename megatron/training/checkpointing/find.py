# SPDX-License-Identifier: Apache-2.0
"""Select the checkpoint of a folder, falling back to an older one if the newest is corrupt.

Every rank calls these functions, and all choose the same checkpoint.

Checkpoints of other programs are detected and rejected, never read: a run that mistook such a
folder for an empty one would start from scratch.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from megatron.core.dist_checkpointing import (
    CheckpointError,
    Coordinator,
    DamagedCheckpointError,
    Manifest,
    latest_checkpoint,
    list_checkpoints,
    read_manifest,
    reading,
)
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, iteration_of
from megatron.core.dist_checkpointing.run_folder import unexpected_files, unexpected_files_warning
from megatron.core.untrusted_files import read_json

#: File that identifies a folder of torch.distributed.checkpoint.
METADATA_NAME = ".metadata"

#: File with which upstream records the format of a folder.
UPSTREAM_NAME = "metadata.json"

#: Size limit of that file.
MAX_UPSTREAM_BYTES = 1 << 16


def foreign_line(path: Path) -> str:
    """Return an error line about a foreign checkpoint; "" if there is none.

    Args:
        path: a checkpoint, or a folder of checkpoints. If any of them, even a corrupt one, has this
            project's format, the folder is not foreign.
    """
    checkpoints = list_checkpoints(path) if path.is_dir() else []
    if any(os.path.lexists(folder / MANIFEST_NAME) for folder in (path, *checkpoints)):
        return ""
    for folder in (path, *checkpoints, path / "release"):
        if kind := foreign_kind(folder):
            return (
                f"{folder} is a foreign checkpoint: convert it with python -m "
                f"megatron.training.checkpoint convert {folder} NEW_FOLDER --from {kind} "
                "--to native and the flags of its model"
            )
    return ""


def foreign_kind(folder: Path) -> str:
    """Return the format of a folder in the terms of `convert --from`: torch_dist or dcp; "" for
    other folders."""
    backend = _backend(folder / UPSTREAM_NAME)
    if (folder / METADATA_NAME).is_file():
        return "torch_dist" if backend == "torch_dist" else "dcp"
    return "torch_dist" if backend else ""


def _backend(path: Path) -> str:
    """Return upstream's name of the folder's format; "" if the file is not upstream's."""
    try:
        fields = read_json(path, MAX_UPSTREAM_BYTES)
    except OSError:
        return ""
    backend = fields.get("sharded_backend") if isinstance(fields, dict) else None
    return backend if isinstance(backend, str) else ""


T = TypeVar("T")

#: Attempts to find a checkpoint if retention removes it between listing and locking.
ATTEMPTS = 5


def load_newest(
    load: str,
    use: Callable[[Path], T],
    coordinator: Coordinator,
    *,
    flag: str = "--load",
    fall_back: bool = True,
) -> tuple[Path, T] | None:
    """Load the checkpoint that `--load` selects; if it is corrupt, log that and load the next older
    one. Retention does not remove a checkpoint that is being loaded.

    Args:
        load: a folder of checkpoints, or one checkpoint, which has no fallback.
        use: loads a checkpoint. It raises the same on every rank, and may be called again after a
            DamagedCheckpointError: the second call must overwrite whatever the failed call wrote.
        flag: the option that names the folder, for messages.
        fall_back: whether an older checkpoint may be loaded.

    Returns:
        The checkpoint's folder and the result of `use`; None if there is no checkpoint.

    Raises:
        ValueError: no checkpoint can be loaded.
    """
    search = _Search(load, coordinator, flag=flag, fall_back=fall_back)
    while True:
        with contextlib.ExitStack() as read_locks:
            folder = search.find(read_locks)
            if folder is None:
                return None
            try:
                return folder, use(folder)
            except DamagedCheckpointError as error:
                search.skip(folder, error)
            except CheckpointError as error:
                raise ValueError(f"{flag} {folder}: {error}") from error


class _Search:
    """Searches for the newest checkpoint that is not known to be damaged."""

    def __init__(self, load: str, coordinator: Coordinator, *, flag: str, fall_back: bool) -> None:
        self._path, self._coordinator, self._flag = Path(load), coordinator, flag
        self._is_single_checkpoint = self._path.name.startswith("iter_")
        self._fall_back = fall_back and not self._is_single_checkpoint
        self._skipped: list[Path] = []
        self._damages: list[str] = []

    def find(self, read_locks: contextlib.ExitStack) -> Path | None:
        """Return the next checkpoint to try; rank 0 holds its read lock until `read_locks` closes.

        Raises:
            ValueError: none is left.
        """
        self._coordinator.begin(f"looking for a checkpoint in {self._path}")
        try:
            name = self._coordinator.agree(
                "find", lambda: self._find(read_locks), lambda names: names[0]
            )
        except CheckpointError as error:
            raise ValueError("; ".join([str(error), *self._damages])) from error
        if self._damages:
            damages = "; ".join(self._damages)
            self._coordinator.say(f"WARNING: falling back to {name}: {damages}")
        return None if name is None else Path(name)

    def skip(self, folder: Path, error: DamagedCheckpointError) -> None:
        """Record a damaged checkpoint. Raises ValueError if no other may be used."""
        if not self._fall_back:
            raise ValueError(f"{self._flag} {folder}: {error}") from error
        self._skipped.append(folder)
        self._damages.append(str(error))

    def _find(self, read_locks: contextlib.ExitStack) -> str | None:
        if self._coordinator.rank:
            return None
        if self._is_single_checkpoint:
            if not self._path.is_dir():
                raise CheckpointError(f"{self._flag} {self._path}: there is no such checkpoint")
            self._reject_foreign()
            read_locks.enter_context(reading(self._path))
            if extra_files := unexpected_files(self._path, read_manifest(self._path)):
                self._coordinator.say(unexpected_files_warning(self._path, extra_files))
            return str(self._path)
        for attempt in range(ATTEMPTS):
            try:
                newest = latest_checkpoint(
                    self._path,
                    excluded=self._skipped,
                    fall_back=self._fall_back,
                    say=self._coordinator.say,
                )
            except DamagedCheckpointError:
                self._reject_foreign()
                raise
            if newest is None:
                self._reject_foreign()
                return None
            try:
                read_locks.enter_context(reading(newest))
            except DamagedCheckpointError:  # retention of a run that saves here has removed it
                if attempt == ATTEMPTS - 1:
                    raise
            else:
                return str(newest)
        raise AssertionError("the last attempt returns or raises")

    def _reject_foreign(self) -> None:
        """Raise CheckpointError if the checkpoint belongs to another program."""
        if line := foreign_line(self._path):
            raise CheckpointError(f"{self._flag} {self._path}: {line}")


def read_together(folder: Path, coordinator: Coordinator) -> Manifest:
    """Return the manifest of a checkpoint, or raise the same error on every rank.

    Raises:
        CheckpointError: some rank cannot read it.
    """
    manifests = []

    def read() -> None:
        manifests.append(read_manifest(folder))

    coordinator.begin(f"reading {folder.name}")
    coordinator.agree("manifest", read, lambda answers: None)
    return manifests[0]


def reject_later_checkpoints(
    save: str, iteration: int, *, resumes_newest: bool, coordinator: Coordinator
) -> None:
    """Ensure that the save folder has no checkpoint later than the iteration the run starts from:
    existing folders are not overwritten, and the next start would load the newest one.

    Args:
        save: the save folder, locked by this run.
        iteration: the iteration the run starts from.
        resumes_newest: whether the run resumes from the newest undamaged checkpoint in the folder;
            later ones are then damaged and renamed.

    Raises:
        ValueError: there are later checkpoints, from another training history.
    """
    root = Path(save)

    def clear() -> None:
        if coordinator.rank:
            return
        later = [folder for folder in list_checkpoints(root) if _is_later(folder, iteration)]
        if later and not resumes_newest:
            raise CheckpointError(_later_checkpoints_line(save, iteration, later))
        for folder in later:
            aside = folder.with_name(f"{folder.name}.damaged-{secrets.token_hex(4)}")
            os.rename(folder, aside)
            coordinator.say(f"WARNING: {folder} is damaged and is now {aside.name}")

    coordinator.begin(f"looking for later checkpoints in {root}")
    try:
        coordinator.agree("clear", clear, lambda answers: None)
    except CheckpointError as error:
        raise ValueError(f"--save {save}: {error}") from error


def _is_later(folder: Path, iteration: int) -> bool:
    folder_iteration = iteration_of(folder)
    return folder_iteration is not None and folder_iteration > iteration


def _later_checkpoints_line(save: str, iteration: int, later: Sequence[Path]) -> str:
    """Return the error line about later checkpoints, which are listed newest first."""
    oldest, newest = later[-1].name, later[0].name
    named = newest if len(later) == 1 else f"{len(later)} checkpoints from {oldest} to {newest}"
    return (
        f"it contains {named}, later than iteration {iteration}, from which this run starts: "
        f"move them away, save elsewhere, or resume from the newest with --load {save}"
    )
