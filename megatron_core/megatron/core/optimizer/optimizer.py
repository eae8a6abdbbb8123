# SPDX-License-Identifier: Apache-2.0
"""Optimizer: AdamW or SGD over flat ranges of weights, with fp32 masters.

A range is a few contiguous pieces (with and without weight decay, and what patterns of names set
apart), so a step is a handful of fused kernels whatever the number of weights. Where weights are
fp32 they are their own masters. Unscaling and clipping cost no pass of their own: they are one
factor handed to the update. Moments kept in bf16 are widened one range at a time.

The norm counts every weight once: pieces that are replicas of another model-parallel rank's are
left out, and the sum runs over the data lanes only if they hold different ranges.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.core.comm.collectives import all_reduce
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.loss_scaler import ConstantLossScaler, LossScaler
from megatron.core.optimizer.weight_groups import UpdateRanges, check_patterns, update_ranges
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.weight_gather.owned import OwnedRange


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did.

    Args:
        applied: False if a gradient was not finite anywhere: nothing was changed on any rank.
        grad_norm: L2 norm of the unscaled gradient before clipping.
        num_zeros: gradient elements that are exactly zero; None if they are not counted.
    """

    applied: bool
    grad_norm: float
    num_zeros: int | None = None


class RangeState:
    """The optimizer's tensors for one owned range: the fp32 master and the moments, flat [k], and
    what is updated alike."""

    def __init__(self, owned: OwnedRange, config: OptimizerConfig) -> None:
        self.owned = owned
        own_master = owned.weights.dtype != torch.float32
        self.master = owned.weights.float() if own_master else owned.weights
        self.writes_back = own_master
        self.updates = update_ranges(owned, lr=config.lr_factors, weight_decay=config.decay_factors)
        self.moments: dict[str, torch.Tensor] = {}
        if config.kind == "adam":
            self.moments = {
                "exp_avg": torch.zeros_like(self.master, dtype=config.exp_avg_dtype),
                "exp_avg_sq": torch.zeros_like(self.master, dtype=config.exp_avg_sq_dtype),
            }
        elif config.sgd_momentum:
            self.moments = {"momentum": torch.zeros_like(self.master)}

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Return the flat tensors that a checkpoint must hold, the master included only if it is
        one."""
        own = {"master": self.master} if self.writes_back else {}
        return {**own, **self.moments}

    def reload_master(self) -> None:
        """Take the masters from the weights (after loading weights without optimizer state)."""
        if self.writes_back:
            self.master.copy_(self.owned.weights)


class Optimizer:
    """Update the owned ranges from their gradients.

    Args:
        owned: what a data-parallel engine's `owned()` returns.
        groups: for the sums of the norm.
        scaler: the loss scaler whose scale is in the gradients.
        names: logical names of the whole model's weights; every pattern of the config must match
            one. None: those of `owned`, which on one rank of many need not be all.

    Raises:
        ValueError: a pattern that matches no weight.

    Attributes:
        steps: updates applied so far (Adam's bias correction; saved and restored by the caller).
    """

    def __init__(
        self,
        owned: Sequence[OwnedRange],
        groups: ProcessGroupCollection,
        *,
        config: OptimizerConfig | None = None,
        scaler: LossScaler | None = None,
        names: Collection[str] | None = None,
    ) -> None:
        self.config = config or OptimizerConfig()
        if names is None:
            names = {placed.box.name for one in owned for placed in one.boxes}
        check_patterns(self.config.lr_factors, names, what="learning rate groups")
        check_patterns(self.config.decay_factors, names, what="weight decay groups")
        self.groups = groups
        self.scaler: LossScaler = scaler or ConstantLossScaler()
        self.ranges = [RangeState(o, self.config) for o in owned]
        self.steps = 0

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float = 0.0) -> StepResult:
        """Clip and apply one update, or skip it on all ranks alike.

        Args:
            lr: learning rate of this step, where no pattern gives a factor.
            weight_decay: decoupled decay of this step, for the ranges that take any.

        Returns:
            The result; the weights' other shards must then be gathered by the data-parallel engine.
        """
        scale = self.scaler.scale
        norm = self.grad_norm() / scale
        zeros = self.count_zeros() if self.config.count_zeros else None
        applied = math.isfinite(norm)
        self.scaler.update(not applied)
        if not applied:
            return StepResult(False, norm, zeros)
        clip = self.config.clip_grad
        divisor = scale * max(1.0, (norm + 1e-6) / clip) if clip > 0.0 else scale
        self.steps += 1
        for state in self.ranges:
            for alike in state.updates:
                self._update(state, alike, lr=lr, decay=weight_decay, divisor=divisor)
            if state.writes_back:
                state.owned.weights.copy_(state.master)
        return StepResult(True, norm, zeros)

    def grad_norm(self) -> float:
        """Return the L2 norm of all gradients, each weight counted once, loss scale included."""
        return math.sqrt(self._total(lambda flat: torch.linalg.vector_norm(flat).double() ** 2))

    def count_zeros(self) -> int:
        """Return the number of gradient elements that are exactly zero, each counted once."""
        return int(self._total(lambda flat: (flat == 0).sum().double()))

    @torch.no_grad()
    def params_norm(self) -> float:
        """Return the L2 norm of the fp32 weights that are trained, each counted once."""
        return math.sqrt(
            self._total(lambda flat: torch.linalg.vector_norm(flat).double() ** 2, of_weights=True)
        )

    def _total(self, measure, *, of_weights: bool = False) -> float:
        """Sum a measure of the counted pieces over the ranks that hold different ones."""
        by_group: dict[str, torch.Tensor] = {}
        for state in self.ranges:
            flat = state.master if of_weights else state.owned.gradients
            total = by_group.setdefault(
                state.owned.norm_group, torch.zeros((), dtype=torch.float64, device=flat.device)
            )
            for start, stop in state.owned.counted:
                total += measure(flat[start:stop])
        return sum(float(all_reduce(t, self.groups[g])) for g, t in sorted(by_group.items()))

    def _update(
        self,
        state: RangeState,
        alike: UpdateRanges,
        *,
        lr: float,
        decay: float,
        divisor: float,
    ) -> None:
        """Run the fused update on some ranges of one state; gradients are divided by `divisor`
        first."""

        def pieces(flat: torch.Tensor) -> list[torch.Tensor]:
            return [flat[start:stop] for start, stop in alike.ranges]

        masters, gradients = pieces(state.master), pieces(state.owned.gradients)
        moments = {name: pieces(flat) for name, flat in state.moments.items()}
        # the same tensors where they are fp32
        wide = {name: [one.float() for one in kept] for name, kept in moments.items()}
        lr, decay = lr * alike.lr_factor, decay * alike.decay_factor
        if self.config.kind == "adam":
            self._adam(masters, gradients, wide, lr=lr, decay=decay, divisor=divisor)
        else:
            if divisor != 1.0:
                torch._foreach_div_(gradients, divisor)
            sgd(
                masters,
                gradients,
                wide.get("momentum", [None] * len(masters)),
                foreach=True,
                weight_decay=decay,
                momentum=self.config.sgd_momentum,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
        for name, kept in moments.items():
            if state.moments[name].dtype != torch.float32:
                torch._foreach_copy_(kept, wide[name])

    def _adam(
        self,
        masters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        moments: dict[str, list[torch.Tensor]],
        *,
        lr: float,
        decay: float,
        divisor: float,
    ) -> None:
        """Run AdamW in place on flat fp32 pieces."""
        device = masters[0].device
        adamw(
            masters,
            gradients,
            moments["exp_avg"],
            moments["exp_avg_sq"],
            [],
            # the kernel adds one before it corrects the bias
            [torch.tensor(self.steps - 1.0, device=device) for _ in masters],
            fused=True,
            grad_scale=None if divisor == 1.0 else torch.tensor(divisor, device=device),
            amsgrad=False,
            beta1=self.config.adam_beta1,
            beta2=self.config.adam_beta2,
            lr=lr,
            weight_decay=decay,
            eps=self.config.adam_eps,
            maximize=False,
        )
