# SPDX-License-Identifier: Apache-2.0
"""OptimizerConfig, and the factors on learning rate and weight decay of each weight.

The config defines everything an optimizer does at a step, except the scheduled learning rate. By
default every weight uses the full learning rate, and all weights except biases and norms use weight
decay. Patterns over logical weight names (shell wildcards, the first match applies) override either
factor. Logical names are the same on every layout, and so are the factors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, get_args

import torch

from megatron.core.weight_gather.store import OwnedRange

#: (pattern, factor) pairs: a weight takes the factor of the first pattern that matches its name.
NameFactors: TypeAlias = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class UpdateRanges:
    """Element ranges of one owned range that are updated with the same factors.

    Args:
        ranges: [start, stop) pairs in order.
        lr_factor: factor on the step's learning rate.
        decay_factor: factor on the step's weight decay.
        decoupled: use the step's decoupled learning rate.
    """

    ranges: tuple[tuple[int, int], ...]
    lr_factor: float
    decay_factor: float
    decoupled: bool = False

    def lr(self, numbers: StepNumbers) -> float:
        """Return the learning rate of these ranges in a step."""
        return numbers.decoupled_lr if self.decoupled else numbers.lr * self.lr_factor


@dataclass(frozen=True)
class StepNumbers:
    """The scalars of one step.

    Args:
        lr, weight_decay: scheduled values, before the factors of weights.
        divisor: divisor of gradients: loss scale times clipping factor.
        count: number of updates, this one included.
        decoupled_lr: learning rate of weights with a decoupled rate.
    """

    lr: float
    weight_decay: float
    divisor: float
    count: int
    decoupled_lr: float


def factor_problems(factors: NameFactors, *, what: str) -> list[str]:
    """Return a message for each negative or non-finite factor, and for each repeated pattern."""
    problems = [
        f"{what} {pattern}={factor}: use a finite factor of at least 0"
        for pattern, factor in factors
        if not 0.0 <= factor < math.inf
    ]
    patterns = [pattern for pattern, _ in factors]
    return problems + [
        f"{what} {pattern} is given twice: keep one"
        for pattern in sorted({p for p in patterns if patterns.count(p) > 1})
    ]


def check_patterns(factors: NameFactors, names: Collection[str], *, what: str) -> None:
    """Check that every pattern matches a weight.

    Args:
        names: logical names of all weights of the model.
        what: name of the setting in errors.

    Raises:
        ValueError: lists all patterns without a match.
    """
    unmatched = [p for p, _ in factors if not any(fnmatchcase(name, p) for name in names)]
    if unmatched:
        few = ", ".join(sorted(names)[:6])
        raise ValueError(
            f"{what}: no weight matches {' or '.join(unmatched)}: weights have names such as {few}"
        )


def update_ranges(
    owned: OwnedRange,
    *,
    lr: NameFactors,
    weight_decay: NameFactors,
    decoupled: Collection[str] = (),
) -> list[UpdateRanges]:
    """Divide an owned range by update factors.

    Args:
        lr, weight_decay: factors by pattern; weights without a match keep the default.
        decoupled: names of weights with the decoupled learning rate, unless a pattern matches them.

    Returns:
        Disjoint ranges; with factors they cover the owned boxes, without vocabulary padding.
    """
    if not (lr or weight_decay or decoupled):
        update_kinds = (
            UpdateRanges(owned.decayed, 1.0, 1.0),
            UpdateRanges(owned.undecayed, 1.0, 0.0),
        )
        return [kind for kind in update_kinds if kind.ranges]
    ranges_by_factors: dict[tuple[float, float, bool], list[tuple[int, int]]] = {}
    for box in owned.boxes:
        start, stop = box.start, box.stop
        default = 1.0 if any(a <= start < b for a, b in owned.decayed) else 0.0
        factor = _factor(box.name, lr, math.nan)
        own_rate = math.isnan(factor) and box.name in decoupled
        key = (
            1.0 if math.isnan(factor) else factor,
            _factor(box.name, weight_decay, default),
            own_rate,
        )
        ranges = ranges_by_factors.setdefault(key, [])
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    return [UpdateRanges(tuple(ranges), *key) for key, ranges in sorted(ranges_by_factors.items())]


def _factor(name: str, factors: Sequence[tuple[str, float]], default: float) -> float:
    return next((f for pattern, f in factors if fnmatchcase(name, pattern)), default)


OptimizerKind: TypeAlias = Literal["adam", "sgd", "muon"]
KINDS: tuple[OptimizerKind, ...] = get_args(OptimizerKind)
STATE_DTYPES = (torch.float32, torch.bfloat16)
#: How an orthogonal update of [rows, cols] is scaled; `muon.update_scale` has the formulas.
ScaleMode: TypeAlias = Literal["spectral", "shape_scaling", "unit_rms_norm", "rms"]
SCALE_MODES: tuple[ScaleMode, ...] = get_args(ScaleMode)
#: Patterns of matrices that AdamW always updates: each row belongs to one token and is used alone,
#: so that the matrix as a whole has no meaning.
TOKEN_MATRICES = ("embedding.*", "*.embedding.*", "head.*", "*.head.*")
#: How Muon divides a fused weight into matrices, see `MuonConfig`.
SPLIT_MATRICES = ("megatron", "all", "whole")
#: A moving average changes by (1 - beta) of itself. bf16 has 8 significant bits: below 2^-7,
#: rounding may swallow the whole change, and the average can no longer decrease.
LEAST_BF16_MOVE = 2.0**-7


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Settings of Muon (Jordan et al. 2024), which updates matrices; AdamW updates other weights.

    Args:
        momentum: mu in M' = mu M + G.
        nesterov: orthogonalise G + mu M' instead of M'.
        num_ns_steps: number of Newton-Schulz iterations.
        scale_mode: how an update is scaled by the shape of its matrix.
        extra_scale_factor: additional factor on every update.
        split_matrices: which rows of a fused weight are orthogonalised as one matrix. "megatron":
            the matrices of Megatron-LM, which join gate and up, keys and values of latent
            attention, its latent and rotary keys, and all inputs of a recurrent mixer; `split_qkv`
            decides about query, key and value. "all": each logical tensor separately. "whole": all
            logical tensors of the weight together. Experts always have separate matrices.
        split_qkv: with "megatron", orthogonalise query, key and value (and attention's output gate)
            separately; False joins those of a layer.
        adam_names: patterns of logical names of matrices that AdamW updates, in addition to
            embedding and head.
        round_bytes: limit on the buffers of an exchange round on any rank, in bytes; a single
            matrix that needs more has its own round.

    Raises:
        ValueError: lists all values out of range.
    """

    momentum: float = 0.9
    nesterov: bool = False
    num_ns_steps: int = 5
    scale_mode: ScaleMode = "spectral"
    extra_scale_factor: float = 1.0
    split_matrices: str = "megatron"
    split_qkv: bool = True
    adam_names: tuple[str, ...] = ()
    round_bytes: int = 2**28

    def __post_init__(self) -> None:
        problems = []
        if not 0.0 <= self.momentum < 1.0:
            problems.append(f"muon momentum is {self.momentum}: use 0 <= value < 1")
        if self.num_ns_steps < 1:
            problems.append(f"muon takes {self.num_ns_steps} Newton-Schulz steps: use at least 1")
        if self.scale_mode not in SCALE_MODES:
            problems.append(
                f"muon scale mode {self.scale_mode!r}: use one of {', '.join(SCALE_MODES)}"
            )
        if self.split_matrices not in SPLIT_MATRICES:
            problems.append(
                f"muon split matrices {self.split_matrices!r}: use one of "
                f"{', '.join(SPLIT_MATRICES)}"
            )
        elif self.split_matrices == "all" and not self.split_qkv:
            problems.append("muon split matrices 'all' splits q, k and v: use split_qkv=True")
        if not 0.0 < self.extra_scale_factor < float("inf"):
            problems.append(
                f"muon extra scale factor is {self.extra_scale_factor}: use a positive number"
            )
        if self.round_bytes < 1:
            problems.append(f"muon rounds of {self.round_bytes} bytes: use a positive number")
        if problems:
            raise ValueError("; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Settings of the update.

    Args:
        kind: "adam" (AdamW, decoupled weight decay), "sgd" (with momentum) or "muon" (Muon for
            matrices, AdamW for other weights).
        adam_beta1, adam_beta2, adam_eps: Adam's hyperparameters.
        exp_avg_dtype, exp_avg_sq_dtype: dtypes in which Adam's moments are stored, fp32 or bf16;
            updates are computed in fp32 and rounded to nearest when stored.
        decoupled: names of logical weights with the learning rate `decoupled_lr` of a step, unless
            `lr_factors` match them.
        lr_factors: (pattern of logical weight names, factor on the learning rate); the first match
            applies.
        decay_factors: the same for weight decay; overrides the rule that biases and norms have
            none.
        sgd_momentum: SGD's momentum; 0 stores no state.
        muon: settings of Muon.
        clip_grad: maximum L2 norm of the whole gradient; 0 disables clipping.
        count_zeros: count gradient elements that are exactly zero, at every step.
        offload_fraction: fraction of the elements whose masters and moments are kept and updated in
            host memory.

    Raises:
        ValueError: lists all values out of range.
    """

    kind: OptimizerKind = "adam"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    decoupled: tuple[str, ...] = ()
    lr_factors: NameFactors = ()
    decay_factors: NameFactors = ()
    sgd_momentum: float = 0.0
    muon: MuonConfig = field(default_factory=MuonConfig)
    clip_grad: float = 1.0
    count_zeros: bool = False
    offload_fraction: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in KINDS:
            problems.append(f"optimizer {self.kind!r}: use one of {', '.join(KINDS)}")
        for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
            if not 0.0 <= getattr(self, name) < 1.0:
                problems.append(f"{name} is {getattr(self, name)}: use 0 <= value < 1")
        if not self.adam_eps > 0.0:
            problems.append(f"adam_eps is {self.adam_eps}: use a positive number")
        if not self.clip_grad >= 0.0:
            problems.append(
                f"clip_grad is {self.clip_grad}: use 0 (no clipping) or a positive norm"
            )
        if not 0.0 <= self.offload_fraction <= 1.0:
            problems.append(f"offload_fraction is {self.offload_fraction}: use 0 to 1")
        elif self.offload_fraction and self.kind == "muon":
            problems.append(
                "muon does not support offloading, as its momentum is needed on the device: "
                "set offload_fraction to 0, or use adam or sgd"
            )
        problems += self._state_problems()
        problems += factor_problems(self.lr_factors, what="learning rate of")
        problems += factor_problems(self.decay_factors, what="weight decay of")
        if problems:
            raise ValueError("; ".join(problems))

    def _state_problems(self) -> list[str]:
        problems = []
        for moment, beta in (("exp_avg", "adam_beta1"), ("exp_avg_sq", "adam_beta2")):
            dtype, decay = getattr(self, f"{moment}_dtype"), getattr(self, beta)
            if dtype not in STATE_DTYPES:
                problems.append(f"{moment}_dtype is {dtype}: use torch.float32 or torch.bfloat16")
            elif dtype is not torch.float32 and self.kind == "sgd":
                problems.append(f"{moment}_dtype is {dtype}: optimizer {self.kind} has no {moment}")
            elif dtype is torch.bfloat16 and 1.0 - decay < LEAST_BF16_MOVE:
                problems.append(
                    f"{moment} in bf16 with {beta} {decay}: rounding loses its updates: use {beta} "
                    f"up to {1.0 - LEAST_BF16_MOVE:.4g}, or fp32"
                )
        return problems
