# SPDX-License-Identifier: Apache-2.0
"""Options of training: batch sizes, length of the run, loss, precision and validation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Annotated, Literal

from megatron.cli.two_way_table import at, unless
from megatron.core.datasets.batch_sizes import BatchSizes, Division
from megatron.training.config.values import not_negative, positive, require, require_all


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Validation."""

    eval_interval: int = 1000
    """Iterations between validations; 0 = never."""
    eval_iters: int = 100
    """Steps per validation, each of --eval-global-batch-size samples; 0 or -1 = no validation."""
    eval_global_batch_size: int | None = None
    """Samples per validation step over all ranks; derived: --global-batch-size."""
    eval_micro_batch_size: int | None = None
    """Samples per rank in one validation forward pass; derived: --micro-batch-size."""

    def __post_init__(self) -> None:
        require_all(
            lambda: not_negative(self, "eval_interval"),
            lambda: require(
                self.eval_iters >= -1, f"--eval-iters is {self.eval_iters}: it must be at least -1"
            ),
            lambda: positive(self, "eval_global_batch_size", "eval_micro_batch_size"),
        )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Batch size, length of the run, loss and precision."""

    seq_length: int
    """Tokens per sample."""
    micro_batch_size: int
    """Samples per rank in one forward pass."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all ranks; derived: micro batch size x data parallel size."""
    step_batch_size_schedule: tuple[str, ...] | None = None
    """THRESHOLD:SIZE ...: the global batch size is SIZE from THRESHOLD consumed tokens up to the
    next threshold; the first threshold is 0, and numbers may end in K, M, B or T, as in `0:384
    200B:768`."""
    rampup_batch_size: tuple[int, ...] | None = None
    """START INCREMENT SAMPLES: ramp the global batch size up from START samples to
    --global-batch-size in steps of INCREMENT, evenly over SAMPLES samples."""
    allow_uneven_batch: bool = False
    """Allow a global batch size that is no multiple of micro batch size x data parallel size: ranks
    with fewer microbatches compute padding microbatches that do not count in the loss, and the last
    microbatch may be smaller."""
    train_iters: int | None = None
    """Number of optimizer steps; give either this or --train-samples."""
    train_samples: int | None = None
    """Number of training samples; give either this or --train-iters."""
    exit_interval: int | None = None
    """Save and exit when the iteration is a multiple of this."""
    seed: int = 1234
    """Random seed of initial weights, dropout and data order."""
    bf16: bool = False
    """Train in bfloat16: bf16 weights and activations, fp32 master weights and gradients."""
    fp16: bool = False
    """Train in float16: fp16 weights and activations, fp32 master weights and gradients, loss
    scaling."""
    calculate_per_token_loss: bool = False
    """Average the loss over the tokens of the global batch instead of over microbatches."""
    mtp_num_layers: int | None = None
    """Number of multi-token prediction depths: additional layers, used in training only, each of
    which predicts one token further ahead; None = off."""
    mtp_loss_scaling_factor: Annotated[float, at("mtp.loss_factor", back=unless(0.1))] = 0.1
    """Weight in the training loss of the mean loss over all multi-token prediction depths."""
    deterministic_mode: bool = False
    """Use deterministic operations only; refuse the others."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto uses a GPU if there is one, cuda requires one."""
    manual_gc: bool = False
    """Disable Python's automatic garbage collection, so that a collection never delays one rank
    alone."""
    manual_gc_interval: int = 0
    """Iterations between garbage collections on all ranks with --manual-gc; 0 = none."""
    max_consecutive_bad_steps: int = 10
    """Stop after this many consecutive steps with a NaN or Inf loss or gradient norm; each such
    step is skipped."""

    def __post_init__(self) -> None:
        require_all(
            lambda: positive(
                self, "seq_length", "micro_batch_size", "global_batch_size", "train_iters"
            ),
            lambda: positive(self, "train_samples", "exit_interval", "max_consecutive_bad_steps"),
            lambda: self.batch_sizes(1),
            lambda: not_negative(self, "seed", "manual_gc_interval"),
            lambda: positive(self, "mtp_num_layers"),
            lambda: not_negative(self, "mtp_loss_scaling_factor"),
            lambda: require(
                (self.mtp_num_layers or 0) < max(self.seq_length, 1),
                f"--mtp-num-layers {self.mtp_num_layers}: samples of {self.seq_length} tokens are "
                "too "
                "short to predict so far ahead: use fewer",
            ),
            lambda: require(
                self.manual_gc or not self.manual_gc_interval,
                "--manual-gc-interval has no effect without --manual-gc: add that",
            ),
            lambda: require(
                not (self.bf16 and self.fp16), "--bf16 and --fp16 are mutually exclusive: keep one"
            ),
        )

    def batch_sizes(self, dp_size: int) -> BatchSizes:
        """Return the global batch size of every step.

        Args:
            dp_size: number of data-parallel ranks; the default global batch size is one microbatch
                for each.

        Raises:
            ValueError: the options contradict each other or describe no batch sizes; one line.
        """
        size, flag = self.global_batch_size, "--step-batch-size-schedule"
        if self.step_batch_size_schedule is None:
            if self.rampup_batch_size is None:
                return BatchSizes.constant(max(size or self.micro_batch_size * dp_size, 1))
            return self._ramp(self.rampup_batch_size)
        require(
            self.rampup_batch_size is None,
            f"{flag} and --rampup-batch-size are mutually exclusive: keep one",
        )
        scheduled_sizes = _steps(flag, self.step_batch_size_schedule, max(self.seq_length, 1))
        require(
            size in (None, scheduled_sizes.sizes[-1]),
            f"--global-batch-size {size} and {flag} are mutually exclusive, as the schedule ends "
            f"with {scheduled_sizes.sizes[-1]}: drop one",
        )
        return scheduled_sizes

    def _ramp(self, words: tuple[int, ...]) -> BatchSizes:
        size, flag = self.global_batch_size, "--rampup-batch-size"
        text = " ".join(map(str, words))
        require(
            len(words) == 3 and min(words) >= 0 and words[0] > 0 and words[1] > 0,
            f"{flag} {text}: give START INCREMENT SAMPLES, the first two above 0",
        )
        require(size is not None, f"{flag} needs --global-batch-size, the final size: give it")
        assert size is not None
        start, increment, samples = words
        require(
            size >= start and (size - start) % increment == 0,
            f"{flag} {text}: --global-batch-size {size} is not {start} and a number of increments "
            f"of {increment}: change one",
        )
        return BatchSizes.ramp(start, increment, samples=samples, size=size)


_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _steps(flag: str, words: tuple[str, ...], seq_length: int) -> BatchSizes:
    """Return the batch sizes of entries such as `0:384 200B:768`, each threshold in tokens."""
    stages: list[tuple[int, int]] = []
    for entry in " ".join(words).replace(",", " ").split():
        threshold, _, size = entry.partition(":")
        tokens, samples = _count(threshold), _count(size)
        if tokens is None or samples is None:
            raise ValueError(f"{flag}: {entry} is not THRESHOLD:SIZE, numbers such as 200B:768")
        stages.append((tokens // seq_length, samples))
    try:
        return BatchSizes(tuple(stages))
    except ValueError as error:
        raise ValueError(f"{flag} {' '.join(words)}: {error}") from None


def _count(text: str) -> int | None:
    """Return a whole number such as 1.5B; None for any other text."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,12})?)([KMBT]?)", text.strip().upper())
    if match is None:
        return None
    value = Fraction(match[1]) * _SUFFIXES[match[2]]
    return int(value) if value.denominator == 1 else None


def batch_problems(
    training: TrainingConfig, evaluation: EvaluationConfig, *, dp_size: int, has_experts: bool
) -> Iterator[str]:
    """Yield a message for each batch size that cannot be divided over data-parallel ranks."""
    problems = partial(
        _division_problems,
        dp_size=dp_size,
        uneven=training.allow_uneven_batch,
        has_experts=has_experts,
    )
    flag, sizes = "--global-batch-size", training.batch_sizes(dp_size).sizes
    if training.step_batch_size_schedule is not None:
        flag = "--step-batch-size-schedule"
    elif training.rampup_batch_size is not None:
        flag = "--rampup-batch-size"
    micro, micro_flag = training.micro_batch_size, "--micro-batch-size"
    for size in dict.fromkeys(sizes):
        yield from problems(batch=(flag, size), micro=(micro_flag, micro))
    size, eval_micro_batch = evaluation.eval_global_batch_size, evaluation.eval_micro_batch_size
    if (size, eval_micro_batch) != (None, None):
        flag = flag if size is None else "--eval-global-batch-size"
        micro_flag = micro_flag if eval_micro_batch is None else "--eval-micro-batch-size"
        batch, micro_with_flag = (flag, size or sizes[-1]), (micro_flag, eval_micro_batch or micro)
        if (batch[1], micro_with_flag[1]) != (sizes[-1], micro):
            yield from problems(batch=batch, micro=micro_with_flag)


def _division_problems(
    *,
    batch: tuple[str, int],
    micro: tuple[str, int],
    dp_size: int,
    uneven: bool,
    has_experts: bool,
) -> Iterator[str]:
    """Yield a message for each problem of a batch size, given with its flag, and of its division
    into microbatches."""
    (flag, size), (micro_flag, rows) = batch, micro
    division = Division(samples=size, micro_batch_size=rows, data_parallel_size=dp_size)
    if not (division.is_even or uneven):
        suggested_size = max(1, round(size / (rows * dp_size))) * rows * dp_size
        yield (
            f"{flag} {size} is not a multiple of {micro_flag} {rows} x data parallel size "
            f"{dp_size} = {rows * dp_size}: use {suggested_size}, for example, or "
            "--allow-uneven-batch"
        )
    if uneven and division.blocks < dp_size:
        yield (
            f"{flag} {size} is {division.blocks} microbatches of {rows}, fewer than "
            f"data parallel size {dp_size}: start fewer processes, or lower {micro_flag}"
        )
    if uneven and size % rows and has_experts:
        yield (
            f"{flag} {size} is not a multiple of {micro_flag} {rows}, which --num-experts requires "
            "even with --allow-uneven-batch: change one"
        )


def length_problems(
    training: TrainingConfig, *, max_position_embeddings: int | None, dp_size: int
) -> Iterator[str]:
    """Yield a message for each problem of the length of the samples and of the run."""
    limit = max_position_embeddings
    if (training.train_iters is None) == (training.train_samples is None):
        yield "give exactly one of --train-iters and --train-samples"
    if limit is not None and training.seq_length > limit:
        yield (
            f"--seq-length {training.seq_length} is above --max-position-embeddings {limit}: "
            "raise the latter"
        )
    batch = training.batch_sizes(dp_size).at(0)
    if training.train_samples is not None and training.train_samples < batch:
        yield (
            f"--train-samples {training.train_samples} is less than one --global-batch-size "
            f"{batch}: raise it"
        )
