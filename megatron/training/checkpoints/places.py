# SPDX-License-Identifier: Apache-2.0
"""Which folder a command means, and what it says of sizes."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron.core.dist_checkpointing import latest_checkpoint
from megatron.core.dist_checkpointing.errors import (
    CheckpointError,
    DamagedCheckpointError,
    describe,
)
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, iteration_of

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def existing_folder(text: str) -> Path:
    """Return a folder that is there. Raises ValueError."""
    path = Path(text)
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such folder")
    return path


def is_checkpoint(path: Path) -> bool:
    """Tell whether a folder is one checkpoint, damaged or not, rather than a folder of some."""
    return iteration_of(path) is not None or (path / MANIFEST_NAME).exists()


def one_checkpoint(text: str) -> Path:
    """Return the checkpoint that a path means: itself, or the one that a run would load.

    Raises:
        ValueError: there is none.
        CheckpointError: there are, and all are damaged.
    """
    path = existing_folder(text)
    if is_checkpoint(path):
        return path
    found = latest_checkpoint(path, say=lambda line: print(line, file=sys.stderr, flush=True))
    if found is None:
        raise ValueError(f"{path} holds no checkpoint: name another folder")
    return found


def problem_of(error: CheckpointError) -> str:
    """Return what is wrong with a checkpoint on one line: damage, or why it cannot be judged."""
    what = "DAMAGED" if isinstance(error, DamagedCheckpointError) else "UNREADABLE"
    return f"{what}: {describe(error)}"


def size_text(size: int) -> str:
    """Return a number of bytes for people, in powers of 1000."""
    value, unit = float(size), 0
    while value >= 999.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{size} {_UNITS[0]}"
