# SPDX-License-Identifier: Apache-2.0
"""Server-sent events, which end when the client disconnects or stops reading."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send


async def disconnected(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


#: The data of an event, one line; or an object whose `type` names the event.
Event = str | dict[str, Any]


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
