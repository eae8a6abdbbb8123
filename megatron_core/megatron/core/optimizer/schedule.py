# SPDX-License-Identifier: Apache-2.0
"""Learning rate and weight decay in closed form, as functions of the samples consumed.

Schedules have no state: both values depend only on the number of samples of applied updates. With n
samples, warm-up W, decay length D, r = (n-W)/(D-W):

    n <= W                   init + (max - init) n/W
    constant                 max, for ever
    linear                   min + (max - min) (1 - r)
    cosine                   min + (max - min) (1 + cos(pi r)) / 2
    inverse-square-root      max(min, max sqrt(W/n))
    wsd                      max until D - A, then min + (max - min) f(s), s = (n - D + A)/A, f:
                             linear 1 - s, cosine (1 + cos(pi s))/2, exponential 2 * 0.5^s - 1,
                             minus_sqrt 1 - sqrt(s)
    n > D                    min, for every style but constant

`wsd` (warm-up, stable, decay): Hu et al. 2024, "MiniCPM"; minus_sqrt: Hägele et al. 2024, "Scaling
laws and compute-optimal training beyond fixed training durations".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

DecayStyle: TypeAlias = Literal["constant", "linear", "cosine", "inverse-square-root", "wsd"]
AnnealStyle: TypeAlias = Literal["linear", "cosine", "exponential", "minus_sqrt"]
RampStyle: TypeAlias = Literal["constant", "linear", "cosine"]

DECAY_STYLES: tuple[DecayStyle, ...] = (
    "constant",
    "linear",
    "cosine",
    "inverse-square-root",
    "wsd",
)
ANNEAL_STYLES: tuple[AnnealStyle, ...] = ("linear", "cosine", "exponential", "minus_sqrt")
RAMP_STYLES: tuple[RampStyle, ...] = ("constant", "linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule:
    """Learning rate as a function of the number of samples.

    Args:
        max_lr: learning rate after warm-up.
        min_lr: learning rate at the end of the decay and later.
        init_lr: learning rate at the start of warm-up.
        warmup_samples: W; 0 for no warm-up.
        decay_samples: D, counted from the first sample, warm-up included.
        style: decay from W to D.
        wsd_decay_samples: A, the length of the annealing phase of `wsd` before D.
        wsd_decay_style: decay in the annealing phase of `wsd`.

    Raises:
        ValueError: lists all invalid settings.
    """

    max_lr: float
    decay_samples: int
    min_lr: float = 0.0
    init_lr: float = 0.0
    warmup_samples: int = 0
    style: DecayStyle = "linear"
    wsd_decay_samples: int | None = None
    wsd_decay_style: AnnealStyle = "exponential"

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise ValueError("; ".join(problems))

    def problems(self) -> list[str]:
        """Return a message with a fix for each invalid setting."""
        problems = []
        if not 0.0 <= self.min_lr <= self.max_lr < math.inf:
            problems.append(
                f"learning rates min {self.min_lr}, max {self.max_lr}: use 0 <= min <= max"
            )
        if not 0.0 <= self.init_lr <= self.max_lr:
            problems.append(
                f"warm-up starts at {self.init_lr}: use a rate from 0 to max {self.max_lr}"
            )
        if self.style not in DECAY_STYLES:
            problems.append(f"unknown decay style {self.style!r}: one of {', '.join(DECAY_STYLES)}")
        if self.wsd_decay_style not in ANNEAL_STYLES:
            problems.append(
                f"unknown wsd decay style {self.wsd_decay_style!r}: "
                f"one of {', '.join(ANNEAL_STYLES)}"
            )
        if not 0 <= self.warmup_samples < self.decay_samples:
            problems.append(
                f"warm-up of {self.warmup_samples} samples, decay of {self.decay_samples}: "
                f"use 0 <= warm-up < decay"
            )
        elif self.style == "wsd":
            stable = self.decay_samples - self.warmup_samples
            if self.wsd_decay_samples is None:
                problems.append("style wsd needs wsd_decay_samples, the length of its final decay")
            elif not 0 < self.wsd_decay_samples <= stable:
                problems.append(
                    f"wsd decays over {self.wsd_decay_samples} samples: use 1 to {stable}, "
                    f"the samples after warm-up"
                )
        return problems

    def lr(self, consumed_samples: int) -> float:
        """Return the learning rate of the update that follows `consumed_samples` samples."""
        n, warmup = consumed_samples, self.warmup_samples
        if warmup > 0 and n <= warmup:
            return self.init_lr + (self.max_lr - self.init_lr) * n / warmup
        if self.style == "constant":
            return self.max_lr
        if n > self.decay_samples:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(warmup, 1) / max(n, 1)))
        return self.min_lr + (self.max_lr - self.min_lr) * self._share(n)

    def _share(self, n: int) -> float:
        """Return the position between min (0) and max (1) after n samples, W <= n <= D."""
        warmup, decay = self.warmup_samples, self.decay_samples
        if self.style != "wsd":
            return _fall(self.style, (n - warmup) / (decay - warmup))
        anneal = self.wsd_decay_samples or 0
        if n <= decay - anneal:
            return 1.0
        return _fall(self.wsd_decay_style, (n - decay + anneal) / anneal)


def _fall(style: str, r: float) -> float:
    """Return the remaining fraction of the decay at r: 1 at r = 0, 0 at r = 1."""
    match style:
        case "linear":
            return 1.0 - r
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * r))
        case "exponential":
            return 2.0 * 0.5**r - 1.0
        case "minus_sqrt":
            return 1.0 - math.sqrt(r)
    raise AssertionError(f"no closed form for {style}")


@dataclass(frozen=True, kw_only=True)
class WeightDecaySchedule:
    """Weight decay as a function of the number of samples: constant, or a ramp from start to end.

    With r = n / ramp_samples: linear start + (end - start) r, cosine start + (end - start) (1 -
    cos(pi r))/2; `end` beyond the ramp.

    Args:
        start, end: initial and final weight decay; equal for "constant".
        ramp_samples: length of the ramp; unused for "constant".
        style: shape of the ramp.

    Raises:
        ValueError: the settings contradict each other.
    """

    start: float
    end: float
    ramp_samples: int = 0
    style: RampStyle = "constant"

    def __post_init__(self) -> None:
        if not (0.0 <= self.start <= self.end < math.inf):
            raise ValueError(
                f"weight decay ramps from {self.start} to {self.end}: use 0 <= start <= end"
            )
        if self.style not in RAMP_STYLES:
            raise ValueError(
                f"unknown weight decay style {self.style!r}: one of {', '.join(RAMP_STYLES)}"
            )
        if self.style == "constant" and self.start != self.end:
            raise ValueError(
                f"constant weight decay, but start {self.start} and end {self.end} differ: "
                f"make them equal, or use style linear or cosine"
            )
        if self.style != "constant" and self.ramp_samples < 1:
            raise ValueError(f"weight decay ramps over {self.ramp_samples} samples: use at least 1")

    def weight_decay(self, consumed_samples: int) -> float:
        """Return the weight decay of the update that follows `consumed_samples` samples."""
        if self.style == "constant" or consumed_samples >= self.ramp_samples:
            return self.end
        left = _fall(self.style, consumed_samples / self.ramp_samples)
        return self.start + (self.end - self.start) * (1.0 - left)
