# SPDX-License-Identifier: Apache-2.0
"""Sends and receives between two ranks of a group, several at a time.

Messages of one batch start together: on NCCL as one grouped launch, so that none of them waits for
another; elsewhere one by one. Between two ranks messages arrive in the order in which they were
sent, so both must list them in the same order; nothing else tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.core.comm.collectives import Pending, Transfer, Underway, observe, poison_
from megatron.core.process_groups import Group

_TAG = 1  # `collectives` sends under tag 0


@dataclass(frozen=True, eq=False, slots=True)
class Message:
    """One tensor on its way.

    Args:
        tensor: contiguous; what is sent, or where what is received goes.
        rank: the other rank, local to the group.
        sends: this rank sends it.
    """

    tensor: torch.Tensor
    rank: int
    sends: bool


def exchange_async(messages: Sequence[Message], group: Group) -> list[Pending]:
    """Start a batch of messages; return what waits for each of them, in their order.

    What is sent must be left alone, what is received not be touched, before `wait()`. A send ends
    when its tensor may be used again, which may be only once it is received.

    Raises:
        ValueError: a message to this rank itself.
    """
    for message in messages:
        if message.rank == group.rank:
            raise ValueError(f"a message over {group.name} to its own rank {group.rank}")
    device = messages[0].tensor.device if messages else torch.device("cpu")
    if device.type == "cuda" and not group.links:
        return _together(messages, group)
    return [_alone(message, group) for message in messages]


def _together(messages: Sequence[Message], group: Group) -> list[Pending]:
    """Start messages as one launch."""
    operations = [
        dist.P2POp(
            dist.isend if message.sends else dist.irecv,
            message.tensor,
            group.ranks[message.rank],
            group=group.handle,
        )
        for message in messages
    ]
    waits = [_observed(message, group) for message in messages]
    works = dist.batch_isend_irecv(operations)
    if len(works) != len(messages):  # one for the whole launch
        works = [works[0]] * len(messages)
    return [
        Pending(message.tensor, work, message.tensor, wait)
        for message, work, wait in zip(messages, works, waits, strict=True)
    ]


def _alone(message: Message, group: Group) -> Pending:
    """Start one message; over a link nothing is to be read before it is waited for."""
    tensor, handle = message.tensor, group.handle
    assert handle is not None
    waits = _observed(message, group)
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
    landing = poisoned(tensor) if group.links else tensor

    def start() -> Underway:
        return handle.recv([landing], message.rank, _TAG)

    pending = Pending(
        landing,
        Transfer("receive", group, None, landing, start, prompt=True).launch(),
        None,
        waits,
    )
    return pending if landing is tensor else pending.then(tensor.copy_)


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """Fill `tensor` with NaN and return another like it, where a message can land meanwhile."""
    poison_(tensor)
    return torch.empty_like(tensor)


def _observed(message: Message, group: Group):
    peer = group.ranks[message.rank]
    if message.sends:
        return observe("send", group, message.tensor, how=f"to {peer}")
    return observe("receive", group, message.tensor, how=f"from {peer}")
