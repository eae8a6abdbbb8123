# SPDX-License-Identifier: Apache-2.0
"""A slow disk that records syncs: every operation of a save takes longer, so kills can hit it.

The program itself is unchanged. Writer processes use the slow disk too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.soak.power_cut import note_syncs

CALLS = ("write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")
#: There are many more writes in a save than other calls; each takes this part of their time.
WRITE_PART = 0.2
REPOSITORY = Path(__file__).resolve().parents[2]


def plant(root: str, seconds: float, *, journal: str) -> None:
    """Let this process, and the writer processes that it starts, use such a disk.

    Args:
        root: save folder.
        seconds: what each operation on a checkpoint takes longer.
        journal: file for the notes.
    """
    slow_down(root, seconds, journal)
    from megatron.core.dist_checkpointing import async_save

    start = subprocess.Popen
    prelude = (
        f"import sys; sys.path.append({str(REPOSITORY)!r}); "
        "from tools.soak import slow_disk; "
        f"slow_disk.slow_down({root!r}, {seconds}, {journal!r}); "
    )

    def started(command: list[str], **options: Any) -> subprocess.Popen[Any]:
        assert command[:2] == [sys.executable, "-c"], command
        return start([*command[:2], prelude + command[2]], **options)

    async_save.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": started})


def slow_down(root: str, seconds: float, journal: str) -> None:
    """Let this process alone use such a disk; see `plant`."""
    note_syncs(root, journal)
    for name in CALLS:
        fraction = WRITE_PART if name == "write" else 1.0
        setattr(os, name, _slowed(getattr(os, name), root, fraction * seconds))


def _slowed(call: Callable[..., Any], root: str, seconds: float) -> Callable[..., Any]:
    def slow(target: Any, *args: Any, **named: Any) -> Any:
        path = _resolved_path(target, named.get("dir_fd"))
        inside = path.startswith(root) and ("/iter_" in path or "/latest_" in path or path == root)
        # half of it behind the call: what a process does next comes later, and may not come
        time.sleep(0.5 * seconds * inside)
        try:
            return call(target, *args, **named)
        finally:
            time.sleep(0.5 * seconds * inside)

    return slow


def _resolved_path(target: Any, folder_fd: int | None) -> str:
    """Return the path of a file descriptor or a name; "" without a path."""
    try:
        if isinstance(target, int):
            return os.readlink(f"/proc/self/fd/{target}")
        name = os.fsdecode(target)
        return name if folder_fd is None else f"{os.readlink(f'/proc/self/fd/{folder_fd}')}/{name}"
    except (OSError, TypeError):
        return ""
