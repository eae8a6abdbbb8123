# SPDX-License-Identifier: Apache-2.0
"""The options of training: data, batch, optimizer, loss scale, schedule and evaluation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Literal, TypeAlias

from megatron.cli.two_way_table import at, unless
from megatron.core.datasets.batch_sizes import BatchSizes
from megatron.training.config.values import (
    fraction,
    name_factors,
    not_negative,
    positive,
    require,
    require_all,
)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data."""

    data_path: tuple[str, ...] | None = None
    """Prefixes of .bin/.idx pairs, cut by --split: PREFIX..., or WEIGHT PREFIX WEIGHT PREFIX ...
    for a blend."""
    data_args_path: str | None = None
    """File that holds the words of --data-path."""
    train_data_path: tuple[str, ...] | None = None
    """Training data of its own, whole, instead of a share of --data-path."""
    valid_data_path: tuple[str, ...] | None = None
    """Validation data of its own; with --train-data-path."""
    test_data_path: tuple[str, ...] | None = None
    """Test data of its own; with --train-data-path."""
    per_split_data_args_path: str | None = None
    """JSON file that holds the words of these three: {"train": [...], "valid": [...], "test":
    [...]}."""
    mock_data: bool = False
    """Train on made-up tokens, without any file; needs --vocab-size or a tokenizer."""
    split: str = "969,30,1"
    """Shares of documents of --data-path for training, validation and test."""
    data_cache_path: str | None = None
    """Folder of sample index caches, of each node's own; None = keep them in memory."""
    dataloader_type: Literal["single", "cyclic"] = "single"
    """single reads samples in order; cyclic permutes them anew in every epoch."""
    num_workers: int = 2
    """Threads that read batches ahead, in the same order; 0 reads when a batch is needed."""
    eod_mask_loss: bool = False
    """Leave end-of-document tokens out of the loss."""
    reset_position_ids: bool = False
    """Count positions anew behind every end-of-document token."""
    reset_attention_mask: bool = False
    """Let tokens attend to their own document only, up to its end-of-document token."""
    sft: bool = False
    """Fine-tune on conversations that preprocess_data --chat wrote: packed into samples, each
    attends to itself alone, and only the assistant's tokens are learnt."""
    reorder_samples: bool = False
    """On resume, order samples anew for the length that the run has now, as Megatron-LM does,
    instead of keeping the order that the run began with."""
    allow_chat_as_text: bool = False
    """Train on conversations without --sft all the same: as one text, on every token."""
    allow_data_change: bool = False
    """Resume on other data than the checkpoint's, from the same number of samples on."""

    def __post_init__(self) -> None:
        not_negative(self, "num_workers")


StateDtype: TypeAlias = Literal["fp32", "bf16"]
#: 1 - beta below which an average kept in bf16 loses its moves to rounding.
_LEAST_BF16_MOVE = 2.0**-7


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Optimizer."""

    optimizer: Literal["adam", "sgd", "muon"] = "adam"
    """adam is AdamW (decoupled weight decay); muon updates matrices by Muon and the rest by
    AdamW."""
    weight_decay: float = 0.01
    """Weight decay; biases and norms have none."""
    start_weight_decay: float | None = None
    """Weight decay at the first step, for a ramp; derived: --weight-decay."""
    end_weight_decay: float | None = None
    """Weight decay at the end of the ramp; derived: --weight-decay."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay goes from start to end over the run."""
    adam_beta1: float = 0.9
    """Decay of Adam's first moment."""
    adam_beta2: float = 0.999
    """Decay of Adam's second moment."""
    adam_eps: float = 1e-8
    """Added to the root of Adam's second moment."""
    exp_avg_dtype: StateDtype = "fp32"
    """How Adam's first moment is kept between steps; updates compute in fp32."""
    exp_avg_sq_dtype: StateDtype = "fp32"
    """How Adam's second moment is kept between steps; bf16 needs --adam-beta2 up to 0.992."""
    lr_group: tuple[str, ...] | None = None
    """PATTERN=FACTOR ...: the learning rate of weights whose name matches is FACTOR times the
    schedule's; the first match wins; shell wildcards, as in `embedding.*=0.1`."""
    weight_decay_group: tuple[str, ...] | None = None
    """PATTERN=FACTOR ...: the weight decay of weights whose name matches is FACTOR times the
    schedule's, biases and norms included; the first match wins."""
    sgd_momentum: float = 0.9
    """Momentum of --optimizer sgd."""
    clip_grad: float = 1.0
    """Largest L2 norm of the gradient; 0 = no clipping."""
    optimizer_cpu_offload: bool = False
    """Keep masters and moments in host memory and update there."""
    optimizer_offload_fraction: float = 1.0
    """With --optimizer-cpu-offload, the share of the elements that is kept and updated there."""

    def __post_init__(self) -> None:
        decays = "weight_decay", "start_weight_decay", "end_weight_decay"
        share = self.optimizer_offload_fraction
        require_all(
            lambda: not_negative(self, *decays, "clip_grad"),
            lambda: positive(self, "adam_eps"),
            lambda: fraction(self, "adam_beta1", "adam_beta2", "sgd_momentum"),
            lambda: name_factors("--lr-group", self.lr_group),
            lambda: name_factors("--weight-decay-group", self.weight_decay_group),
            lambda: require(
                0.0 < share <= 1.0,
                f"--optimizer-offload-fraction is {share}: it must be above 0 and at most 1",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Loss scaling of --fp16."""

    loss_scale: float | None = None
    """Constant loss scale; None = dynamic."""
    initial_loss_scale: float = 2.0**32
    """First dynamic loss scale."""
    min_loss_scale: float = 1.0
    """Smallest dynamic loss scale."""
    loss_scale_window: int = 1000
    """Good steps in a row before the scale doubles."""
    hysteresis: int = 2
    """Overflows before the scale is halved."""

    def __post_init__(self) -> None:
        scales = "loss_scale", "initial_loss_scale", "min_loss_scale"
        positive(self, *scales, "loss_scale_window", "hysteresis")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate schedule, counted in samples."""

    lr: float
    """Highest learning rate."""
    min_lr: float = 0.0
    """Lowest learning rate."""
    decoupled_lr: float | None = None
    """Highest learning rate of embedding and head, where no --lr-group matches them."""
    decoupled_min_lr: float | None = None
    """Lowest learning rate of embedding and head with --decoupled-lr; derived: --min-lr."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """How the learning rate falls after warm-up."""
    lr_decay_iters: int | None = None
    """Iterations until the learning rate reaches its minimum; derived: --train-iters."""
    lr_decay_samples: int | None = None
    """Samples until the learning rate reaches its minimum; derived: --train-samples."""
    lr_warmup_iters: int = 0
    """Iterations of linear warm-up."""
    lr_warmup_samples: int = 0
    """Samples of linear warm-up."""
    lr_warmup_fraction: float | None = None
    """Linear warm-up as a share of the decay length."""
    lr_warmup_init: float = 0.0
    """Learning rate at the start of warm-up."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """How the learning rate falls in the last phase of WSD."""
    lr_wsd_decay_iters: int | None = None
    """Iterations of the last phase of WSD."""
    lr_wsd_decay_samples: int | None = None
    """Samples of the last phase of WSD."""

    def _check_decoupled(self) -> None:
        max_lr, min_lr = self.decoupled_lr, self.decoupled_min_lr
        if max_lr is None:
            return
        name, min_lr = (
            ("--min-lr", self.min_lr) if min_lr is None else ("--decoupled-min-lr", min_lr)
        )
        require(min_lr <= max_lr, f"{name} {min_lr} is above --decoupled-lr {max_lr}: lower {name}")
        require(
            self.lr_warmup_init <= max_lr,
            f"--lr-warmup-init {self.lr_warmup_init} is above --decoupled-lr {max_lr}: lower it",
        )

    def __post_init__(self) -> None:
        decays = "lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples"
        starts = "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_init"
        share = self.lr_warmup_fraction
        require_all(
            lambda: positive(self, "lr", "decoupled_lr", *decays),
            lambda: not_negative(self, "min_lr", "decoupled_min_lr", *starts),
            self._check_decoupled,
            lambda: require(
                share is None or 0.0 <= share < 1.0,
                f"--lr-warmup-fraction is {share}: it must lie in [0, 1)",
            ),
            lambda: require(
                self.min_lr <= self.lr,
                f"--min-lr {self.min_lr} is above --lr {self.lr}: lower --min-lr",
            ),
            lambda: require(
                self.lr_warmup_init <= self.lr,
                f"--lr-warmup-init {self.lr_warmup_init} is above --lr {self.lr}: lower it",
            ),
        )


def optimizer_problems(config: OptimizerOptions) -> Iterator[str]:
    """Name what does not go together in an optimizer, each with its fix."""
    yield from _state("--exp-avg-dtype", config.exp_avg_dtype, "--adam-beta1", config)
    yield from _state("--exp-avg-sq-dtype", config.exp_avg_sq_dtype, "--adam-beta2", config)
    if config.optimizer_cpu_offload and config.optimizer == "muon":
        yield (
            "--optimizer-cpu-offload does not go with --optimizer muon, which multiplies its "
            "momentum's matrices on the device: drop it or choose adam"
        )


def _state(flag: str, dtype: str, beta_flag: str, config: OptimizerOptions) -> Iterator[str]:
    """Name what is wrong with a moment that is kept in `dtype`."""
    if dtype == "fp32":
        return
    beta = config.adam_beta1 if beta_flag == "--adam-beta1" else config.adam_beta2
    if config.optimizer == "sgd":
        yield f"{flag} {dtype} has no effect with --optimizer {config.optimizer}: drop it"
    elif 1.0 - beta < _LEAST_BF16_MOVE:
        yield (
            f"{flag} {dtype} with {beta_flag} {beta}: rounding loses what one step adds: lower "
            f"{beta_flag} to at most 0.992, or keep fp32"
        )


@dataclass(frozen=True, kw_only=True)
class MuonOptions:
    """Muon."""

    muon_momentum: float = 0.9
    """Momentum of --optimizer muon."""
    muon_use_nesterov: bool = False
    """Orthogonalize the gradient plus its momentum; off, the momentum alone."""
    muon_num_ns_steps: int = 5
    """Newton-Schulz iterations of an update."""
    muon_scale_mode: Literal["spectral", "shape_scaling", "unit_rms_norm", "rms"] = "spectral"
    """How an update is scaled by its matrix's shape [rows, cols]: the root of max(rows, cols), of
    max(1, rows / cols), of rows / cols, or 0.2 times the first, for learning rates of AdamW."""
    muon_extra_scale_factor: float = 1.0
    """A factor of every update beside that."""
    muon_split_qkv: bool = True
    """Orthogonalize query, key and value each by itself; off, those of a layer as one matrix."""
    muon_split_matrices: Literal["megatron", "all", "whole"] | None = None
    """Which rows of a fused weight are one matrix: megatron has Megatron-LM's matrices (gate with
    up, keys with values of a latent, all inputs of a recurrent mixer), all splits every tensor off,
    whole splits none, not even q, k and v; derived: as in the checkpoint that a run goes on from,
    megatron in a new run."""
    muon_adam_weights: tuple[str, ...] | None = None
    """PATTERN ...: matrices that AdamW updates as it does embedding, head, norms and biases; shell
    wildcards over weight names."""

    def __post_init__(self) -> None:
        fraction(self, "muon_momentum")
        positive(self, "muon_num_ns_steps", "muon_extra_scale_factor")
        require(
            self.muon_split_qkv or self.muon_split_matrices != "all",
            "--no-muon-split-qkv does not go with --muon-split-matrices all, which splits q, k and "
            "v too: drop one",
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Validation."""

    eval_interval: int = 1000
    """Iterations between validations; 0 = never."""
    eval_iters: int = 100
    """Global batches per validation, of --eval-global-batch-size samples; 0 or -1 = no
    validation."""
    eval_global_batch_size: int | None = None
    """Samples per step of a validation over all ranks; derived: --global-batch-size."""
    eval_micro_batch_size: int | None = None
    """Samples per rank in one forward pass of a validation; derived: --micro-batch-size."""

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
    """Batch, length of the run, loss and numbers format."""

    seq_length: int
    """Tokens per sample."""
    micro_batch_size: int
    """Samples per rank in one forward pass."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all ranks; derived: micro batch x data parallel size."""
    step_batch_size_schedule: tuple[str, ...] | None = None
    """THRESHOLD:SIZE ...: the global batch has SIZE samples from THRESHOLD consumed tokens on, up
    to the next threshold; the first is 0, and numbers may end in K, M, B or T, as in
    `0:384 200B:768`."""
    rampup_batch_size: tuple[int, ...] | None = None
    """START INCREMENT SAMPLES: the global batch has START samples at first and grows to
    --global-batch-size by INCREMENT at a time, evenly over SAMPLES samples."""
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
    mtp_loss_scaling_factor: Annotated[float, at("mtp_loss_factor", back=unless(0.1))] = 0.1
    """Factor of the mean loss of all multi-token prediction layers in the training loss."""
    deterministic_mode: bool = False
    """Refuse operations whose result may differ between two equal runs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes a GPU when there is one, cuda insists on it."""
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
            lambda: self.batch_sizes(1),
            lambda: not_negative(self, "seed", "manual_gc_interval"),
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

    def batch_sizes(self, dp_size: int) -> BatchSizes:
        """Return the global batch size of every step.

        Args:
            dp_size: number of data-parallel ranks; the default global batch size is one microbatch
                for each.

        Raises:
            ValueError: options that say no such sizes; one line.
        """
        size, flag = self.global_batch_size, "--step-batch-size-schedule"
        if self.step_batch_size_schedule is None:
            if self.rampup_batch_size is None:
                return BatchSizes.constant(max(size or self.micro_batch_size * dp_size, 1))
            return self._ramp(self.rampup_batch_size)
        require(
            self.rampup_batch_size is None,
            f"{flag} and --rampup-batch-size exclude each other: keep one",
        )
        scheduled_sizes = _steps(flag, self.step_batch_size_schedule, max(self.seq_length, 1))
        require(
            size in (None, scheduled_sizes.sizes[-1]),
            f"--global-batch-size {size} and {flag} exclude each other, as that ends with "
            f"{scheduled_sizes.sizes[-1]}: drop one",
        )
        return scheduled_sizes

    def _ramp(self, words: tuple[int, ...]) -> BatchSizes:
        size, flag = self.global_batch_size, "--rampup-batch-size"
        text = " ".join(map(str, words))
        require(
            len(words) == 3 and min(words) >= 0 and words[0] > 0 and words[1] > 0,
            f"{flag} {text}: give START INCREMENT SAMPLES, the first two above 0",
        )
        require(size is not None, f"{flag} needs --global-batch-size, which it grows to: give it")
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
    """Return the sizes of words such as `0:384 200B:768`, each threshold in tokens."""
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


@dataclass(frozen=True, kw_only=True)
class QuantizationOptions:
    """Products of linear layers in FP8 or FP4, of --transformer-impl transformer_engine."""

    fp8_format: Literal["e4m3", "hybrid"] | None = None
    """Multiply the linear layers of the decoder in FP8: e4m3, or hybrid with output gradients in
    e5m2. Weights, gradients and optimizer state keep their dtypes."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "delayed"
    """Where the scales of FP8 tensors come from: delayed takes the largest magnitudes of earlier
    steps, tensorwise that of the tensor, blockwise those of its blocks of 128 elements, mxfp8 those
    of 32 elements as powers of two (Blackwell)."""
    fp8_margin: int = 0
    """With --fp8-recipe delayed, room above the largest magnitude: a factor of 2 to this power."""
    fp8_amax_history_len: int = 1
    """With --fp8-recipe delayed, steps whose largest magnitudes are kept."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """With --fp8-recipe delayed, which of the kept magnitudes makes the scale: the last, or the
    largest."""
    fp4_format: Literal["e2m1"] | None = None
    """Multiply the linear layers of the decoder in FP4 with scales of 16 elements, NVFP4
    (Blackwell)."""
    first_last_layers_bf16: bool = False
    """Keep the first and last layers in the dtype of the weights."""
    num_layers_at_start_in_bf16: int = 1
    """With --first-last-layers-bf16, how many at the start."""
    num_layers_at_end_in_bf16: int = 1
    """With --first-last-layers-bf16, how many at the end."""

    def __post_init__(self) -> None:
        require_all(
            lambda: positive(self, "fp8_amax_history_len"),
            lambda: not_negative(self, "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
        )

    @property
    def flag(self) -> str | None:
        """The flag that asks for products in FP8 or FP4; None without any."""
        if self.fp8_format is not None:
            return f"--fp8-format {self.fp8_format}"
        return None if self.fp4_format is None else f"--fp4-format {self.fp4_format}"
