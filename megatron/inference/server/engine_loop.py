# SPDX-License-Identifier: Apache-2.0
"""The loop of the engine process: orders from the HTTP process in, a step, what it found out.

Of several ranks the first alone is told orders, and shares them with the others before each step,
so that all replicas are told the same requests and all ranks of one plan the same steps.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from megatron.core.inference.engine import Completion, Request
from megatron.core.inference.requests import RequestError
from megatron.core.inference.router import Replicas, all_gather_json
from megatron.core.inference.sampling import SamplingParams
from megatron.core.inference.scheduler import CacheStats
from megatron.core.process_groups import Group
from megatron.inference.server.engine_control import EngineControl
from megatron.inference.server.protocol import Ask, FrameReader, News, frame

if TYPE_CHECKING:
    from megatron.inference.server.embedder import Embedder
    from megatron.inference.server.structured import Grammars, ReasoningLimit, TokenMask

#: Between two heartbeats of an engine that has nothing to do.
IDLE_SECONDS = 0.5

_READ_BYTES = 1 << 20
# Between two looks for orders while there is nothing to do but to compile a grammar.
_COMPILE_SECONDS = 0.01

# The same while weights are on their way.
_RECEIVE_SECONDS = 0.05

Order = Mapping[str, Any]


class EngineLoop:
    """Run the replicas of an engine for the HTTP process.

    Args:
        replicas: as this rank knows them.
        link: to the HTTP process; None on ranks that follow.
        hosts: all ranks, the first of which has the link. Its collectives take tensors of the CPU,
            and go on while a step does (see `ProcessGroupCollection.host_group`).
        grammars: of structured output; None where the model can have none.
        embedder: None where the model embeds no texts.
        explained: facts about the model, for `/health`.
        control: does what administration asks for.
    """

    def __init__(
        self,
        replicas: Replicas,
        link: socket.socket | None,
        hosts: Group,
        *,
        grammars: Grammars | None,
        embedder: Embedder | None = None,
        explained: Mapping[str, Any] | None = None,
        control: EngineControl | None = None,
    ) -> None:
        self._explained, self._control = explained or {}, control or EngineControl(replicas)
        self._replicas, self._engine = replicas, replicas.engine
        self._link, self._hosts = link, hosts
        self._grammars, self._embedder = grammars, embedder
        self._to_embed: dict[int, Ask] = {}  # by its id
        self._compiler = ThreadPoolExecutor(1)
        self._compiling: dict[int, tuple[Order, Future[object]]] = {}  # by the id of the ask
        self._reader = FrameReader()
        self._asks: dict[int, Ask] = {}  # by the engine's id
        self._engine_ids: dict[int, int] = {}  # by the id of the ask
        self._reported: dict[int, int] = {}  # tokens, by the engine's id
        self._weights_order = -1  # that is answered once weights have come
        # Tokens of prompts that were looked up in the prefix cache, and found there.
        self._prefix_queried = self._prefix_hit = 0
        self._news_outside: list[News] = []  # of no step: refusals, aborts, and profiles
        # Not a flag alone: the loop may be waiting for orders.
        self._wake, self._woken = socket.socketpair()

    def drain(self) -> None:
        """Have the HTTP process admit nothing more; the loop ends when all have their answers.

        A signal handler or another thread may call it.
        """
        self._wake.send(b"d")

    def run(self) -> None:
        """Serve until the HTTP process ends."""
        with self._compiler, self._wake, self._woken:
            self._send({"kind": "facts", "facts": self._facts()})
            self._serve()

    def _serve(self) -> None:
        while True:
            for order in self._shared(self._received()):
                if order["kind"] == "add":
                    self._add(Ask.from_json(order))
                elif order["kind"] == "abort":
                    self._abort(order["id"])
                elif order["kind"] == "control":
                    self._administer(order)
                elif order["kind"] == "received":
                    self._take_weights(order["refused"])
                else:
                    assert order["kind"] == "end", order
                    return
            news = self._known(self._replicas.step())  # a pause may have ended all that were asked
            self._report(self._news_outside + news + self._embedded())
            self._news_outside = []

    def _shared(self, orders: Sequence[Order]) -> list[Order]:
        """Return the orders of the first rank; all ranks call it, the others with none.

        Once no rank receives weights any more, there is one order more: to put them in, or why some
        rank has none.
        """
        message = [list(orders), self._control.received]
        found = all_gather_json(message, self._hosts)
        received = [one for _, one in found if one is not None]
        if len(received) == len(found):
            found[0][0].insert(0, {"kind": "received", "refused": next(filter(None, received), "")})
        return found[0][0]

    def _received(self) -> list[Order]:
        """Return what the HTTP process has sent; wait a little for it if there is nothing to do."""
        if self._link is None:
            return []
        busy = (self._asks or self._to_embed) and not self._engine.paused
        wait = 0.0 if busy else IDLE_SECONDS
        if wait and self._compiling:
            futures.wait([work for _, work in self._compiling.values()], _COMPILE_SECONDS)
            wait = 0.0
        if wait and self._control.receiving:
            wait = _RECEIVE_SECONDS
        found: list[Order] = []
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
                return [*found, {"kind": "end"}]
            found += self._reader.feed(data)
        return self._compiled(found)

    def _compiled(self, orders: Sequence[Order]) -> list[Order]:
        """Return orders without those whose grammar is being compiled, and with those for which
        that is done: the engine's steps do not wait for it."""
        found = []
        for order in orders:
            if order["kind"] == "add" and order["grammar"] is not None:
                assert self._grammars is not None
                work = self._compiler.submit(self._grammars.compile, order["grammar"])
                self._compiling[order["id"]] = (order, work)
            elif order["kind"] != "abort" or self._compiling.pop(order["id"], None) is None:
                found.append(order)
        done = [number for number, (_, work) in self._compiling.items() if work.done()]
        return found + [self._compiling.pop(number)[0] for number in done]

    def _add(self, ask: Ask) -> None:
        if ask.embed:
            assert self._embedder is not None
            most = self._embedder.max_tokens
            if len(ask.prompt) <= most:
                self._to_embed[ask.id] = ask
            else:
                told = f"a text of {len(ask.prompt)} tokens: --inference-max-tokens {most} embeds"
                self._news_outside.append(News(id=ask.id, refused=f"{told} no longer ones"))
            return
        try:
            mask: TokenMask | ReasoningLimit | None = None
            if ask.grammar is not None:
                assert self._grammars is not None
                mask = self._grammars.mask(ask.grammar)
            if ask.reasoning_limit is not None:
                assert self._grammars is not None
                mask = self._grammars.reasoning_limit(mask, **ask.reasoning_limit)
            number = self._replicas.add(
                Request(
                    prompt=tuple(ask.prompt),
                    max_new_tokens=ask.max_new_tokens,
                    sampling=SamplingParams(**ask.sampling),
                    stop_tokens=frozenset(ask.stop_tokens),
                    sequence=ask.sequence,
                    prompt_logprobs=ask.prompt_logprobs,
                    mask=mask,
                    forced=None if mask is None else mask.forced,
                    priority=ask.priority,
                )
            )
        except ValueError as error:  # one line for the user: the cache is too small for it
            field = error.field if isinstance(error, RequestError) else ""
            self._news_outside.append(News(id=ask.id, refused=str(error), refused_field=field))
            return
        self._asks[number], self._reported[number] = ask, 0
        self._engine_ids[ask.id] = number

    def _abort(self, ask_id: int) -> None:
        """End an output that nobody waits for any more; one that has ended does nothing."""
        self._to_embed.pop(ask_id, None)
        number = self._engine_ids.get(ask_id)
        if number is not None:
            self._replicas.abort(number)
            self._forget(number)

    def _administer(self, order: Order) -> None:
        """Do what administration asks for, and answer it."""
        try:
            if order["action"] == "weights" and order["load"] is None:
                self._control.receive(order)
                self._weights_order = order["id"]
                return
            if order["action"] == "pause" and order["mode"] == "abort":
                for number in list(self._asks):
                    self._news_outside += self._known(self._replicas.abort(number))
            told, completions = self._control.apply(order)
        except ValueError as error:  # one line for the user
            self._tell(order["id"], refused=str(error))
            return
        self._news_outside += self._known(completions)
        self._tell(order["id"], told)

    def _take_weights(self, refused: str) -> None:
        """Put weights in that all ranks have received, and answer the order."""
        try:
            told = self._control.take_received(refused)
        except ValueError as error:
            self._tell(self._weights_order, refused=str(error))
            return
        self._tell(self._weights_order, told)

    def _tell(self, order: int, told: Mapping[str, Any] | None = None, refused: str = "") -> None:
        """Answer an order."""
        self._report([])  # what is told holds in the metrics from here on
        self._send({"kind": "done", "id": order, "told": told or {}, "refused": refused})

    def _known(self, completions: Sequence[Completion]) -> list[News]:
        """Return the news of outputs that somebody waits for."""
        return [self._news(c) for c in completions if c.request_id in self._asks]

    def _embedded(self) -> list[News]:
        """Embed the texts that came first, as many as one forward pass takes: between two of them
        the engine has a step."""
        if not self._to_embed or self._engine.paused or self._engine.asleep:
            return []
        assert self._embedder is not None
        asks = list(self._to_embed.values())
        asks = asks[: self._embedder.batch([len(ask.prompt) for ask in asks])]
        if self._engine.config.asynchronous:
            self._engine.drain()  # its collectives and those of the forward pass are in one order
        vectors = self._embedder([ask.prompt for ask in asks])
        for ask in asks:
            del self._to_embed[ask.id]
        return [
            News(id=ask.id, finish_reason="stop", embedding=vector)
            for ask, vector in zip(asks, vectors, strict=True)
        ]

    def _forget(self, number: int) -> None:
        del self._engine_ids[self._asks.pop(number).id], self._reported[number]

    def _news(self, completion: Completion) -> News:
        """Return what an output has that was not reported yet."""
        number = completion.request_id
        start, ask = self._reported[number], self._asks[number]
        first = {}
        if not start:
            self._count_lookup(ask, completion)
            first = {
                "cached_tokens": completion.cached_tokens,
                "prompt_logprobs": completion.prompt_logprobs,
                "prompt_top_logprobs": completion.prompt_top_logprobs,
            }
        self._reported[number] = len(completion.tokens)
        if completion.finish_reason:
            self._forget(number)
        return News(
            id=ask.id,
            tokens=completion.tokens[start:],
            logprobs=completion.logprobs[start:],
            top_logprobs=completion.top_logprobs[start:],
            epochs=completion.epochs[start:],
            finish_reason=completion.finish_reason,
            **first,
        )

    def _count_lookup(self, ask: Ask, completion: Completion) -> None:
        """Count what the prefix cache had of a prompt, once for all its outputs."""
        looks_up = self._engine.config.prefix_caching and not ask.prompt_logprobs
        if looks_up and ask.counts_prompt:
            self._prefix_queried += len(ask.prompt)
            self._prefix_hit += completion.cached_tokens

    def _report(self, news: Sequence[News]) -> None:
        """Tell the HTTP process what a step found; without news it is a heartbeat."""
        self._send({"kind": "step", "news": [n.to_json() for n in news], "stats": self._stats()})

    def _send(self, message: Mapping[str, Any]) -> None:
        """Tell the HTTP process something; ranks that follow do not."""
        if self._link is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._link.sendall(frame(message))  # if it fails the next read finds the end

    def _stats(self) -> dict[str, float]:
        """Return what all replicas do together."""
        loads = self._replicas.loads()
        stats = sum((load.stats for load in loads), CacheStats())
        return {
            "running": sum(load.running for load in loads),
            "waiting": sum(load.waiting for load in loads),
            "cache_usage": sum(n.used_blocks for n in loads) / sum(n.num_blocks for n in loads),
            "prefix_queried": self._prefix_queried,
            "prefix_hit": self._prefix_hit,
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
        """Return what the engine is, which does not change."""
        engine, config = self._engine, self._engine.config
        return {
            **self._explained,
            "device": str(engine.device),
            "cache_blocks": engine.scheduler.pool.num_blocks,
            "block_tokens": config.block_size,
            "max_requests": config.max_rows,
            "max_step_tokens": config.max_step_tokens,
            "prefix_caching": config.prefix_caching,
            "async_scheduling": config.asynchronous,
            "drafts_of_a_step": config.num_speculative_tokens,
            "recorded_decode_steps": engine.graphs is not None and not engine.graphs.refused,
            "structured_output": self._grammars is not None,
        }
