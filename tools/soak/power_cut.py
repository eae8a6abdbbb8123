# SPDX-License-Identifier: Apache-2.0
"""Simulate a power failure: reduce a save folder to its synced content.

A killed process loses no written data, so kills alone do not show whether a program syncs its
files. Here every `fsync` is recorded, and a power cut discards all unsynced changes: content after
a file's last sync, names that are newer than the last sync of their folder, and renames since then.
A disk may keep more, but a program must not rely on it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Files up to this size come back with their content where they were replaced.
SMALL_BYTES = 100
#: What a save folder holds beside these (locks, logs) is left alone.
PREFIXES = ("iter_", "latest_")


@dataclass(kw_only=True)
class Durable:
    """The durable state of the disk, by inode.

    A file system may reuse the inode of a removed file, so a missing sync can rarely go unseen.

    Args:
        names: entries of folders.
        sizes: sizes of files.
        contents: contents of small files.
    """

    names: dict[int, dict[str, int]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    contents: dict[int, bytes] = field(default_factory=dict)

    @staticmethod
    def everything(root: Path) -> Durable:
        """Return a state in which all current files are durable."""
        durable = Durable()
        root.mkdir(parents=True, exist_ok=True)
        for path in [root, *_checkpoint_files(root)]:
            with contextlib.suppress(FileNotFoundError):
                durable.add(_state(path))
        return durable

    def add(self, state: dict[str, Any]) -> None:
        """Take note of one sync."""
        if "names" in state:
            self.names[state["inode"]] = state["names"]
            return
        self.sizes[state["inode"]] = state["size"]
        if "content" in state:
            self.contents[state["inode"]] = base64.b64decode(state["content"])

    def read(self, journal: Path) -> None:
        """Take note of the syncs that processes have noted."""
        if journal.exists():
            for line in journal.read_text().splitlines():
                self.add(json.loads(line))


def note_syncs(root: str, journal: str) -> None:
    """Let this process note every sync below `root`."""
    os.fsync = _noting(os.fsync, root, journal)


def cut_power(root: Path, durable: Durable) -> None:
    """Take back all that was not synced."""
    _restore_names(root, durable)
    for folder in root.iterdir():
        if folder.name.startswith("iter_"):
            _restore_files(folder, durable)


def _noting(sync: Callable[[int], None], root: str, journal: str) -> Callable[[int], None]:
    def noted(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        # what is there before the call is what the call makes durable
        state = _state(Path(path)) if path == root or path.startswith(f"{root}/") else None
        sync(fd)
        if state is not None:
            with open(journal, "a", encoding="utf-8") as file:
                file.write(json.dumps(state) + "\n")

    return noted


def _state(path: Path) -> dict[str, Any]:
    """Return the state that a sync of a file or folder makes durable."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        return {"inode": status.st_ino, "names": _inodes(path)}
    state: dict[str, Any] = {"inode": status.st_ino, "size": status.st_size}
    if status.st_size <= SMALL_BYTES:
        state["content"] = base64.b64encode(path.read_bytes()).decode()
    return state


def _inodes(folder: Path) -> dict[str, int]:
    paths_by_inode = {}
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            paths_by_inode[path.name] = path.stat().st_ino
    return paths_by_inode


def _checkpoint_files(root: Path) -> list[Path]:
    return [path for prefix in PREFIXES for path in root.glob(f"{prefix}*")] + list(
        root.glob("iter_*/*")
    )


def _restore_names(root: Path, durable: Durable) -> None:
    """Bring back the names of the last sync of `root`."""
    durable_names = durable.names[root.stat().st_ino]
    now = {name: i for name, i in _inodes(root).items() if name.startswith(PREFIXES)}
    checkpoint_names = {name: i for name, i in durable_names.items() if name.startswith(PREFIXES)}
    moved = [inode for name, inode in now.items() if checkpoint_names.get(name) != inode]
    aside = {inode: root / f"aside-{inode}" for inode in moved}
    for name, inode in now.items():
        if inode in aside:
            os.rename(root / name, aside[inode])
    for name, inode in checkpoint_names.items():
        if now.get(name) == inode:
            continue
        if inode in aside:
            os.rename(aside.pop(inode), root / name)
        elif name.startswith("iter_"):
            (root / name).mkdir()  # its files were removed
        else:
            (root / name).write_bytes(durable.contents.get(inode, b""))
    for path in aside.values():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _restore_files(folder: Path, durable: Durable) -> None:
    """Bring back the names and sizes of the last syncs in a checkpoint's folder."""
    durable_names = durable.names.get(folder.stat().st_ino, {})
    for path in list(folder.iterdir()):
        status = path.stat()
        if durable_names.get(path.name) != status.st_ino:
            path.unlink()
            continue
        size = durable.sizes.get(status.st_ino, 0)
        if size < status.st_size:
            os.truncate(path, size)
