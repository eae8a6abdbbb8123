# SPDX-License-Identifier: Apache-2.0
"""CaptureRules: streams and events of a fake GPU that enforce the rules of CUDA stream capture.

- Inside a capture, no stream may wait for an event recorded outside, and the host may not wait.
- Inside, no copy may read host memory: a replay would read memory that has been freed.
- Outside, no stream may wait for an event recorded inside a capture.
- A stream joins the capture by waiting for a captured stream, and the capture's origin stream must
  wait for it before the capture ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Protocol, TypeAlias
from unittest import mock

import torch

from megatron.core.comm import collectives
from megatron.core.comm.collectives import CollectiveWork, Transfer
from megatron.core.context_parallel import layout
from megatron.core.distributed import data_parallel, gradient_bucket
from megatron.core.ops import sequences
from megatron.core.weight_gather import gatherer

MODULES: tuple[ModuleType, ...] = (
    gatherer,
    collectives,
    data_parallel,
    gradient_bucket,
)


Unrecorded: TypeAlias = contextlib.AbstractContextManager[None]


class Streams(Protocol):
    """The stream functions of a fake GPU."""

    @property
    def current(self) -> object:
        """The current stream."""

    def new_stream(self, device: object = None, *, priority: int = 0) -> object:
        """Make a stream."""

    def new_event(self, device: object = None, *, timing: bool = False) -> object:
        """Make an event."""

    def on_stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        """Make a stream the current one."""


class CaptureError(RuntimeError):
    """An operation that CUDA refuses during stream capture."""


class PretendStream:
    """A stream with the id of its capture and the work that the origin stream has waited for."""

    def __init__(self, rules: CaptureRules) -> None:
        self.rules = rules
        self.capture: int | None = None
        self.work = self.seen = 0

    def wait_event(self, event: PretendEvent) -> None:
        """Wait for an event, and join the capture of a captured event."""
        if event.stream is None:
            return
        if event.capture is None:
            if self.capture is not None:
                raise CaptureError("a stream in a capture waits for an event of before")
            return
        if event.capture != self.rules.active:
            raise CaptureError("a stream waits for an event that was recorded in a capture")
        self.capture = event.capture
        self.work += 1
        if self is self.rules.origin:
            event.stream.seen = max(event.stream.seen, event.work)

    def wait_stream(self, stream: PretendStream) -> None:
        """Wait for all work of another stream."""
        event = PretendEvent(self.rules)
        event.record(stream)
        self.wait_event(event)


class PretendEvent:
    """An event with the stream and capture of its last record."""

    def __init__(self, rules: CaptureRules) -> None:
        self.rules = rules
        self.stream: PretendStream | None = None
        self.capture: int | None = None
        self.work = 0

    def record(self, stream: PretendStream | None = None) -> None:
        """Record the stream's position."""
        self.stream = stream or self.rules.current
        self.capture, self.work = self.stream.capture, self.stream.work

    def synchronize(self) -> None:
        """Block the host."""
        if self.rules.active is not None:
            raise CaptureError("the host waits during a capture")
        if self.capture is not None:
            raise CaptureError("the host waits for an event that was recorded in a capture")


class CaptureRules:
    """The fake GPU, and the link that carries its collectives.

    Args:
        unrecorded: context manager around gloo's own waits.

    Attributes:
        active: number of the capture under way; None outside.
        count: collectives so far.
    """

    def __init__(self, unrecorded: Callable[[], Unrecorded] = contextlib.nullcontext) -> None:
        self.unrecorded = unrecorded
        self.active: int | None = None
        self.captures = self.count = 0
        self.streams: list[PretendStream] = []
        self.origin: PretendStream | None = None
        self.current = self._outside = self.new_stream()

    def new_stream(self, device: object = None, *, priority: int = 0) -> PretendStream:
        """Make a stream."""
        self.streams.append(PretendStream(self))
        return self.streams[-1]

    def begin(self) -> None:
        """Begin a capture on a stream of its own."""
        self.captures += 1
        self.active = self.captures
        self.current = self.origin = self.new_stream()
        self.origin.capture = self.active

    def end(self) -> None:
        """End it."""
        for stream in self.streams:
            if stream is not self.origin and stream.capture is not None:
                if stream.seen < stream.work:
                    raise CaptureError("a stream was not joined at the end of the capture")
                stream.capture = None
        self.active, self.current = None, self._outside

    def __call__(self, transfer: Transfer) -> CollectiveWork:
        """Start a collective on the current stream."""
        self.count += 1
        self.current.work += 1
        work = transfer.start()
        if isinstance(work, collectives._RankSum):
            work.work = _Work(self, work.work, self.current.capture)
            return work
        return _Work(self, work, self.current.capture)

    @contextlib.contextmanager
    def on_stream(self, stream: PretendStream) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def new_event(self, device: object = None, *, timing: bool = False) -> PretendEvent:
        """Make an event."""
        return PretendEvent(self)

    def pin(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a tensor that can be copied to the device asynchronously."""
        if self.active is not None:
            raise CaptureError(
                "a capture copies from the host's memory, which a replay reads again"
            )
        return tensor

    @contextlib.contextmanager
    def enforced(self) -> Iterator[None]:
        """Replace the CPU's streams, which check nothing, by this fake GPU."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(pretended_streams(self))
            for module in (layout, sequences):
                stack.enter_context(mock.patch.object(module, "pin", self.pin))
            yield


@contextlib.contextmanager
def pretended_streams(gpu: Streams) -> Iterator[None]:
    """Replace the CPU's streams and events by a fake GPU's."""
    pretended = {
        "current_stream": lambda device: gpu.current,
        "new_stream": gpu.new_stream,
        "new_event": gpu.new_event,
        "on_stream": gpu.on_stream,
        "record_use": lambda tensor, *streams: tensor,
    }
    with contextlib.ExitStack() as stack:
        for module in MODULES:
            replacements = {n: v for n, v in pretended.items() if n in vars(module)}
            stack.enter_context(mock.patch.multiple(module, **replacements))
        yield


class _Work:
    """A collective in flight; start and wait must be in the same capture, or both outside."""

    def __init__(self, rules: CaptureRules, work: CollectiveWork, capture: int | None) -> None:
        self.rules, self.work, self.capture = rules, work, capture

    def wait(self) -> torch.Tensor | object:
        """Make the current stream wait."""
        if self.capture != self.rules.current.capture:
            raise CaptureError("a collective is waited for on the other side of a capture's border")
        with self.rules.unrecorded():
            return self.work.wait()
