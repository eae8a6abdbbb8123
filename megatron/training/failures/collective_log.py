# SPDX-License-Identifier: Apache-2.0
"""The collective that this rank has come to last: where it waits when a run is stuck."""

from __future__ import annotations

from megatron.core.comm import CollectiveRecord


class LastCollective:
    """An observer of process groups that keeps one record and counts."""

    def __init__(self) -> None:
        self.count = 0
        self._last: CollectiveRecord | None = None

    def __call__(self, record: object) -> None:
        """Take note of a collective that starts."""
        assert isinstance(record, CollectiveRecord)
        self._last, self.count = record, self.count + 1

    @property
    def name(self) -> str:
        """Say which one it is."""
        return "no collective yet" if self._last is None else describe(self._last)


def describe(record: CollectiveRecord) -> str:
    """Return a collective in words, the same on all ranks that take part in it alike."""
    if record.kind == "all_to_all":  # its parts are uneven: every rank has its own sizes
        return f"{record.kind} of {record.dtype} over {record.group}"
    how = f" ({record.how})" if record.how else ""
    size = " x ".join(map(str, record.shape)) or "one number"
    return f"{record.kind}{how} of {record.dtype} [{size}] over {record.group}"
