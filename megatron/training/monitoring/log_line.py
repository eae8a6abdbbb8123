# SPDX-License-Identifier: Apache-2.0
"""Log lines of a training run: the window of steps that a line covers, its format, its display.

The training and validation lines have Megatron's format, which existing parsers rely on. A terminal
shows a progress bar, any other output plain lines. Only the rank that has the loss prints; every
other rank uses `Silent`.
"""

from __future__ import annotations

import datetime
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import TracebackType
from typing import Any, Protocol, TextIO

from megatron.core.models.gpt import GPTModel, take_mean_mtp_losses
from megatron.core.moe import MoEConfig
from megatron.core.moe.router import Balance, RouterLoad
from megatron.training.config.model_table import gpt_config
from megatron.training.config.resolve import ResolvedRun
from megatron.training.hooks import LogPart, Progress, StepReport, TrainingHooks
from megatron.training.monitoring.flops import (
    flops_per_square,
    mean_square,
    training_flops,
    window_shares,
)
from megatron.training.monitoring.metrics import EXPERT_LOAD


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


@dataclass(frozen=True, kw_only=True)
class Speedometer:
    """Sizes that convert step time to tokens and FLOPs per second.

    Args:
        tokens_per_sample: sequence length.
        flops_per_sample: model FLOPs of a sample that is one document.
        squares_per_sample: `mean_square` of the sequence length.
        flops_per_square: attention FLOPs per unit of `mean_square`.
        world_size: number of ranks.
        peak_flops: peak FLOP/s of one device; None if unknown.
    """

    tokens_per_sample: int
    flops_per_sample: float
    squares_per_sample: float
    flops_per_square: float
    world_size: int
    peak_flops: float | None

    @staticmethod
    def of(run: ResolvedRun, *, padded_vocab_size: int, peak_flops: float | None) -> Speedometer:
        """Return the speedometer of a run."""
        training = run.config.training
        model = gpt_config(run.config, padded_vocab_size)
        return Speedometer(
            tokens_per_sample=training.seq_length,
            flops_per_sample=training_flops(
                model,
                vocab_size=padded_vocab_size,
                seq_length=training.seq_length,
                samples=1,
            ),
            squares_per_sample=mean_square(training.seq_length, window_shares(model)),
            flops_per_square=flops_per_square(model),
            world_size=run.world_size,
            peak_flops=peak_flops,
        )

    def flops(self, *, samples: int, squares: float) -> float:
        """Return the model FLOPs of some samples.

        Args:
            samples: number of samples.
            squares: sum of `mean_square` over all documents of the samples; 0 if each sample is
                one document.
        """
        masked_squares = self.squares_per_sample * samples - squares if squares else 0
        return self.flops_per_sample * samples - masked_squares * self.flops_per_square


class StepWindow:
    """Sums over the steps since the last record.

    Args:
        run: the run.
        speed: converts step time to throughput.
        memory: returns current and peak memory in bytes; None records neither.
    """

    def __init__(
        self,
        run: ResolvedRun,
        speed: Speedometer,
        *,
        memory: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        self._run, self._speed, self._memory = run, speed, memory
        self._clear()

    def _clear(self) -> None:
        self._num_steps = self._samples = self._last_step_samples = 0
        self._seconds = 0.0
        self._squares = 0
        self._sums: dict[str, float] = {"skipped": 0, "nan": 0, "good": 0, "loss": 0.0}

    def add(self, outcome: StepReport, seconds: float, *, samples: int) -> None:
        """Add one step with its number of samples and its seconds."""
        self._num_steps += 1
        self._samples, self._last_step_samples = self._samples + samples, samples
        self._seconds += seconds
        self._sums["skipped"] += not outcome.applied
        self._sums["nan"] += not math.isfinite(outcome.loss)
        if outcome.applied:
            self._sums["good"] += 1
            self._sums["loss"] += outcome.loss

    def add_squares(self, squares: float) -> None:
        """Add the squared document lengths of one step, summed over all ranks."""
        self._squares += squares

    def to_json(self) -> dict[str, float]:
        """Return the sums for a checkpoint, so that the next log line is the same."""
        return dict(self._sums)

    def restore(self, saved: Mapping[str, float]) -> None:
        """Restore saved sums; times measured by another process are not restored.

        Raises:
            KeyError, TypeError: a sum is missing or is not a number.
        """
        sums = {name: saved[name] for name in self._sums}
        if invalid_names := [
            name for name, value in sums.items() if type(value) not in (int, float)
        ]:
            raise TypeError(f"{invalid_names[0]} is {sums[invalid_names[0]]!r}")
        self._sums.update(sums)

    def record(
        self,
        progress: Progress,
        last_outcome: StepReport,
        *,
        learning_rate: float,
        loss_scale: float,
        params_norm: float | None,
    ) -> StepRecord:
        """Return the record of the steps so far and start the next window."""
        seconds = self._seconds / self._num_steps
        sums = self._sums
        flops_total = self._speed.flops(samples=self._samples, squares=self._squares)
        flops = flops_total / self._seconds / self._speed.world_size
        peak = self._speed.peak_flops
        memory = self._memory() if self._memory else (None, None)
        record = StepRecord(
            iteration=progress.iteration,
            train_iters=self._run.train_iters,
            consumed_samples=progress.consumed_samples,
            global_batch_size=self._last_step_samples,
            seconds_per_iteration=seconds,
            tokens_per_second=self._speed.tokens_per_sample * self._samples / self._seconds,
            learning_rate=learning_rate,
            lm_loss=sums["loss"] / sums["good"] if sums["good"] else None,
            loss_scale=loss_scale,
            grad_norm=last_outcome.grad_norm,
            num_skipped=int(sums["skipped"]),
            num_nan=int(sums["nan"]),
            tflops=flops / 1e12,
            mfu=flops / peak if peak else None,
            num_zeros=last_outcome.num_zeros,
            params_norm=params_norm,
            memory_bytes=memory[0],
            peak_memory_bytes=memory[1],
        )
        self._clear()
        return record


class ModelLog(TrainingHooks):
    """Adds the model's counters to log lines.

    Args:
        model: may have multi-token prediction depths.
        balance: the balance of expert loads; None without experts.
    """

    def __init__(self, model: GPTModel, balance: Balance | None) -> None:
        self._model, self._balance = model, balance

    def log_parts(self) -> list[LogPart]:
        """Return the losses of MTP depths and the expert loads; every rank calls this."""
        log_parts = []
        if self._model.config.mtp_num_layers:
            log_parts.append(mtp_losses(self._model))
        if self._balance is not None:
            log_parts.append(load_balance(self._balance.report(), self._balance.config))
        return log_parts


def mtp_losses(model: GPTModel) -> LogPart:
    """Return the log part of multi-token prediction losses since the previous line; depths count
    from 1.

    Every rank calls this.
    """
    losses = dict(enumerate(take_mean_mtp_losses(model), start=1))
    words = " | ".join(f"mtp {depth} loss: {loss:.6E}" for depth, loss in losses.items())
    return LogPart(words, {f"mtp_{depth}_loss": loss for depth, loss in losses.items()})


def load_balance(loads: Sequence[RouterLoad], config: MoEConfig) -> LogPart:
    """Return the log part of the load of all routers since the previous line.

    Args:
        loads: the load of every router, in the model's order.
        config: of the experts; quantities of disabled features are left out.
    """
    worst = max(loads, key=lambda load: load.imbalance)
    busiest = worst.tokens.index(max(worst.tokens))
    router = config.router
    numbers = {
        "expert_load_max": worst.imbalance,
        "router_entropy": fmean(load.entropy for load in loads),
    }
    words = [
        f"load balance: worst {worst.imbalance:.2f} ({layer_name(worst.name)}, expert {busiest})",
        f"router entropy {numbers['router_entropy']:.3f}",
    ]
    if config.capacity_factor is not None:
        numbers["tokens_dropped"] = fmean(load.dropped for load in loads)
        words.insert(1, f"dropped {numbers['tokens_dropped']:.2%}")
    if router.balance != "none":
        numbers["aux_loss"] = fmean(load.balance_loss for load in loads)
        words.append(f"aux loss {numbers['aux_loss']:.4f}")
    if router.z_loss_coeff > 0.0:
        numbers["z_loss"] = fmean(load.z_loss for load in loads)
        words.append(f"z loss {numbers['z_loss']:.4f}")
    table = {layer_name(load.name): relative(load.tokens) for load in loads}
    return LogPart(" | ".join(words), numbers, {EXPERT_LOAD: table})


def relative(tokens: Sequence[int]) -> list[float]:
    """Return the tokens of each expert divided by their mean: 1 is an even load."""
    mean = sum(tokens) / len(tokens)
    return [round(count / mean, 4) if mean else 0.0 for count in tokens]


def layer_name(router: str) -> str:
    """Return the display name of a router: "layer 2", counted from 0, for
    `decoder.blocks.5.moe.router`; "mtp 1", counted from 1 like its loss, for `mtp.0.`."""
    mtp_match = re.match(r"mtp\.([0-9]+)\.", router)
    if mtp_match is not None:
        return f"mtp {int(mtp_match[1]) + 1}"
    block_match = re.match(r"decoder\.blocks\.([0-9]+)\.", router)
    return router if block_match is None else f"layer {int(block_match[1]) // 2}"
