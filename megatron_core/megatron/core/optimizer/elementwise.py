# SPDX-License-Identifier: Apache-2.0
"""AdamW and SGD on the flat pieces of a range, by torch's fused kernels.

Updates compute in fp32 whatever the dtype of gradients and of kept moments: what is narrower is
widened one range at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.range_state import RangeState
from megatron.core.optimizer.weight_groups import UpdateRanges


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


def update_ranges(
    states: Sequence[RangeState], numbers: StepNumbers, *, config: OptimizerConfig
) -> None:
    """Update ranges from their own gradients; AdamW's that need no widening share its kernel.

    Args:
        states: in the memory of their gradients, by AdamW or SGD; fp32 gradients may be
            overwritten.
    """
    together: dict[tuple[float, float], tuple[list[torch.Tensor], ...]] = {}
    for state in states:
        flats = [state.master, state.owned.gradients, *state.moments.values()]
        if state.kind != "adam" or any(flat.dtype != torch.float32 for flat in flats):
            update_range(state, state.owned.gradients, numbers, config=config)
            continue
        for alike in state.updates:
            key = alike.lr_factor, alike.decay_factor
            found = together.setdefault(key, ([], [], [], []))
            for pieces, flat in zip(found, flats, strict=True):
                pieces += _pieces(flat, alike)
    for (lr, decay), (masters, gradients, first, second) in together.items():
        _adam(
            masters,
            gradients,
            {"exp_avg": first, "exp_avg_sq": second},
            numbers=numbers,
            lr=numbers.lr * lr,
            decay=numbers.weight_decay * decay,
            config=config,
        )


def update_range(
    state: RangeState, gradients: torch.Tensor, numbers: StepNumbers, *, config: OptimizerConfig
) -> None:
    """Update a state's master and moments in place.

    Args:
        gradients: [k] on the state's device, fp32 or bf16; fp32 ones may be overwritten.
    """
    for alike in state.updates:
        masters = _pieces(state.master, alike)
        # the same tensors where they are fp32
        wide = [one.float() for one in _pieces(gradients, alike)]
        moments = {name: _pieces(flat, alike) for name, flat in state.moments.items()}
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


def _pieces(flat: torch.Tensor, alike: UpdateRanges) -> list[torch.Tensor]:
    """Return the pieces of a flat tensor [k] that are updated alike."""
    return [flat[start:stop] for start, stop in alike.ranges]


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
    # Filled where they are: a number copied to a GPU from pageable memory makes the host wait.
    # Each piece has a count of its own, because the kernel adds one before it corrects the bias.
    counts = torch.full((len(masters),), numbers.count - 1.0, device=device)
    adamw(
        masters,
        gradients,
        moments["exp_avg"],
        moments["exp_avg_sq"],
        [],
        list(counts.unbind()),
        fused=True,
        grad_scale=None if divisor == 1.0 else torch.full((), divisor, device=device),
        amsgrad=False,
        beta1=config.adam_beta1,
        beta2=config.adam_beta2,
        lr=lr,
        weight_decay=decay,
        eps=config.adam_eps,
        maximize=False,
    )
