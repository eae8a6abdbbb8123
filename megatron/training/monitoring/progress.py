# SPDX-License-Identifier: Apache-2.0
"""What a run shows while it goes: a live line on a terminal, plain lines elsewhere.

The rank that has the loss shows it; every other rank is given a `Silent`.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Protocol, TextIO

from megatron.training.monitoring.log_line import StepRecord


class Display(Protocol):
    """Shows the progress of a run; used as a context manager."""

    def step(self, iteration: int, loss: float | None) -> None:
        """Say that an iteration is done; its loss where it is known."""

    def log(self, line: str, record: StepRecord | None = None) -> None:
        """Show one line, and what it was made of if it is a log line."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Silent:
    """Shows nothing."""

    def step(self, iteration: int, loss: float | None) -> None:
        """Show nothing."""

    def log(self, line: str, record: StepRecord | None = None) -> None:
        """Show nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *exception: object) -> None:
        """Close nothing."""


class Plain:
    """Prints lines."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def step(self, iteration: int, loss: float | None) -> None:
        """Show nothing: lines come at the log interval."""

    def log(self, line: str, record: StepRecord | None = None) -> None:
        """Print the line."""
        print(line, file=self._out, flush=True)

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *exception: object) -> None:
        """Close nothing."""


class Live:
    """Keeps one progress bar at the bottom of a terminal; lines scroll above it.

    Args:
        out: a terminal.
        total: iterations of the run.
        done: iterations already done.
    """

    def __init__(self, out: TextIO, *, total: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining

        columns = [
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            Remaining(),
        ]
        self._progress: Any = Progress(*columns, console=Console(file=out), refresh_per_second=4)
        self._task = self._progress.add_task("", total=total, completed=done, loss="", speed="")

    def step(self, iteration: int, loss: float | None) -> None:
        """Move the bar and show the newest loss."""
        shown = {} if loss is None else {"loss": f"loss {loss:.4f}"}
        self._progress.update(self._task, completed=iteration, **shown)

    def log(self, line: str, record: StepRecord | None = None) -> None:
        """Print a line above the bar; of a log line keep the speed in the bar instead."""
        if record is None:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        speed = f"{record.tokens_per_second:,.0f} tok/s"
        if record.tflops is not None:
            speed += f" · {record.tflops:.1f} TFLOP/s"
        if record.mfu is not None:
            speed += f" · MFU {record.mfu:.1%}"
        shown = {} if record.lm_loss is None else {"loss": f"loss {record.lm_loss:.4f}"}
        self._progress.update(self._task, completed=record.iteration, speed=speed, **shown)

    def __enter__(self) -> Live:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the bar as it stands."""
        self._progress.stop()


def open_display(
    mode: str, *, shows: bool, total: int, done: int, out: TextIO | None = None
) -> Display:
    """Choose how this rank shows progress.

    Args:
        mode: `auto`, `plain` or `live`; auto is live on a terminal where rich is installed.
        shows: whether this rank shows anything.
        total: iterations of the run.
        done: iterations already done.
        out: where to print; stdout if None.

    Raises:
        ValueError: `live` was asked for and rich is absent.
    """
    out = out or sys.stdout
    if not shows:
        return Silent()
    if mode == "plain" or (mode == "auto" and not out.isatty()):
        return Plain(out)
    try:
        return Live(out, total=total, done=done)
    except ImportError:
        if mode == "live":
            raise ValueError("--progress live needs rich: pip install rich") from None
        return Plain(out)
