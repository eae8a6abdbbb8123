# SPDX-License-Identifier: Apache-2.0
"""Claiming a save folder at start-up: one run at a time, known to be writable, leftovers swept."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType

from megatron.core.dist_checkpointing.commit import sync_folder, write_synced
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.inventory import sweep_temporary
from megatron.core.untrusted_files import UnsafeFileError, open_lock

LOCK_NAME = ".writer.lock"


class SaveFolderClaim:
    """The right to save into a folder, held by one process until `close` or its end.

    Rank 0 of a run makes one before the first step. It creates the folder, refuses a folder that
    another live run has claimed, finds out now rather than at the first save whether it can be
    written, and removes what interrupted saves left.

    The lock is a POSIX record lock: it ends with the process, however that ends, is not inherited
    by forked workers, and works between hosts on NFS.

    Args:
        root: folder of all checkpoints of a run.

    Raises:
        CheckpointError: the folder cannot be written or is claimed.
    """

    def __init__(self, root: Path | str) -> None:
        self._root = Path(root)
        path = self._root / LOCK_NAME
        try:
            self._made_root = not self._root.exists()
            self._root.mkdir(parents=True, exist_ok=True)
            self._fd = open_lock(path)
        except OSError as error:
            raise self._refusal(error) from error
        try:
            self._lock(path)
            self._test_write()
            self.swept = tuple(sweep_temporary(self._root))
        except OSError as error:
            self.close()
            raise self._refusal(error) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SaveFolderClaim:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the folder free; calling it again does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def abandon(self) -> None:
        """Give the folder free and, if there is nothing in it, leave no trace of the claim."""
        if self._fd >= 0 and os.listdir(self._root) == [LOCK_NAME]:
            with contextlib.suppress(OSError):
                (self._root / LOCK_NAME).unlink()
                if self._made_root:
                    self._root.rmdir()
        self.close()

    def _lock(self, path: Path) -> None:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            owner = os.pread(self._fd, 200, 0).decode(errors="replace").strip()
            raise CheckpointError(
                f"{self._root} is in use by another run ({owner or 'unknown'}): stop it, or save "
                "elsewhere"
            ) from error
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(self._fd)):
            raise CheckpointError(
                f"{self._root} was abandoned by another run at this moment: start again"
            )
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _test_write(self) -> None:
        test = self._root / f".write-test-{os.getpid()}"
        test.unlink(missing_ok=True)
        try:
            write_synced(test, b"x" * 4096)
            sync_folder(self._root)
        finally:
            test.unlink(missing_ok=True)

    def _refusal(self, error: OSError) -> CheckpointError:
        if isinstance(error, UnsafeFileError):
            return CheckpointError(f"cannot save under {self._root}: {error.strerror}")
        return CheckpointError(
            f"cannot save under {self._root}: {error.strerror}; name a folder that can be written"
        )


def see_claim(root: Path | str) -> None:
    """See that a folder which this run has claimed is still there: a file system may have gone, or
    somebody may have moved the folder, and a save would quietly begin another one in its place.

    Raises:
        CheckpointError: it is not.
    """
    if not Path(root, LOCK_NAME).exists():
        raise CheckpointError(
            f"{root} is no longer the folder that this run claimed, as {LOCK_NAME} is not in it: "
            "bring it back, what was saved is where it went"
        )
