# SPDX-License-Identifier: Apache-2.0
"""The outermost layer of all routes: request ids, the API key, limits on requests, the log.

`RequestGuard` wraps the application; `TimedProtocol` limits the time for a header, which arrives
before the application is called. Log lines are text or JSON, with the request id.
"""

from __future__ import annotations

import asyncio
import datetime
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron.inference.server.protocol.api_error import ApiError

LogFormat = Literal["text", "json"]
LogLevel = Literal["info", "warning", "error"]

#: Id of the request in progress, for its log lines; "" outside of a request.
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")

LOG = logging.getLogger("megatron.inference.server")

MAX_HEADER_BYTES = 16 << 10
#: Most fields that the header `x-ignored-fields` names.
MAX_HEADER_FIELDS = 16
#: Routes without authentication.
OPEN_ROUTES = frozenset({"/", "/health", "/ping"})
#: Routes that are polled and therefore not logged.
POLLED_ROUTES = frozenset({"/health", "/metrics", "/ping", "/load"})


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on requests.

    Args:
        max_body_bytes: largest body of a request.
        body_seconds: time for a request's header, and then for its body, to arrive.
        request_seconds: time for an answer, including its time in the queue.
    """

    max_body_bytes: int
    body_seconds: float
    request_seconds: float


class RequestGuard:
    """The outermost layer of the application.

    Args:
        app: application with the routes.
        limits: limits on requests.
        key: API key; None without authentication.
        note_answer: called with the status of every answer.
    """

    def __init__(
        self, app: ASGIApp, limits: Limits, key: str | None, note_answer: Callable[[int], None]
    ) -> None:
        self._app, self._limits, self._note_answer = app, limits, note_answer
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        REQUEST_ID.set(request_id)
        # The status if the client disconnects before its answer.
        begin, status = time.perf_counter(), 499

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                id_header = (b"x-request-id", request_id.encode())
                message["headers"] = [*message.get("headers", ()), id_header]
                if ignored := scope["state"].get("ignored_fields"):
                    names = ", ".join(ignored[:MAX_HEADER_FIELDS])
                    message["headers"].append((b"x-ignored-fields", names.encode()))
                self._note_answer(status)
            await send(message)

        try:
            self._check(scope)
        except ApiError as error:
            response = error.response(request_id, scope["path"])
            await response(scope, receive, send_with_id)
        else:
            await self._app(scope, _BoundedBody(receive, self._limits), send_with_id)
        if scope["path"] not in POLLED_ROUTES:
            seconds = time.perf_counter() - begin
            log_answer(scope["method"], scope["path"], status=status, seconds=seconds)

    def _check(self, scope: Scope) -> None:
        """Check the header of a request: size, API key and length of the body. Raises ApiError."""
        headers = scope["headers"]
        if sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            raise ApiError(431, f"the header has more than {MAX_HEADER_BYTES} bytes")
        if self._key is not None and scope["path"] not in OPEN_ROUTES:
            authorizations = [value for name, value in headers if name == b"authorization"]
            keys = [value[7:] for value in authorizations if value[:7].lower() == b"bearer "]
            keys += [value for name, value in headers if name == b"x-api-key"]
            if not any(hmac.compare_digest(key.strip(), self._key) for key in keys):
                raise ApiError(
                    401,
                    "no valid API key: send it as `Authorization: Bearer KEY`",
                    code="invalid_api_key",
                )
        lengths = [value for name, value in headers if name == b"content-length"]
        if any(int(value) > self._limits.max_body_bytes for value in lengths):
            raise _too_long(self._limits)


def _too_long(limits: Limits) -> ApiError:
    return ApiError(413, f"the body has more than {limits.max_body_bytes} bytes")


class _BoundedBody:
    """Receive a body within the limits on size and time; raise ApiError beyond them."""

    def __init__(self, receive: Receive, limits: Limits) -> None:
        self._receive, self._limits = receive, limits
        self._bytes, self._complete = 0, False

    async def __call__(self) -> Message:
        if self._complete:  # after the body: waits for the disconnect
            return await self._receive()
        try:
            message = await asyncio.wait_for(self._receive(), self._limits.body_seconds)
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time") from None
        if message["type"] == "http.request":
            self._bytes += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
        if self._bytes > self._limits.max_body_bytes:
            raise _too_long(self._limits)
        return message


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


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, request_id; for an answer also
    method, path, status and seconds; for an exception its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as JSON."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        fields = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": REQUEST_ID.get() or None,
            **record.__dict__.get("answer", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in fields.items() if value is not None})


def log_answer(method: str, path: str, *, status: int, seconds: float) -> None:
    """Log an answered request. No argument contains the API key."""
    answer = {"method": method, "path": path, "status": status, "seconds": round(seconds, 6)}
    LOG.info(
        "request %s: %s %r answered %d in %.3f s",
        REQUEST_ID.get(),
        method,
        path,
        status,
        seconds,
        extra={"answer": answer},
    )


def set_up(form: LogFormat, level: LogLevel) -> None:
    """Configure logging to stderr in this format; at `info` there is a line per answer."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter()
        if form == "json"
        else logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s")
    )
    logging.basicConfig(handlers=[handler])
    LOG.setLevel(level.upper())
