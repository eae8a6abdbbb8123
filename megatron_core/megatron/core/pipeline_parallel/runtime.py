# SPDX-License-Identifier: Apache-2.0
"""Execution of one rank's action list of a pipeline schedule.

The executor does not depend on a model and makes no decisions: it runs the list. A `Worker`
computes. Activations and their gradients use two communicators over the same ranks, so a transfer
of one never waits for a transfer of the other. Adjacent transfers of one direction start as one
batch. A receive starts at its position in the list, and the compute that needs its tensor waits for
it. A send also starts at its position, and its tensor is released after it has been sent.

`AutogradWorker` computes the model chunks of one stage, forward by a function, backward by
autograd:

F   hidden -> output. It saves the input and the graph's edge at the output for backward, but not
    the output, whose memory is free after it has been sent
B   backward through this graph
I   backward through this graph, with every weight gradient deferred to a queue
W   drains the queue: only the matrix products that I deferred
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.core.comm.collectives import P2PMessage, Pending, exchange_async
from megatron.core.device import runs_ahead
from megatron.core.pipeline_parallel.schedule import (
    FORWARD_TRANSFERS,
    SENDS,
    TRANSFERS,
    Action,
    ActionKind,
    Schedule,
)
from megatron.core.process_groups import Group
from megatron.core.weight_gather import BACKWARD, FORWARD, WgradQueue, segment_name


class StageEngine(Protocol):
    """The methods of the data-parallel engine that a stage calls."""

    def enter_segment(self, name: str) -> None:
        """Declare that a segment of the step's program runs from now on."""

    def prefetch_segment(self, name: str) -> None:
        """Start the first all-gathers of a segment."""

    def begin_last_backward(self, model_chunk: int) -> None:
        """Declare that the last microbatch accumulates gradients of a model chunk from now on."""

    def post_backward(self, model_chunk: int) -> None:
        """Declare that a microbatch has accumulated all gradients of a model chunk."""


#: Computes a chunk's output [s/tp, b, h], or the loss (a scalar) in the model's last chunk, from
#: the chunk, the microbatch and the received hidden states (None in the model's first chunk).
StageRun = Callable[[int, int, torch.Tensor | None], torch.Tensor]


class AutogradWorker:
    """Compute the model chunks of a stage.

    Args:
        run: see `StageRun`.
        recv_buffer: returns an empty tensor for the received hidden states of a microbatch.
        engine: gathers weights and reduces gradients; its store has the same model chunks.
        defer: opens a queue for the weight gradients of all chunks; None for evaluation, which
            saves no activations.
        microbatches: number of microbatches of this step.
    """

    def __init__(
        self,
        run: StageRun,
        *,
        recv_buffer: Callable[[int], torch.Tensor],
        engine: StageEngine,
        defer: Callable[[], AbstractContextManager[WgradQueue]] | None,
        microbatches: int,
    ) -> None:
        self._run, self.recv_buffer, self._engine, self._defer = run, recv_buffer, engine, defer
        self._last_microbatch = microbatches - 1
        self._saved: dict[tuple[int, int], tuple[torch.Tensor | None, GradientEdge | None]] = {}
        self._queues: dict[tuple[int, int], WgradQueue] = {}

    def forward(self, chunk: int, microbatch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """Return a chunk's output, detached; `Worker.forward`."""
        self._engine.enter_segment(segment_name(FORWARD, chunk))
        if self._defer is None:
            return self._run(chunk, microbatch, hidden)
        if hidden is not None:
            hidden.requires_grad_()  # a leaf: its gradient is sent to the previous stage
        output = self._run(chunk, microbatch, hidden)
        # The edge keeps the graph alive without the output's memory.
        edge = get_gradient_edge(output) if output.requires_grad else None
        self._saved[chunk, microbatch] = hidden, edge
        # Detached, so that releasing it after its send frees its memory; contiguous for NCCL.
        return output.detach().contiguous()

    def backward(
        self, chunk: int, microbatch: int, grad: torch.Tensor | None, *, split: bool
    ) -> torch.Tensor | None:
        """Return the gradient of the received hidden states; `Worker.backward`."""
        self._engine.enter_segment(segment_name(BACKWARD, chunk))
        hidden, edge = self._saved.pop((chunk, microbatch))
        if split:
            assert self._defer is not None
            # One queue per chunk and microbatch: W of another microbatch may run in between.
            with self._defer() as queue:
                _run_backward(edge, grad)
            self._queues[chunk, microbatch] = queue
        else:
            # Before backward: the engine reduces each bucket as its last gradient is accumulated.
            if microbatch == self._last_microbatch:
                self._engine.begin_last_backward(chunk)
            _run_backward(edge, grad)
        if hidden is None:
            return None
        assert hidden.grad is not None, "the loss depends on the received hidden states"
        return hidden.grad.contiguous()

    def weight_gradient(self, chunk: int, microbatch: int) -> None:
        """Compute the weight gradients that a split `backward` has deferred."""
        # With split backward, the last gradients of the step are accumulated here, not in I.
        if microbatch == self._last_microbatch:
            self._engine.begin_last_backward(chunk)
        self._queues.pop((chunk, microbatch)).drain()

    def gather(self, chunk: int, microbatch: int) -> None:
        """Start the all-gathers of a chunk's next use: backward if its forward has run."""
        # A saved input means that forward has run and backward has not.
        use = BACKWARD if (chunk, microbatch) in self._saved else FORWARD
        self._engine.prefetch_segment(segment_name(use, chunk))

    def reduce(self, chunk: int, microbatch: int) -> None:
        """Let the engine reduce the remaining gradients of a microbatch."""
        self._engine.post_backward(chunk)


def program(schedule: Schedule, rank: int) -> list[str]:
    """Return the segments of a rank's list in the order in which they use weights."""
    names = {
        ActionKind.FORWARD: FORWARD,
        ActionKind.BACKWARD: BACKWARD,
        ActionKind.INPUT_GRADIENT: BACKWARD,
    }
    return [
        segment_name(names[action.kind], action.chunk)
        for action in schedule.ranks[rank]
        if action.kind in names
    ]


def _run_backward(edge: GradientEdge | None, grad: torch.Tensor | None) -> None:
    """Run backward from a chunk's output; None is the edge of a chunk without trained weights."""
    if edge is not None:
        torch.autograd.backward((edge,), None if grad is None else (grad,))


#: Sends of one direction in flight where a wait blocks the host (Gloo).
MAX_SENDS_IN_FLIGHT = 2


class Worker(Protocol):
    """Computes the model chunks of one rank.

    Actions of one kind on a chunk come in the order of their microbatches.
    """

    def recv_buffer(self, microbatch: int) -> torch.Tensor:
        """Return an empty tensor for received hidden states or their gradient."""
        ...

    def forward(self, chunk: int, microbatch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """Return a chunk's output; `hidden` is None in the first chunk of the model."""
        ...

    def backward(
        self, chunk: int, microbatch: int, grad: torch.Tensor | None, *, split: bool
    ) -> torch.Tensor | None:
        """Return the gradient of forward's `hidden`, None in the first chunk of the model.

        Args:
            chunk, microbatch: of the forward.
            grad: gradient of the chunk's output; None in the last chunk, whose output is the loss.
            split: defer the weight gradients until `weight_gradient`.
        """

    def weight_gradient(self, chunk: int, microbatch: int) -> None:
        """Compute the weight gradients that a split backward has deferred."""

    def gather(self, chunk: int, microbatch: int) -> None:
        """Start the all-gathers of the weights that a chunk uses next."""

    def reduce(self, chunk: int, microbatch: int) -> None:
        """Start the reduction of a chunk's gradients after a microbatch."""


class Executor:
    """Run this rank's action list of a schedule, once.

    Args:
        schedule: a schedule with transfers, for as many stages as the group has ranks.
        worker: computes the model chunks.
        group: the pipeline's group, for activations.
        backward_group: the same ranks over another communicator, for gradients of activations.
        observe: called with every action before it runs.

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
                f"{backward_group.ranks}: both directions need the same ranks"
            )
        self.schedule, self.worker, self.group = schedule, worker, group
        self.backward_group = backward_group
        self.observe = observe or (lambda action: None)
        self._receiving: dict[tuple[ActionKind, int, int], Pending] = {}
        self._outputs: dict[tuple[ActionKind, int, int], torch.Tensor] = {}
        self._sending: dict[ActionKind, deque[Pending]] = {kind: deque() for kind in SENDS}

    def run(self) -> None:
        """Run the list, then wait for all sends."""
        for actions in batches(self.schedule.ranks[self.group.rank]):
            for action in actions:
                self.observe(action)
            if actions[0].kind not in TRANSFERS:
                self._compute(actions[0])
                continue
            # Each communicator runs its transfers in order, so each direction has its own.
            forward_transfers = [action for action in actions if action.kind in FORWARD_TRANSFERS]
            backward_transfers = [
                action for action in actions if action.kind not in FORWARD_TRANSFERS
            ]
            # Both ends start the batches in this order; a fixed order of communicators avoids
            # deadlocks of NCCL kernels that wait for each other on one device.
            self._exchange(forward_transfers, self.group)
            self._exchange(backward_transfers, self.backward_group)
        # The tensors of these sends must stay alive until the peer has received them.
        for sending in self._sending.values():
            while sending:
                sending.popleft().wait()
        assert not self._receiving, "no compute uses a received tensor"
        assert not self._outputs, "an output for another stage was not sent"

    def _compute(self, action: Action) -> None:
        kind, chunk, microbatch = action.kind, action.chunk, action.microbatch
        if kind is ActionKind.FORWARD:
            hidden = None
            if self.schedule.prev_stage(self.group.rank, chunk) is not None:
                hidden = self._received(ActionKind.RECEIVE_FORWARD, action)
            output = self.worker.forward(chunk, microbatch, hidden)
            if self.schedule.next_stage(self.group.rank, chunk) is not None:
                self._outputs[ActionKind.SEND_FORWARD, chunk, microbatch] = output
        elif kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
            grad = None
            if self.schedule.next_stage(self.group.rank, chunk) is not None:
                grad = self._received(ActionKind.RECEIVE_BACKWARD, action)
            split = kind is ActionKind.INPUT_GRADIENT
            input_grad = self.worker.backward(chunk, microbatch, grad, split=split)
            if self.schedule.prev_stage(self.group.rank, chunk) is not None:
                assert input_grad is not None
                self._outputs[ActionKind.SEND_BACKWARD, chunk, microbatch] = input_grad
        elif kind is ActionKind.WEIGHT_GRADIENT:
            self.worker.weight_gradient(chunk, microbatch)
        elif kind is ActionKind.GATHER:
            self.worker.gather(chunk, microbatch)
        else:
            assert kind is ActionKind.REDUCE, kind
            self.worker.reduce(chunk, microbatch)

    def _received(self, kind: ActionKind, action: Action) -> torch.Tensor:
        # The compute stream waits for the receive; the host goes on.
        return self._receiving.pop((kind, action.chunk, action.microbatch)).wait()

    def _exchange(self, actions: Sequence[Action], group: Group) -> None:
        """Start a batch of transfers, if there are any. Both peers list them in the same order."""
        messages = []
        for action in actions:
            key = (action.kind, action.chunk, action.microbatch)
            if action.kind in SENDS:
                # Popped: the pending send is now the only owner of the output.
                tensor = self._outputs.pop(key)
            else:
                tensor = self.worker.recv_buffer(action.microbatch)
            messages.append(P2PMessage(tensor, self._peer(action), action.kind in SENDS))
        for action, pending in zip(actions, exchange_async(messages, group), strict=True):
            if action.kind in SENDS:
                self._release_sent(self._sending[action.kind], pending)
            else:
                self._receiving[action.kind, action.chunk, action.microbatch] = pending

    def _peer(self, action: Action) -> int:
        """Return the peer rank of a transfer."""
        peer = self.schedule.matching_transfer(self.group.rank, action)
        assert peer is not None
        return peer[0]

    def _release_sent(self, sending: deque[Pending], pending: Pending) -> None:
        """Keep the tensor of a send until it is complete, and release completed ones."""
        sending.append(pending)
        if runs_ahead(pending.output.device):
            # A wait here would make the compute stream wait for the peer. The host polls instead.
            # It may run ahead of its GPU by a whole step, and without a bound it would keep the
            # tensors of all sends of the step alive.
            # In order: transfers of a communicator complete in the order of their start.
            while sending and sending[0].is_completed():
                sending.popleft()
            while len(sending) > self.schedule.stages + 1:
                sending.popleft().wait()
            return
        # Gloo reports completion by a blocking wait() only. The wait is short, because the peer
        # posts its receives before the compute that runs meanwhile.
        while len(sending) > MAX_SENDS_IN_FLIGHT:
            sending.popleft().wait()


def batches(actions: Sequence[Action]) -> Iterator[list[Action]]:
    """Yield adjacent transfers as one batch, and every other action as a batch of its own."""
    for are_transfers, group in groupby(actions, key=lambda a: a.kind in TRANSFERS):
        if are_transfers:
            yield list(group)
        else:
            yield from ([action] for action in group)
