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
    """Prefixes of .bin/.idx pairs, divided by --split into training, validation and test data:
    PREFIX..., or WEIGHT PREFIX WEIGHT PREFIX ... for a blend."""
    data_args_path: str | None = None
    """File that holds the arguments of --data-path."""
    train_data_path: tuple[str, ...] | None = None
    """Prefixes of the training data, used whole, instead of a share of --data-path."""
    valid_data_path: tuple[str, ...] | None = None
    """Prefixes of the validation data; requires --train-data-path."""
    test_data_path: tuple[str, ...] | None = None
    """Prefixes of the test data; requires --train-data-path."""
    per_split_data_args_path: str | None = None
    """JSON file that holds the arguments of --train-data-path, --valid-data-path and
    --test-data-path: {"train": [...], "valid": [...], "test": [...]}."""
    mock_data: bool = False
    """Train on synthetic tokens, without any data file; needs --vocab-size or a tokenizer."""
    split: str = "969,30,1"
    """Relative shares of the documents of --data-path for training, validation and test."""
    data_cache_path: str | None = None
    """Folder for cached sample indices, local to each node or shared; None = keep them in
    memory."""
    dataloader_type: Literal["single", "cyclic"] = "single"
    """single reads samples in order; cyclic shuffles them again in every epoch."""
    num_workers: int = 2
    """Threads that prefetch batches, in the same order; 0 reads each batch when it is needed."""
    eod_mask_loss: bool = False
    """Exclude end-of-document tokens from the loss."""
    reset_position_ids: bool = False
    """Restart position ids after every end-of-document token."""
    reset_attention_mask: bool = False
    """Mask attention at document boundaries: a token attends only to its own document, whose
    end-of-document token included."""
    sft: bool = False
    """Supervised fine-tuning on conversations written by preprocess_data --chat: conversations are
    packed into samples, attend only to themselves, and only the assistant's tokens count in the
    loss."""
    reorder_samples: bool = False
    """On resume, shuffle samples for the current length of the run, as Megatron-LM does, instead of
    keeping the order that the run started with."""
    allow_chat_as_text: bool = False
    """Allow training on conversations without --sft, as plain text with a loss on every token."""
    allow_data_change: bool = False
    """Allow resuming on other data than the checkpoint's, starting after the same number of
    samples."""

    def __post_init__(self) -> None:
        not_negative(self, "num_workers")


StateDtype: TypeAlias = Literal["fp32", "bf16"]
#: Smallest 1 - beta for a bf16 moving average; below it, rounding swallows the updates.
_MIN_BF16_STEP = 2.0**-7


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Optimizer."""

    optimizer: Literal["adam", "sgd", "muon"] = "adam"
    """adam is AdamW (decoupled weight decay); muon updates matrices with Muon and all other weights
    with AdamW."""
    weight_decay: float = 0.01
    """Weight decay; not applied to biases and norms."""
    start_weight_decay: float | None = None
    """Weight decay at the first step, if it changes over the run; derived: --weight-decay."""
    end_weight_decay: float | None = None
    """Weight decay at the end of the run, if it changes; derived: --weight-decay."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay moves from its start value to its end value over the run."""
    adam_beta1: float = 0.9
    """Decay rate of Adam's first moment."""
    adam_beta2: float = 0.999
    """Decay rate of Adam's second moment."""
    adam_eps: float = 1e-8
    """Term added to the square root of Adam's second moment, for numerical stability."""
    exp_avg_dtype: StateDtype = "fp32"
    """Dtype in which Adam's first moment is stored; updates are computed in fp32."""
    exp_avg_sq_dtype: StateDtype = "fp32"
    """Dtype in which Adam's second moment is stored; bf16 needs --adam-beta2 of at most 0.992."""
    lr_group: tuple[str, ...] | None = None
    """PATTERN=FACTOR ...: multiply the learning rate of weights whose name matches by FACTOR; the
    first matching pattern applies; shell wildcards, as in `embedding.*=0.1`."""
    weight_decay_group: tuple[str, ...] | None = None
    """PATTERN=FACTOR ...: multiply the weight decay of weights whose name matches by FACTOR, biases
    and norms included; the first matching pattern applies."""
    sgd_momentum: float = 0.9
    """Momentum of --optimizer sgd."""
    clip_grad: float = 1.0
    """Clip gradients to this global L2 norm; 0 = no clipping."""
    optimizer_cpu_offload: bool = False
    """Keep master weights and moments in host memory and run the optimizer on the CPU."""
    optimizer_offload_fraction: float = 1.0
    """With --optimizer-cpu-offload, the fraction of the elements whose state is kept and updated on
    the CPU."""

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
    """Static loss scale; None = dynamic."""
    initial_loss_scale: float = 2.0**32
    """Initial dynamic loss scale."""
    min_loss_scale: float = 1.0
    """Minimum dynamic loss scale."""
    loss_scale_window: int = 1000
    """Consecutive steps without overflow after which the scale is doubled."""
    hysteresis: int = 2
    """Overflows before the scale is halved."""

    def __post_init__(self) -> None:
        scales = "loss_scale", "initial_loss_scale", "min_loss_scale"
        positive(self, *scales, "loss_scale_window", "hysteresis")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate schedule, counted in samples."""

    lr: float
    """Maximum learning rate."""
    min_lr: float = 0.0
    """Minimum learning rate."""
    decoupled_lr: float | None = None
    """Maximum learning rate of the embedding and the output head, unless an --lr-group matches
    them."""
    decoupled_min_lr: float | None = None
    """Minimum learning rate of embedding and output head with --decoupled-lr; derived: --min-lr."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Learning rate decay after warm-up."""
    lr_decay_iters: int | None = None
    """Iterations until the learning rate reaches its minimum; derived: --train-iters."""
    lr_decay_samples: int | None = None
    """Samples until the learning rate reaches its minimum; derived: --train-samples."""
    lr_warmup_iters: int = 0
    """Iterations of linear learning rate warm-up."""
    lr_warmup_samples: int = 0
    """Samples of linear learning rate warm-up."""
    lr_warmup_fraction: float | None = None
    """Fraction of the decay length used for linear warm-up."""
    lr_warmup_init: float = 0.0
    """Learning rate at the start of warm-up."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Learning rate decay in the final annealing phase of WSD."""
    lr_wsd_decay_iters: int | None = None
    """Iterations of the final annealing phase of WSD."""
    lr_wsd_decay_samples: int | None = None
    """Samples of the final annealing phase of WSD."""

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
    """Yield a message for each pair of optimizer options that cannot be combined, with its fix."""
    yield from _state("--exp-avg-dtype", config.exp_avg_dtype, "--adam-beta1", config)
    yield from _state("--exp-avg-sq-dtype", config.exp_avg_sq_dtype, "--adam-beta2", config)
    if config.optimizer_cpu_offload and config.optimizer == "muon":
        yield (
            "--optimizer-cpu-offload cannot be combined with --optimizer muon, which multiplies "
            "momentum matrices on the device: drop it or choose adam"
        )


def _state(flag: str, dtype: str, beta_flag: str, config: OptimizerOptions) -> Iterator[str]:
    """Yield a message if a moment cannot be stored in `dtype`."""
    if dtype == "fp32":
        return
    beta = config.adam_beta1 if beta_flag == "--adam-beta1" else config.adam_beta2
    if config.optimizer == "sgd":
        yield f"{flag} {dtype} has no effect with --optimizer {config.optimizer}: drop it"
    elif 1.0 - beta < _MIN_BF16_STEP:
        yield (
            f"{flag} {dtype} with {beta_flag} {beta}: rounding loses the change of one step: lower "
            f"{beta_flag} to at most 0.992, or keep fp32"
        )


@dataclass(frozen=True, kw_only=True)
class MuonOptions:
    """Muon."""

    muon_momentum: float = 0.9
    """Momentum of --optimizer muon."""
    muon_use_nesterov: bool = False
    """Use Nesterov momentum: orthogonalize the gradient plus its momentum instead of the
    momentum."""
    muon_num_ns_steps: int = 5
    """Newton-Schulz iterations per update."""
    muon_scale_mode: Literal["spectral", "shape_scaling", "unit_rms_norm", "rms"] = "spectral"
    """How an update is scaled by the shape [rows, cols] of its matrix: spectral by sqrt(max(rows,
    cols)), shape_scaling by sqrt(max(1, rows / cols)), unit_rms_norm by sqrt(rows / cols), rms by
    0.2 x sqrt(max(rows, cols)), which suits learning rates of AdamW."""
    muon_extra_scale_factor: float = 1.0
    """Additional factor on every Muon update."""
    muon_split_qkv: bool = True
    """Orthogonalize query, key and value separately; off, the fused matrix of a layer as a
    whole."""
    muon_split_matrices: Literal["megatron", "all", "whole"] | None = None
    """How fused weights are divided into matrices to orthogonalize: megatron divides them as
    Megatron-LM does (gate with up, keys with values of latent attention and all inputs of a
    recurrent mixer stay together), all separates every tensor, whole separates none, not even q, k
    and v; derived: the checkpoint's choice on resume, megatron in a new run."""
    muon_adam_weights: tuple[str, ...] | None = None
    """PATTERN ...: matrices that AdamW updates, as it updates embedding, head, norms and biases;
    shell wildcards over weight names."""

    def __post_init__(self) -> None:
        fraction(self, "muon_momentum")
        positive(self, "muon_num_ns_steps", "muon_extra_scale_factor")
        require(
            self.muon_split_qkv or self.muon_split_matrices != "all",
            "--no-muon-split-qkv contradicts --muon-split-matrices all, which also splits q, k "
            "and v: drop one",
        )


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
    mtp_loss_scaling_factor: Annotated[float, at("mtp_loss_factor", back=unless(0.1))] = 0.1
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


@dataclass(frozen=True, kw_only=True)
class QuantizationOptions:
    """FP8 and FP4 matrix products of linear layers, with --transformer-impl transformer_engine."""

    fp8_format: Literal["e4m3", "hybrid"] | None = None
    """Compute the decoder's linear layers in FP8: e4m3 for all tensors, or hybrid with output
    gradients in e5m2. Weights, gradients and optimizer state keep their dtypes."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "delayed"
    """How FP8 scales are computed: delayed from the absolute maxima (amax) of earlier steps,
    tensorwise from the current tensor's amax, blockwise per block of 128 elements, mxfp8 per 32
    elements as powers of two (Blackwell)."""
    fp8_margin: int = 0
    """With --fp8-recipe delayed, headroom above the amax: the scale is divided by 2 to this
    power."""
    fp8_amax_history_len: int = 1
    """With --fp8-recipe delayed, number of steps in the amax history."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """With --fp8-recipe delayed, which amax of the history sets the scale: the latest or the
    largest."""
    fp4_format: Literal["e2m1"] | None = None
    """Compute the decoder's linear layers in NVFP4: FP4 with one scale per 16 elements
    (Blackwell)."""
    first_last_layers_bf16: bool = False
    """Compute the first and last layers in bf16 (the dtype of the weights) instead of FP8 or
    FP4."""
    num_layers_at_start_in_bf16: int = 1
    """With --first-last-layers-bf16, number of such layers at the start."""
    num_layers_at_end_in_bf16: int = 1
    """With --first-last-layers-bf16, number of such layers at the end."""

    def __post_init__(self) -> None:
        require_all(
            lambda: positive(self, "fp8_amax_history_len"),
            lambda: not_negative(self, "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
        )

    @property
    def flag(self) -> str | None:
        """The flag that turns FP8 or FP4 on, with its value; None if neither is on."""
        if self.fp8_format is not None:
            return f"--fp8-format {self.fp8_format}"
        return None if self.fp4_format is None else f"--fp4-format {self.fp4_format}"
