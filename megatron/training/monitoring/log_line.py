# SPDX-License-Identifier: Apache-2.0
"""What a run prints while it trains: Megatron's log line, and a live line on a terminal.

The training log line is Megatron's, which existing parsers rely on; so is the validation line. On
a terminal a run shows a live line, elsewhere plain lines. The rank that has the loss shows it;
every other rank is given a `Silent`.
"""

from __future__ import annotations

import datetime
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, TextIO


@dataclass(frozen=True)
class LogPart:
    """What a part of the model has to say in a log line.

    Args:
        words: for the line, between its bars.
        numbers: for every writer of metrics, by name.
        tables: rows of numbers by their names, for metrics.jsonl alone, by name.
    """

    words: str
    numbers: Mapping[str, float]
    tables: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What is logged about the iterations since the last log line.

    Args:
        iteration: the last of them, from 1.
        train_iters: iterations of the whole run.
        consumed_samples: samples used so far.
        global_batch_size: samples per step.
        seconds_per_iteration: mean wall time.
        tokens_per_second: over all ranks.
        learning_rate: of the last step.
        lm_loss: mean over those steps that were not skipped; None if all were.
        loss_scale: of the last step; 1 without fp16.
        grad_norm: of the last step, before clipping.
        num_skipped: iterations skipped, since the last line.
        num_nan: iterations with a NaN or Inf loss, since the last line.
        tflops: TFLOP/s per device.
        mfu: share of the device's peak in [0, 1], where that is known.
        num_zeros: gradient elements that are zero, if asked for.
        params_norm: L2 norm of all weights, if asked for.
        memory_bytes: in use by this rank now: allocated on its GPU, or resident on a CPU.
        peak_memory_bytes: the most so far.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    global_batch_size: int
    seconds_per_iteration: float
    tokens_per_second: float
    learning_rate: float
    lm_loss: float | None
    loss_scale: float
    grad_norm: float | None
    num_skipped: int
    num_nan: int
    tflops: float | None = None
    mfu: float | None = None
    num_zeros: int | None = None
    params_norm: float | None = None
    memory_bytes: int | None = None
    peak_memory_bytes: int | None = None


def format_step(
    record: StepRecord,
    now: datetime.datetime,
    *,
    throughput: bool = False,
    more: Sequence[LogPart] = (),
) -> str:
    """Return the log line of one record: Megatron's fields, then our own.

    Args:
        record: what to say.
        now: when.
        throughput: whether to show TFLOP/s and the share of the peak.
        more: what else to say.
    """
    parts = [
        f" [{now:%Y-%m-%d %H:%M:%S}] iteration {record.iteration:8d}/{record.train_iters:8d} |",
        f" consumed samples: {record.consumed_samples:12d} |",
        f" elapsed time per iteration (ms): {record.seconds_per_iteration * 1000.0:.1f} |",
    ]
    if throughput and record.tflops is not None:
        parts.append(f" throughput per GPU (TFLOP/s/GPU): {record.tflops:.1f} |")
    parts += [
        f" learning rate: {record.learning_rate:.6E} |",
        f" global batch size: {record.global_batch_size:5d} |",
    ]
    if record.lm_loss is not None:
        parts.append(f" lm loss: {record.lm_loss:.6E} |")
    parts.append(f" loss scale: {record.loss_scale:.1f} |")
    if record.grad_norm is not None:
        parts.append(f" grad norm: {record.grad_norm:.3f} |")
    if record.num_zeros is not None:
        parts.append(f" num zeros: {record.num_zeros} |")
    if record.params_norm is not None:
        parts.append(f" params norm: {record.params_norm:.3f} |")
    parts += [
        f" number of skipped iterations: {record.num_skipped:3d} |",
        f" number of nan iterations: {record.num_nan:3d} |",
        f" tokens per second: {record.tokens_per_second:,.0f} |",
    ]
    if throughput and record.mfu is not None:
        parts.append(f" MFU: {record.mfu:.1%} |")
    if record.memory_bytes is not None and record.peak_memory_bytes is not None:
        now_mb, peak_mb = record.memory_bytes / 1e6, record.peak_memory_bytes / 1e6
        parts.append(f" memory (MB): {now_mb:,.0f} | peak memory (MB): {peak_mb:,.0f} |")
    parts += [f" {part.words} |" for part in more]
    return "".join(parts)


def format_validation(iteration: int, loss: float, *, on: str = "") -> str:
    """Return the line of one validation, `on` some set; the perplexity's exponent is capped at
    20."""
    where = f"{iteration} on {on}" if on else f"{iteration}"
    return (
        f" validation loss at iteration {where} | lm loss value: {loss:.6E} | "
        f"lm loss PPL: {math.exp(min(20.0, loss)):.6E} |"
    )


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
