# SPDX-License-Identifier: Apache-2.0
"""Batch, length, loss and numbers format of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.training.config.values import not_negative, positive, require, require_all


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Batch, length of the run, loss and numbers format."""

    seq_length: int
    """Tokens per sample."""
    micro_batch_size: int
    """Samples per rank in one forward pass."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all ranks; derived: micro batch x data parallel size."""
    allow_uneven_batch: bool = False
    """Take a global batch that is no multiple of micro batch x data parallel size: ranks with fewer
    microbatches compute fillers that count for nothing, and the last microbatch may be smaller."""
    train_iters: int | None = None
    """Number of optimizer steps; give this or --train-samples."""
    train_samples: int | None = None
    """Number of samples to train on; give this or --train-iters."""
    exit_interval: int | None = None
    """Save and stop when the iteration is a multiple of this."""
    seed: int = 1234
    """Seed of initial weights, dropout and data order."""
    bf16: bool = False
    """Weights and activations in bfloat16, with fp32 master weights and gradients."""
    fp16: bool = False
    """Weights and activations in float16, with fp32 master weights, gradients and loss scaling."""
    calculate_per_token_loss: bool = False
    """Weight every token of the global batch alike, instead of every microbatch."""
    mtp_num_layers: int | None = None
    """Depths of multi-token prediction: so many more layers, used in training alone, each predict
    one token further ahead; none predicts the next token alone."""
    mtp_loss_scaling_factor: float = 0.1
    """Factor of the mean loss of all depths of multi-token prediction in the training loss."""
    deterministic_mode: bool = False
    """Refuse operations whose result may differ between two equal runs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes a GPU when there is one, cuda insists on it."""
    eval_interval: int = 1000
    """Iterations between validations; 0 = never."""
    eval_iters: int = 100
    """Global batches per validation."""
    manual_gc: bool = False
    """Turn Python's automatic garbage collection off, so that no rank pauses alone."""
    manual_gc_interval: int = 0
    """Iterations between collections on all ranks with --manual-gc; 0 = none."""
    max_consecutive_bad_steps: int = 10
    """Stop after this many steps in a row with a NaN or Inf loss or gradient norm; each is
    skipped."""

    def __post_init__(self) -> None:
        require_all(
            lambda: positive(
                self, "seq_length", "micro_batch_size", "global_batch_size", "train_iters"
            ),
            lambda: positive(self, "train_samples", "exit_interval", "max_consecutive_bad_steps"),
            lambda: not_negative(self, "eval_interval", "eval_iters", "seed", "manual_gc_interval"),
            lambda: positive(self, "mtp_num_layers"),
            lambda: not_negative(self, "mtp_loss_scaling_factor"),
            lambda: require(
                (self.mtp_num_layers or 0) < max(self.seq_length, 1),
                f"--mtp-num-layers {self.mtp_num_layers}: samples of {self.seq_length} tokens have "
                "none so far ahead: use fewer",
            ),
            lambda: require(
                self.manual_gc or not self.manual_gc_interval,
                "--manual-gc-interval has no effect without --manual-gc: add that",
            ),
            lambda: require(
                not (self.bf16 and self.fp16), "--bf16 and --fp16 exclude each other: keep one"
            ),
        )
