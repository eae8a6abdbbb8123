# SPDX-License-Identifier: Apache-2.0
"""Retention: which checkpoints of a run are removed once a newer one is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.inventory import list_checkpoints, tracked_checkpoint
from megatron.core.dist_checkpointing.manifest import iteration_of
from megatron.core.dist_checkpointing.readers import remove_checkpoint
from megatron.core.dist_checkpointing.say import print_to_stderr
from megatron.core.dist_checkpointing.verify import verify_checkpoint


def prune_checkpoints(
    root: Path | str,
    *,
    keep_last: int,
    retain_interval: int | None = None,
    say: Callable[[str], None] = print_to_stderr,
) -> list[Path]:
    """Remove checkpoints that are no longer wanted, and return those that are gone.

    Kept are the newest `keep_last` undamaged ones, so the newest one always, those at multiples of
    `retain_interval`, the one that the tracker names, damaged ones, for someone to look at, and
    what any process is reading (`reading`). Nothing is waited for: what cannot be removed now is
    told to `say` and tried again the next time.

    Args:
        root: folder of all checkpoints of a run, which the caller alone saves in.
        keep_last: how many of the newest ones stay.
        retain_interval: iterations between checkpoints that stay for good; None = there are none.
        say: receives a line for each that should have gone and could not.

    Raises:
        ValueError: `keep_last` or `retain_interval` is below 1.
    """
    for name, value in (("keep_last", keep_last), ("retain_interval", retain_interval)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    root = Path(root)
    kept = {tracked_checkpoint(root)}
    undamaged = 0
    removed = []
    for folder in list_checkpoints(root):
        iteration = iteration_of(folder)
        assert iteration is not None
        for_good = retain_interval is not None and iteration % retain_interval == 0
        if undamaged >= keep_last and (for_good or folder in kept):
            continue  # whether it is whole would change nothing
        try:
            verify_checkpoint(folder, digests=False)
        except (CheckpointError, OSError):
            continue
        undamaged += 1
        if undamaged <= keep_last or for_good or folder in kept:
            continue
        try:
            remove_checkpoint(folder)
        except CheckpointError as error:
            say(f"retention: {error}")
            continue
        removed.append(folder)
    return removed
