# SPDX-License-Identifier: Apache-2.0
"""Client of the engine process in the HTTP process: sends requests and receives output deltas.

It bounds the number of outputs in flight and the tokens that a slow reader leaves unread.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from megatron.core.inference.requests import EngineRequest, OutputDelta
from megatron.inference.server.engine.link import FrameReader, frame, to_message

_READ_BYTES = 1 << 20
# Iterations of the event loop between a message and its frame. Requests that arrive meanwhile go
# into the same frame, so that the first step of an idle engine batches all of them. A request takes
# about ten iterations from its first byte to its message. An idle iteration takes about 2 us.
_TURNS = 16


class QueueFull(Exception):
    """The number of outputs in flight has reached its limit."""


class Draining(Exception):
    """The server is shutting down and admits no requests."""


class EngineLost(Exception):
    """The engine process has exited."""


class Cancelled(Exception):
    """Another request cancelled this request."""


class ReaderStalled(Exception):
    """The client does not read, and its unread tokens have reached the limit."""


class Refused(Exception):
    """The engine rejects a request, a text to embed, or an administration command.

    Args:
        message: one line for the user.
        field: field of `EngineRequest` that the message is about; "" for no single field.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class Outputs:
    """A queue of the deltas of one HTTP request's outputs, in order of arrival.

    Args:
        client: client that receives the deltas.
        ids: ids of the outputs.
        max_unsent: most unread tokens in the queue.
    """

    def __init__(self, client: EngineClient, ids: Sequence[int], max_unsent: int) -> None:
        self._client, self._max_unsent = client, max_unsent
        self._queue: asyncio.Queue[OutputDelta | Exception] = asyncio.Queue()
        self._open, self._unsent = set(ids), 0
        self.stalled = asyncio.Event()
        """Set when `max_unsent` is reached; the outputs have been aborted then."""

    def put(self, delta: OutputDelta) -> None:
        """Queue a delta of one output."""
        self._unsent += len(delta.tokens)
        if delta.finish_reason:
            self._open.discard(delta.request_id)
        elif self._unsent > self._max_unsent:
            self.close()
            self.stalled.set()
            self._queue.put_nowait(ReaderStalled())
            return
        self._queue.put_nowait(delta)

    def refuse(self, request_id: int, error: Refused) -> None:
        """End one output with an error of the engine."""
        self._open.discard(request_id)
        self._queue.put_nowait(error)

    def fail(self, error: Exception) -> None:
        """End all outputs with an error."""
        self._open.clear()
        self._queue.put_nowait(error)

    def finish(self, request_id: int) -> None:
        """Abort one output whose text contains a stop string."""
        if request_id in self._open:
            self._open.discard(request_id)
            self._client.abort([request_id])

    def close(self) -> None:
        """Abort unfinished outputs."""
        self._client.abort(list(self._open))
        self._open.clear()

    async def deltas(self) -> AsyncIterator[OutputDelta]:
        """Yield deltas until all outputs have finished.

        Raises:
            Refused: the engine rejects a request.
            EngineLost: the engine process has exited.
            ReaderStalled: the unread tokens exceed `max_unsent`.
        """
        while self._open or not self._queue.empty():
            delta = await self._queue.get()
            if isinstance(delta, Exception):
                raise delta
            self._unsent -= len(delta.tokens)
            yield delta


class Reservation:
    """Outputs in flight that one HTTP request holds over several steps.

    Args:
        client: client of the engine.
        count: number of outputs.
    """

    def __init__(self, client: EngineClient, count: int) -> None:
        self._client, self._count = client, count
        self._outputs: Outputs | None = None
        self._num_aborts = client.num_aborts
        client.idle_slots += count

    async def outputs(self, requests: Sequence[EngineRequest]) -> list[OutputDelta]:
        """Return the only delta of each request.

        Args:
            requests: at most `count` requests for one new token each.

        Raises:
            EngineLost: the engine process has exited.
            Refused: the engine rejects a request.
        """
        assert len(requests) <= self._count
        if self._num_aborts != self._client.num_aborts:  # between two steps
            return [OutputDelta(-1, finish_reason="abort")] * len(requests)
        ids, self._outputs = self._client.add_requests(requests, reserved=True)
        self._client.idle_slots -= len(requests)
        try:
            deltas = {delta.request_id: delta async for delta in self._outputs.deltas()}
        finally:
            self._outputs.close()
            self._client.idle_slots += len(requests)
        return [deltas[request_id] for request_id in ids]

    def close(self) -> None:
        """Abort the requests in flight and release the outputs; later calls do nothing."""
        if self._outputs is not None:
            self._outputs.close()
        self._client.idle_slots -= self._count
        self._count = 0


class EngineClient:
    """Send requests to the engine process and dispatch its messages.

    Args:
        reader, writer: streams of the link to the engine process.
        max_outputs: most outputs in flight, running and waiting.
        max_unsent: most unread tokens of a request.
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
        self._frames: list[bytes] = []  # messages that are not written yet
        self._next_id = 0
        self._replies: dict[int, asyncio.Future[Any]] = {}  # of commands and embeddings
        self._num_embeddings = 0  # texts that wait for their embedding
        self.idle_slots = 0
        """Reserved outputs that are not in flight."""
        self.num_aborts = 0
        """How often all running outputs have been aborted."""
        self._last_message_time = time.monotonic()
        self.lost = asyncio.Event()
        """Set when the engine process has exited."""
        self.draining = asyncio.Event()
        """Set when no more requests are admitted."""
        self.stats: Mapping[str, float] = {}
        """Statistics of the last step."""
        self.facts: Mapping[str, Any] = {}
        """Constant facts about the engine; empty until it runs."""

    @property
    def active(self) -> int:
        """Number of unfinished and reserved outputs, and of unfinished embeddings."""
        return len(self._outputs) + self.idle_slots + self._num_embeddings

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last message of the engine."""
        return time.monotonic() - self._last_message_time

    def reserve(self, count: int) -> Reservation:
        """Return a reservation of outputs, for a request with many steps.

        Raises:
            QueueFull, Draining, EngineLost: as in `add_requests`.
        """
        self._check_admission(count)
        return Reservation(self, count)

    def add_requests(
        self, requests: Sequence[EngineRequest], *, reserved: bool = False
    ) -> tuple[list[int], Outputs]:
        """Send the requests of one HTTP request; return their ids and the queue of their deltas.

        Args:
            requests: requests for one output each, without ids.
            reserved: the outputs have been admitted by a reservation.

        Raises:
            QueueFull: the outputs would exceed `max_outputs`.
            Draining: the server is shutting down.
            EngineLost: the engine process has exited.
        """
        ids = self._admit(len(requests), reserved=reserved)
        outputs = Outputs(self, ids, self._max_unsent)
        for request_id, request in zip(ids, requests, strict=True):
            request = dataclasses.replace(request, request_id=request_id)
            self._send({"kind": "add", "request": to_message(request)}, turns=_TURNS)
            self._outputs[request_id] = outputs
        return ids, outputs

    def embed(self, prompts: Sequence[Sequence[int]]) -> list[asyncio.Future[list[float]]]:
        """Send texts; return their embeddings. Cancelling an embedding aborts it.

        An embedding raises Refused if the engine rejects the text, and EngineLost if the engine
        process exits.

        Args:
            prompts: token ids of each text.

        Raises:
            QueueFull, Draining, EngineLost: as in `add_requests`.
        """
        embeddings = []
        for request_id, prompt in zip(self._admit(len(prompts)), prompts, strict=True):
            self._send({"kind": "embed", "id": request_id, "prompt": prompt}, turns=_TURNS)
            embedding = self._expect_reply(request_id)
            self._num_embeddings += 1
            embedding.add_done_callback(functools.partial(self._end_embedding, request_id))
            embeddings.append(embedding)
        return embeddings

    def _check_admission(self, count: int) -> None:
        """Check that new outputs can be admitted. Raises as `add_requests`."""
        if self.lost.is_set():
            raise EngineLost
        if self.draining.is_set():
            raise Draining
        if self.active + count > self.max_outputs:
            raise QueueFull

    def _admit(self, count: int, *, reserved: bool = False) -> list[int]:
        """Return the ids of new outputs. Raises as `add_requests`."""
        if not reserved:
            self._check_admission(count)
        elif self.lost.is_set():
            raise EngineLost
        self._next_id += count
        return list(range(self._next_id - count, self._next_id))

    def _end_embedding(self, request_id: int, embedding: asyncio.Future[Any]) -> None:
        self._num_embeddings -= 1
        if embedding.cancelled() and self._replies.pop(request_id, None) is not None:
            self._send({"kind": "abort", "id": request_id})

    def _expect_reply(self, message_id: int) -> asyncio.Future[Any]:
        reply = self._replies[message_id] = asyncio.get_running_loop().create_future()
        return reply

    async def control(self, action: str, **fields: Any) -> dict[str, Any]:
        """Run an administration command between two steps (see `EngineControl`); return the reply.

        Raises:
            Refused: the engine rejects the command; its state has not changed.
            EngineLost: the engine process has exited.
        """
        if self.lost.is_set():
            raise EngineLost
        self.num_aborts += action == "pause" and fields.get("mode") == "abort"
        message_id, self._next_id = self._next_id, self._next_id + 1
        reply = self._expect_reply(message_id)
        self._send({"kind": "control", "id": message_id, "action": action, **fields})
        return await reply

    def abort(self, ids: Sequence[int]) -> None:
        """Abort outputs; finished outputs are ignored."""
        for request_id in ids:
            if self._outputs.pop(request_id, None) is not None:
                self._send({"kind": "abort", "id": request_id})

    def _send(self, message: Mapping[str, Any], *, turns: int = 0) -> None:
        """Send a message after some iterations of the event loop, batched with later messages."""
        self._frames.append(frame(message))
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
        """Dispatch the engine's messages until the engine process exits."""
        frames = FrameReader()
        while data := await self._read():
            for message in frames.feed(data):
                self._last_message_time = time.monotonic()
                if message["kind"] == "drain":
                    self.draining.set()
                elif message["kind"] == "facts":
                    self.facts = message["facts"]
                elif message["kind"] == "done":
                    self._deliver_reply(message)
                elif message["kind"] == "refused":
                    self._deliver_refusal(message)
                else:
                    self._deliver_step(message)
        self.lost.set()
        for outputs in set(self._outputs.values()):
            outputs.fail(EngineLost())
        self._outputs.clear()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(EngineLost())

    def _deliver_reply(self, message: Mapping[str, Any]) -> None:
        reply = self._replies.pop(message["id"], None)
        if reply is None or reply.done():  # the caller has been cancelled
            return
        if message["error"]:
            reply.set_exception(Refused(message["error"]))
        else:
            reply.set_result(message["result"])

    def _deliver_refusal(self, message: Mapping[str, Any]) -> None:
        outputs = self._outputs.pop(message["id"], None)
        if outputs is not None:  # not aborted meanwhile
            outputs.refuse(message["id"], Refused(message["error"], message["field"]))

    async def _read(self) -> bytes:
        try:
            return await self._reader.read(_READ_BYTES)
        except ConnectionError:
            return b""

    def _deliver_step(self, message: Mapping[str, Any]) -> None:
        self.stats = message["stats"]
        for values in message["deltas"]:
            delta = OutputDelta(*values)
            outputs = self._outputs.get(delta.request_id)
            if outputs is None:  # aborted meanwhile
                continue
            if delta.finish_reason:
                del self._outputs[delta.request_id]
            outputs.put(delta)
