# SPDX-License-Identifier: Apache-2.0
"""The last collectives of this rank: which it has come to, and whether it came out of them.

A rank that is stuck shows here where it waits, and what came before. `groups.observers` has the log
of a run; it costs a few microseconds a collective.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from megatron.core.comm import CollectiveRecord

#: How many collectives are kept.
KEPT = 64

#: Kinds that only one other rank takes part in: ranks of a group come to different numbers of them.
BETWEEN_TWO = ("send", "receive")


class Entry:
    """One collective, and the context in which its caller waits for it.

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
        has queued, so `returned` says that it was queued."""

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
        found: dict[str, object] = {
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
            found["waited_seconds"] = round((self.ended or now) - self.waited, 6)
        return found


class CollectiveLog:
    """An observer of process groups that keeps the last records and counts.

    Args:
        iteration: returns the iteration that the rank is in.
    """

    def __init__(self, iteration: Callable[[], int] = lambda: 0) -> None:
        self._iteration = iteration
        self._entries: deque[Entry] = deque(maxlen=KEPT)
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
        """Say which one was last."""
        return describe(self._entries[-1].record) if self._entries else "no collective yet"

    def stuck(self) -> Entry | None:
        """Return the first one that this rank waits in, or that has failed; None if all is well.

        What fails behind a failure, while the step is cleared away, does so because of that.
        """
        found = [entry for entry in self.entries() if entry.state in ("waiting", "failed")]
        return found[0] if found else None

    def entries(self) -> list[Entry]:
        """Return what is kept, the oldest first; other threads may call this."""
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
