# SPDX-License-Identifier: Apache-2.0
"""Options of the optimizer, Muon, the loss scale and the learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from megatron.training.config.training_options import TrainingConfig
from megatron.training.config.values import (
    fraction,
    name_factors,
    not_negative,
    positive,
    require,
    require_all,
)

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


def weight_decay_problems(optimizer: OptimizerOptions) -> Iterator[str]:
    """Yield a message for each problem of a weight decay that changes over the run."""
    plain = optimizer.weight_decay
    start = plain if optimizer.start_weight_decay is None else optimizer.start_weight_decay
    end = plain if optimizer.end_weight_decay is None else optimizer.end_weight_decay
    if optimizer.weight_decay_incr_style == "constant" and start != end:
        yield (
            f"weight decay goes from {start} to {end} but --weight-decay-incr-style is constant: "
            "use linear or cosine"
        )
    if start > end:
        yield f"--start-weight-decay {start} is above --end-weight-decay {end}: swap them"


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


def schedule_problems(schedule: ScheduleConfig, training: TrainingConfig) -> Iterator[str]:
    """Yield a message for each problem of the learning-rate schedule of a run."""
    by_samples = training.train_samples is not None
    wrong = (
        {
            "lr_decay_iters": schedule.lr_decay_iters,
            "lr_warmup_iters": schedule.lr_warmup_iters or None,
        }
        if by_samples
        else {
            "lr_decay_samples": schedule.lr_decay_samples,
            "lr_warmup_samples": schedule.lr_warmup_samples or None,
        }
    )
    for name, value in wrong.items():
        if value is not None:
            unit = "samples" if by_samples else "iters"
            flag, instead = (
                name.replace("_", "-"),
                name.rsplit("_", 1)[0].replace("_", "-") + f"-{unit}",
            )
            yield f"--{flag} cannot be combined with --train-{unit}: use --{instead}"
    warmup_flags = [
        f"--{flag}"
        for flag, value in {
            "lr-warmup-iters": schedule.lr_warmup_iters,
            "lr-warmup-samples": schedule.lr_warmup_samples,
            "lr-warmup-fraction": schedule.lr_warmup_fraction,
        }.items()
        if value
    ]
    if len(warmup_flags) > 1:
        yield f"{' and '.join(warmup_flags)} are mutually exclusive: keep one"
    decay = (
        (schedule.lr_decay_samples or training.train_samples)
        if by_samples
        else (schedule.lr_decay_iters or training.train_iters)
    )
    warmup = schedule.lr_warmup_samples if by_samples else schedule.lr_warmup_iters
    if decay is not None and warmup >= decay and warmup > 0:
        yield f"warm-up of {warmup} is not shorter than the decay of {decay}: shorten it"
    wsd = schedule.lr_wsd_decay_samples if by_samples else schedule.lr_wsd_decay_iters
    if schedule.lr_decay_style == "WSD" and wsd is None:
        yield (
            f"--lr-decay-style WSD needs --lr-wsd-decay-{'samples' if by_samples else 'iters'}: "
            "give it"
        )
    if wsd is not None and decay is not None and wsd > decay - warmup:
        yield f"the WSD decay of {wsd} does not fit after warm-up in {decay}: shorten it"
