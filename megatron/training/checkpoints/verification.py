# SPDX-License-Identifier: Apache-2.0
"""Every byte of one checkpoint, or of all in a folder, compared with its digest."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron.core.dist_checkpointing import (
    CheckpointError,
    list_checkpoints,
    read_manifest,
    verify_checkpoint,
)
from megatron.training.checkpoints.options import VerifyConfig
from megatron.training.checkpoints.places import (
    existing_folder,
    is_checkpoint,
    problem_of,
    size_text,
)
from megatron.training.stored_model import check_stored


def verify_folders(config: VerifyConfig) -> int:
    """Print what was verified. Returns 1 if anything is damaged. Raises ValueError."""
    path = existing_folder(config.folder)
    folders = [path] if is_checkpoint(path) else list_checkpoints(path)
    if not folders:
        raise ValueError(f"{path} holds no checkpoint: name another folder")
    # Not all(): one that is damaged shall not hide another.
    return int(not min([_verify(folder) for folder in folders]))


def _verify(folder: Path) -> bool:
    """Verify one checkpoint, say what came out, and return whether it is whole."""
    try:
        manifest = read_manifest(folder)
        report = verify_checkpoint(folder)
        odd = check_stored(folder)
    except CheckpointError as error:
        print(problem_of(error), file=sys.stderr, flush=True)
        return False
    print(
        f"whole {folder}: {size_text(report.bytes_verified)} of {len(manifest.tensors)} tensors "
        f"in {len(manifest.files)} files verified",
        flush=True,
    )
    if odd:
        print(f"warning: {odd}", file=sys.stderr, flush=True)
    for name in report.unexpected_files:
        print(f"warning: {folder / name} is no part of the checkpoint", file=sys.stderr, flush=True)
    return True
