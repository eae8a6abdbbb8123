# SPDX-License-Identifier: Apache-2.0
"""Simulated communicators that turn every misuse of a buffer in flight into an error or a delay.

A collective reads its input and writes its output at some time between its start and the end of
`wait()`. On real communicators this time varies, so a missing wait or a buffer reused too early
passes most runs. A simulated link chooses one end of the interval:

| link | the collective runs | shows |
|---|---|---|
| Late | in `wait()`; the output holds poison till then | a read before the wait |
| Early | at its start | an output buffer that was still in use when it started |
| Latency | as usual, and is done some seconds later at the earliest | what overlap hides |

Late and Early raise an error in `wait()` if input or output were written in between. With Late,
ranks must wait for the collectives of all groups in one order, else they wait for each other.
Messages between two ranks start at once on both; the received data is poison until the wait.

    with simulated(groups, Late()) as link:
        train()
    assert link.count > 0
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

from megatron.core import ProcessGroupCollection
from megatron.core.comm.collectives import CollectiveWork, Transfer, poison_


class Link(Protocol):
    """Carries a collective in place of its communicator; `count` is the number so far."""

    count: int

    def __call__(self, transfer: Transfer) -> CollectiveWork:
        """Start a collective and return its work handle."""


AnyLink = TypeVar("AnyLink", bound=Link)


@contextmanager
def simulated(groups: ProcessGroupCollection, link: AnyLink) -> Iterator[AnyLink]:
    """Carry every collective over any group of `groups` by `link` while the context is open.

    What started inside may be waited for later. The innermost of nested contexts is used.
    """
    groups.links.append(link)
    try:
        yield link
    finally:
        groups.links.remove(link)


class Late:
    """Run each collective as late as possible: inside `wait()`, with the input of that time."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, transfer: Transfer) -> CollectiveWork:
        """Poison the output and start nothing."""
        self.count += 1
        return _Prompt(transfer) if transfer.prompt else _LateTransfer(transfer)


class Early:
    """Run each collective as early as possible: completely at its start."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, transfer: Transfer) -> CollectiveWork:
        """Carry the collective out."""
        self.count += 1
        if transfer.prompt:
            return _Prompt(transfer)
        transfer.start().wait()
        return _Untouched(transfer)


class Latency:
    """Delay collectives on a link that carries one at a time, in the order of their starts.

    A collective completes no earlier than `seconds` after its start and after the end of the
    previous collective.

    Args:
        seconds: duration of each collective.
        shared: all groups share one link; False gives every communicator its own.
    """

    def __init__(
        self,
        seconds: float,
        *,
        shared: bool = True,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if seconds < 0:
            raise ValueError(f"a latency of {seconds} seconds: use 0 or more")
        self.seconds, self.shared = seconds, shared
        self.count = 0
        self._now, self._sleep = now, sleep
        self._free_at: dict[object, float] = {}

    def __call__(self, transfer: Transfer) -> CollectiveWork:
        """Start the collective and occupy the link for its duration."""
        self.count += 1
        link = None if self.shared else transfer.group.handle
        end = max(self._now(), self._free_at.get(link, 0.0)) + self.seconds
        self._free_at[link] = end
        return _DelayedTransfer(transfer.start(), end, self._now, self._sleep)


class _Untouched:
    """Check in `wait()` that a transfer's buffers were not written since the start."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._marks = [("output", transfer.output, transfer.output.detach().clone())]
        if transfer.source is not None:
            self._marks.append(("input", transfer.source, transfer.source.detach().clone()))

    def wait(self) -> None:
        """Raise RuntimeError if a buffer has changed."""
        for name, tensor, mark in self._marks:
            if not equal_bits(tensor, mark):
                raise RuntimeError(
                    f"{self._transfer.kind} over {self._transfer.group.name}: its {name} "
                    f"{list(tensor.shape)} was written while it was under way; wait for it first"
                )
        self._marks.clear()


class _Prompt:
    """A transfer that has started as usual; its input must not change until it completes."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._mark = None if transfer.source is None else transfer.source.detach().clone()
        self._work = transfer.start()

    def wait(self) -> None:
        """Wait for the transfer; raise RuntimeError if its input has changed meanwhile."""
        self._work.wait()
        source = self._transfer.source
        if self._mark is not None and source is not None and not equal_bits(source, self._mark):
            raise RuntimeError(
                f"{self._transfer.kind} over {self._transfer.group.name}: its input "
                f"{list(source.shape)} was written while it was under way; wait for it first"
            )


class _LateTransfer:
    """A transfer that has not started."""

    @torch.no_grad()
    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        output, source = transfer.output, transfer.source
        read = output if source is None else _overlap(source, output)
        self._read = None if read is None else read.detach()
        self._aside = None if read is None else read.detach().clone()
        poison_(output.detach())
        if transfer.keeps_source:
            self._restore()
        self._untouched = _Untouched(transfer)

    def wait(self) -> None:
        """Check that the buffers were left alone, then carry the collective out."""
        self._untouched.wait()
        self._restore()
        self._transfer.start().wait()

    @torch.no_grad()
    def _restore(self) -> None:
        """Put the input's values back where they overlap the output."""
        if self._read is not None and self._aside is not None:
            self._read.copy_(self._aside)


class _DelayedTransfer:
    """A transfer that completes at a given time at the earliest."""

    def __init__(
        self,
        work: CollectiveWork,
        end: float,
        now: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._work, self._end, self._now, self._sleep = work, end, now, sleep

    def wait(self) -> None:
        """Wait for the transfer and until its completion time."""
        self._work.wait()
        remaining_seconds = self._end - self._now()
        if remaining_seconds > 0:
            self._sleep(remaining_seconds)


def _overlap(source: torch.Tensor, output: torch.Tensor) -> torch.Tensor | None:
    """Return the elements of `source` that share memory with `output`, flat; both contiguous."""
    size, start = source.element_size(), source.data_ptr()
    low = max(start, output.data_ptr())
    high = min(start + source.nbytes, output.data_ptr() + output.nbytes)
    return source.view(-1)[(low - start) // size : (high - start) // size] if low < high else None


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype and shape hold the same bits, including NaNs."""
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
