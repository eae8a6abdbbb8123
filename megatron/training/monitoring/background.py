# SPDX-License-Identifier: Apache-2.0
"""A metrics writer on a thread of its own, so that a server or disk that does not answer delays no
step.

Events wait in a bounded queue. When it is full, what comes is dropped, with one line; at the end
the run waits a bounded time for what is left.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

#: Events that may wait for a writer.
CAPACITY = 1000
#: How long the end of a run waits for its writers, all of them together.
CLOSE_SECONDS = 20.0


class MetricsWriter(Protocol):
    """Takes the numbers of one event."""

    def write(self, kind: str, iteration: int, values: Mapping[str, float]) -> None:
        """Record values by name."""

    def close(self) -> None:
        """Write out what is pending."""


class Background:
    """Passes events on to a writer that may block or fail; itself it does neither.

    Args:
        name: of the writer, for messages.
        make: connects and returns the writer; called on the thread.
        warn: prints one line; called from either thread.
        capacity: events that may wait.
        close_seconds: the longest that `close` takes, from `stop` on.

    Attributes:
        dropped: events that found the queue full.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], MetricsWriter],
        *,
        warn: Callable[[str], None],
        capacity: int = CAPACITY,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._name, self._make, self._warn = name, make, warn
        self._close_seconds = close_seconds
        self._waiting: queue.Queue[tuple[str, int, Mapping[str, float]] | None]
        self._waiting = queue.Queue(capacity)
        self._failed = threading.Event()
        self._deadline: float | None = None
        self.dropped = 0
        # A daemon: a server that never answers must not hold the interpreter's end either.
        self._thread = threading.Thread(target=self._work, name=f"metrics: {name}", daemon=True)
        self._thread.start()

    def write(self, kind: str, iteration: int, values: Mapping[str, float]) -> None:
        """Hand over one event, or drop it."""
        if self._failed.is_set():
            return
        try:
            self._waiting.put_nowait((kind, iteration, values))
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                self._warn(
                    f"metrics: {self._name} does not keep up: {self._waiting.maxsize} events wait, "
                    "further ones are dropped; training goes on"
                )

    def stop(self) -> None:
        """Let the thread end after the events that wait; returns at once."""
        if self._deadline is not None:
            return
        self._deadline = time.monotonic() + self._close_seconds
        while True:
            try:
                self._waiting.put_nowait(None)
                return
            except queue.Full:
                self._drop_one()

    def close(self) -> None:
        """Wait for the thread to end, but not for ever."""
        self.stop()
        assert self._deadline is not None
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn(
                f"metrics: {self._name} has not taken everything within "
                f"{self._close_seconds:g} s; the run ends without it"
            )

    def _drop_one(self) -> None:
        try:
            self._waiting.get_nowait()
            self.dropped += 1
        except queue.Empty:  # the thread was quicker
            pass

    def _work(self) -> None:
        try:
            writer = self._make()
            while (event := self._waiting.get()) is not None:
                writer.write(*event)
            writer.close()
        except BaseException as error:  # SystemExit too: some libraries raise it
            self._failed.set()
            self._warn(off(self._name, error))


def off(name: str, error: BaseException) -> str:
    """Return the line about a writer that failed."""
    text = " ".join(str(error).split())
    return f"metrics: {name} is off: {type(error).__name__}: {text}; training goes on"
