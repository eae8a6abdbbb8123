# SPDX-License-Identifier: Apache-2.0
"""The commit protocol: a checkpoint appears under its name complete and on disk, or not at all.

    iter_0000100.tmp-<random>/   shards written and synced by their ranks, then manifest.json
    rename to iter_0000100/      the one step that makes it a checkpoint; the parent is synced
    latest_checkpointed_iteration.txt   replaced by a synced temporary file

A process may be killed between any two of these. A name is never renamed over.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, Manifest, encode_manifest
from megatron.core.untrusted_files import open_to_write

TRACKER_NAME = "latest_checkpointed_iteration.txt"

_TEMPORARY = re.compile(r"iter_\d{7,}\.tmp-[0-9a-f]{16}")


def checkpoint_folder(root: Path | str, iteration: int) -> Path:
    """Return where the checkpoint of `iteration` lies, whether it exists or not."""
    if iteration < 0:
        raise ValueError(f"iteration must not be negative, got {iteration}")
    return Path(root, f"iter_{iteration:07d}")


def temporary_folder(folder: Path) -> Path:
    """Return a name beside `folder` that nobody else uses and that `is_temporary` recognises."""
    return folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(8)}")


def is_temporary(folder: Path) -> bool:
    """Return whether a folder is what an interrupted save or removal left behind."""
    return _TEMPORARY.fullmatch(folder.name) is not None


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_synced(path: Path, data: bytes) -> None:
    """Write a small new file and make its content durable."""
    with open_to_write(path, "x") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def open_temporary(root: Path, iteration: int, *, name: str | None = None) -> Path:
    """Create the folder that a save writes into.

    Args:
        name: of the folder, as `temporary_folder` makes them; None makes one.

    Raises:
        CheckpointError: the step has been saved, or nothing can be written.
    """
    folder = checkpoint_folder(root, iteration)
    try:
        root.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(folder):
            raise CheckpointError(
                f"{folder} exists already and is never overwritten: remove it, or save elsewhere"
            )
        temporary = temporary_folder(folder) if name is None else root / name
        temporary.mkdir()
    except OSError as error:
        raise CheckpointError(
            f"cannot save under {root}: {error.strerror}; name a folder that can be written"
        ) from error
    return temporary


def publish(temporary: Path, manifest: Manifest) -> Path:
    """Write the manifest into a folder of synced shards and give the folder its name.

    Raises:
        CheckpointError: a shard is not as its rank wrote it, the name is taken, or the file
            system refuses.
    """
    root = temporary.parent
    folder = checkpoint_folder(root, manifest.iteration)
    try:
        for name, file in manifest.files.items():
            size = (temporary / name).stat().st_size
            if size != file.bytes:
                raise CheckpointError(
                    f"{temporary / name} has {size} bytes here, its rank wrote {file.bytes}: all "
                    "ranks must see the same file system"
                )
        write_synced(temporary / MANIFEST_NAME, encode_manifest(manifest))
        sync_folder(temporary)
        # rename would silently replace an empty folder of that name
        if os.path.lexists(folder):
            raise CheckpointError(f"{folder} has appeared during the save and is left as it is")
        os.rename(temporary, folder)
        sync_folder(root)
    except OSError as error:
        raise CheckpointError(
            f"cannot complete {folder}: {error.strerror}: {error.filename}; nothing was saved, "
            "earlier checkpoints are intact"
        ) from error
    return folder


def write_tracker(root: Path, iteration: int) -> None:
    """Make the tracker name `iteration`, in one step. Raises CheckpointError."""
    temporary = root / f"{TRACKER_NAME}.tmp-{secrets.token_hex(8)}"
    try:
        write_synced(temporary, f"{iteration}\n".encode())
        os.replace(temporary, root / TRACKER_NAME)
        sync_folder(root)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"{checkpoint_folder(root, iteration)} is complete, but {root / TRACKER_NAME} could "
            f"not be written: {error.strerror}"
        ) from error
