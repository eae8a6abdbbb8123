# SPDX-License-Identifier: Apache-2.0
"""The loop of the engine process: receive messages from the HTTP process, run a step, send deltas.

Only rank 0 receives messages. It broadcasts them before each step, so that all replicas get the
same requests and all ranks of a replica schedule the same steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import select
import socket
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from megatron.core.inference.request_state import SchedulerStats
from megatron.core.inference.requests import EngineRequest, OutputDelta, RequestError
from megatron.core.inference.router import Replicas, all_gather_json
from megatron.core.process_groups import Group
from megatron.inference.server.engine.control import EngineControl
from megatron.inference.server.engine.link import FrameReader, frame, from_message

if TYPE_CHECKING:
    from megatron.inference.server.engine.embedder import Embedder
    from megatron.inference.server.guided_decoding.grammars import (
        Grammars,
        ReasoningLimit,
        TokenMask,
    )

#: Seconds between two heartbeats of an idle engine.
IDLE_SECONDS = 0.5

_READ_BYTES = 1 << 20
# Seconds between two polls for messages while the only work is the compilation of a grammar.
_COMPILE_SECONDS = 0.01

# Seconds between two polls for messages while an idle engine receives weights.
_RECEIVE_SECONDS = 0.05

EngineMessage = Mapping[str, Any]


class EngineLoop:
    """Run the replicas of an engine for the HTTP process.

    Args:
        replicas: the engines of all data-parallel ranks.
        link: socket to the HTTP process; None on all ranks but 0.
        host_group: group of all ranks for CPU tensors; its collectives may overlap with a step (see
            `ProcessGroupCollection.host_group`).
        grammars: grammars of structured output; None if the tokenizer does not support them.
        embedder: embedder of texts; None if the model has no pooling.
        model_facts: facts about the model, for `/health`.
        control: executes administration commands.
    """

    def __init__(
        self,
        replicas: Replicas,
        link: socket.socket | None,
        host_group: Group,
        *,
        grammars: Grammars | None,
        embedder: Embedder | None = None,
        model_facts: Mapping[str, Any] | None = None,
        control: EngineControl | None = None,
    ) -> None:
        self._model_facts, self._control = model_facts or {}, control or EngineControl(replicas)
        self._replicas, self._engine = replicas, replicas.engine
        self._link, self._host_group = link, host_group
        self._grammars, self._embedder = grammars, embedder
        self._texts: dict[int, Sequence[int]] = {}  # texts to embed, by request id
        self._compiler = ThreadPoolExecutor(1)
        self._compiling: dict[int, tuple[EngineMessage, Future[Any]]] = {}  # by request id
        self._reader = FrameReader()
        self._unfinished: set[int] = set()  # ids of requests
        self._weights_message_id = -1  # replied to once the weights are installed
        self._extra_deltas: list[OutputDelta] = []  # outside of steps: aborts and profiles
        # A socket and not a flag, as it has to interrupt the `select` of an idle loop.
        self._wake, self._woken = socket.socketpair()

    def drain(self) -> None:
        """Stop admitting requests; the loop ends after the last answer.

        Safe to call from a signal handler or another thread.
        """
        self._wake.send(b"d")

    def run(self) -> None:
        """Serve until the HTTP process ends."""
        with self._compiler, self._wake, self._woken:
            self._send({"kind": "facts", "facts": self._facts()})
            self._serve()

    def _serve(self) -> None:
        while True:
            for message in self._broadcast(self._receive()):
                if message["kind"] == "add":
                    self._add(from_message(EngineRequest, message["request"]))
                elif message["kind"] == "embed":
                    self._add_text(message["id"], message["prompt"])
                elif message["kind"] == "abort":
                    self._abort(message["id"])
                elif message["kind"] == "control":
                    self._administer(message)
                elif message["kind"] == "received":
                    self._install_weights(message["refused"])
                else:
                    assert message["kind"] == "end", message
                    return
            self._report(self._extra_deltas + self._replicas.step())
            self._extra_deltas = []
            self._embed()

    def _broadcast(self, messages: Sequence[EngineMessage]) -> list[EngineMessage]:
        """Return the messages of rank 0; all ranks call it.

        Once all ranks have finished receiving weights, it inserts a message "received": to install
        the weights, or with the error of a rank.
        """
        messages_and_error = [list(messages), self._control.received]
        gathered = all_gather_json(messages_and_error, self._host_group)
        errors = [error for _, error in gathered if error is not None]
        if len(errors) == len(gathered):
            gathered[0][0].insert(
                0, {"kind": "received", "refused": next(filter(None, errors), "")}
            )
        return gathered[0][0]

    def _receive(self) -> list[EngineMessage]:
        """Return the messages of the HTTP process; an idle engine waits a moment for them."""
        if self._link is None:
            return []
        busy = (self._unfinished or self._texts) and not self._engine.paused
        wait = 0.0 if busy else IDLE_SECONDS
        if wait and self._compiling:
            futures.wait([work for _, work in self._compiling.values()], _COMPILE_SECONDS)
            wait = 0.0
        if wait and self._control.receiving:
            wait = _RECEIVE_SECONDS
        messages: list[EngineMessage] = []
        while ready := select.select([self._link, self._woken], [], [], wait)[0]:
            wait = 0.0
            if self._woken in ready:
                self._woken.recv(1)
                self._send({"kind": "drain"})
            if self._link not in ready:
                continue
            try:
                data = self._link.recv(_READ_BYTES)
            except ConnectionResetError:
                data = b""
            if not data:
                return [*messages, {"kind": "end"}]
            messages += self._reader.feed(data)
        return self._compile_grammars(messages)

    def _compile_grammars(self, messages: Sequence[EngineMessage]) -> list[EngineMessage]:
        """Hold back requests whose grammar is being compiled; return the other messages and the
        requests whose grammar is ready. Steps do not wait for a compilation."""
        ready = []
        for message in messages:
            if message["kind"] == "add" and "grammar" in message["request"]:
                assert self._grammars is not None
                request = message["request"]
                work = self._compiler.submit(self._grammars.compile, request["grammar"])
                self._compiling[request["request_id"]] = (message, work)
            elif message["kind"] != "abort" or self._compiling.pop(message["id"], None) is None:
                ready.append(message)
        compiled_ids = [
            request_id for request_id, (_, work) in self._compiling.items() if work.done()
        ]
        return ready + [self._compiling.pop(request_id)[0] for request_id in compiled_ids]

    def _add(self, request: EngineRequest) -> None:
        assert request.request_id is not None
        try:
            self._replicas.add(self._with_mask(request))
        except ValueError as error:  # one line for the user: the cache is too small for it
            field = error.field if isinstance(error, RequestError) else ""
            refusal = {"id": request.request_id, "error": str(error), "field": field}
            self._send({"kind": "refused", **refusal})
            return
        self._unfinished.add(request.request_id)

    def _with_mask(self, request: EngineRequest) -> EngineRequest:
        """Return a request with the mask of its grammar and its reasoning limit."""
        mask: TokenMask | ReasoningLimit | None = None
        if request.grammar is not None:
            assert self._grammars is not None
            mask = self._grammars.mask(request.grammar)
        if request.reasoning_limit is not None:
            assert self._grammars is not None
            mask = self._grammars.reasoning_limit(mask, **request.reasoning_limit)
        if mask is None:
            return request
        return dataclasses.replace(request, mask=mask, forced=mask.forced)

    def _add_text(self, request_id: int, text: Sequence[int]) -> None:
        """Queue a text to embed."""
        assert self._embedder is not None
        max_tokens = self._embedder.max_tokens
        if len(text) > max_tokens:
            error = (
                f"a text has {len(text)} tokens, but a forward pass takes at most "
                f"{max_tokens} (--inference-max-tokens)"
            )
            self._reply(request_id, error=error)
            return
        self._texts[request_id] = text

    def _abort(self, request_id: int) -> None:
        """Abort an output or an embedding; a finished one is ignored."""
        self._texts.pop(request_id, None)
        self._replicas.abort(request_id)
        self._unfinished.discard(request_id)

    def _administer(self, message: EngineMessage) -> None:
        """Execute an administration command and reply."""
        try:
            if message["action"] == "weights" and message["load"] is None:
                self._control.receive(message)
                self._weights_message_id = message["id"]
                return
            if message["action"] == "pause" and message["mode"] == "abort":
                for request_id in sorted(self._unfinished):
                    self._extra_deltas += self._replicas.abort(request_id)
            state, deltas = self._control.apply(message)
        except ValueError as error:  # one line for the user
            self._reply_to_command(message["id"], error=str(error))
            return
        self._extra_deltas += deltas
        self._reply_to_command(message["id"], state)

    def _install_weights(self, failure: str) -> None:
        """Install the weights that all ranks have received, and reply to the command."""
        try:
            state = self._control.install_received(failure)
        except ValueError as error:
            self._reply_to_command(self._weights_message_id, error=str(error))
            return
        self._reply_to_command(self._weights_message_id, state)

    def _reply_to_command(
        self, message_id: int, state: Mapping[str, Any] | None = None, error: str = ""
    ) -> None:
        self._report([])  # the metrics must show the new state before the reply
        self._reply(message_id, state or {}, error)

    def _reply(self, message_id: int, content: Any = None, error: str = "") -> None:
        """Reply to an administration command or with an embedding."""
        self._send({"kind": "done", "id": message_id, "result": content, "error": error})

    def _embed(self) -> None:
        """Embed the oldest texts that fit one forward pass; a step runs between two passes."""
        if not self._texts or self._engine.paused or self._engine.asleep:
            return
        assert self._embedder is not None
        count = self._embedder.batch_size([len(text) for text in self._texts.values()])
        ids = list(self._texts)[:count]
        if self._engine.config.asynchronous:
            # Collectives of a step in flight must precede those of the forward pass.
            self._engine.drain()
        vectors = self._embedder([self._texts.pop(request_id) for request_id in ids])
        for request_id, vector in zip(ids, vectors, strict=True):
            self._reply(request_id, vector)

    def _report(self, deltas: Sequence[OutputDelta]) -> None:
        """Send the deltas of a step; without deltas the message is a heartbeat."""
        self._unfinished -= {delta.request_id for delta in deltas if delta.finish_reason}
        self._send({"kind": "step", "deltas": deltas, "stats": self._stats()})

    def _send(self, message: Mapping[str, Any]) -> None:
        """Send a message to the HTTP process, on rank 0."""
        if self._link is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                # After an error the next read sees the closed link.
                self._link.sendall(frame(message))

    def _stats(self) -> dict[str, float]:
        """Return the statistics of all replicas."""
        loads = self._replicas.loads()
        stats = sum((load.stats for load in loads), SchedulerStats())
        return {
            "running": sum(load.running for load in loads),
            "waiting": sum(load.waiting for load in loads),
            "cache_usage": sum(n.used_blocks for n in loads) / sum(n.num_blocks for n in loads),
            "preempted": stats.preempted,
            "steps": stats.steps,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "forced": stats.forced,
            "epoch": self._engine.epoch,
            "paused": self._engine.paused,
            "asleep": self._engine.asleep,
        }

    def _facts(self) -> dict[str, Any]:
        """Return the constant facts about the engine."""
        engine, config = self._engine, self._engine.config
        return {
            **self._model_facts,
            "device": str(engine.device),
            "cache_blocks": engine.scheduler.kv_cache.pool.num_blocks,
            "block_tokens": config.block_size,
            "max_requests": config.max_num_seqs,
            "max_step_tokens": config.max_num_batched_tokens,
            "prefix_caching": config.prefix_caching,
            "async_scheduling": config.asynchronous,
            "drafts_of_a_step": config.num_speculative_tokens,
            "recorded_decode_steps": engine.graphs is not None and not engine.graphs.refused,
            "structured_output": self._grammars is not None,
        }
