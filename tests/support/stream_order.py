# SPDX-License-Identifier: Apache-2.0
"""StreamOrder: a pretended GPU that refuses two uses of memory which no wait has put in order.

Every stream has a vector clock (Mattern 1989): how much of each stream's work is done before what
comes next on it. Waiting for a stream or an event takes the larger entries of both. Every op uses
memory on the current stream, every collective on the stream of its communicator, which waits for
the current one at its start as NCCL's does. Of two uses of the same bytes, one of them a write, the
earlier must be in the later one's clock. Hosts that wait are no help: they put nothing in order.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.comm.collectives import Transfer, Underway, _Sum
from tests.support.capture_rules import pretended_streams

#: The name of a stream, whether it writes, and the addresses from start to stop.
_Use: TypeAlias = tuple[str, bool, int, int]


class OrderError(RuntimeError):
    """Two uses of the same memory that may run in either order."""


class OrderedStream:
    """A stream: of every stream, how many uses are done before its next one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Counter[str] = Counter()

    def wait_stream(self, stream: OrderedStream) -> None:
        """Wait for everything on another stream."""
        self.clock |= stream.clock

    def wait_event(self, event: OrderedEvent) -> None:
        """Wait for what was on the event's stream when it was recorded."""
        self.clock |= event.clock


class OrderedEvent:
    """An event: the clock of its stream when it was recorded last."""

    def __init__(self, order: StreamOrder) -> None:
        self.order = order
        self.clock: Counter[str] = Counter()

    def record(self, stream: OrderedStream | None = None) -> None:
        """Note what the stream has done so far."""
        self.clock = (stream or self.order.current).clock.copy()


class StreamOrder(TorchDispatchMode):
    """The pretended GPU, checked inside a `with`, and the link that its collectives go over.

    Collectives move nothing, so one process can play a rank of many.

    Attributes:
        count: collectives so far.
        crossings: uses so far that another stream's use had to come before.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it is to import it first, for seconds

    def __init__(self) -> None:
        super().__init__()
        self.count = self.crossings = self._streams = 0
        self.current = self.new_stream()
        self._communicators: dict[int, OrderedStream] = defaultdict(self.new_stream)
        # Storages are kept, so that no address comes back as another's.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._uses: dict[int, dict[_Use, tuple[int, str]]] = defaultdict(dict)

    def new_stream(self, device: object = None, *, priority: int = 0) -> OrderedStream:
        """Make a stream."""
        self._streams += 1
        return OrderedStream(f"stream {self._streams}")

    def new_event(self, device: object = None, *, timing: bool = False) -> OrderedEvent:
        """Make an event."""
        return OrderedEvent(self)

    @contextlib.contextmanager
    def on_stream(self, stream: OrderedStream) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def enforced(self) -> contextlib.AbstractContextManager[None]:
        """Give the engine these streams instead of the CPU's."""
        return pretended_streams(self)

    def __call__(self, transfer: Transfer) -> Underway:
        """Start a collective on its communicator's stream."""
        self.count += 1
        stream = self._communicators[id(transfer.group.handle)]
        stream.clock |= self.current.clock
        work = transfer.start()
        output = work.parts if isinstance(work, _Sum) else transfer.output
        if transfer.source is not None:
            self._use(transfer.source, stream, what=transfer.kind)
        self._use(output, stream, what=transfer.kind, writes=True)
        done = _Work(self, stream.clock.copy())
        if isinstance(work, _Sum):
            work.work = done
            return work
        return done

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        named = kwargs or {}
        what = str(function)
        for i, argument in enumerate(function._schema.arguments):
            value = args[i] if i < len(args) else named.get(argument.name)
            effect = argument.alias_info
            if effect is None or effect.is_write:  # a view uses nothing
                for tensor in _tensors(value):
                    self._use(tensor, self.current, what=what, writes=effect is not None)
        results = function(*args, **named)
        if all(r.alias_info is None for r in function._schema.returns):
            for tensor in _tensors(results):
                self._use(tensor, self.current, what=what, writes=True)
        return results

    def _use(
        self, tensor: torch.Tensor, stream: OrderedStream, *, what: str, writes: bool = False
    ) -> None:
        """Note a use, and compare it with those of the same bytes before it."""
        if tensor.numel() == 0:
            return
        storage = tensor.untyped_storage()
        self._storages.setdefault(storage.data_ptr(), storage)
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        stop = start + (last + 1) * tensor.element_size()
        uses = self._uses[storage.data_ptr()]
        for (other, wrote, low, high), (time, kind) in uses.items():
            if other == stream.name or not (writes or wrote) or high <= start or stop <= low:
                continue
            self.crossings += 1
            if stream.clock[other] < time:
                raise OrderError(f"{what} on {stream.name} does not wait for {kind} on {other}")
        stream.clock[stream.name] += 1
        uses[stream.name, writes, start, stop] = stream.clock[stream.name], what


class _Work:
    """A collective under way."""

    def __init__(self, order: StreamOrder, clock: Counter[str]) -> None:
        self.order, self.clock = order, clock

    def wait(self) -> None:
        """Let the current stream wait."""
        self.order.current.clock |= self.clock


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
