# SPDX-License-Identifier: Apache-2.0
"""A pipeline of linear stages, y = w x + microbatch, with closed-form gradients."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron.core.pipeline_parallel import Schedule

FEATURES = 3


def stage_weight(virtual_stage: int) -> float:
    """Return the weight of a virtual stage."""
    return 1.0 + virtual_stage / 4


def microbatch_length(microbatch: int) -> int:
    """Return the length of a microbatch; lengths differ."""
    return 2 + microbatch % 3


def first_input(microbatch: int) -> torch.Tensor:
    """Return the input of the first virtual stage, [length, FEATURES]."""
    rows = torch.arange(microbatch_length(microbatch) * FEATURES, dtype=torch.float64)
    return (rows * 0.1 + microbatch).view(-1, FEATURES)


@dataclass
class LinearWorker:
    """The chunks of one rank, as an executor's worker.

    Attributes:
        calls: the calls in order, spelled as actions.
        weight_grads: gradients of the weights by (chunk, microbatch).
        input_grads: gradients of the model's input by microbatch.
        losses: sums of the last chunk's outputs by microbatch.
    """

    schedule: Schedule
    rank: int
    calls: list[str] = field(default_factory=list)
    weight_grads: dict[tuple[int, int], float] = field(default_factory=dict)
    input_grads: dict[int, torch.Tensor] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    _saved_inputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    _deferred_grads: dict[tuple[int, int], float] = field(default_factory=dict)

    def recv_buffer(self, microbatch: int) -> torch.Tensor:
        """Return an empty buffer for a microbatch."""
        return torch.empty(microbatch_length(microbatch), FEATURES, dtype=torch.float64)

    def forward(self, chunk: int, microbatch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """Return w x + microbatch."""
        self.calls.append(f"F{chunk}.{microbatch}")
        stage = self.schedule.virtual_stage(self.rank, chunk)
        assert (hidden is None) == (stage == 0)
        x = first_input(microbatch) if hidden is None else hidden
        self._saved_inputs[chunk, microbatch] = x
        y = stage_weight(stage) * x + microbatch
        if self.schedule.next_stage(self.rank, chunk) is None:
            self.losses[microbatch] = float(y.sum())
        return y

    def backward(
        self, chunk: int, microbatch: int, grad: torch.Tensor | None, *, split: bool
    ) -> torch.Tensor | None:
        """Return w dy; the weight's gradient is x · dy."""
        self.calls.append(f"{'I' if split else 'B'}{chunk}.{microbatch}")
        stage = self.schedule.virtual_stage(self.rank, chunk)
        x = self._saved_inputs.pop((chunk, microbatch))
        assert (grad is None) == (self.schedule.next_stage(self.rank, chunk) is None)
        dy = torch.ones_like(x) if grad is None else grad
        grads = self._deferred_grads if split else self.weight_grads
        grads[chunk, microbatch] = float((x * dy).sum())
        dx = stage_weight(stage) * dy
        if stage == 0:
            self.input_grads[microbatch] = dx
            return None
        return dx

    def weight_gradient(self, chunk: int, microbatch: int) -> None:
        """Record the weight gradient that a split backward deferred."""
        self.calls.append(f"W{chunk}.{microbatch}")
        self.weight_grads[chunk, microbatch] = self._deferred_grads.pop((chunk, microbatch))

    def gather(self, chunk: int, microbatch: int) -> None:
        """Record a weight gather."""
        self.calls.append(f"G{chunk}.{microbatch}")

    def reduce(self, chunk: int, microbatch: int) -> None:
        """Record a gradient reduction."""
        self.calls.append(f"R{chunk}.{microbatch}")


def reference(stages: int, microbatch: int) -> tuple[float, torch.Tensor, list[float]]:
    """Return the loss, the input's gradient and the weights' gradients by autograd on a single
    process."""
    weights = [
        torch.tensor(stage_weight(g), dtype=torch.float64).requires_grad_() for g in range(stages)
    ]
    x = model_input = first_input(microbatch).requires_grad_()
    for weight in weights:
        x = weight * x + microbatch
    loss = x.sum()
    grads = torch.autograd.grad(loss, [model_input, *weights])
    return float(loss.detach()), grads[0], [float(g) for g in grads[1:]]
