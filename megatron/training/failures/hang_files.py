# SPDX-License-Identifier: Apache-2.0
"""Diagnostic files that a rank writes to the save folder when a run hangs.

    SAVE/hang_report_attempt_A.txt                where every rank is, by the first that knows
    SAVE/stacks/attempt_A_rank_R.txt              stacks of all threads
    SAVE/stacks/attempt_A_rank_R_collectives.json the last collectives, oldest first
    SAVE/stacks/attempt_A_rank_R_torch.json       torch's record of them, if it keeps one
    SAVE/stacks/attempt_A_rank_R_frozen.txt       stacks of a rank whose interpreter is frozen

The last is written without the interpreter, by a timer that is reset at every heartbeat.

The log of collectives gives for each whether this rank has entered and left it, so it shows where a
rank hangs and what came before. The log is one of the `observers` of a `ProcessGroupCollection`; it
costs a few microseconds a collective. torch's own record of collectives (the flight recorder) also
knows, on a GPU, which have really begun and ended there. It exists if the environment enables it
before process groups are created, and is read as JSON.
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

#: How often a file is opened in a folder that other ranks may remove.
_ATTEMPTS = 100

#: Kinds that only one other rank takes part in: ranks of a group come to different numbers of them.
BETWEEN_TWO = ("send", "receive")


class Entry:
    """A logged collective, and the context manager in which its caller waits for it.

    Args:
        number: among the collectives of its group, from 1; 0 for what is between two ranks.
        iteration: in which it started.
        record: what it is.
        at: when it started, by the monotonic clock.
    """

    __slots__ = ("at", "ended", "iteration", "number", "record", "state", "waited")

    def __init__(self, number: int, iteration: int, *, record: CollectiveRecord, at: float) -> None:
        self.number, self.iteration, self.record, self.at = number, iteration, record, at
        self.waited = self.ended = 0.0
        self.state = "started"
        """`started`, `waiting`, `returned` or `failed`; on a GPU the host does not wait for what it
        has queued, so `returned` means that it was queued."""

    def __enter__(self) -> None:
        if self.state != "failed":  # else who clears the step away waits for it once more
            self.state, self.waited = "waiting", time.monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.state != "failed":
            self.state, self.ended = "returned" if error is None else "failed", time.monotonic()

    def to_json(self, now: float) -> dict[str, object]:
        """Return it as plain data, times as seconds before `now`."""
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
            "started_seconds_ago": round(now - self.at, 6),
        }
        if self.waited:
            fields["waited_seconds"] = round((self.ended or now) - self.waited, 6)
        return fields


class CollectiveLog:
    """An observer of process groups that logs the last collectives and counts all.

    Args:
        iteration: returns the iteration that the rank is in.
    """

    def __init__(self, iteration: Callable[[], int] = lambda: 0) -> None:
        self._iteration = iteration
        self._entries: deque[Entry] = deque(maxlen=MAX_ENTRIES)
        self.count = 0
        """Collectives so far."""
        self.in_group: dict[str, int] = {}
        """Collectives so far by group, without what is between two ranks."""

    def __call__(self, record: object) -> Entry:
        """Take note of a collective that starts; what is returned is entered by who waits for
        it."""
        assert isinstance(record, CollectiveRecord)
        number = 0
        if record.kind not in BETWEEN_TWO:
            number = self.in_group[record.group] = self.in_group.get(record.group, 0) + 1
        entry = Entry(number, self._iteration(), record=record, at=time.monotonic())
        self._entries.append(entry)
        self.count += 1
        return entry

    @property
    def name(self) -> str:
        """Describe the last collective."""
        return describe(self._entries[-1].record) if self._entries else "no collective yet"

    def stuck(self) -> Entry | None:
        """Return the first one that this rank waits in, or that has failed; None if all is well.

        What fails after a failure, while the step is cleared away, does so because of that.
        """
        stuck_entries = [entry for entry in self.entries() if entry.state in ("waiting", "failed")]
        return stuck_entries[0] if stuck_entries else None

    def entries(self) -> list[Entry]:
        """Return the logged collectives, oldest first; other threads may call this."""
        while True:
            try:
                return list(self._entries)
            except RuntimeError:  # changed meanwhile
                continue


def describe(record: CollectiveRecord) -> str:
    """Return a collective in words, the same on all ranks that take part in it alike."""
    if record.kind == "all_to_all":  # its parts are uneven: every rank has its own sizes
        return f"{record.kind} of {record.dtype} over {record.group}"
    how = f" ({record.how})" if record.how else ""
    size = " x ".join(map(str, record.shape)) or "one number"
    return f"{record.kind}{how} of {record.dtype} [{size}] over {record.group}"


#: How many collectives torch keeps; the second name is that of older versions.
SIZE_NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")

#: Default number of collectives that torch records.
SIZE = 2000


def ask_for_record(environment: MutableMapping[str, str]) -> None:
    """Enable torch's flight recorder, unless the environment sets its size."""
    if not any(name in environment for name in SIZE_NAMES):
        environment[SIZE_NAMES[0]] = str(SIZE)


def is_kept(environment: MutableMapping[str, str]) -> bool:
    """Return whether the environment asks for the record."""
    return any(environment.get(name, "0") not in ("", "0") for name in SIZE_NAMES)


def read_record(bindings: Any) -> bytes | None:
    """Return the record as JSON; None if this torch has none.

    Args:
        bindings: `torch._C._distributed_c10d`, of which versions differ in what they offer.
    """
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump: Callable[[], bytes | str] | None = getattr(bindings, name, None)
        if dump is not None:
            record = dump()
            return record.encode() if isinstance(record, str) else bytes(record)
    return None


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
    """Open a file of the stacks folder, which another rank removes where it finds it empty."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            make_folder(path.parent, root=root)
            return write_to(path, "w", root=root)
    raise FileNotFoundError(f"{path.parent} was removed {_ATTEMPTS} times")


class HangFiles:
    """The files of one rank; writing them never fails.

    Args:
        save: the save folder.
        attempt: how often the launcher has restarted the processes.
        rank: of this process.
        frozen_seconds: after how long without a beat the interpreter is taken to hang.
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
        """Write stacks and collectives.

        Args:
            reason: why, in one line.
            error: what has brought the calling thread here.
            log: of this rank's collectives.
        """
        self.close()  # this rank is not the one that hangs
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
        # Last, as it asks the device.
        with contextlib.suppress(Exception):
            if is_kept(self._environment):
                import torch

                if (torch_record := read_record(torch._C._distributed_c10d)) is not None:
                    replace_file(self._sibling("torch.json"), torch_record, root=self._save)

    def write_report(self, text: str) -> None:
        """Write the report of all ranks."""
        with contextlib.suppress(OSError):
            make_folder(self._save, root=self._save)
            replace_file(self.report, text)

    def beat(self) -> None:
        """Reset the timer that writes the stacks if no heartbeat follows in time."""
        with contextlib.suppress(Exception), self._timer:
            if self._closed:
                return
            if self._frozen is None:
                self._frozen = _open_stacks(self._sibling("frozen.txt"), self._save)
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
            path = self._sibling("frozen.txt")
            if path.stat().st_size == 0:
                path.unlink()
                path.parent.rmdir()  # if that was all that is in it

    def _sibling(self, end: str) -> Path:
        return self._stacks.with_name(f"{self._stacks.stem}_{end}")
