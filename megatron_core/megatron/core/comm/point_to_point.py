# SPDX-License-Identifier: Apache-2.0
"""Batches of sends and receives between two ranks of a group.

Messages of a batch start together: on NCCL as one grouped launch, so that no message waits for
another; on other backends one by one. Messages between two ranks arrive in the order in which they
were sent and have no other identity, so both ranks must list them in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.core.comm.collectives import CollectiveWork, Pending, Transfer, observe, poison_
from megatron.core.process_groups import Group

_TAG = 1  # `collectives` sends under tag 0


@dataclass(frozen=True, eq=False, slots=True)
class P2PMessage:
    """One tensor to send or receive.

    Args:
        tensor: contiguous, the source of a send or the destination of a receive.
        rank: the peer's rank in the group.
        sends: whether this rank sends.
    """

    tensor: torch.Tensor
    rank: int
    sends: bool


def exchange_async(messages: Sequence[P2PMessage], group: Group) -> list[Pending]:
    """Start a batch of messages and return their handles, in the same order.

    Before `wait()`, a sent tensor must not be modified and a received tensor not be accessed. A
    send may complete only after its message was received.

    Raises:
        ValueError: a message to this rank itself.
    """
    for message in messages:
        if message.rank == group.rank:
            raise ValueError(f"a message over {group.name} from rank {group.rank} to itself")
    device = messages[0].tensor.device if messages else torch.device("cpu")
    if device.type == "cuda" and not group.links:
        return _start_batched(messages, group)
    return [_start_single(message, group) for message in messages]


def _start_batched(messages: Sequence[P2PMessage], group: Group) -> list[Pending]:
    """Start messages as one grouped launch."""
    operations = [
        dist.P2POp(
            dist.isend if message.sends else dist.irecv,
            message.tensor,
            group.ranks[message.rank],
            group=group.handle,
        )
        for message in messages
    ]
    # Observers see every message before the launch, in the order of the list.
    waits = [_observe(message, group) for message in messages]
    # One ncclGroup: a rank that both sends and receives cannot deadlock on the order.
    works = dist.batch_isend_irecv(operations)
    if len(works) != len(messages):  # NCCL returns one work for the whole launch
        works = [works[0]] * len(messages)
    return [
        Pending(message.tensor, work, message.tensor, wait)
        for message, work, wait in zip(messages, works, waits, strict=True)
    ]


def _start_single(message: P2PMessage, group: Group) -> Pending:
    """Start one message; over a link the destination is poisoned until the wait."""
    tensor, handle = message.tensor, group.handle
    assert handle is not None
    waits = _observe(message, group)
    if message.sends:
        transfer = Transfer(
            "send",
            group,
            tensor,
            tensor,
            lambda: handle.send([tensor], message.rank, _TAG),
            prompt=True,
        )
        return Pending(tensor, transfer.launch(), tensor, waits)
    # Simulated links deliver late: a read before the wait must see NaN, not the arrived data.
    receive_buffer = poison_and_replace(tensor) if group.links else tensor

    def start() -> CollectiveWork:
        return handle.recv([receive_buffer], message.rank, _TAG)

    pending = Pending(
        receive_buffer,
        Transfer("receive", group, None, receive_buffer, start, prompt=True).launch(),
        None,
        waits,
    )
    return pending if receive_buffer is tensor else pending.then(tensor.copy_)


def poison_and_replace(tensor: torch.Tensor) -> torch.Tensor:
    """Poison `tensor` and return an uninitialised tensor like it, to receive the message."""
    # The caller must not see the message in `tensor` before the wait copies it there.
    poison_(tensor)
    return torch.empty_like(tensor)


def _observe(message: P2PMessage, group: Group):
    peer = group.ranks[message.rank]
    if message.sends:
        return observe("send", group, message.tensor, how=f"to {peer}")
    return observe("receive", group, message.tensor, how=f"from {peer}")
