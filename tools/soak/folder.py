# SPDX-License-Identifier: Apache-2.0
"""Snapshots of a save folder, and the stage of a save in progress."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from megatron.core.dist_checkpointing.manifest import MANIFEST_NAME, iteration_of
from megatron.core.dist_checkpointing.run_folder import TRACKER_NAME, is_temporary


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A save folder.

    Args:
        complete: iterations of the folders under their final names.
        temporary: names of the folders of saves and removals in progress.
        with_manifest: names of the temporary folders with a manifest.
        tracked: iteration in the tracker; None without a tracker, -1 if it cannot be read.
    """

    complete: frozenset[int] = frozenset()
    temporary: frozenset[str] = frozenset()
    with_manifest: frozenset[str] = frozenset()
    tracked: int | None = None

    @property
    def newest(self) -> int:
        """The newest iteration that is complete, -1 if there is none."""
        return max(self.complete, default=-1)

    def saves(self, start: Snapshot) -> frozenset[str]:
        """Return the temporary folders of saves, newer than all complete checkpoints.

        Args:
            start: the folder before the processes started; leftovers do not belong to a save.
        """
        new_folders = self.temporary - start.temporary
        return frozenset(name for name in new_folders if iteration_of_temporary(name) > self.newest)


def look(root: Path) -> Snapshot:
    """Return a snapshot of a save folder."""
    if not root.is_dir():
        return Snapshot()
    tracked: int | None = None
    # First the tracker: what it names has its final name already.
    with contextlib.suppress(FileNotFoundError):
        text = (root / TRACKER_NAME).read_text().strip()
        tracked = int(text) if text.isdigit() else -1
    folders = sorted(path for path in root.iterdir() if path.name.startswith("iter_"))
    temporary = [path for path in folders if is_temporary(path)]
    numbers = (iteration_of(path) for path in folders)
    return Snapshot(
        complete=frozenset(number for number in numbers if number is not None),
        temporary=frozenset(path.name for path in temporary),
        with_manifest=frozenset(p.name for p in temporary if (p / MANIFEST_NAME).exists()),
        tracked=tracked,
    )


def under_way(now: Snapshot, start: Snapshot) -> str:
    """Return the stage of a save: "writing", "manifest", "renamed", "removing" or "".

    Args:
        now: the folder.
        start: the folder before the processes started; leftovers are ignored.
    """
    if saves := now.saves(start):
        return "manifest" if saves & now.with_manifest else "writing"
    if now.newest not in start.complete and now.newest > (now.tracked or -1):
        return "renamed"
    return "removing" if now.temporary - start.temporary else ""


def iteration_of_temporary(name: str) -> int:
    """Return the iteration in a temporary folder's name."""
    return int(name.removeprefix("iter_").split(".")[0])
