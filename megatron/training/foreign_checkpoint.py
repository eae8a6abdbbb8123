# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other programs where one of ours is expected: recognised, never read.

A run that took such a folder for an empty one would start anew.
"""

from __future__ import annotations

from pathlib import Path

from megatron.core.dist_checkpointing import list_checkpoints
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME
from megatron.core.untrusted_files import read_json

#: What folders of torch.distributed.checkpoint hold instead of a manifest.
METADATA_NAME = ".metadata"

#: What upstream adds: which of its formats a folder is of.
UPSTREAM_NAME = "metadata.json"

#: More than upstream writes there.
MAX_UPSTREAM_BYTES = 1 << 16


def foreign_line(path: Path) -> str:
    """Return what to do with a foreign checkpoint, in one line; "" if there is none.

    Args:
        path: a checkpoint, or a folder of checkpoints. One of ours among them, even a damaged one,
            makes it ours.
    """
    found = list_checkpoints(path) if path.is_dir() else []
    if any((folder / MANIFEST_NAME).exists() for folder in (path, *found)):
        return ""
    for folder in (path, *found, path / "release"):
        if kind := foreign_kind(folder):
            return (
                f"{folder} is a foreign checkpoint: make one of ours of it with python -m "
                f"megatron.training.checkpoint convert {folder} NEW_FOLDER --from {kind} "
                "--to native and the flags of its model"
            )
    return ""


def foreign_kind(folder: Path) -> str:
    """Return what `convert --from` calls the format of a folder: torch_dist or dcp; "" if it is
    neither."""
    backend = _backend(folder / UPSTREAM_NAME)
    if (folder / METADATA_NAME).is_file():
        return "torch_dist" if backend == "torch_dist" else "dcp"
    return "torch_dist" if backend else ""


def _backend(path: Path) -> str:
    """Return what upstream calls the format of a folder; "" if the file is none of upstream's."""
    try:
        fields = read_json(path, MAX_UPSTREAM_BYTES)
    except OSError:
        return ""
    found = fields.get("sharded_backend") if isinstance(fields, dict) else None
    return found if isinstance(found, str) else ""
