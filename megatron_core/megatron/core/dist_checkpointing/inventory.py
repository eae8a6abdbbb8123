# SPDX-License-Identifier: Apache-2.0
"""The folder of a run's checkpoints: which there are, which to resume from, what is rubbish."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from megatron.core.dist_checkpointing.commit import (
    TRACKER_NAME,
    checkpoint_folder,
    is_temporary,
    temporary_folder,
)
from megatron.core.dist_checkpointing.errors import DamagedCheckpointError
from megatron.core.dist_checkpointing.manifest import iteration_of
from megatron.core.dist_checkpointing.say import print_to_stderr
from megatron.core.dist_checkpointing.verify import verify_checkpoint
from megatron.core.untrusted_files import read_regular

#: Foreign files named in one line; the rest is counted.
MAX_FILES = 8

#: An iteration, and what an editor or another program may add.
MAX_TRACKER_BYTES = 1 << 16


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
    passed_over: Collection[Path] = (),
    fall_back: bool = True,
    say: Callable[[str], None] = print_to_stderr,
) -> Path | None:
    """Return the checkpoint to resume from, or None if there is no trace of one.

    That is the newest undamaged one, whatever the tracker says: the tracker is a hint for people
    and other programs. One line tells when it names another one or none, when newer ones are
    damaged, and when there are files in the folder that do not belong to it.

    Args:
        root: folder of all checkpoints of a run.
        digests: whether "undamaged" means every byte, or manifest and file sizes.
        passed_over: checkpoints in `root` that are known to be damaged and have been told of.
        fall_back: whether an older one may be returned if the newest one is damaged.
        say: receives the lines.

    Raises:
        CheckpointError: there were checkpoints, and all are damaged; or the newest one is and
            `fall_back` is off; or one was written by another version of this library.
    """
    root = Path(root)
    folders = [folder for folder in list_checkpoints(root) if folder not in passed_over]
    tracked, tracker = _read_tracker(root)
    if not folders and not passed_over and tracked is None and not tracker:
        return None
    damages = []
    for folder in folders:
        try:
            report = verify_checkpoint(folder, digests=digests)
        except DamagedCheckpointError as error:
            damages.append(str(error))
            if not fall_back:
                break
            continue
        if damages:
            say(f"WARNING: falling back to {folder}: {'; '.join(damages)}")
        elif folder != tracked and not passed_over:
            tracker = tracker or f"{root / TRACKER_NAME} names {_what_is(tracked)}"
            say(f"{tracker}; using {folder.name}, the newest undamaged checkpoint")
        if report.unexpected_files:
            say(unexpected_line(folder, report.unexpected_files))
        return folder
    if not folders and not passed_over:
        damages.append(tracker or f"{root / TRACKER_NAME} names {_what_is(tracked)}")
    if damages and not fall_back:
        raise DamagedCheckpointError(f"the newest checkpoint in {root} is damaged: {damages[0]}")
    reasons = f": {'; '.join(damages)}" if damages else ""
    raise DamagedCheckpointError(f"no undamaged checkpoint in {root}{reasons}")


def unexpected_line(folder: Path, files: Sequence[str]) -> str:
    """Return a line about files that lie in a checkpoint's folder and are no part of it."""
    listed = ", ".join(files[:MAX_FILES])
    more = f" and {len(files) - MAX_FILES} more" if len(files) > MAX_FILES else ""
    return f"WARNING: {folder} holds files that do not belong to it and are ignored: {listed}{more}"


def tracked_checkpoint(root: Path | str) -> Path | None:
    """Return the folder that the tracker names, whether it exists or not; None if it names none."""
    return _read_tracker(Path(root))[0]


def sweep_temporary(root: Path | str) -> list[Path]:
    """Remove what interrupted saves and removals left in `root`, and return what was removed.

    Only for the start of a run that has claimed `root`: it would remove a save in progress. What a
    writer process of an ended run still writes to cannot become a checkpoint afterwards.
    """
    root = Path(root)
    removed = []
    for path in sorted(root.iterdir()):
        if is_temporary(path):
            # Under its old name a surviving writer would go on to add files and commit.
            doomed = temporary_folder(path.with_name(path.name.split(".")[0]))
            os.rename(path, doomed)
            if doomed.is_symlink() or not doomed.is_dir():
                doomed.unlink()  # no save makes such a thing: what a link leads to is not ours
            else:
                shutil.rmtree(doomed)
        elif path.name.startswith(f"{TRACKER_NAME}.tmp-"):
            path.unlink()
        else:
            continue
        removed.append(path)
    return removed


def _read_tracker(root: Path) -> tuple[Path | None, str]:
    """Return the folder that the tracker names, or why it names none ("" without a tracker and any
    checkpoint)."""
    path = root / TRACKER_NAME
    try:
        text = read_regular(path, MAX_TRACKER_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return None, f"{path} does not exist" if list_checkpoints(root) else ""
    except OSError as error:
        return None, f"cannot read {path}: {error.strerror}"
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        return None, f"{path} holds {text[:40]!r}, not an iteration"
    return checkpoint_folder(root, int(text)), ""


def _what_is(folder: Path | None) -> str:
    """Return the name of what a tracker names, and whether it is there."""
    if folder is None:
        return "none"
    return folder.name + ("" if folder.is_dir() else ", which is not there")
