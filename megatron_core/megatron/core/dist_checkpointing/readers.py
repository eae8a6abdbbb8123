# SPDX-License-Identifier: Apache-2.0
"""Who reads a checkpoint holds it: retention removes none that a reader of any process has open.

Readers share a `flock` on the manifest, whoever removes the folder needs it alone. It ends with the
process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron.core.dist_checkpointing.commit import sync_folder, temporary_folder
from megatron.core.dist_checkpointing.errors import CheckpointError, DamagedCheckpointError
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME
from megatron.core.untrusted_files import open_lock, regular_fd


@contextlib.contextmanager
def reading(folder: Path | str) -> Iterator[None]:
    """Keep a checkpoint from being removed until the block ends. It may be entered several times.

    Raises:
        DamagedCheckpointError: it is incomplete, or is being removed at this moment.
    """
    folder = Path(folder)
    path = folder / MANIFEST_NAME
    try:
        fd = regular_fd(path)
    except OSError as error:
        raise DamagedCheckpointError(
            f"cannot read {path}: {error.strerror}: {folder} is not a complete checkpoint"
        ) from error
    try:
        # Without locks in the file system nothing is removed either: that needs one.
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DamagedCheckpointError(f"{folder} is being removed by retention") from None
        if not _is_at(fd, path):  # it went between the two calls
            raise DamagedCheckpointError(f"{folder} was removed by retention at this moment")
        yield
    finally:
        os.close(fd)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint that nobody reads. It loses its name first, so that a half-removed one is
    never taken for a checkpoint.

    Raises:
        CheckpointError: it is being read, or cannot be removed.
    """
    path = folder / MANIFEST_NAME
    doomed = temporary_folder(folder)
    try:
        fd = open_lock(path, make=False)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(f"{folder} is being read and stays for now") from None
            os.rename(folder, doomed)
            sync_folder(folder.parent)
            shutil.rmtree(doomed)
        finally:
            os.close(fd)
    except OSError as error:
        left = f"; {doomed.name} is what is left of it" if doomed.is_dir() else ""
        raise CheckpointError(f"cannot remove {folder}: {error.strerror}{left}") from error


def _is_at(fd: int, path: Path) -> bool:
    """Return whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False
