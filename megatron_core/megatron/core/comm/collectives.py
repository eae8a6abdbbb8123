# SPDX-License-Identifier: Apache-2.0
"""Collectives over one `Group` on dimension 0, and sends and receives between two of its ranks.

The input of a collective changes only if it is passed as output.

On a group of one rank they are the identity. Only SUM and MAX are offered: AVG on gloo is silently
SUM before torch 2.10, so the caller scales before the sum. Method names of the process group that
differ between versions of torch are chosen only in `_gather_method` and `_scatter_method`.

Between CPUs, gather and scatter are direct sends and receives between all pairs of ranks
(`DirectAllGather`, `DirectReduceScatter`). Gloo's own gather copies through a buffer and its
scatter is a ring; a direct exchange moves the same bytes in about half the time on one machine.
Sums are taken in rank order. Gloo's all-reduce is as fast as both together, so it is used.
Several exchanges may be in flight on one communicator: messages between two ranks arrive in the
order in which they were sent, and all ranks start exchanges in one order.

A batch of sends and receives (`exchange_async`) starts together: on NCCL as one grouped launch, so
that no message waits for another; on other backends one by one. Messages between two ranks have no
identity but their order, so both ranks must list them in the same order.

Tests poison buffers, so that memory read before it is written shows in the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import Work

from megatron.core.device import current_stream, record_use
from megatron.core.process_groups import Group, ProcessGroupCollection


@torch.no_grad()
def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with NaN, or with its dtype's largest value if there is no NaN; return it."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.fill_(float("nan"))
    if tensor.dtype is torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(torch.iinfo(tensor.dtype).max)


class CollectiveWork(Protocol):
    """Handle of a started transfer; `torch.distributed.Work` is one."""

    def wait(self) -> object:
        """Block until the transfer is complete (on a GPU: make the current stream wait for it)."""


@dataclass(slots=True)
class Transfer:
    """A collective that is about to start.

    Args:
        kind: kind of the collective, as in its `CollectiveRecord`.
        source: the input; None if the output is also the input, as in an all-reduce.
        output: is overwritten.
        start: starts the collective on the contents that `source` has at the call.
        keeps_source: whether the input's values survive where input and output overlap (an
            in-place gather).
        prompt: whether a link must start it at once, because the peer may wait for it before this
            rank does.
    """

    kind: str
    group: Group
    source: torch.Tensor | None
    output: torch.Tensor
    start: Callable[[], CollectiveWork]
    keeps_source: bool = False
    prompt: bool = False

    def launch(self) -> CollectiveWork:
        """Start the collective, on the last of the group's `links` if there are any."""
        links = self.group.links
        return links[-1](self) if links else self.start()


@dataclass
class Pending:
    """A started collective; `wait()` returns its output and may be called again.

    `source` keeps the input alive until the transfer is complete, because the transfer may still
    read it. The contexts `waits` are entered while the caller waits. `finish` is applied once to
    the output after the transfer, and its return value replaces the output.
    """

    output: torch.Tensor
    work: CollectiveWork | None = None
    source: torch.Tensor | None = None
    waits: tuple[AbstractContextManager[object], ...] = ()
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None

    def wait(self) -> torch.Tensor:
        """Block until the output is valid (on a GPU: until the current stream may read it)."""
        if self.work is not None:
            if (
                len(self.waits) == 1
            ):  # the usual number; an ExitStack would cost more time than the wait
                with self.waits[0]:
                    self.work.wait()
            elif self.waits:
                with ExitStack() as stack:
                    for context in self.waits:
                        stack.enter_context(context)
                    self.work.wait()
            else:
                self.work.wait()
            # The transfer no longer reads the input: release its memory.
            self.work = self.source = None
        if self.finish is not None:
            # Cleared before the call: `finish` runs once, also if it waits for this object again.
            finish, self.finish = self.finish, None
            self.output = finish(self.output)
        return self.output

    def is_completed(self) -> bool:
        """Return whether the transfer is complete; on a CPU only `wait()` completes it."""
        return self.work is None or (isinstance(self.work, Work) and self.work.is_completed())

    def then(self, finish: Callable[[torch.Tensor], torch.Tensor]) -> Pending:
        """Apply `finish` to the output in `wait()`, after earlier functions; return this object."""
        previous = self.finish
        self.finish = finish if previous is None else lambda output: finish(previous(output))
        return self


#: Smaller tensors are as fast with gloo's ring or tree; more ranks mean too many messages.
MIN_DIRECT_BYTES, MAX_DIRECT_RANKS = 1 << 20, 16
# Different tags, so that the sends of a collective match no receive of a single message.
_TAG, _MESSAGE_TAG = 0, 1


def uses_direct_exchange(full_tensor: torch.Tensor, group: Group) -> bool:
    """Return whether a collective whose full tensor is `full_tensor` uses direct sends."""
    # All ranks must choose alike, so only the shape, the dtype and the group decide.
    return (
        full_tensor.device.type == "cpu"
        and group.size <= MAX_DIRECT_RANKS
        and full_tensor.numel() * full_tensor.element_size() >= MIN_DIRECT_BYTES
    )


@dataclass(slots=True)
class DirectAllGather:
    """A started all-gather: every rank's shard arrives in its slice of the output."""

    works: list[dist.Work]

    @staticmethod
    def start(
        handle: dist.ProcessGroup, group: Group, *, shards: Sequence[torch.Tensor]
    ) -> DirectAllGather:
        """Send this rank's shard, one of `shards` by rank, and receive all other shards."""
        works = []
        for step in range(1, group.size):
            next_rank, previous_rank = (
                (group.rank + step) % group.size,
                (group.rank - step) % group.size,
            )
            works += _send(handle, shards[group.rank], next_rank)
            works += _receive(handle, shards[previous_rank], previous_rank)
        return DirectAllGather(works)

    def wait(self) -> None:
        """Block until all shards have arrived and this rank's shard was sent."""
        for work in self.works:
            work.wait()


@dataclass(slots=True)
class DirectReduceScatter:
    """A started reduce-scatter: addends of this rank's shard arrive and are summed in `out`.

    Args:
        addends: by rank; this rank's own addend may overlap `out`, in place.
    """

    works: list[dist.Work]
    addends: list[torch.Tensor]
    rank: int
    out: torch.Tensor

    @staticmethod
    def start(
        handle: dist.ProcessGroup,
        group: Group,
        *,
        shards: Sequence[torch.Tensor],
        out: torch.Tensor,
    ) -> DirectReduceScatter:
        """Send every rank its shard of this rank's tensor, and receive the addends of `out`."""
        local_shard = shards[group.rank]
        # One receive buffer per peer: the sum needs rank order, not the order of arrival.
        addends = [
            local_shard if r == group.rank else torch.empty_like(local_shard)
            for r in range(group.size)
        ]
        works = []
        for step in range(1, group.size):
            next_rank, previous_rank = (
                (group.rank + step) % group.size,
                (group.rank - step) % group.size,
            )
            works += _send(handle, shards[next_rank], next_rank)
            works += _receive(handle, addends[previous_rank], previous_rank)
        return DirectReduceScatter(works, addends, group.rank, out)

    def wait(self) -> None:
        """Block until the sum is complete and all shards were sent."""
        for work in self.works:
            work.wait()
        # `out` may overlap this rank's addend, so it is not written before that addend is read.
        # Addends are summed in rank order, so that every rank rounds in the same way.
        total, last_index = self.addends[0], len(self.addends) - 1
        for rank in range(1, last_index + 1):
            target = self.out if rank >= self.rank else self.addends[0]
            total = torch.add(total, self.addends[rank], out=target)


def _send(handle: dist.ProcessGroup, shard: torch.Tensor, rank: int) -> list[dist.Work]:
    return [handle.send([shard], rank, _TAG)] if shard.numel() else []


def _receive(handle: dist.ProcessGroup, shard: torch.Tensor, rank: int) -> list[dist.Work]:
    return [handle.recv([shard], rank, _TAG)] if shard.numel() else []


_OPERATIONS: Mapping[str, Any] = MappingProxyType(
    {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
)


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective that ran: kind, group name and size, bytes of its full tensor.

    The full tensor of an all-to-all is the sent tensor, including this rank's own rows. The further
    fields do not take part in comparisons: the group's global ranks, shape and dtype of this rank's
    full tensor, and the reduction (`sum` or `max`) or other detail.
    """

    kind: str
    group: str
    size: int
    bytes: int
    ranks: tuple[int, ...] = field(default=(), compare=False)
    shape: tuple[int, ...] = field(default=(), compare=False)
    dtype: str = field(default="", compare=False)
    how: str = field(default="", compare=False)


@contextmanager
def trace(groups: ProcessGroupCollection) -> Iterator[list[CollectiveRecord]]:
    """Record every collective over any group of `groups` while the context is open.

    Groups of one rank run no collectives, so they leave no record.
    """
    records: list[CollectiveRecord] = []
    observer: Callable[[Any], Any] = records.append
    groups.observers.append(observer)
    try:
        yield records
    finally:
        groups.observers.remove(observer)


def all_reduce(
    x: torch.Tensor, group: Group, *, op: str = "sum", out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum (or max) of `x` over the group.

    Args:
        x: any shape, contiguous or not.
        op: "sum" or "max".
        out: destination; pass `x` itself to reduce in place. A new tensor if None.
    """
    return all_reduce_async(x, group, op=op, out=out).wait()


def all_reduce_async(
    x: torch.Tensor, group: Group, *, op: str = "sum", out: torch.Tensor | None = None
) -> Pending:
    """Start `all_reduce`; the output must not be read or written before `wait()`."""
    if group.size == 1:
        if out is None or out is x:
            return Pending(x)
        return Pending(out.copy_(x))
    # The process group reduces in place, so the input is copied unless it is the output.
    if out is None:
        out = x.clone(memory_format=torch.contiguous_format)
    elif out is not x:
        out.copy_(x)
    options = dist.AllreduceOptions()
    options.reduceOp = _OPERATIONS[op]
    transfer = Transfer(
        "all_reduce", group, None, out, lambda: _handle(group).allreduce([out], options)
    )
    return _launch(transfer, out, how=op)


def all_gather(x: torch.Tensor, group: Group, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Concatenate `x` [n, ...] of every rank along dimension 0: [n·size, ...].

    Args:
        out: destination; `x` may be this rank's slice of it.
    """
    return all_gather_async(x, group, out=out).wait()


def all_gather_async(x: torch.Tensor, group: Group, *, out: torch.Tensor | None = None) -> Pending:
    """Start `all_gather`; the output must not be read before `wait()`."""
    if group.size == 1:
        if out is None or out.data_ptr() == x.data_ptr():
            return Pending(x if out is None else out)
        return Pending(out.copy_(x))
    x = x.contiguous()
    if out is None:
        out = x.new_empty((x.shape[0] * group.size, *x.shape[1:]))
    handle = _handle(group)

    def start() -> CollectiveWork:
        if not uses_direct_exchange(out, group):
            return _gather_method(handle)(out, x)
        # The input is copied at the launch, which a link may delay, and not before it.
        shards = list(out.view(group.size, -1).unbind(0))
        local_shard = shards[group.rank]
        if local_shard.data_ptr() != x.data_ptr():
            local_shard.copy_(x.view(-1))
        return DirectAllGather.start(handle, group, shards=shards)

    # A link that starts late must not poison the input, which may be a slice of the output.
    transfer = Transfer("all_gather", group, x, out, start, keeps_source=True)
    return _launch(transfer, out)


def reduce_scatter(
    x: torch.Tensor, group: Group, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum `x` [n·size, ...] over the group and return this rank's n rows of it.

    Raises:
        ValueError: dimension 0 does not divide by the size of the group.
    """
    return reduce_scatter_async(x, group, out=out).wait()


def reduce_scatter_async(
    x: torch.Tensor, group: Group, *, out: torch.Tensor | None = None
) -> Pending:
    """Start `reduce_scatter`; input and output must not be accessed before `wait()`."""
    if group.size == 1:
        if out is None or out.data_ptr() == x.data_ptr():
            return Pending(x if out is None else out)
        return Pending(out.copy_(x))
    _check_rows("reduce_scatter", x.shape[0], group)
    x = x.contiguous()
    if out is None:
        out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    handle = _handle(group)

    def start() -> CollectiveWork:
        if not uses_direct_exchange(x, group):
            return _scatter_method(handle)(out, x)
        shards = list(x.view(group.size, -1).unbind(0))
        return DirectReduceScatter.start(handle, group, shards=shards, out=out.view(-1))

    return _launch(Transfer("reduce_scatter", group, x, out, start), x, how="sum")


def reduce_scatter_fp32_async(
    x: torch.Tensor,
    group: Group,
    *,
    out: torch.Tensor | None = None,
    receive_buffer: torch.Tensor | None = None,
) -> Pending:
    """Start a reduce-scatter that sends `x` in its own dtype and sums in fp32, in rank order.

    The addends of a rank's rows reach it by all-to-all, so bf16 is rounded only at the inputs and
    not at every partial sum.

    Args:
        x: [n·size, ...]; must not be modified before `wait()`.
        out: fp32 [n, ...], destination; must not overlap `x`.
        receive_buffer: like `x`, receives the addends; free after `wait()`.

    Raises:
        ValueError: dimension 0 does not divide by the size of the group.
    """
    _check_rows("reduce_scatter", x.shape[0], group)
    rows = x.shape[0] // group.size
    if out is None:
        out = x.new_empty((rows, *x.shape[1:]), dtype=torch.float32)
    if group.size == 1:
        return Pending(out.copy_(x))
    # Also keeps a contiguous copy alive in `Pending.source` until the transfer is complete.
    x = x.contiguous()
    receive_buffer = torch.empty_like(x) if receive_buffer is None else receive_buffer
    alltoall = _handle(group).alltoall_base
    transfer = Transfer(
        "all_to_all",
        group,
        x,
        out,
        lambda: _RankSum(
            alltoall(receive_buffer, x, [], [], dist.AllToAllOptions()), receive_buffer, out
        ),
    )
    return _launch(transfer, x)


def all_to_all(
    x: torch.Tensor,
    group: Group,
    *,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Send rows of `x` [n, ...] to every rank and return the rows received from all ranks.

    Args:
        x: rows for rank 0 of the group, then rows for rank 1, and so on.
        send_counts: rows for each rank; equal counts if None.
        receive_counts: rows from each rank; equal counts if None. Rank i's send count for j must
            equal rank j's receive count for i.
        out: destination; must not overlap `x`.

    Returns:
        [sum(receive_counts), ...], by source rank.

    Raises:
        ValueError: the rows do not divide or add up, or only one of the counts is None.
    """
    return all_to_all_async(
        x, group, send_counts=send_counts, receive_counts=receive_counts, out=out
    ).wait()


def all_to_all_async(
    x: torch.Tensor,
    group: Group,
    *,
    send_counts: Sequence[int] | None = None,
    receive_counts: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
) -> Pending:
    """Start `all_to_all`; do not modify the input or read the output before `wait()`."""
    sends, receives = _splits(x.shape[0], group, send_counts, receive_counts)
    if group.size == 1:
        return Pending(x if out is None else out.copy_(x))
    x = x.contiguous()
    if out is None:
        out = x.new_empty((sum(receives) if receives else x.shape[0], *x.shape[1:]))
    alltoall = _handle(group).alltoall_base
    transfer = Transfer(
        "all_to_all",
        group,
        x,
        out,
        lambda: alltoall(out, x, receives, sends, dist.AllToAllOptions()),
    )
    return _launch(transfer, x)


@dataclass
class _RankSum:
    """A started all-to-all whose received addends are then summed into `out`, in its dtype."""

    work: CollectiveWork
    receive_buffer: torch.Tensor
    out: torch.Tensor

    def wait(self) -> None:
        # Orders the sum on the current stream after the exchange on the communicator's stream.
        self.work.wait()
        addends = self.receive_buffer.view(-1, *self.out.shape)  # [size, n, ...]
        if addends.is_cuda:  # reads each addend once and writes the sum once
            torch.sum(addends, dim=0, dtype=self.out.dtype, out=self.out)
        else:  # torch.sum would first convert all addends on a CPU: 4 to 13 times the time
            total, *remaining = addends
            self.out.copy_(total)
            for addend in remaining:
                self.out.add_(addend)
        # The caller may free the buffer at once: its memory must not be reused before the sum ran.
        record_use(self.receive_buffer, current_stream(self.receive_buffer.device))


def _handle(group: Group) -> dist.ProcessGroup:
    assert group.handle is not None
    return group.handle


def _check_rows(kind: str, rows: int, group: Group) -> None:
    """Raise ValueError unless the rows divide evenly over the ranks."""
    if rows % group.size:
        raise ValueError(
            f"{kind} over {group.name}: {rows} rows do not divide by {group.size} ranks"
        )


def _splits(
    rows: int, group: Group, send: Sequence[int] | None, receive: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """Return send and receive counts by rank; empty lists for equal counts."""
    if send is None and receive is None:
        _check_rows("all_to_all", rows, group)
        return [], []
    if send is None or receive is None:
        raise ValueError(f"all_to_all over {group.name}: pass both counts or neither")
    if not len(send) == len(receive) == group.size or sum(send) != rows:
        raise ValueError(
            f"all_to_all over {group.name} of {group.size} ranks: {rows} rows, but counts "
            f"{list(send)} to send and {list(receive)} to receive: give one count per rank; "
            "the send counts must sum to the number of rows"
        )
    return list(send), list(receive)


def _launch(transfer: Transfer, full_tensor: torch.Tensor, *, how: str = "") -> Pending:
    """Call the observers of a transfer, then start it.

    Args:
        full_tensor: the larger one of input and output, whose bytes are recorded.
    """
    # Observers run before the launch, so that records are in launch order on every rank.
    waits = observe(transfer.kind, transfer.group, full_tensor, how=how)
    return Pending(transfer.output, transfer.launch(), transfer.source, waits)


def observe(
    kind: str, group: Group, full_tensor: torch.Tensor, *, how: str = ""
) -> tuple[AbstractContextManager[object], ...]:
    """Call every observer of a transfer that is about to start.

    Returns:
        The observers' contexts, to be entered while the caller waits for the transfer.
    """
    # The usual case builds no record: a training step starts hundreds of transfers.
    if not group.observers:
        return ()
    record = CollectiveRecord(
        kind,
        group.name,
        group.size,
        full_tensor.numel() * full_tensor.element_size(),
        group.ranks,
        tuple(full_tensor.shape),
        str(full_tensor.dtype).removeprefix("torch."),
        how,
    )
    return tuple(
        context for observer in group.observers if (context := observer(record)) is not None
    )


# The functions of torch.distributed take 33-86 us per call, the process group's methods 27 us.
def _gather_method(handle: dist.ProcessGroup):
    return handle._allgather_base


def _scatter_method(handle: dist.ProcessGroup) -> Callable[..., CollectiveWork]:
    return handle._reduce_scatter_base


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
            lambda: handle.send([tensor], message.rank, _MESSAGE_TAG),
            prompt=True,
        )
        return Pending(tensor, transfer.launch(), tensor, waits)
    # Simulated links deliver late: a read before the wait must see NaN, not the arrived data.
    receive_buffer = poison_and_replace(tensor) if group.links else tensor

    def start() -> CollectiveWork:
        return handle.recv([receive_buffer], message.rank, _MESSAGE_TAG)

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
