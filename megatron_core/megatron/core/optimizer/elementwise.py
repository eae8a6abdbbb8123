# SPDX-License-Identifier: Apache-2.0
"""AdamW and SGD on the flat pieces of a range, by torch's fused kernels.

Updates compute in fp32 whatever the dtype of gradients and of kept moments: what is narrower is
widened one range at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.range_state import RangeState


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one step.

    Args:
        lr, weight_decay: before the factors by name.
        divisor: what gradients are divided by: the loss scale, and what clips them.
        count: updates, this one included.
    """

    lr: float
    weight_decay: float
    divisor: float
    count: int


def update_range(
    state: RangeState, gradients: torch.Tensor, numbers: StepNumbers, *, config: OptimizerConfig
) -> None:
    """Update a state's master and moments in place.

    Args:
        gradients: [k] on the state's device, fp32 or bf16; fp32 ones may be overwritten.
    """
    for alike in state.updates:

        def pieces(flat: torch.Tensor, ranges=alike.ranges) -> list[torch.Tensor]:
            return [flat[start:stop] for start, stop in ranges]

        masters = pieces(state.master)
        # the same tensors where they are fp32
        wide = [one.float() for one in pieces(gradients)]
        moments = {name: pieces(flat) for name, flat in state.moments.items()}
        opened = {name: [one.float() for one in kept] for name, kept in moments.items()}
        lr = numbers.lr * alike.lr_factor
        decay = numbers.weight_decay * alike.decay_factor
        if state.kind == "adam":
            _adam(masters, wide, opened, numbers=numbers, lr=lr, decay=decay, config=config)
        else:
            if numbers.divisor != 1.0:
                torch._foreach_div_(wide, numbers.divisor)
            sgd(
                masters,
                wide,
                opened.get("momentum", [None] * len(masters)),
                foreach=True,
                weight_decay=decay,
                momentum=config.sgd_momentum,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
        for name, kept in moments.items():
            if state.moments[name].dtype != torch.float32:
                torch._foreach_copy_(kept, opened[name])


def _adam(
    masters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    moments: dict[str, list[torch.Tensor]],
    *,
    numbers: StepNumbers,
    lr: float,
    decay: float,
    config: OptimizerConfig,
) -> None:
    """Run AdamW in place on flat fp32 pieces."""
    device, divisor = masters[0].device, numbers.divisor
    adamw(
        masters,
        gradients,
        moments["exp_avg"],
        moments["exp_avg_sq"],
        [],
        # the kernel adds one before it corrects the bias
        [torch.tensor(numbers.count - 1.0, device=device) for _ in masters],
        fused=True,
        grad_scale=None if divisor == 1.0 else torch.tensor(divisor, device=device),
        amsgrad=False,
        beta1=config.adam_beta1,
        beta2=config.adam_beta2,
        lr=lr,
        weight_decay=decay,
        eps=config.adam_eps,
        maximize=False,
    )
