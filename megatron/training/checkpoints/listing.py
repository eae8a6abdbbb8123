# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a run: which are whole, which one a run would load, and who is writing."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.dist_checkpointing import (
    CheckpointError,
    latest_checkpoint,
    list_checkpoints,
    read_manifest,
    verify_checkpoint,
)
from megatron.core.dist_checkpointing.claim import LOCK_NAME
from megatron.core.dist_checkpointing.commit import TRACKER_NAME, is_temporary
from megatron.core.dist_checkpointing.inventory import MAX_TRACKER_BYTES
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, VERSION, iteration_of
from megatron.core.untrusted_files import read_regular, regular_fd
from megatron.training.checkpoints.options import ListConfig
from megatron.training.checkpoints.places import (
    existing_folder,
    is_checkpoint,
    problem_of,
    size_text,
)
from megatron.training.foreign_checkpoint import foreign_kind, foreign_line
from megatron.training.stored_model import check_stored

_HEAD = ("iteration", "size", "ranks", "saved", "format", "state")

_ASIDE = re.compile(r"iter_\d{7,}\.damaged-[0-9a-f]+")

#: `struct flock` of Linux: type, whence, start, length, process.
_FLOCK = "hhqqi4x"


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A checkpoint of a run.

    Args:
        iteration: by its name.
        num_bytes: of all files in the folder.
        saved: when its manifest was written, in seconds since 1970; None without one.
        world_size: ranks that saved it; None if that cannot be read.
        problem: what is wrong with it, see `problem_of`; "" if nothing is.
    """

    iteration: int
    num_bytes: int
    saved: float | None
    world_size: int | None
    problem: str


def list_root(config: ListConfig) -> int:
    """Print the checkpoints of a folder. Returns 1 if one is damaged. Raises ValueError."""
    root = existing_folder(config.root)
    if is_checkpoint(root):
        raise ValueError(
            f"{root} is one checkpoint: name the folder that it lies in, or use inspect"
        )
    found = [_look_at(folder, digests=config.verify) for folder in list_checkpoints(root)]
    checked = "every byte read" if config.verify else "sizes checked"
    total = size_text(sum(listed.num_bytes for listed in found))
    print(f"{root}: {len(found)} checkpoint{'s' * (len(found) != 1)}, {total}, {checked}")
    if found:
        print("\n".join(_table([_HEAD, *map(_row, found)])))
    for line in (*_chosen(root, digests=config.verify), *_remains(root), _owner(root)):
        print(line)
    return int(any(listed.problem for listed in found))


def _look_at(folder: Path, *, digests: bool) -> Listed:
    iteration = iteration_of(folder)
    assert iteration is not None, "list_checkpoints finds no others"
    world_size, saved, problem = None, None, ""
    try:
        saved = (folder / MANIFEST_NAME).stat().st_mtime
        world_size = read_manifest(folder).world_size
        verify_checkpoint(folder, digests=digests)
        if digests:
            check_stored(folder)
    except FileNotFoundError:
        problem = f"DAMAGED: {folder / MANIFEST_NAME} does not exist"
        if foreign_kind(folder):
            problem = "FOREIGN: of torch.distributed.checkpoint, see convert"
    except CheckpointError as error:
        problem = problem_of(error)
    return Listed(
        iteration=iteration,
        num_bytes=folder_bytes(folder),
        saved=saved,
        world_size=world_size,
        problem=problem,
    )


def folder_bytes(folder: Path) -> int:
    """Return the size of the files in a folder; one that is removed meanwhile has none."""
    found = 0
    for name in os.listdir(folder) if folder.is_dir() else ():
        try:
            found += (folder / name).lstat().st_size
        except OSError:
            continue
    return found


def _row(listed: Listed) -> tuple[str, ...]:
    known = listed.world_size is not None
    when = "-"
    if listed.saved is not None:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(listed.saved))
    return (
        str(listed.iteration),
        size_text(listed.num_bytes),
        str(listed.world_size) if known else "-",
        when,
        str(VERSION) if known else "-",
        listed.problem or "whole",
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return lines with columns under each other, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = {"iteration", "size", "ranks", "format"}
    return [
        "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(row, widths, _HEAD, strict=True)
        ).rstrip()
        for row in rows
    ]


def _chosen(root: Path, *, digests: bool) -> Iterator[str]:
    """Say what the tracker holds, and which checkpoint a run would load."""
    try:
        tracker = read_regular(root / TRACKER_NAME, MAX_TRACKER_BYTES)
        text = tracker.decode(errors="replace").strip()
        yield f"tracker: {text[:40]}" if text.isdigit() else f"tracker: {text[:40]!r}"
    except OSError:
        yield f"tracker: none ({TRACKER_NAME})"
    said: list[str] = []
    foreign = foreign_line(root)
    try:
        found = latest_checkpoint(root, digests=digests, say=said.append)
    except CheckpointError as error:
        yield f"a run would load: none, and stop: {foreign or ' '.join(str(error).split())}"
        return
    if found is None and foreign:
        yield f"a run would load: none, and stop: {foreign}"
        return
    yield f"a run would load: {'none, and start anew' if found is None else found.name}"
    yield from (f"  {line}" for line in said)


def _remains(root: Path) -> Iterator[str]:
    """Name what a save is working on or has left behind, and what a run has put aside."""
    for path in sorted(root.iterdir()):
        if is_temporary(path):
            size = size_text(folder_bytes(path))
            yield f"temporary: {path.name}, {size}: of a save that runs or was interrupted"
        elif _ASIDE.fullmatch(path.name):
            yield f"put aside: {path.name}, {size_text(folder_bytes(path))}: it was damaged"


def _owner(root: Path) -> str:
    """Say who may write into the folder: the process that holds its lock.

    Asks without taking the lock: a run that starts at this moment is not disturbed.
    """
    path = root / LOCK_NAME
    try:
        fd = regular_fd(path)
    except OSError:
        return "in use by: nobody"
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_, process = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        if kind == fcntl.F_UNLCK:
            return "in use by: nobody"
        text = os.pread(fd, 200, 0).decode(errors="replace").strip()
        text = "".join(c if c.isprintable() else " " for c in text)
        return f"in use by: {text or f'pid {process}'}"
    finally:
        os.close(fd)
