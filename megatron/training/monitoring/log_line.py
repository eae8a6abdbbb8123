# SPDX-License-Identifier: Apache-2.0
"""Megatron's training log line, which parsers in the field rely on, and the validation line."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


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
