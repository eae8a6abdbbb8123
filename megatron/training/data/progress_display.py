# SPDX-License-Identifier: Apache-2.0
"""Progress display: a bar on a terminal, a line every few seconds otherwise."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

_SECONDS_BETWEEN_LINES = 5.0


class Report(Protocol):
    """A callable that is called with the progress after every block."""

    def __call__(self, *, read_bytes: int, documents: int, tokens: int | None = None) -> None:
        """Report the progress."""


def silent(*, read_bytes: int, documents: int, tokens: int | None = None) -> None:
    """Show nothing."""


@contextmanager
def show_progress(
    total: int, out: TextIO, *, label: str = "encoding", line_prefix: str = "encoded"
) -> Iterator[Report]:
    """Show progress: bytes, documents, tokens if known, speed and remaining time.

    Args:
        total: number of bytes to process.
        out: stream to write to.
        label: label of the bar.
        line_prefix: first word of each line.

    Yields:
        The callable that receives progress reports.
    """
    if not out.isatty():
        yield _Lines(total, out, line_prefix)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = [
        TextColumn(label),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[counts]}"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=Console(file=out)) as bar:
        task = bar.add_task("", total=total, counts="")

        def show(*, read_bytes: int, documents: int, tokens: int | None = None) -> None:
            bar.update(task, completed=read_bytes, counts=_counts(documents, tokens))

        yield show


class _Lines:
    """Prints a line every few seconds."""

    def __init__(self, total: int, out: TextIO, line_prefix: str) -> None:
        self._total = total
        self._line_prefix = line_prefix
        self._out = out
        self._start_time = self._last_line_time = time.monotonic()
        self._resumed_bytes: int | None = None

    def __call__(self, *, read_bytes: int, documents: int, tokens: int | None = None) -> None:
        now = time.monotonic()
        if self._resumed_bytes is None:  # bytes read before a resume do not count for the speed
            self._resumed_bytes = read_bytes
        if now - self._last_line_time < _SECONDS_BETWEEN_LINES:
            return
        self._last_line_time = now
        speed = (read_bytes - self._resumed_bytes) / (now - self._start_time)
        remaining = f", {_duration((self._total - read_bytes) / speed)} left" if speed > 0 else ""
        print(
            f"{self._line_prefix} {read_bytes / 1e6:.1f} of {self._total / 1e6:.1f} MB "
            f"({read_bytes / max(self._total, 1):.0%}), {_counts(documents, tokens)}, "
            f"{speed / 1e6:.1f} MB/s{remaining}",
            file=self._out,
            flush=True,
        )


def _counts(documents: int, tokens: int | None) -> str:
    return f"{documents:,} documents" + ("" if tokens is None else f", {tokens:,} tokens")


def _duration(seconds: float) -> str:
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}"
