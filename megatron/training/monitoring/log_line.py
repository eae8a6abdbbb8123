# SPDX-License-Identifier: Apache-2.0
"""Console output of a training run: Megatron's log lines, and a progress bar on a terminal.

The training and validation lines have Megatron's format, which existing parsers rely on. A terminal
shows a progress bar, any other output plain lines. Only the rank that has the loss prints; every
other rank uses `Silent`.
"""

from __future__ import annotations

import datetime
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TextIO

from megatron.training.hooks import LogPart


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Values of a log line, which covers the iterations since the previous one.

    Args:
        iteration: last iteration, from 1.
        train_iters: iterations of the whole run.
        consumed_samples: samples consumed so far.
        global_batch_size: samples per step.
        seconds_per_iteration: mean wall time.
        tokens_per_second: summed over all ranks.
        learning_rate: learning rate of the last step.
        lm_loss: mean loss of the steps that were not skipped; None if all were skipped.
        loss_scale: loss scale of the last step; 1 without fp16.
        grad_norm: gradient norm of the last step, before clipping.
        num_skipped: skipped iterations since the last line.
        num_nan: iterations with a NaN or Inf loss, since the last line.
        tflops: TFLOP/s per device.
        mfu: model FLOPs utilization in [0, 1]; None if the device's peak is unknown.
        num_zeros: gradient elements that are zero, if counted.
        params_norm: L2 norm of all weights, if computed.
        memory_bytes: current memory of this rank: allocated on its GPU, or resident on a CPU.
        peak_memory_bytes: maximum of memory_bytes so far.
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
    sections: Sequence[LogPart] = (),
) -> str:
    """Return the log line of a record: Megatron's fields, then additional ones.

    Args:
        record: values of the line.
        now: timestamp of the line.
        throughput: whether to show TFLOP/s and MFU.
        sections: additional fields, appended in order.
    """
    fields = [
        f" [{now:%Y-%m-%d %H:%M:%S}] iteration {record.iteration:8d}/{record.train_iters:8d} |",
        f" consumed samples: {record.consumed_samples:12d} |",
        f" elapsed time per iteration (ms): {record.seconds_per_iteration * 1000.0:.1f} |",
    ]
    if throughput and record.tflops is not None:
        fields.append(f" throughput per GPU (TFLOP/s/GPU): {record.tflops:.1f} |")
    fields += [
        f" learning rate: {record.learning_rate:.6E} |",
        f" global batch size: {record.global_batch_size:5d} |",
    ]
    if record.lm_loss is not None:
        fields.append(f" lm loss: {record.lm_loss:.6E} |")
    fields.append(f" loss scale: {record.loss_scale:.1f} |")
    if record.grad_norm is not None:
        fields.append(f" grad norm: {record.grad_norm:.3f} |")
    if record.num_zeros is not None:
        fields.append(f" num zeros: {record.num_zeros} |")
    if record.params_norm is not None:
        fields.append(f" params norm: {record.params_norm:.3f} |")
    fields += [
        f" number of skipped iterations: {record.num_skipped:3d} |",
        f" number of nan iterations: {record.num_nan:3d} |",
        f" tokens per second: {record.tokens_per_second:,.0f} |",
    ]
    if throughput and record.mfu is not None:
        fields.append(f" MFU: {record.mfu:.1%} |")
    if record.memory_bytes is not None and record.peak_memory_bytes is not None:
        current_mb, peak_mb = record.memory_bytes / 1e6, record.peak_memory_bytes / 1e6
        fields.append(f" memory (MB): {current_mb:,.0f} | peak memory (MB): {peak_mb:,.0f} |")
    fields += [f" {section.words} |" for section in sections]
    return "".join(fields)


def format_validation(iteration: int, loss: float, *, split: str = "") -> str:
    """Return the line of one validation.

    Args:
        iteration: iteration of the validation.
        loss: mean loss, in nats per token; the perplexity's exponent is capped at 20.
        split: name of the split, if it is not the validation split.
    """
    position = f"{iteration} on {split}" if split else f"{iteration}"
    return (
        f" validation loss at iteration {position} | lm loss value: {loss:.6E} | "
        f"lm loss PPL: {math.exp(min(20.0, loss)):.6E} |"
    )


class Display(Protocol):
    """Shows the progress of a run; used as a context manager."""

    def step(self, iteration: int, loss: float | None) -> None:
        """Report a finished iteration, with its loss if known."""

    def log(self, line: str, record: StepRecord | None = None) -> None:
        """Show one line; `record` has its values if it is a log line."""

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
        """Show nothing: lines are printed at the log interval."""

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
        completed: iterations already completed.
    """

    def __init__(self, out: TextIO, *, total: int, completed: int) -> None:
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
        self._task = self._progress.add_task(
            "", total=total, completed=completed, loss="", speed=""
        )

    def step(self, iteration: int, loss: float | None) -> None:
        """Move the bar and show the newest loss."""
        loss_field = {} if loss is None else {"loss": f"loss {loss:.4f}"}
        self._progress.update(self._task, completed=iteration, **loss_field)

    def log(self, line: str, record: StepRecord | None = None) -> None:
        """Print a line above the bar; a log line only updates the loss and speed in the bar."""
        if record is None:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        speed = f"{record.tokens_per_second:,.0f} tok/s"
        if record.tflops is not None:
            speed += f" · {record.tflops:.1f} TFLOP/s"
        if record.mfu is not None:
            speed += f" · MFU {record.mfu:.1%}"
        loss_field = {} if record.lm_loss is None else {"loss": f"loss {record.lm_loss:.4f}"}
        self._progress.update(self._task, completed=record.iteration, speed=speed, **loss_field)

    def __enter__(self) -> Live:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop the bar without clearing it."""
        self._progress.stop()


def open_display(
    mode: str, *, enabled: bool, total: int, completed: int, out: TextIO | None = None
) -> Display:
    """Return the display of this rank.

    Args:
        mode: `auto`, `plain` or `live`; auto is live on a terminal where rich is installed.
        enabled: whether this rank prints.
        total: iterations of the run.
        completed: iterations already completed.
        out: where to print; stdout if None.

    Raises:
        ValueError: mode is `live` and rich is not installed.
    """
    out = out or sys.stdout
    if not enabled:
        return Silent()
    if mode == "plain" or (mode == "auto" and not out.isatty()):
        return Plain(out)
    try:
        return Live(out, total=total, completed=completed)
    except ImportError:
        if mode == "live":
            raise ValueError("--progress live needs rich: pip install rich") from None
        return Plain(out)
