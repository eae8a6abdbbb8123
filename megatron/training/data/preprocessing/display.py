# SPDX-License-Identifier: Apache-2.0
"""How far the work is: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

_SECONDS_BETWEEN_LINES = 5.0


class Report(Protocol):
    """Called after every block with the progress."""

    def __call__(self, *, read_bytes: int, documents: int, tokens: int | None = None) -> None:
        """Show it, or not."""


def silent(*, read_bytes: int, documents: int, tokens: int | None = None) -> None:
    """Show nothing."""


@contextmanager
def show_progress(
    total: int, out: TextIO, *, doing: str = "encoding", done: str = "encoded"
) -> Iterator[Report]:
    """Show progress: bytes, documents, tokens if there are any, speed and the time that is left.

    Args:
        total: bytes to work through.
        out: where to show it.
        doing, done: what happens to them.

    Yields:
        What `preprocess` reports to.
    """
    if not out.isatty():
        yield _Lines(total, out, done)
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
        TextColumn(doing),
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

    def __init__(self, total: int, out: TextIO, done: str) -> None:
        self._total = total
        self._done = done
        self._out = out
        self._begin = self._said = time.monotonic()
        self._before: int | None = None

    def __call__(self, *, read_bytes: int, documents: int, tokens: int | None = None) -> None:
        now = time.monotonic()
        if self._before is None:  # what an earlier run had read does not count as this one's speed
            self._before = read_bytes
        if now - self._said < _SECONDS_BETWEEN_LINES:
            return
        self._said = now
        speed = (read_bytes - self._before) / (now - self._begin)
        left = f", {_duration((self._total - read_bytes) / speed)} left" if speed > 0 else ""
        print(
            f"{self._done} {read_bytes / 1e6:.1f} of {self._total / 1e6:.1f} MB "
            f"({read_bytes / max(self._total, 1):.0%}), {_counts(documents, tokens)}, "
            f"{speed / 1e6:.1f} MB/s{left}",
            file=self._out,
            flush=True,
        )


def _counts(documents: int, tokens: int | None) -> str:
    return f"{documents:,} documents" + ("" if tokens is None else f", {tokens:,} tokens")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
