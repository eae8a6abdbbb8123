# SPDX-License-Identifier: Apache-2.0
"""Optimizer, loss scale and learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from megatron.training.config.values import (
    fraction,
    name_factors,
    not_negative,
    positive,
    require,
    require_all,
)

StateDtype: TypeAlias = Literal["fp32", "bf16"]
#: 1 - beta below which an average kept in bf16 loses its moves to rounding.
_LEAST_BF16_MOVE = 2.0**-7


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
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
    """Highest learning rate of embedding and head, after --lr-group; warm-up and --min-lr scale
    along."""
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

    def __post_init__(self) -> None:
        decays = "lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples"
        starts = "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_init"
        share = self.lr_warmup_fraction
        require_all(
            lambda: positive(self, "lr", "decoupled_lr", *decays),
            lambda: not_negative(self, "min_lr", *starts),
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


def problems(config: OptimizerConfig) -> Iterator[str]:
    """Name what does not go together in an optimizer, each with its mend."""
    yield from _state("--exp-avg-dtype", config.exp_avg_dtype, "--adam-beta1", config)
    yield from _state("--exp-avg-sq-dtype", config.exp_avg_sq_dtype, "--adam-beta2", config)
    if config.optimizer_cpu_offload and config.optimizer == "muon":
        yield (
            "--optimizer-cpu-offload does not go with --optimizer muon, which multiplies its "
            "momentum's matrices on the device: drop it or choose adam"
        )


def _state(flag: str, dtype: str, beta_flag: str, config: OptimizerConfig) -> Iterator[str]:
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
