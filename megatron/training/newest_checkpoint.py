# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a folder means, and fallback to an older one where the newest is corrupt.

Every rank calls these and all of them choose the same checkpoint.

Checkpoints of other programs where one of this project is expected are recognised, never read. A
run that took such a folder for an empty one would start from scratch.
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

#: What folders of torch.distributed.checkpoint hold instead of a manifest.
METADATA_NAME = ".metadata"

#: What upstream adds: which of its formats a folder is of.
UPSTREAM_NAME = "metadata.json"

#: More than upstream writes there.
MAX_UPSTREAM_BYTES = 1 << 16


def foreign_line(path: Path) -> str:
    """Return what to do with a foreign checkpoint, in one line; "" if there is none.

    Args:
        path: a checkpoint, or a folder of checkpoints. One of this project among them, even a
            corrupt one, makes it a folder of this project.
    """
    checkpoints = list_checkpoints(path) if path.is_dir() else []
    if any(os.path.lexists(folder / MANIFEST_NAME) for folder in (path, *checkpoints)):
        return ""
    for folder in (path, *checkpoints, path / "release"):
        if kind := foreign_kind(folder):
            return (
                f"{folder} is a foreign checkpoint: make one of ours of it with python -m "
                f"megatron.training.checkpoint convert {folder} NEW_FOLDER --from {kind} "
                "--to native and the flags of its model"
            )
    return ""


def foreign_kind(folder: Path) -> str:
    """Return what `convert --from` calls the format of a folder: torch_dist or dcp; "" if it is
    neither."""
    backend = _backend(folder / UPSTREAM_NAME)
    if (folder / METADATA_NAME).is_file():
        return "torch_dist" if backend == "torch_dist" else "dcp"
    return "torch_dist" if backend else ""


def _backend(path: Path) -> str:
    """Return what upstream calls the format of a folder; "" if the file is none of upstream's."""
    try:
        fields = read_json(path, MAX_UPSTREAM_BYTES)
    except OSError:
        return ""
    backend = fields.get("sharded_backend") if isinstance(fields, dict) else None
    return backend if isinstance(backend, str) else ""


T = TypeVar("T")

#: How often a checkpoint that retention removed at the moment it was found is looked for again.
ATTEMPTS = 5


def load_newest(
    load: str,
    use: Callable[[Path], T],
    coordinator: Coordinator,
    *,
    flag: str = "--load",
    fall_back: bool = True,
) -> tuple[Path, T] | None:
    """Load the checkpoint that `--load` means; where its bytes turn out to be corrupt, log it and
    load the next older one. Retention removes nothing that is being loaded.

    Args:
        load: a folder of checkpoints, or one checkpoint, from which nothing falls back.
        use: loads a checkpoint. It raises the same on every rank, and may be called again after a
            DamagedCheckpointError: it must write over everything the failed call has written.
        flag: which option named it.
        fall_back: whether an older checkpoint may be loaded.

    Returns:
        The checkpoint's folder and what `use` returned; None if there is no checkpoint.

    Raises:
        ValueError: there is none that can be loaded.
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
                search.pass_over(folder, error)
            except CheckpointError as error:
                raise ValueError(f"{flag} {folder}: {error}") from error


class _Search:
    """Looks for the newest checkpoint that has not turned out to be damaged."""

    def __init__(self, load: str, coordinator: Coordinator, *, flag: str, fall_back: bool) -> None:
        self._path, self._coordinator, self._flag = Path(load), coordinator, flag
        self._is_single_checkpoint = self._path.name.startswith("iter_")
        self._fall_back = fall_back and not self._is_single_checkpoint
        self._passed_over: list[Path] = []
        self._damages: list[str] = []

    def find(self, read_locks: contextlib.ExitStack) -> Path | None:
        """Return the next checkpoint to try, which rank 0 locks for reading until `read_locks`
        closes.

        Raises:
            ValueError: there is none left.
        """
        self._coordinator.begin(f"looking for a checkpoint in {self._path}")
        try:
            name = self._coordinator.agree(
                "find", lambda: self._find(read_locks), lambda all: all[0]
            )
        except CheckpointError as error:
            raise ValueError("; ".join([str(error), *self._damages])) from error
        if self._damages:
            damages = "; ".join(self._damages)
            self._coordinator.say(f"WARNING: falling back to {name}: {damages}")
        return None if name is None else Path(name)

    def pass_over(self, folder: Path, error: DamagedCheckpointError) -> None:
        """Take note of a checkpoint that is damaged. Raises ValueError if no other may be used."""
        if not self._fall_back:
            raise ValueError(f"{self._flag} {folder}: {error}") from error
        self._passed_over.append(folder)
        self._damages.append(str(error))

    def _find(self, read_locks: contextlib.ExitStack) -> str | None:
        if self._coordinator.rank:
            return None
        if self._is_single_checkpoint:
            if not self._path.is_dir():
                raise CheckpointError(f"{self._flag} {self._path}: there is no such checkpoint")
            self._refuse_foreign()
            read_locks.enter_context(reading(self._path))
            if extra_files := unexpected_files(self._path, read_manifest(self._path)):
                self._coordinator.say(unexpected_files_warning(self._path, extra_files))
            return str(self._path)
        for attempt in range(ATTEMPTS):
            try:
                newest = latest_checkpoint(
                    self._path,
                    excluded=self._passed_over,
                    fall_back=self._fall_back,
                    say=self._coordinator.say,
                )
            except DamagedCheckpointError:
                self._refuse_foreign()
                raise
            if newest is None:
                self._refuse_foreign()
                return None
            try:
                read_locks.enter_context(reading(newest))
            except DamagedCheckpointError:  # a run that saves here has removed it meanwhile
                if attempt == ATTEMPTS - 1:
                    raise
            else:
                return str(newest)
        raise AssertionError("the last attempt returns or raises")

    def _refuse_foreign(self) -> None:
        """Raise CheckpointError where the checkpoint is another program's."""
        if line := foreign_line(self._path):
            raise CheckpointError(f"{self._flag} {self._path}: {line}")


def read_together(folder: Path, coordinator: Coordinator) -> Manifest:
    """Return the manifest of a checkpoint, or raise the same error on every rank.

    Raises:
        CheckpointError: a rank cannot read it.
    """
    manifests = []

    def read() -> None:
        manifests.append(read_manifest(folder))

    coordinator.begin(f"reading {folder.name}")
    coordinator.agree("manifest", read, lambda answers: None)
    return manifests[0]


def clear_the_way(
    save: str, iteration: int, *, from_the_newest: bool, coordinator: Coordinator
) -> None:
    """See that nothing in the save folder belongs to later iterations than a run starts from: what
    is there already is never saved again, and the newest folder counts at the next start.

    Args:
        save: the folder that the run saves in and has claimed.
        iteration: where it starts.
        from_the_newest: whether it goes on from the newest undamaged checkpoint in it; later ones
            are damaged then and lose their names.

    Raises:
        ValueError: there are later ones, of another course of training.
    """
    root = Path(save)

    def clear() -> None:
        if coordinator.rank:
            return
        later = [folder for folder in list_checkpoints(root) if _is_later(folder, iteration)]
        if later and not from_the_newest:
            raise CheckpointError(_refusal(save, iteration, later))
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


def _refusal(save: str, iteration: int, later: Sequence[Path]) -> str:
    """Return a line about checkpoints that are in the way, newest first."""
    oldest, newest = later[-1].name, later[0].name
    named = newest if len(later) == 1 else f"{len(later)} checkpoints from {oldest} to {newest}"
    return (
        f"it holds {named}, later than iteration {iteration} that this run starts from: move "
        f"what is later away, save elsewhere, or go on from the newest with --load {save}"
    )
