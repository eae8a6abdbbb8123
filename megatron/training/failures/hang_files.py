# SPDX-License-Identifier: Apache-2.0
"""What a rank leaves in the save folder when a run is stuck.

    SAVE/hang_report_attempt_A.txt                where every rank is, by the first that knows
    SAVE/stacks/attempt_A_rank_R.txt              stacks of all threads
    SAVE/stacks/attempt_A_rank_R_collectives.json the last collectives, oldest first
    SAVE/stacks/attempt_A_rank_R_torch.json       torch's record of them, if it keeps one
    SAVE/stacks/attempt_A_rank_R_frozen.txt       stacks of a rank whose interpreter stands still

The last is written without the interpreter, by a timer that is set anew at every beat.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from megatron.core.untrusted_files import make_folder, replace_file, write_to
from megatron.training.failures.collective_log import CollectiveLog
from megatron.training.failures.flight_recorder import is_kept, read_record
from megatron.training.failures.stack_dump import stack_file, write_stacks


class HangFiles:
    """The files of one rank; writing them never fails.

    Args:
        save: the save folder.
        attempt: how often the launcher has restarted the processes.
        rank: of this process.
        frozen_seconds: after how long without a beat the interpreter is taken to stand still.
        environment: of this process.
    """

    def __init__(
        self,
        save: str,
        *,
        attempt: int,
        rank: int,
        frozen_seconds: float,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._rank, self._frozen_seconds, self._environment = rank, frozen_seconds, environment
        self._save = Path(save)
        self._stacks = stack_file(save, attempt=attempt, rank=rank)
        self.report = Path(save, f"hang_report_attempt_{attempt}.txt")
        """Where the report of all ranks goes."""
        self.files = str(self._stacks.with_name(f"attempt_{attempt}_rank_*"))
        """What all ranks leave."""
        self._frozen: IO[str] | None = None
        self._closed = False
        self._timer = threading.Lock()

    def write(self, reason: str, error: BaseException | None, log: CollectiveLog) -> None:
        """Leave stacks and collectives.

        Args:
            reason: why, in one line.
            error: what has brought the calling thread here.
            log: of this rank's collectives.
        """
        self.close()  # this rank is not the one that stands still
        write_stacks(self._stacks, reason, root=self._save, error=error)
        with contextlib.suppress(Exception):
            now = time.monotonic()
            told = {
                "rank": self._rank,
                "reason": reason,
                "collectives": log.count,
                "last": [entry.to_json(now) for entry in log.entries()],
            }
            told_text = json.dumps(told, indent=1) + "\n"
            replace_file(self._beside("collectives.json"), told_text, root=self._save)
        # Last, as it asks the device.
        with contextlib.suppress(Exception):
            if is_kept(self._environment):
                import torch

                if (found := read_record(torch._C._distributed_c10d)) is not None:
                    replace_file(self._beside("torch.json"), found, root=self._save)

    def write_report(self, text: str) -> None:
        """Leave the report of all ranks."""
        with contextlib.suppress(OSError):
            make_folder(self._save, root=self._save)
            replace_file(self.report, text)

    def beat(self) -> None:
        """Set the timer anew that writes the stacks if no further beat comes in time."""
        with contextlib.suppress(Exception), self._timer:
            if self._closed:
                return
            if self._frozen is None:
                path = self._beside("frozen.txt")
                make_folder(path.parent, root=self._save)
                self._frozen = write_to(path, "w", root=self._save)
            faulthandler.dump_traceback_later(self._frozen_seconds, file=self._frozen)

    def close(self) -> None:
        """Stop the timer, and leave nothing behind if it has written nothing."""
        with contextlib.suppress(OSError), self._timer:
            self._closed = True
            if self._frozen is None:
                return
            faulthandler.cancel_dump_traceback_later()
            frozen, self._frozen = self._frozen, None
            frozen.close()
            path = self._beside("frozen.txt")
            if path.stat().st_size == 0:
                path.unlink()
                path.parent.rmdir()  # if that was all that is in it

    def _beside(self, end: str) -> Path:
        return self._stacks.with_name(f"{self._stacks.stem}_{end}")
