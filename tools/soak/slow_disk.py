# SPDX-License-Identifier: Apache-2.0
"""A disk on which every operation of a save takes longer, so that there is time to kill in it.

Nothing else is changed: the program calls what it always calls. Writer processes get it too.
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

CALLS = ("write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")
REPOSITORY = Path(__file__).resolve().parents[2]


def slow_down(root: str, seconds: float) -> None:
    """Let this process wait in every operation on a checkpoint below `root`."""
    for name in CALLS:
        setattr(os, name, _slowed(getattr(os, name), root, seconds))


def slow_down_writers(root: str, seconds: float) -> None:
    """Let the writer processes that this process starts do so."""
    from megatron.core.dist_checkpointing import writer_client

    start = subprocess.Popen
    first = (
        f"import sys; sys.path.append({str(REPOSITORY)!r}); "
        f"from tools.soak.slow_disk import slow_down; slow_down({root!r}, {seconds}); "
    )

    def started(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        assert command[:2] == [sys.executable, "-c"], command
        return start([*command[:2], first + command[2]], **options)

    writer_client.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": started})


def _slowed(call: Callable[..., Any], root: str, seconds: float) -> Callable[..., Any]:
    def slow(target: Any, *more: Any, **named: Any) -> Any:
        place = _place(target, named.get("dir_fd"))
        if place.startswith(root) and ("/iter_" in place or "/latest_" in place or place == root):
            time.sleep(seconds)
        return call(target, *more, **named)

    return slow


def _place(target: Any, folder_fd: int | None) -> str:
    """Return the path that a file descriptor or a name stands for; "" if it has none."""
    try:
        if isinstance(target, int):
            return os.readlink(f"/proc/self/fd/{target}")
        name = os.fsdecode(target)
        return name if folder_fd is None else f"{os.readlink(f'/proc/self/fd/{folder_fd}')}/{name}"
    except (OSError, TypeError):
        return ""
