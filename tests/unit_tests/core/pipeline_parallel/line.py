# SPDX-License-Identifier: Apache-2.0
"""A pipeline of straight lines, y = w x + microbatch, whose gradients are known by heart."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron.core.pipeline_parallel import Schedule

FEATURES = 3


def slope(virtual_stage: int) -> float:
    """Return the weight of a virtual stage."""
    return 1.0 + virtual_stage / 4


def width(microbatch: int) -> int:
    """Return the length of a microbatch: they differ."""
    return 2 + microbatch % 3


def start(microbatch: int) -> torch.Tensor:
    """Return what the first virtual stage works on, [length, FEATURES]."""
    rows = torch.arange(width(microbatch) * FEATURES, dtype=torch.float64)
    return (rows * 0.1 + microbatch).view(-1, FEATURES)


@dataclass
class Line:
    """The chunks of one rank, as an executor's worker.

    Attributes:
        calls: what was asked of it, in order, as the actions are spelled.
        slopes: gradients of the weights by (chunk, microbatch).
        inputs: gradients of what the model's first chunk works on, by microbatch.
        losses: sums of the last chunk's outputs by microbatch.
    """

    schedule: Schedule
    rank: int
    calls: list[str] = field(default_factory=list)
    slopes: dict[tuple[int, int], float] = field(default_factory=dict)
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    _kept: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    _late: dict[tuple[int, int], float] = field(default_factory=dict)

    def recv_buffer(self, microbatch: int) -> torch.Tensor:
        """Return room for a microbatch."""
        return torch.empty(width(microbatch), FEATURES, dtype=torch.float64)

    def forward(self, chunk: int, microbatch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """Return w x + microbatch."""
        self.calls.append(f"F{chunk}.{microbatch}")
        stage = self.schedule.virtual_stage(self.rank, chunk)
        assert (hidden is None) == (stage == 0)
        x = start(microbatch) if hidden is None else hidden
        self._kept[chunk, microbatch] = x
        y = slope(stage) * x + microbatch
        if self.schedule.next_stage(self.rank, chunk) is None:
            self.losses[microbatch] = float(y.sum())
        return y

    def backward(
        self, chunk: int, microbatch: int, grad: torch.Tensor | None, *, split: bool
    ) -> torch.Tensor | None:
        """Return w dy; the weight's gradient is x · dy."""
        self.calls.append(f"{'I' if split else 'B'}{chunk}.{microbatch}")
        stage = self.schedule.virtual_stage(self.rank, chunk)
        x = self._kept.pop((chunk, microbatch))
        assert (grad is None) == (self.schedule.next_stage(self.rank, chunk) is None)
        dy = torch.ones_like(x) if grad is None else grad
        found = self._late if split else self.slopes
        found[chunk, microbatch] = float((x * dy).sum())
        dx = slope(stage) * dy
        if stage == 0:
            self.inputs[microbatch] = dx
            return None
        return dx

    def weight_gradient(self, chunk: int, microbatch: int) -> None:
        """Give out what backward put off."""
        self.calls.append(f"W{chunk}.{microbatch}")
        self.slopes[chunk, microbatch] = self._late.pop((chunk, microbatch))

    def gather(self, chunk: int, microbatch: int) -> None:
        """Note it."""
        self.calls.append(f"G{chunk}.{microbatch}")

    def reduce(self, chunk: int, microbatch: int) -> None:
        """Note it."""
        self.calls.append(f"R{chunk}.{microbatch}")


def expected(stages: int, microbatch: int) -> tuple[float, torch.Tensor, list[float]]:
    """Return the loss, the gradient of the input and those of the weights, by autograd on a single
    process."""
    weights = [torch.tensor(slope(g), dtype=torch.float64).requires_grad_() for g in range(stages)]
    x = first = start(microbatch).requires_grad_()
    for weight in weights:
        x = weight * x + microbatch
    loss = x.sum()
    grads = torch.autograd.grad(loss, [first, *weights])
    return float(loss.detach()), grads[0], [float(g) for g in grads[1:]]
