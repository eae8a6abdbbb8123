# SPDX-License-Identifier: Apache-2.0
"""Write files atomically.

A file is written under a temporary name next to its target, flushed to the disk, and renamed. A
rename within one folder is atomic on POSIX, so a reader sees the old file, the new file or none,
and any number of writers of the same content need no lock.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from megatron.core.untrusted_files import open_to_write


def temporary_path(target: Path) -> Path:
    """Return a name next to `target` that no other writer uses.

    Args:
        target: the final path; the temporary file must share its folder for the rename.

    Returns:
        `<target>.<random>.tmp`.
    """
    return target.with_name(f"{target.name}.{secrets.token_hex(6)}.tmp")


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of names, so that a rename in it survives a power cut.

    Args:
        folder: an existing folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, target: Path) -> None:
    """Give a closed, flushed temporary file its final name.

    Args:
        temporary: a path from `temporary_path`.
        target: the final path; replaced if it exists.
    """
    os.replace(temporary, target)
    sync_folder(target.parent)


@contextmanager
def atomic_write(target: Path) -> Iterator[BinaryIO]:
    """Open a stream whose content becomes `target` when the block ends without an error.

    Args:
        target: the final path; its folder must exist.

    Yields:
        A binary stream. An exception in the block removes the temporary file.
    """
    temporary = temporary_path(target)
    try:
        with open_to_write(temporary, "x") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        publish(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
