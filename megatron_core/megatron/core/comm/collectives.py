# SPDX-License-Identifier: Apache-2.0
"""Collectives over one `Group` on dimension 0; the input changes only if it is passed as output.

The identity on a group of one rank. Only SUM and MAX: AVG on gloo is silently SUM before torch
2.10, so all scaling is done by the caller, before the sum. Method names of the process group that
differ between versions of torch are chosen in `_gather_method` and `_scatter_method`, nowhere else.

Between CPUs, gather and scatter are sends and receives, every rank to every rank at once (`Gather`,
`Scatter`). Gloo's own gather copies through a buffer and its scatter is a ring; a direct exchange
moves the same bytes in about half the time on one machine. Sums are taken in the order of ranks.
Gloo's all-reduce is as fast as both together, so it is used. Several exchanges may be in flight on
one communicator: messages between two ranks arrive in the order in which they were sent, and all
ranks start exchanges in one order.

Under test, buffers are poisoned, so that memory read before it is written shows in the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import Work

from megatron.core.device import current_stream, record_use
from megatron.core.process_groups import Group, ProcessGroupCollection


@torch.no_grad()
def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with NaN, or with the largest value of a dtype that has none; return it."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.fill_(float("nan"))
    if tensor.dtype is torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(torch.iinfo(tensor.dtype).max)


class Underway(Protocol):
    """What started a transfer; `torch.distributed.Work` is one."""

    def wait(self) -> object:
        """Block until the transfer is done (on a GPU: make the current stream wait for it)."""


@dataclass(slots=True)
class Transfer:
    """A collective that is about to start.

    Args:
        kind: of its record.
        source: what it reads; None if that is the output, as in an all-reduce.
        output: what it overwrites.
        start: starts the real collective on what `source` holds at that time.
        keeps_source: where input and output overlap, the input's values stay (a gather in place).
        prompt: it cannot be put off: its peer may wait for it before this rank does.
    """

    kind: str
    group: Group
    source: torch.Tensor | None
    output: torch.Tensor
    start: Callable[[], Underway]
    keeps_source: bool = False
    prompt: bool = False

    def launch(self) -> Underway:
        """Start it: on the last of the group's `links` if there is any, else on its handle."""
        links = self.group.links
        return links[-1](self) if links else self.start()


@dataclass
class Pending:
    """A collective under way; `wait()` returns its output and may be called again.

    `source` keeps the input alive and untouched until the transfer is done. Each of `waits` is
    entered while the caller waits for that. `finish`, if any, is applied to the output once, after
    the transfer, and what it returns is the output from then on.
    """

    output: torch.Tensor
    work: Underway | None = None
    source: torch.Tensor | None = None
    waits: tuple[AbstractContextManager[object], ...] = ()
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None

    def wait(self) -> torch.Tensor:
        """Block until the output is valid (on a GPU: until the current stream may read it)."""
        if self.work is not None:
            if len(self.waits) == 1:  # the usual number; a stack costs more than all the rest
                with self.waits[0]:
                    self.work.wait()
            elif self.waits:
                with ExitStack() as stack:
                    for context in self.waits:
                        stack.enter_context(context)
                    self.work.wait()
            else:
                self.work.wait()
            self.work = self.source = None
        if self.finish is not None:
            finish, self.finish = self.finish, None
            self.output = finish(self.output)
        return self.output

    def is_done(self) -> bool:
        """Return whether the transfer is over, without waiting; CPU transfers know in `wait()`."""
        return self.work is None or (isinstance(self.work, Work) and self.work.is_completed())

    def then(self, finish: Callable[[torch.Tensor], torch.Tensor]) -> Pending:
        """Apply `finish` to the output, after what was asked for earlier, when it is waited for.

        Returns this object, whose `wait()` returns what `finish` does.
        """
        before = self.finish
        self.finish = finish if before is None else lambda output: finish(before(output))
        return self


#: Below this gloo's ring or tree is as fast; above this many ranks a rank has too many messages.
LEAST_BYTES, MOST_RANKS = 1 << 20, 16
_TAG = 0


def goes_directly(full_tensor: torch.Tensor, group: Group) -> bool:
    """Whether a collective whose wide side is `full_tensor` is better exchanged directly."""
    return (
        full_tensor.device.type == "cpu"
        and group.size <= MOST_RANKS
        and full_tensor.numel() * full_tensor.element_size() >= LEAST_BYTES
    )


@dataclass(slots=True)
class Gather:
    """An all-gather under way: what every rank holds arrives in its part of the output."""

    works: list[dist.Work]

    @staticmethod
    def start(handle: dist.ProcessGroup, group: Group, *, parts: Sequence[torch.Tensor]) -> Gather:
        """Send this rank's part, one of `parts` by rank, and receive the others."""
        works = []
        for step in range(1, group.size):
            after, before = (group.rank + step) % group.size, (group.rank - step) % group.size
            works += _send(handle, parts[group.rank], after)
            works += _receive(handle, parts[before], before)
        return Gather(works)

    def wait(self) -> None:
        """Block until all parts are here and this rank's has left."""
        for work in self.works:
            work.wait()


@dataclass(slots=True)
class Scatter:
    """A reduce-scatter under way: addends of this rank's part arrive, and are summed in `out`.

    Args:
        addends: by rank; this rank's own may overlap `out`, in place.
    """

    works: list[dist.Work]
    addends: list[torch.Tensor]
    rank: int
    out: torch.Tensor

    @staticmethod
    def start(
        handle: dist.ProcessGroup, group: Group, *, parts: Sequence[torch.Tensor], out: torch.Tensor
    ) -> Scatter:
        """Send every rank its part of this rank's tensor, and receive addends of `out`."""
        local_shard = parts[group.rank]
        addends = [
            local_shard if r == group.rank else torch.empty_like(local_shard)
            for r in range(group.size)
        ]
        works = []
        for step in range(1, group.size):
            after, before = (group.rank + step) % group.size, (group.rank - step) % group.size
            works += _send(handle, parts[after], after)
            works += _receive(handle, addends[before], before)
        return Scatter(works, addends, group.rank, out)

    def wait(self) -> None:
        """Block until the sum is complete and everything sent has left."""
        for work in self.works:
            work.wait()
        # `out` may be this rank's addend: nothing is written there before that one is added.
        # Addends are summed in the order of ranks, so that all ranks round alike.
        total, last_index = self.addends[0], len(self.addends) - 1
        for rank in range(1, last_index + 1):
            target = self.out if rank >= self.rank else self.addends[0]
            total = torch.add(total, self.addends[rank], out=target)


def _send(handle: dist.ProcessGroup, shard: torch.Tensor, rank: int) -> list[dist.Work]:
    return [handle.send([shard], rank, _TAG)] if shard.numel() else []


def _receive(handle: dist.ProcessGroup, shard: torch.Tensor, rank: int) -> list[dist.Work]:
    return [handle.recv([shard], rank, _TAG)] if shard.numel() else []


_OPERATIONS = MappingProxyType({"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX})


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective that ran: its kind, its group's name and size, the bytes of its wide side.

    The wide side of an all-to-all is what this rank sends, its own part included. What follows
    tells equal ones apart and takes no part in comparisons: the group's global ranks, this rank's
    tensor on the wide side, and what is done with it (`sum` or `max`).
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

    Groups of one rank run none, so they leave no record.
    """
    records: list[CollectiveRecord] = []
    observer = records.append
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
        out: where the result goes; pass `x` itself to reduce in place. A new tensor if None.
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
        out: where the result goes; `x` may be this rank's slice of it.
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

    def start() -> Underway:
        if not goes_directly(out, group):
            return _gather_method(handle)(out, x)
        shards = list(out.view(group.size, -1).unbind(0))
        local_shard = shards[group.rank]
        if local_shard.data_ptr() != x.data_ptr():
            local_shard.copy_(x.view(-1))
        return Gather.start(handle, group, parts=shards)

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
    """Start `reduce_scatter`; input and output must be left alone before `wait()`."""
    if group.size == 1:
        if out is None or out.data_ptr() == x.data_ptr():
            return Pending(x if out is None else out)
        return Pending(out.copy_(x))
    _check_rows("reduce_scatter", x.shape[0], group)
    x = x.contiguous()
    if out is None:
        out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    handle = _handle(group)

    def start() -> Underway:
        if not goes_directly(x, group):
            return _scatter_method(handle)(out, x)
        shards = list(x.view(group.size, -1).unbind(0))
        return Scatter.start(handle, group, parts=shards, out=out.view(-1))

    return _launch(Transfer("reduce_scatter", group, x, out, start), x, how="sum")


def reduce_scatter_wide_async(
    x: torch.Tensor,
    group: Group,
    *,
    out: torch.Tensor | None = None,
    parts: torch.Tensor | None = None,
) -> Pending:
    """Start a reduce-scatter that sends `x` as it is and sums in fp32, in the order of ranks.

    The addends of one rank's rows come to it by all-to-all, so a bf16 sum is rounded once, at the
    inputs, and not at every rank.

    Args:
        x: [n·size, ...]; left alone before `wait()`.
        out: fp32 [n, ...], where the result goes; must not overlap `x`.
        parts: like `x`: where the addends arrive, free after `wait()`.

    Raises:
        ValueError: dimension 0 does not divide by the size of the group.
    """
    _check_rows("reduce_scatter", x.shape[0], group)
    rows = x.shape[0] // group.size
    if out is None:
        out = x.new_empty((rows, *x.shape[1:]), dtype=torch.float32)
    if group.size == 1:
        return Pending(out.copy_(x))
    x = x.contiguous()
    parts = torch.empty_like(x) if parts is None else parts
    exchange = _handle(group).alltoall_base
    transfer = Transfer(
        "all_to_all",
        group,
        x,
        out,
        lambda: _Sum(exchange(parts, x, [], [], dist.AllToAllOptions()), parts, out),
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
    """Send rows of `x` [n, ...] to every rank and return the rows that they sent here.

    Args:
        x: the rows for rank 0 of the group, then those for rank 1, and so on.
        send_counts: how many rows go to each rank; equal parts if None.
        receive_counts: how many rows come from each rank; equal parts if None. What rank i sends to
            j must be what j receives from i.
        out: where the result goes; must not overlap `x`.

    Returns:
        [sum(receive_counts), ...], by rank of origin.

    Raises:
        ValueError: the rows do not divide or add up, or only one of the counts is given.
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
    """Start `all_to_all`; the input must be left alone and the output not read before `wait()`."""
    sends, receives = _splits(x.shape[0], group, send_counts, receive_counts)
    if group.size == 1:
        return Pending(x if out is None else out.copy_(x))
    x = x.contiguous()
    if out is None:
        out = x.new_empty((sum(receives) if receives else x.shape[0], *x.shape[1:]))
    exchange = _handle(group).alltoall_base
    transfer = Transfer(
        "all_to_all",
        group,
        x,
        out,
        lambda: exchange(out, x, receives, sends, dist.AllToAllOptions()),
    )
    return _launch(transfer, x)


@dataclass
class _Sum:
    """An all-to-all under way whose parts are then summed into `out`, in its dtype."""

    work: Underway
    parts: torch.Tensor
    out: torch.Tensor

    def wait(self) -> None:
        self.work.wait()
        addends = self.parts.view(-1, *self.out.shape)  # [size, n, ...]
        if addends.is_cuda:  # each part is read once, and the sum written once
            torch.sum(addends, dim=0, dtype=self.out.dtype, out=self.out)
        else:  # a CPU would convert all parts first: 4 to 13 times the time
            total, *remaining = addends
            self.out.copy_(total)
            for addend in remaining:
                self.out.add_(addend)
        record_use(self.parts, current_stream(self.parts.device))


def _handle(group: Group) -> dist.ProcessGroup:
    assert group.handle is not None
    return group.handle


def _check_rows(kind: str, rows: int, group: Group) -> None:
    """Raise ValueError unless the rows have an equal part for every rank."""
    if rows % group.size:
        raise ValueError(
            f"{kind} over {group.name}: {rows} rows do not divide by {group.size} ranks"
        )


def _splits(
    rows: int, group: Group, send: Sequence[int] | None, receive: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """Return rows to and from each rank, empty lists for equal parts."""
    if send is None and receive is None:
        _check_rows("all_to_all", rows, group)
        return [], []
    if send is None or receive is None:
        raise ValueError(f"all_to_all over {group.name}: pass both counts or neither")
    if not len(send) == len(receive) == group.size or sum(send) != rows:
        raise ValueError(
            f"all_to_all over {group.name} of {group.size} ranks: {rows} rows, but counts "
            f"{list(send)} to send and {list(receive)} to receive: give one for each rank, those "
            "to send adding up to the rows"
        )
    return list(send), list(receive)


def _launch(transfer: Transfer, full_tensor: torch.Tensor, *, how: str = "") -> Pending:
    """Start a transfer whose wide side is `full_tensor`, after calling its observers."""
    waits = observe(transfer.kind, transfer.group, full_tensor, how=how)
    return Pending(transfer.output, transfer.launch(), transfer.source, waits)


def observe(
    kind: str, group: Group, full_tensor: torch.Tensor, *, how: str = ""
) -> tuple[AbstractContextManager[object], ...]:
    """Tell every observer of a transfer that is about to start, and return what they want entered
    while its caller waits for it."""
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
    return tuple(w for observer in group.observers if (w := observer(record)) is not None)


# The functions of torch.distributed cost 33-86 us a call, the group's own methods 27.
def _gather_method(handle: dist.ProcessGroup):
    return handle._allgather_base


def _scatter_method(handle: dist.ProcessGroup):
    return handle._reduce_scatter_base
