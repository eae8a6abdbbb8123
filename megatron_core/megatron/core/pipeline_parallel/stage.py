# SPDX-License-Identifier: Apache-2.0
"""AutogradWorker: the chunks of one stage, computed forward by a function and backward by autograd.

F   hidden -> output; kept until backward: the input, and the edge of the graph at the output,
    not the output itself, whose memory is free once it has been sent
B   backward through that graph
I   the same, with every weight gradient put into a queue
W   drains the queue: the products that I put off, no second forward or backward
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.pipeline_parallel.schedule import Kind, Schedule
from megatron.core.weight_gather import BACKWARD, FORWARD, WgradQueue, segment_name


class StageEngine(Protocol):
    """What a stage needs of the data-parallel engine."""

    def segment(self, name: str) -> None:
        """Say which segment of the step's program runs from now on."""

    def prefetch(self, name: str) -> None:
        """Start the gathers that a segment needs first."""

    def last(self, part: int) -> None:
        """Say that the step's last puts into a part's weights follow."""

    def close(self, part: int) -> None:
        """Say that a part's weights have got all puts of a microbatch."""


#: Computes a chunk's output [s/tp, b, h], or the loss (a scalar) in the model's last chunk, from
#: the chunk's number, the microbatch's and what arrives (None in the model's first chunk).
StageRun = Callable[[int, int, torch.Tensor | None], torch.Tensor]


class AutogradWorker:
    """Compute the chunks of a stage.

    Args:
        run: see `StageRun`.
        landing: returns an empty tensor of what arrives of a microbatch.
        engine: gathers and reduces; each chunk is one part of its store.
        defer: opens a queue for weight gradients on the weights of all chunks; None without
            backward, for which nothing is kept then.
        microbatches: of this step.
    """

    def __init__(
        self,
        run: StageRun,
        *,
        landing: Callable[[int], torch.Tensor],
        engine: StageEngine,
        defer: Callable[[], AbstractContextManager[WgradQueue]] | None,
        microbatches: int,
    ) -> None:
        self._run, self.landing, self._engine, self._defer = run, landing, engine, defer
        self._last = microbatches - 1
        self._kept: dict[tuple[int, int], tuple[torch.Tensor | None, GradientEdge | None]] = {}
        self._queues: dict[tuple[int, int], WgradQueue] = {}

    def forward(self, chunk: int, microbatch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """Return a chunk's output, detached; `Worker.forward`."""
        self._engine.segment(segment_name(FORWARD, chunk))
        if self._defer is None:
            return self._run(chunk, microbatch, hidden)
        if hidden is not None:
            hidden.requires_grad_()
        output = self._run(chunk, microbatch, hidden)
        edge = get_gradient_edge(output) if output.requires_grad else None
        self._kept[chunk, microbatch] = hidden, edge
        return output.detach().contiguous()

    def backward(
        self, chunk: int, microbatch: int, grad: torch.Tensor | None, *, split: bool
    ) -> torch.Tensor | None:
        """Return the gradient of what arrived in forward; `Worker.backward`."""
        self._engine.segment(segment_name(BACKWARD, chunk))
        hidden, edge = self._kept.pop((chunk, microbatch))
        if split:
            assert self._defer is not None
            with self._defer() as queue:
                _through(edge, grad)
            self._queues[chunk, microbatch] = queue
        else:
            if microbatch == self._last:
                self._engine.last(chunk)
            _through(edge, grad)
        if hidden is None:
            return None
        assert hidden.grad is not None, "what arrives reaches the loss"
        return hidden.grad.contiguous()

    def weight_gradient(self, chunk: int, microbatch: int) -> None:
        """Carry out what `backward` has put off."""
        if microbatch == self._last:
            self._engine.last(chunk)
        self._queues.pop((chunk, microbatch)).drain()

    def gather(self, chunk: int, microbatch: int) -> None:
        """Start the gathers of a chunk's next use: backward's if it has been forward."""
        use = BACKWARD if (chunk, microbatch) in self._kept else FORWARD
        self._engine.prefetch(segment_name(use, chunk))

    def reduce(self, chunk: int, microbatch: int) -> None:
        """Let the engine reduce what a microbatch has left open."""
        self._engine.close(chunk)


def program(schedule: Schedule, rank: int) -> list[str]:
    """Return the segments of a rank's list in the order in which they need weights."""
    names = {Kind.FORWARD: FORWARD, Kind.BACKWARD: BACKWARD, Kind.INPUT_GRADIENT: BACKWARD}
    return [
        segment_name(names[action.kind], action.chunk)
        for action in schedule.ranks[rank]
        if action.kind in names
    ]


def _through(edge: GradientEdge | None, grad: torch.Tensor | None) -> None:
    """Run backward from a chunk's output, unless nothing there is trained."""
    if edge is not None:
        torch.autograd.backward((edge,), None if grad is None else (grad,))
