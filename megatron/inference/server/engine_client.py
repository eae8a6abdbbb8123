# SPDX-License-Identifier: Apache-2.0
"""The HTTP process's end of the link to the engine: outputs asked for, and their news as they come.

It bounds what is asked for at a time, and what an output may hold that its reader has not taken.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from megatron.inference.server.protocol import Ask, FrameReader, News, frame

_READ_BYTES = 1 << 20
# Turns of the event loop between an order and its frame: requests that have arrived by then are
# asked for with it, so that the first step of an idle engine has all of them. From its first byte
# to its order a request takes about ten turns. A turn with nothing else to do takes some 2 us.
_TURNS = 16


class QueueFull(Exception):
    """As many outputs are asked for as may be."""


class Draining(Exception):
    """The server is ending and takes nothing more."""


class EngineLost(Exception):
    """The engine process is gone."""


class Cancelled(Exception):
    """The request was cancelled by another one."""


class ReaderStalled(Exception):
    """The client does not read, and what is unsent has reached its bound."""


class OrderRefused(Exception):
    """The engine cannot do what administration asks; the text is one line for the user."""


class Outputs:
    """News of the outputs of one HTTP request, in the order in which they come.

    Args:
        client: that they come from.
        ids: of the outputs.
        max_unsent: tokens that may wait to be taken.
    """

    def __init__(self, client: EngineClient, ids: Sequence[int], max_unsent: int) -> None:
        self._client, self._max_unsent = client, max_unsent
        self._queue: asyncio.Queue[News | Exception] = asyncio.Queue()
        self._open, self._unsent = set(ids), 0
        self.stalled = asyncio.Event()
        """Set when `max_unsent` is reached; the outputs have been aborted then."""

    def put(self, news: News) -> None:
        """Take news of one output in."""
        self._unsent += len(news.tokens)
        if news.finish_reason or news.refused:
            self._open.discard(news.id)
        elif self._unsent > self._max_unsent:
            self.close()
            self.stalled.set()
            self._queue.put_nowait(ReaderStalled())
            return
        self._queue.put_nowait(news)

    def fail(self, error: Exception) -> None:
        """End all outputs with an error."""
        self._open.clear()
        self._queue.put_nowait(error)

    def finish(self, ask_id: int) -> None:
        """End one output: its end was seen in its text."""
        if ask_id in self._open:
            self._open.discard(ask_id)
            self._client.abort([ask_id])

    def close(self) -> None:
        """Abort what has not ended."""
        self._client.abort(list(self._open))
        self._open.clear()

    async def news(self) -> AsyncIterator[News]:
        """Yield news until all outputs have ended.

        Raises:
            EngineLost: they never will.
            ReaderStalled: too much was not taken.
        """
        while self._open or not self._queue.empty():
            found = await self._queue.get()
            if isinstance(found, Exception):
                raise found
            self._unsent -= len(found.tokens)
            yield found


class EngineClient:
    """Ask an engine for outputs.

    Args:
        reader, writer: of the link.
        max_outputs: that may run and wait at a time.
        max_unsent: tokens of a request that may wait for its reader.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        max_outputs: int,
        max_unsent: int,
    ) -> None:
        self._reader, self._writer = reader, writer
        self.max_outputs, self._max_unsent = max_outputs, max_unsent
        self._outputs: dict[int, Outputs] = {}
        self._frames: list[bytes] = []  # orders on their way to `writer`
        self._next_id = 0
        self._orders: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._heard = time.monotonic()
        self.lost = asyncio.Event()
        """Set when the engine process is gone."""
        self.draining = asyncio.Event()
        """Set when nothing more is admitted."""
        self.stats: Mapping[str, float] = {}
        """What the engine said last about itself."""
        self.facts: Mapping[str, Any] = {}
        """What the engine is; empty until it is there."""

    @property
    def active(self) -> int:
        """Outputs that were asked for and have not ended."""
        return len(self._outputs)

    @property
    def silent_seconds(self) -> float:
        """How long the engine has said nothing."""
        return time.monotonic() - self._heard

    def ask(self, wanted: Sequence[Mapping[str, Any]]) -> tuple[list[int], Outputs]:
        """Ask for the outputs of one HTTP request; return their ids and where news come.

        Args:
            wanted: fields of an `Ask` each, but the id.

        Raises:
            QueueFull: there is no room for all of them.
            Draining, EngineLost: there will be none.
        """
        if self.lost.is_set():
            raise EngineLost
        if self.draining.is_set():
            raise Draining
        if self.active + len(wanted) > self.max_outputs:
            raise QueueFull
        ids = list(range(self._next_id, self._next_id + len(wanted)))
        self._next_id += len(wanted)
        outputs = Outputs(self, ids, self._max_unsent)
        for number, fields in zip(ids, wanted, strict=True):
            self._send(Ask(id=number, **fields).to_json(), turns=_TURNS)
            self._outputs[number] = outputs
        return ids, outputs

    async def order(self, action: str, **fields: Any) -> dict[str, Any]:
        """Have the engine do something between two steps (see `EngineControl`); return what it
        tells.

        Raises:
            OrderRefused: it cannot, and nothing has changed.
            EngineLost: it is gone.
        """
        if self.lost.is_set():
            raise EngineLost
        number, self._next_id = self._next_id, self._next_id + 1
        self._orders[number] = asyncio.get_running_loop().create_future()
        self._send({"kind": "control", "id": number, "action": action, **fields})
        return await self._orders[number]

    def abort(self, ids: Sequence[int]) -> None:
        """Have the engine end outputs; those that have ended are left alone."""
        for number in ids:
            if self._outputs.pop(number, None) is not None:
                self._send({"kind": "abort", "id": number})

    def _send(self, order: Mapping[str, Any], *, turns: int = 0) -> None:
        """Send an order, with those of the next turns of the event loop."""
        self._frames.append(frame(order))
        if not turns or len(self._frames) == 1:
            self._flush_after(turns)

    def _flush_after(self, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._flush_after, turns - 1)
            return
        frames, self._frames = self._frames, []
        if frames and not self._writer.is_closing():
            self._writer.write(b"".join(frames))

    async def listen(self) -> None:
        """Pass on what the engine says until it is gone."""
        frames = FrameReader()
        while data := await self._read():
            for message in frames.feed(data):
                self._heard = time.monotonic()
                if message["kind"] == "drain":
                    self.draining.set()
                elif message["kind"] == "facts":
                    self.facts = message["facts"]
                elif message["kind"] == "done":
                    self._take_answer(message)
                else:
                    self._take_step(message)
        self.lost.set()
        for outputs in set(self._outputs.values()):
            outputs.fail(EngineLost())
        self._outputs.clear()
        for answer in self._orders.values():
            if not answer.done():
                answer.set_exception(EngineLost())

    def _take_answer(self, message: Mapping[str, Any]) -> None:
        answer = self._orders.pop(message["id"])
        if answer.done():  # nobody waits for it any more
            return
        if message["refused"]:
            answer.set_exception(OrderRefused(message["refused"]))
        else:
            answer.set_result(message["told"])

    async def _read(self) -> bytes:
        try:
            return await self._reader.read(_READ_BYTES)
        except ConnectionError:
            return b""

    def _take_step(self, message: Mapping[str, Any]) -> None:
        self.stats = message["stats"]
        for fields in message["news"]:
            news = News(**fields)
            outputs = self._outputs.get(news.id)
            if outputs is None:  # aborted since
                continue
            if news.finish_reason or news.refused:
                del self._outputs[news.id]
            outputs.put(news)
