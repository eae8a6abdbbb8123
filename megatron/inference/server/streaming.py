# SPDX-License-Identifier: Apache-2.0
"""Responses to generation requests: complete, or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from megatron.inference.server.beam_search import BeamSearch
from megatron.inference.server.engine.client import Cancelled, EngineLost, ReaderStalled, Refused
from megatron.inference.server.middleware import LOG, Limits
from megatron.inference.server.output_processor import Delta, Generation, NotFinite
from megatron.inference.server.protocol.api_error import ApiError, internal_error
from megatron.inference.server.serving import engine_lost

T = TypeVar("T")

#: The data of an event, one line; or an object whose `type` names the event.
Event = str | dict[str, Any]


class AnswerFormatter(Protocol):
    """Formats the deltas of a request as the response of an API."""

    def complete(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the complete response from all of its deltas."""
        ...

    def events(self, delta: Delta) -> Sequence[Event]:
        """Return the events of a delta."""
        ...

    def closing_events(self) -> Sequence[Event]:
        """Return the events after the last delta."""
        ...

    def error(self, error: ApiError) -> Event:
        """Return the event of an error, which ends the stream."""
        ...


async def respond(
    request: Request,
    generation: Generation | BeamSearch,
    formatter: AnswerFormatter,
    limits: Limits,
    *,
    stream: bool,
    ended: Callable[[], object] = lambda: None,
) -> Response:
    """Return the complete response to a request, or a stream of events.

    Args:
        request: the HTTP request.
        generation: outputs of the request.
        formatter: format of the response.
        limits: limits on requests.
        stream: return a stream of events.
        ended: called at the end of a stream.
    """
    if stream:
        events = _events(request.state.request_id, generation, formatter, limits, ended)
        return EventStream(events, generation.stalled)

    async def collect() -> dict[str, Any]:
        return formatter.complete([delta async for delta in _checked_deltas(generation)])

    response = await run_until_disconnect(request, collect(), limits)
    if response is None:
        return Response(status_code=499)  # the client has disconnected
    return JSONResponse(response)


async def run_until_disconnect(
    request: Request, work: Coroutine[Any, Any, T], limits: Limits
) -> T | None:
    """Return the result of a coroutine; None if the client disconnects before it ends.

    Raises:
        ApiError: the coroutine failed or exceeded the time limit.
    """
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait(
            [task, disconnect],
            timeout=limits.request_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if task.done():
            return task.result()
        if disconnect.done():
            return None
        raise _timeout_error(limits)
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _events(
    request_id: str,
    generation: Generation | BeamSearch,
    formatter: AnswerFormatter,
    limits: Limits,
    ended: Callable[[], object],
) -> AsyncGenerator[Event, None]:
    """Yield the events of a streamed response."""
    try:
        async with asyncio.timeout(limits.request_seconds):
            async for delta in _checked_deltas(generation):
                for event in formatter.events(delta):
                    yield event
        for event in formatter.closing_events():
            yield event
    except TimeoutError:
        yield formatter.error(_timeout_error(limits))
    except ReaderStalled:
        LOG.warning("request %s: the client stopped reading, so its stream was closed", request_id)
    except ApiError as error:
        yield formatter.error(error)
    except Exception:
        LOG.exception("request %s failed while streaming", request_id)
        yield formatter.error(internal_error())
    finally:
        generation.close()
        ended()


async def _checked_deltas(generation: Generation | BeamSearch) -> AsyncIterator[Delta]:
    """Yield the deltas of a request; errors of the engine are raised as ApiErrors."""
    try:
        async for delta in generation.deltas():
            yield delta
    except Refused as error:
        param = generation.request.name(error.field) or None
        raise ApiError(400, str(error), param=param) from None
    except NotFinite:
        request = generation.request.requests[0]
        if request.allowed_tokens or request.banned_sequences or request.min_new_tokens:
            raise ApiError(
                400,
                "allowed_token_ids, bad_words, min_tokens and the grammar together allow no token",
                param="allowed_token_ids" if request.allowed_tokens else "bad_words",
            ) from None
        raise ApiError(
            500,
            "the model's logits are not finite, or the grammar allows no token",
            code="not_finite",
        ) from None
    except Cancelled:
        raise ApiError(409, "the response was cancelled") from None
    except EngineLost:
        raise engine_lost() from None


def _timeout_error(limits: Limits) -> ApiError:
    """Return the error of a request that exceeds the time limit."""
    return ApiError(504, f"no response within {limits.request_seconds:g} s: request fewer tokens")


async def disconnected(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, until they end, the client disconnects, or it stops reading.

    Args:
        events: the events.
        stalled: set when the client has too many unread tokens; the connection is then closed.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Event, None], stalled: asyncio.Event) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._stalled = events, stalled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        sending = asyncio.ensure_future(self._send_all(send))
        watching = [
            asyncio.ensure_future(disconnected(receive)),
            asyncio.ensure_future(self._stalled.wait()),
        ]
        try:
            await asyncio.wait([sending, *watching], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, *watching):
                task.cancel()
            await asyncio.gather(sending, *watching, return_exceptions=True)
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        async for data in self._events:
            text = f"data: {data}\n\n"
            if not isinstance(data, str):
                text = f"event: {data['type']}\ndata: {json.dumps(data)}\n\n"
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
