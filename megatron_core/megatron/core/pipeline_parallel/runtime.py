# SPDX-License-Identifier: Apache-2.0
"""Running one rank's list of a pipeline schedule.

The runtime knows no model and decides nothing: it runs the list. A `Worker` computes. Activations
and their gradients are sent over two groups of the same ranks, so that neither waits for the other.
Adjacent transfers of one direction start as one batch. A receive starts at its place in the list,
and the computation that needs it waits for it. A send starts at its place too, and its tensor is
released once it has been sent.

`AutogradWorker` computes the chunks of one stage, forward by a function and backward by autograd:

F   hidden -> output; kept until backward: the input, and the edge of the graph at the output,
    not the output itself, whose memory is free once it has been sent
B   backward through that graph
I   the same, with every weight gradient put into a queue
W   drains the queue: the products that I deferred, no second forward or backward
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.comm.collectives import Pending
from megatron.core.comm.point_to_point import Message, exchange_async
from megatron.core.device import runs_ahead
from megatron.core.pipeline_parallel.schedule import AHEAD, SENDS, TRANSFERS, Action, Kind, Schedule
from megatron.core.process_groups import Group
from megatron.core.weight_gather import BACKWARD, FORWARD, WgradQueue, segment_name


class StageEngine(Protocol):
    """What a stage needs of the data-parallel engine."""

    def segment(self, name: str) -> None:
        """Say which segment of the step's program runs from now on."""

    def prefetch(self, name: str) -> None:
        """Start the gathers that a segment needs first."""

    def last(self, part: int) -> None:
        """Declare that the step's last gradients of a model chunk's weights follow."""

    def close(self, part: int) -> None:
        """Declare that a model chunk's weights have all gradients of a microbatch."""


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
        """Carry out what `backward` has deferred."""
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


#: Sends of one kind that may wait for their receivers, where a wait stops this process.
SENDS_UNDER_WAY = 2


class Worker(Protocol):
    """What computes the chunks of one rank.

    Microbatches of a chunk come in order, in every kind of action.
    """

    def landing(self, microbatch: int) -> torch.Tensor:
        """Return an empty tensor for what arrives of a microbatch, in either direction."""

    def forward(self, chunk: int, microbatch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """Return a chunk's output; `hidden` is None in the first chunk of the model."""

    def backward(
        self, chunk: int, microbatch: int, grad: torch.Tensor | None, *, split: bool
    ) -> torch.Tensor | None:
        """Return the gradient of what forward got, None in the first chunk of the model.

        Args:
            grad: of the chunk's output; None in the last chunk, whose output is the loss.
            split: put the weights' gradients off until `weight_gradient`.
        """

    def weight_gradient(self, chunk: int, microbatch: int) -> None:
        """Carry out what a split backward has deferred."""

    def gather(self, chunk: int, microbatch: int) -> None:
        """Start to make the weights whole that a chunk needs next."""

    def reduce(self, chunk: int, microbatch: int) -> None:
        """Take note that a chunk's weights have got a microbatch's gradients."""


class Executor:
    """Carry out a schedule's list on this rank, once.

    Args:
        schedule: with transfers; for as many stages as the group has ranks.
        worker: computes.
        group: the pipeline's, for what forward computes.
        backward_group: the same ranks over another communicator, for gradients.
        observe: called with every action before it is carried out.

    Raises:
        ValueError: the schedule is for another number of stages, or the groups' ranks differ.
    """

    def __init__(
        self,
        schedule: Schedule,
        worker: Worker,
        *,
        group: Group,
        backward_group: Group,
        observe: Callable[[Action], None] | None = None,
    ) -> None:
        if schedule.stages != group.size:
            raise ValueError(
                f"the schedule is for {schedule.stages} stages, group {group.name} has "
                f"{group.size} ranks"
            )
        if backward_group.ranks != group.ranks:
            raise ValueError(
                f"{group.name} has the ranks {group.ranks}, {backward_group.name} has "
                f"{backward_group.ranks}: both directions go over the same ranks"
            )
        self.schedule, self.worker, self.group = schedule, worker, group
        self.backward_group = backward_group
        self.observe = observe or (lambda action: None)
        self._arriving: dict[tuple[Kind, int, int], Pending] = {}
        self._ready: dict[tuple[Kind, int, int], torch.Tensor] = {}
        self._leaving: dict[Kind, deque[Pending]] = {kind: deque() for kind in SENDS}

    def run(self) -> None:
        """Carry out the list, then wait until all that was sent has left."""
        for actions in batches(self.schedule.ranks[self.group.rank]):
            for action in actions:
                self.observe(action)
            if actions[0].kind not in TRANSFERS:
                self._compute(actions[0])
                continue
            ahead = [action for action in actions if action.kind in AHEAD]
            back = [action for action in actions if action.kind not in AHEAD]
            self._exchange(ahead, self.group)
            self._exchange(back, self.backward_group)
        for leaving in self._leaving.values():
            while leaving:
                leaving.popleft().wait()
        assert not self._arriving, "a list that receives what nothing needs"
        assert not self._ready, "a list that does not send what others need"

    def _compute(self, action: Action) -> None:
        kind, chunk, microbatch = action.kind, action.chunk, action.microbatch
        if kind is Kind.FORWARD:
            hidden = None
            if self.schedule.preceding(self.group.rank, chunk) is not None:
                hidden = self._arrived(Kind.RECEIVE_FORWARD, action)
            output = self.worker.forward(chunk, microbatch, hidden)
            if self.schedule.following(self.group.rank, chunk) is not None:
                self._ready[Kind.SEND_FORWARD, chunk, microbatch] = output
        elif kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
            grad = None
            if self.schedule.following(self.group.rank, chunk) is not None:
                grad = self._arrived(Kind.RECEIVE_BACKWARD, action)
            split = kind is Kind.INPUT_GRADIENT
            before = self.worker.backward(chunk, microbatch, grad, split=split)
            if self.schedule.preceding(self.group.rank, chunk) is not None:
                assert before is not None
                self._ready[Kind.SEND_BACKWARD, chunk, microbatch] = before
        elif kind is Kind.WEIGHT_GRADIENT:
            self.worker.weight_gradient(chunk, microbatch)
        elif kind is Kind.GATHER:
            self.worker.gather(chunk, microbatch)
        else:
            assert kind is Kind.REDUCE, kind
            self.worker.reduce(chunk, microbatch)

    def _arrived(self, kind: Kind, action: Action) -> torch.Tensor:
        return self._arriving.pop((kind, action.chunk, action.microbatch)).wait()

    def _exchange(self, actions: Sequence[Action], group: Group) -> None:
        """Start a batch of transfers, if there are any."""
        messages = []
        for action in actions:
            key = (action.kind, action.chunk, action.microbatch)
            if action.kind in SENDS:
                tensor = self._ready.pop(key)
            else:
                tensor = self.worker.landing(action.microbatch)
            messages.append(Message(tensor, self._peer(action), action.kind in SENDS))
        for action, pending in zip(actions, exchange_async(messages, group), strict=True):
            if action.kind in SENDS:
                self._forget_sent(self._leaving[action.kind], pending)
            else:
                self._arriving[action.kind, action.chunk, action.microbatch] = pending

    def _peer(self, action: Action) -> int:
        """Return the rank at a transfer's other end."""
        there = self.schedule.other_end(self.group.rank, action)
        assert there is not None
        return there[0]

    def _forget_sent(self, leaving: deque[Pending], pending: Pending) -> None:
        """Keep a send's tensor until it has left, and those of earlier ones no longer than that."""
        leaving.append(pending)
        if runs_ahead(pending.output.device):
            # Waiting would make the computation wait as well; a GPU knows what is done. A process
            # runs ahead of its GPU, though, by as much as a whole step: without a bound it would
            # keep all that the step sends.
            while leaving and leaving[0].is_done():
                leaving.popleft()
            while len(leaving) > self.schedule.stages + 1:
                leaving.popleft().wait()
            return
        # Gloo knows it in wait() only. The receiver's list has come to its receive soon: receives
        # stand before the computation that goes on there while this rank sends.
        while len(leaving) > SENDS_UNDER_WAY:
            leaving.popleft().wait()


def batches(actions: Sequence[Action]) -> Iterator[list[Action]]:
    """Cut a list: transfers next to each other stay together, any other action is by itself."""
    for transfers, run in groupby(actions, key=lambda a: a.kind in TRANSFERS):
        if transfers:
            yield list(run)
        else:
            yield from ([action] for action in run)
