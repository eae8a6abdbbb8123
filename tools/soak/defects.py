# SPDX-License-Identifier: Apache-2.0
"""Defects that a soak has to find: `--plant tools.soak.defects:NAME` plants one in every rank."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core import untrusted_files
from megatron.core.dist_checkpointing import run_folder, save_plan
from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, Manifest, encode_manifest
from megatron.core.dist_checkpointing.run_folder import list_checkpoints
from megatron.training.hooks import Progress


def resume_reads_a_batch_twice(rank: int) -> None:
    """Go on one batch before the sample that the checkpoint names."""
    whole: Callable[[Any], Progress] = Progress.from_json

    def before(saved: Any) -> Progress:
        progress = whole(saved)
        return replace(progress, consumed_samples=progress.consumed_samples - 8)

    Progress.from_json = staticmethod(before)


def named_before_it_is_whole(rank: int) -> None:
    """Give a folder its name, and write the manifest then: not every soak hits the milliseconds."""

    def publish(temporary: Path, manifest: Manifest) -> Path:
        folder = run_folder.checkpoint_folder(temporary.parent, manifest.iteration)
        os.rename(temporary, folder)
        run_folder.write_synced(folder / MANIFEST_NAME, encode_manifest(manifest))
        untrusted_files.sync_folder(folder)
        untrusted_files.sync_folder(folder.parent)
        return folder

    save_plan.publish = publish


def makes_room_first(rank: int) -> None:
    """Remove all older checkpoints at the begin of a save, not at its end."""
    whole = save_plan.open_temporary

    def opened(root: Path, iteration: int, **options: Any) -> None:
        for folder in list_checkpoints(root):
            shutil.rmtree(folder)
        whole(root, iteration, **options)

    save_plan.open_temporary = opened


def manifest_is_not_synced(rank: int) -> None:
    """Do not wait until a manifest is on disk: no kill shows that, a power cut does."""

    def unsynced(path: Path, data: bytes) -> None:
        with path.open("xb") as file:
            file.write(data)

    run_folder.write_synced = unsynced
