# SPDX-License-Identifier: Apache-2.0
"""Diagnostic files that a rank writes to the save folder when a run hangs.

    SAVE/hang_report_attempt_A.txt                state of all ranks, by the first that detects it
    SAVE/stacks/attempt_A_rank_R.txt              stacks of all threads
    SAVE/stacks/attempt_A_rank_R_collectives.json the last collectives, oldest first
    SAVE/stacks/attempt_A_rank_R_torch.json       torch's flight recorder, if it is enabled
    SAVE/stacks/attempt_A_rank_R_frozen.txt       stacks of a rank whose interpreter is frozen

The last file is written without the interpreter, by a timer that every heartbeat resets.

The log of collectives records whether this rank has entered and left each of them, so it shows
where a rank hangs, and the collectives before. The log is one of the `observers` of a
`ProcessGroupCollection`; it costs a few microseconds per collective. torch's flight recorder also
knows, on a GPU, which collectives have started and ended on the device. It exists if the
environment enables it before process groups are created, and is read as JSON.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from megatron.core.comm import CollectiveRecord
from megatron.core.untrusted_files import make_folder, replace_file, write_to

#: Maximum number of logged collectives.
MAX_ENTRIES = 64

#: Attempts to open a file in a folder that other ranks may remove.
_ATTEMPTS = 100

#: Kinds between two ranks; the ranks of a group take part in different numbers of them.
POINT_TO_POINT = ("send", "receive")


class CollectiveEntry:
    """A logged collective, and the context manager in which its caller waits for it.

    Args:
        number: position among the collectives of its group, from 1; 0 for point-to-point.
        iteration: the iteration in which it started.
        record: the collective's description.
        started_at: start time by the monotonic clock.
    """

    __slots__ = ("ended_at", "iteration", "number", "record", "started_at", "state", "waited_since")

    def __init__(
        self, number: int, iteration: int, *, record: CollectiveRecord, started_at: float
    ) -> None:
        self.number, self.iteration, self.record = number, iteration, record
        self.started_at = started_at
        self.waited_since = self.ended_at = 0.0
        self.state = "started"
        """`started`, `waiting`, `returned` or `failed`. On a GPU the host does not wait for
        collectives, so `returned` means that the collective is enqueued."""

    def __enter__(self) -> None:
        if self.state != "failed":  # clearing the failed step waits for it once more
            self.state, self.waited_since = "waiting", time.monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.state != "failed":
            self.state, self.ended_at = "returned" if error is None else "failed", time.monotonic()

    def to_json(self, now: float) -> dict[str, object]:
        """Return the JSON form, with times as seconds before `now`."""
        fields: dict[str, object] = {
            "kind": self.record.kind,
            "how": self.record.how,
            "group": self.record.group,
            "number_in_group": self.number or None,
            "size": self.record.size,
            "dtype": self.record.dtype,
            "shape": list(self.record.shape),
            "bytes": self.record.bytes,
            "iteration": self.iteration,
            "state": self.state,
            "started_seconds_ago": round(now - self.started_at, 6),
        }
        if self.waited_since:
            fields["waited_seconds"] = round((self.ended_at or now) - self.waited_since, 6)
        return fields


class CollectiveLog:
    """An observer of process groups that logs the last collectives and counts all.

    Args:
        iteration: returns the rank's current iteration.
    """

    def __init__(self, iteration: Callable[[], int] = lambda: 0) -> None:
        self._iteration = iteration
        self._entries: deque[CollectiveEntry] = deque(maxlen=MAX_ENTRIES)
        self.count = 0
        """Number of collectives so far."""
        self.collectives_by_group: dict[str, int] = {}
        """Number of collectives so far by group, without point-to-point operations."""

    def __call__(self, record: object) -> CollectiveEntry:
        """Log the start of a collective; the caller enters the returned entry while it waits."""
        assert isinstance(record, CollectiveRecord)
        number = 0
        if record.kind not in POINT_TO_POINT:
            number = self.collectives_by_group[record.group] = (
                self.collectives_by_group.get(record.group, 0) + 1
            )
        entry = CollectiveEntry(
            number, self._iteration(), record=record, started_at=time.monotonic()
        )
        self._entries.append(entry)
        self.count += 1
        return entry

    @property
    def name(self) -> str:
        """Describe the last collective."""
        return describe(self._entries[-1].record) if self._entries else "no collective yet"

    def stuck(self) -> CollectiveEntry | None:
        """Return the first collective that this rank waits in, or that has failed; else None.

        Later failures, while the step is cleared, are consequences of the first.
        """
        stuck_entries = [entry for entry in self.entries() if entry.state in ("waiting", "failed")]
        return stuck_entries[0] if stuck_entries else None

    def entries(self) -> list[CollectiveEntry]:
        """Return the logged collectives, oldest first; other threads may call this."""
        while True:
            try:
                return list(self._entries)
            except RuntimeError:  # changed meanwhile
                continue


def describe(record: CollectiveRecord) -> str:
    """Describe a collective, equally on all ranks that take part in it."""
    if record.kind == "all_to_all":  # sizes differ between ranks
        return f"{record.kind} of {record.dtype} over {record.group}"
    how = f" ({record.how})" if record.how else ""
    size = " x ".join(map(str, record.shape)) or "one number"
    return f"{record.kind}{how} of {record.dtype} [{size}] over {record.group}"


#: Variables with the flight recorder's size; older torch versions use the second name.
BUFFER_SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")

#: Default number of collectives that torch records.
DEFAULT_BUFFER_SIZE = 2000


def enable_flight_recorder(environment: MutableMapping[str, str]) -> None:
    """Enable torch's flight recorder, unless the environment sets its size."""
    if not any(name in environment for name in BUFFER_SIZE_VARIABLES):
        environment[BUFFER_SIZE_VARIABLES[0]] = str(DEFAULT_BUFFER_SIZE)


def flight_recorder_enabled(environment: MutableMapping[str, str]) -> bool:
    """Return whether the environment enables the flight recorder."""
    return any(environment.get(name, "0") not in ("", "0") for name in BUFFER_SIZE_VARIABLES)


def read_flight_recorder(bindings: Any) -> bytes | None:
    """Return the flight recorder's content as JSON; None if this torch version has none.

    Args:
        bindings: `torch._C._distributed_c10d`; its functions differ between versions.
    """
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump: Callable[[], bytes | str] | None = getattr(bindings, name, None)
        if dump is not None:
            record = dump()
            return record.encode() if isinstance(record, str) else bytes(record)
    return None


def stack_file(save: str, *, attempt: int, rank: int) -> Path:
    """Return the path of a rank's stacks; each start by the launcher has its own files."""
    return Path(save, "stacks", f"attempt_{attempt}_rank_{rank}.txt")


def write_stacks(
    path: Path, reason: str, *, root: Path, error: BaseException | None = None
) -> None:
    """Write the stacks of all threads of this process; never raises.

    Args:
        path: the file; its folder is created, and an earlier dump is replaced.
        reason: text for the first line.
        root: the save folder, which contains `path`.
        error: the exception of the calling thread, whose stack no longer shows it.
    """
    try:
        with _open_stacks(path, root) as file:
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            print(f"process {os.getpid()} on {socket.gethostname()}, {when}: {reason}", file=file)
            if error is not None:
                print("".join(traceback.format_exception(error)), file=file)
            file.flush()
            faulthandler.dump_traceback(file=file, all_threads=True)
    except Exception:  # the run is already ending: the original error matters more
        return


def _open_stacks(path: Path, root: Path) -> IO[str]:
    """Open a file in the stacks folder, which other ranks remove when it is empty."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            make_folder(path.parent, root=root)
            return write_to(path, "w", root=root)
    raise FileNotFoundError(f"{path.parent} was removed {_ATTEMPTS} times")


class HangFiles:
    """The diagnostic files of one rank; writing them never raises.

    Args:
        save: the save folder.
        attempt: number of restarts by the launcher so far.
        rank: this process's rank.
        frozen_seconds: without a heartbeat for this long, the interpreter is considered frozen.
        environment: this process's environment variables.
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
        """Path of the report about all ranks."""
        self.files = str(self._stacks.with_name(f"attempt_{attempt}_rank_*"))
        """Pattern of the files of all ranks."""
        self._frozen: IO[str] | None = None
        self._closed = False
        self._timer = threading.Lock()

    def write(self, reason: str, error: BaseException | None, log: CollectiveLog) -> None:
        """Write stacks and collectives.

        Args:
            reason: the reason, in one line.
            error: the exception of the calling thread.
            log: this rank's log of collectives.
        """
        self.close()  # this rank's interpreter is not frozen
        write_stacks(self._stacks, reason, root=self._save, error=error)
        with contextlib.suppress(Exception):
            now = time.monotonic()
            report = {
                "rank": self._rank,
                "reason": reason,
                "collectives": log.count,
                "last": [entry.to_json(now) for entry in log.entries()],
            }
            report_text = json.dumps(report, indent=1) + "\n"
            replace_file(self._sibling("collectives.json"), report_text, root=self._save)
        # Last, because it accesses the device, which may hang.
        with contextlib.suppress(Exception):
            if flight_recorder_enabled(self._environment):
                import torch

                if (torch_record := read_flight_recorder(torch._C._distributed_c10d)) is not None:
                    replace_file(self._sibling("torch.json"), torch_record, root=self._save)

    def write_report(self, text: str) -> None:
        """Write the report about all ranks."""
        with contextlib.suppress(OSError):
            make_folder(self._save, root=self._save)
            replace_file(self.report, text)

    def heartbeat(self) -> None:
        """Reset the timer that writes the stacks if no heartbeat follows in time."""
        with contextlib.suppress(Exception), self._timer:
            if self._closed:
                return
            if self._frozen is None:
                self._frozen = _open_stacks(self._sibling("frozen.txt"), self._save)
            faulthandler.dump_traceback_later(self._frozen_seconds, file=self._frozen)

    def close(self) -> None:
        """Stop the timer, and remove its file if it is empty."""
        with contextlib.suppress(OSError), self._timer:
            self._closed = True
            if self._frozen is None:
                return
            faulthandler.cancel_dump_traceback_later()
            frozen, self._frozen = self._frozen, None
            frozen.close()
            path = self._sibling("frozen.txt")
            if path.stat().st_size == 0:
                path.unlink()
                path.parent.rmdir()  # fails unless the folder is empty

    def _sibling(self, end: str) -> Path:
        return self._stacks.with_name(f"{self._stacks.stem}_{end}")
