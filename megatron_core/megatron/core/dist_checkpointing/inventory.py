# SPDX-License-Identifier: Apache-2.0
"""The folder of a run's checkpoints: which there are, which to resume from, which to remove."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from megatron.core.dist_checkpointing.commit import (
    TRACKER_NAME,
    checkpoint_folder,
    is_temporary,
    iteration_of,
    sync_folder,
    temporary_folder,
)
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.say import print_to_stderr
from megatron.core.dist_checkpointing.verify import verify_checkpoint


def list_checkpoints(root: Path | str) -> list[Path]:
    """Return the checkpoint folders in `root`, newest first, undamaged or not."""
    root = Path(root)
    if not root.is_dir():
        return []
    found = [(iteration_of(path), path) for path in root.iterdir() if path.is_dir()]
    return [path for _, path in sorted((i, path) for i, path in found if i is not None)][::-1]


def latest_checkpoint(
    root: Path | str,
    *,
    digests: bool = False,
    say: Callable[[str], None] = print_to_stderr,
) -> Path | None:
    """Return the checkpoint to resume from, or None if there is no trace of one.

    That is the one the tracker names. If the tracker or what it names is damaged, it is the
    newest undamaged folder, and one line says so. A newer folder than the tracker's (a kill
    between rename and tracker, or a tracker set back by hand) is mentioned and not used.

    Args:
        root: folder of all checkpoints of a run.
        digests: whether "undamaged" means every byte, or manifest and file sizes.
        say: receives the line.

    Raises:
        CheckpointError: there were checkpoints, and all are damaged.
    """
    root = Path(root)
    folders = list_checkpoints(root)
    tracked, reason = _read_tracker(root)
    if tracked is not None:
        try:
            verify_checkpoint(tracked, digests=digests)
        except CheckpointError as error:
            reason = str(error)
        else:
            if folders and iteration_of(folders[0]) > iteration_of(tracked):
                say(
                    f"{root / TRACKER_NAME} names {tracked.name}, which is used; {folders[0].name} "
                    "is newer and ignored"
                )
            return tracked
    if not folders and not reason:
        return None
    reason = reason or f"{root / TRACKER_NAME} does not exist"
    for folder in folders:
        if folder == tracked:
            continue
        try:
            verify_checkpoint(folder, digests=digests)
        except CheckpointError as error:
            reason += f"; {error}"
            continue
        say(f"WARNING: falling back to {folder}: {reason}")
        return folder
    raise CheckpointError(f"no undamaged checkpoint in {root}: {reason}")


def prune_checkpoints(root: Path | str, keep_last: int) -> list[Path]:
    """Remove all but the newest `keep_last` undamaged checkpoints, and return what was removed.

    What the tracker names is always kept, and so are damaged folders, for someone to look at.
    A folder loses its name first, so that a half-removed one is never taken for a checkpoint.

    Raises:
        ValueError: `keep_last` is below 1.
        CheckpointError: a folder could not be removed.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, got {keep_last}")
    root = Path(root)
    tracked, _ = _read_tracker(root)
    undamaged = []
    for folder in list_checkpoints(root):
        try:
            verify_checkpoint(folder, digests=False)
        except CheckpointError:
            continue
        undamaged.append(folder)
    removed = []
    for folder in undamaged[keep_last:]:
        if folder == tracked:
            continue
        doomed = temporary_folder(folder)
        try:
            os.rename(folder, doomed)
            sync_folder(root)
            shutil.rmtree(doomed)
        except OSError as error:
            raise CheckpointError(f"cannot remove {folder}: {error.strerror}") from error
        removed.append(folder)
    return removed


def sweep_temporary(root: Path | str) -> list[Path]:
    """Remove what interrupted saves and removals left in `root`, and return what was removed.

    Only for the start of a run that has claimed `root`: it would remove a save in progress.
    """
    root = Path(root)
    removed = []
    for path in sorted(root.iterdir()):
        if is_temporary(path):
            shutil.rmtree(path)
        elif path.name.startswith(f"{TRACKER_NAME}.tmp-"):
            path.unlink()
        else:
            continue
        removed.append(path)
    return removed


def _read_tracker(root: Path) -> tuple[Path | None, str]:
    """Return the folder that the tracker names, or why it names none ("" if there is none)."""
    path = root / TRACKER_NAME
    try:
        text = path.read_text(errors="replace").strip()
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"cannot read {path}: {error.strerror}"
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        return None, f"{path} holds {text[:40]!r}, not an iteration"
    return checkpoint_folder(root, int(text)), ""
