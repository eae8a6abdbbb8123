# SPDX-License-Identifier: Apache-2.0
"""Where every thread of a process stands, in a file: what a rank leaves when the run is stuck."""

from __future__ import annotations

import faulthandler
import os
import socket
import time
import traceback
from pathlib import Path

from megatron.core.untrusted_files import make_folder, write_to


def stack_file(save: str, *, attempt: int, rank: int) -> Path:
    """Return where a rank's stacks go; every start of the launcher has files of its own."""
    return Path(save, "stacks", f"attempt_{attempt}_rank_{rank}.txt")


def write_stacks(
    path: Path, reason: str, *, root: Path, error: BaseException | None = None
) -> None:
    """Write the stacks of all threads of this process; never fails itself.

    Args:
        path: of the file, whose folder is made; an earlier dump in it is replaced.
        reason: why, for the first line.
        root: the save folder, in which it lies.
        error: what has brought the calling thread here, whose own stack no longer shows it.
    """
    try:
        make_folder(path.parent, root=root)
        with write_to(path, "w", root=root) as file:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            print(f"process {os.getpid()} on {socket.gethostname()}, {when}: {reason}", file=file)
            if error is not None:
                print("".join(traceback.format_exception(error)), file=file)
            file.flush()
            faulthandler.dump_traceback(file=file, all_threads=True)
    except Exception:  # the run is ending already, for a reason that matters more
        return
