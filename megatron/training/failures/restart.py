# SPDX-License-Identifier: Apache-2.0
"""A launcher that starts the processes again (`torchrun --max-restarts`): they go on by themselves.

What was saved is noted in the launcher's store, which outlives the processes but not the launcher.
So a restart goes on from what this very job has saved, also without --load, and never from what
an earlier job left in the same folder.
"""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from megatron.training.config.resolve import Run
from megatron.training.launch import Launch


class RestartNote:
    """Whether this job has saved a checkpoint, over all its starts.

    Args:
        launch: of this process.
        timeout_seconds: how long to wait for the store.
    """

    def __init__(self, launch: Launch, *, timeout_seconds: float) -> None:
        self._store: dist.Store | None = None
        if launch.launcher_serves:
            self._store = launch.open_store(timeout_seconds=timeout_seconds, of_job=True)
        # Read before anybody can have saved: the same on every rank.
        self.going_on = launch.attempt > 0 and self._is_set()
        """Whether this start goes on from what an earlier one has saved."""

    def _is_set(self) -> bool:
        return self._store is not None and self._store.check(["saved"])

    def saved(self) -> None:
        """Note that there is a checkpoint."""
        if self._store is not None:
            self._store.set("saved", "1")


def going_on(run: Run) -> Run:
    """Return a run that loads what it has saved, whatever it was started from."""
    checkpoint = run.config.checkpoint
    chosen = replace(checkpoint, load=checkpoint.save, load_optim=True, finetune=False)
    return replace(run, config=replace(run.config, checkpoint=chosen))
