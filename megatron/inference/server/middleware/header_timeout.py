# SPDX-License-Identifier: Apache-2.0
"""A time limit for the header of each HTTP request."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedProtocol(H11Protocol):
    """HTTP/1.1 with a time limit for the header of each request.

    `header_seconds` is set by `timed_protocol`.
    """

    header_seconds: float
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timer of the first header."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Keep the timer running until the header is complete."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._waiting is None:
            self._wait()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP, and drop the answer of a request whose body was invalid."""
        super().send_400_response(msg)
        if self.cycle is not None:
            self.cycle.disconnected = True

    def on_response_complete(self) -> None:
        """Stop the timer; uvicorn closes idle connections."""
        self._stop_waiting()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(self.header_seconds, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


def timed_protocol(seconds: float) -> type[TimedProtocol]:
    """Return the protocol class with this time limit for headers."""
    return type("TimedProtocol", (TimedProtocol,), {"header_seconds": seconds})
