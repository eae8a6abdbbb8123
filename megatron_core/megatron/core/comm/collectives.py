# SPDX-License-Identifier: Apache-2.0
"""Collectives over one `Group` on dimension 0; the input changes only if it is passed as output.

The identity on a group of one rank. Only SUM and MAX: AVG on gloo is silently SUM before torch
2.10, so all scaling is done by the caller, before the sum. Method names of the process group that
differ between versions of torch are chosen in `_gather_method` and `_scatter_method`, nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
import torch.distributed as dist

from megatron.core.comm.direct import Gather, Scatter, goes_directly
from megatron.core.comm.transfer import Pending, Transfer, Underway
from megatron.core.device import current_stream, record_use
from megatron.core.process_groups import Group, ProcessGroupCollection

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
        parts = list(out.view(group.size, -1).unbind(0))
        own = parts[group.rank]
        if own.data_ptr() != x.data_ptr():
            own.copy_(x.view(-1))
        return Gather.start(handle, group, parts=parts)

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
        parts = list(x.view(group.size, -1).unbind(0))
        return Scatter.start(handle, group, parts=parts, out=out.view(-1))

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
        first, *others = self.parts.view(-1, *self.out.shape)  # [size, n, ...]
        self.out.copy_(first)
        for part in others:
            self.out.add_(part)
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


def _launch(transfer: Transfer, wide: torch.Tensor, *, how: str = "") -> Pending:
    """Start a transfer whose wide side is `wide`, its observers told before."""
    waits = observe(transfer.kind, transfer.group, wide, how=how)
    return Pending(transfer.output, transfer.launch(), transfer.source, waits)


def observe(
    kind: str, group: Group, wide: torch.Tensor, *, how: str = ""
) -> tuple[AbstractContextManager[object], ...]:
    """Tell every observer of a transfer that is about to start, and return what they want entered
    while its caller waits for it."""
    if not group.observers:
        return ()
    record = CollectiveRecord(
        kind,
        group.name,
        group.size,
        wide.numel() * wide.element_size(),
        group.ranks,
        tuple(wide.shape),
        str(wide.dtype).removeprefix("torch."),
        how,
    )
    return tuple(w for observer in group.observers if (w := observer(record)) is not None)


# The functions of torch.distributed cost 33-86 us a call, the group's own methods 27.
def _gather_method(handle: dist.ProcessGroup):
    return handle._allgather_base


def _scatter_method(handle: dist.ProcessGroup):
    return handle._reduce_scatter_base
