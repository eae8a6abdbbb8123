# SPDX-License-Identifier: Apache-2.0
"""How far the work is: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

_SECONDS_BETWEEN_LINES = 5.0


class Report(Protocol):
    """Is told after every block how far the work is."""

    def __call__(self, *, read_bytes: int, documents: int, tokens: int) -> None:
        """Show it, or not."""


def silent(*, read_bytes: int, documents: int, tokens: int) -> None:
    """Show nothing."""


@contextmanager
def show_progress(total: int, out: TextIO) -> Iterator[Report]:
    """Show progress: bytes, documents, tokens, speed and the time that is left.

    Args:
        total: bytes of all inputs.
        out: where to show it.

    Yields:
        What `preprocess` reports to.
    """
    if not out.isatty():
        yield _Lines(total, out)
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
        TextColumn("encoding"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=Console(file=out)) as bar:
        task = bar.add_task("", total=total, documents=0, tokens=0)

        def show(*, read_bytes: int, documents: int, tokens: int) -> None:
            bar.update(task, completed=read_bytes, documents=documents, tokens=tokens)

        yield show


class _Lines:
    """Prints a line every few seconds."""

    def __init__(self, total: int, out: TextIO) -> None:
        self._total = total
        self._out = out
        self._begin = self._said = time.monotonic()
        self._before: int | None = None

    def __call__(self, *, read_bytes: int, documents: int, tokens: int) -> None:
        now = time.monotonic()
        if self._before is None:  # what an earlier run had read does not count as this one's speed
            self._before = read_bytes
        if now - self._said < _SECONDS_BETWEEN_LINES:
            return
        self._said = now
        speed = (read_bytes - self._before) / (now - self._begin)
        left = f", {_duration((self._total - read_bytes) / speed)} left" if speed > 0 else ""
        print(
            f"encoded {read_bytes / 1e6:.1f} of {self._total / 1e6:.1f} MB "
            f"({read_bytes / max(self._total, 1):.0%}), {documents:,} documents, "
            f"{tokens:,} tokens, {speed / 1e6:.1f} MB/s{left}",
            file=self._out,
            flush=True,
        )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
