# SPDX-License-Identifier: Apache-2.0
"""Data-parallel replicas of the engine: which one serves a request, and what all of them find.

    >>> replicas = Replicas(engine, groups.host_group("dp"))
    >>> replicas.add(Request(prompt=(5, 6, 7), max_new_tokens=20))
    0
    >>> while replicas.unfinished:
    ...     completions = replicas.step()
    >>> len(completions[0].tokens)
    20

Every rank of every replica is told the same requests between the same steps. `RequestRouter`
assigns each to a replica, alike on all ranks, and that one's engine serves it. After each step the
replicas exchange what is new, one JSON message each, so that all ranks return the same outputs. The
hosts do that, while an asynchronous engine computes its next step.
"""

from __future__ import annotations

import json
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.comm.collectives import all_gather
from megatron.core.inference.blocks import block_digests
from megatron.core.inference.engine import Engine
from megatron.core.inference.requests import Completion, Request
from megatron.core.inference.scheduler import CacheStats
from megatron.core.process_groups import Group

#: Bytes of the first collective of a message; longer ones take another.
FIRST_BYTES = 4096
_LENGTH = struct.Struct("<I")


def all_gather_json(message: Any, group: Group) -> list[Any]:
    """Return the message of each rank, plain JSON values; all ranks call this.

    Args:
        group: its collectives take tensors of the CPU.
    """
    if group.size == 1:
        return [message]
    data = json.dumps(message, separators=(",", ":")).encode()
    framed = _LENGTH.pack(len(data)) + data
    parts = _gathered(framed, FIRST_BYTES, group)
    lengths = [_LENGTH.unpack_from(part)[0] + _LENGTH.size for part in parts]
    if max(lengths) > FIRST_BYTES:
        more = _gathered(framed[FIRST_BYTES:], max(lengths) - FIRST_BYTES, group)
        parts = [first + rest for first, rest in zip(parts, more, strict=True)]
    pairs = zip(parts, lengths, strict=True)
    return [json.loads(part[_LENGTH.size : length]) for part, length in pairs]


def _gathered(data: bytes, size: int, group: Group) -> list[bytes]:
    """Return the first `size` bytes of each rank's data, zeros where it is shorter."""
    padded = bytearray(data[:size].ljust(size, b"\0"))
    there = all_gather(torch.frombuffer(padded, dtype=torch.uint8), group)
    return [part.numpy().tobytes() for part in there.view(group.size, size)]


class RequestRouter:
    """Choose the replica of each request; knows no engine, so ranks that tell it the same choose
    the same.

    A request goes to a replica that has a free row for each of its outputs, if any has. Of these it
    goes to the one that was sent the longest beginning of its prompt, in whole blocks, so a prefix
    is computed in one replica as long as that has room. Of equal ones it goes to the one with the
    fewest tokens to serve: prompts and new tokens of all outputs that wait and run. Of equal ones,
    to the first.

    Args:
        replicas: how many there are.
        max_rows: that run at a time in each.
        block_size: tokens of a block of their caches.
        num_blocks: of each cache: as many blocks of prompts are remembered of each replica, those
            that were sent last. 0 remembers none.

    Attributes:
        requests: sent to each replica.
        matched: tokens of their prompts that the replica had been sent before.
    """

    def __init__(self, replicas: int, *, max_rows: int, block_size: int, num_blocks: int) -> None:
        self._max_rows, self._block_size, self._num_blocks = max_rows, block_size, num_blocks
        self._rows, self._tokens = [0] * replicas, [0] * replicas
        self._sent: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(replicas)]
        self.requests, self.matched = [0] * replicas, [0] * replicas

    @property
    def load(self) -> list[list[int]]:
        """Requests that each replica was sent, and tokens that it has to serve."""
        return [self.requests, self._tokens]

    def assign(self, request: Request) -> int:
        """Return the replica of a request, which counts as sent there."""
        digests = block_digests(request.prompt, self._block_size) if self._num_blocks else []
        every = range(len(self._rows))
        free = [r for r in every if self._rows[r] + request.n <= self._max_rows]
        shared = [self._shared(sent, digests) for sent in self._sent]
        chosen = min(free or every, key=lambda r: (-shared[r], self._tokens[r], r))
        self._rows[chosen] += request.n
        self._tokens[chosen] += request.n * self._cost(request)
        self.requests[chosen] += 1
        self.matched[chosen] += shared[chosen] * self._block_size
        sent = self._sent[chosen]
        for digest in reversed(digests):  # as in the cache, the last block goes before the first
            sent[digest] = None
            sent.move_to_end(digest)
        while len(sent) > self._num_blocks:
            sent.popitem(last=False)
        return chosen

    def output_ended(self, replica: int, request: Request) -> None:
        """Take note that an output of a request has ended."""
        self._rows[replica] -= 1
        self._tokens[replica] -= self._cost(request)

    def forget_prefixes(self) -> None:
        """Remember no prompt: the caches hold none any more."""
        for sent in self._sent:
            sent.clear()

    @staticmethod
    def _cost(request: Request) -> int:
        return len(request.prompt) + request.max_new_tokens

    @staticmethod
    def _shared(sent: OrderedDict[bytes, None], digests: Sequence[bytes]) -> int:
        """Return how many blocks of a prompt, from its first on, were sent before."""
        for count, digest in enumerate(digests):
            if digest not in sent:
                return count
        return len(digests)


class EngineLoad(NamedTuple):
    """What an engine has to do between two steps.

    Args:
        running, waiting: outputs.
        used_blocks, num_blocks: of the cache.
        stats: since the start.
    """

    running: int
    waiting: int
    used_blocks: int
    num_blocks: int
    stats: CacheStats

    @staticmethod
    def of(engine: Engine) -> EngineLoad:
        """Return that of an engine now."""
        scheduler = engine.scheduler
        blocks, free = scheduler.pool.num_blocks, scheduler.pool.available
        rows = len(scheduler.running), len(scheduler.waiting)
        return EngineLoad(*rows, blocks - free, blocks, engine.stats)


@dataclass(eq=False)
class _Routed:
    """A request and its replica.

    Args:
        replica: that serves it.
        local_id: of that one's engine; -1 on ranks of the others.
        outputs: that have not ended, by index, as every rank knows them.
    """

    request: Request
    replica: int
    local_id: int
    outputs: dict[int, Completion]


#: Lists of a completion that grow; what is new at their ends is exchanged.
_GROWING = (
    "tokens",
    "logprobs",
    "epochs",
    "top_logprobs",
    "prompt_logprobs",
    "prompt_top_logprobs",
)


class Replicas:
    """The engines of data-parallel ranks as one.

    All ranks make it, and call its methods, in the same order with the same requests.

    Args:
        engine: of this rank, alone or with the tensor and pipeline parallel ranks of its replica.
        group: the ranks that have this rank's place in each replica; see
            `ProcessGroupCollection.host_group`.

    Attributes:
        router: which requests went where; None for a single replica.
    """

    def __init__(self, engine: Engine, group: Group) -> None:
        self.engine, self.group = engine, group
        self.router: RequestRouter | None = None
        if group.size > 1:
            config, pool = engine.config, engine.scheduler.pool
            self.router = RequestRouter(
                group.size,
                max_rows=config.max_rows,
                block_size=config.block_size,
                num_blocks=pool.num_blocks if config.prefix_caching else 0,
            )
        self._routed: dict[int, _Routed] = {}
        self._global_ids: dict[int, int] = {}  # by the local engine's
        self._next_id = 0
        self._loads = [EngineLoad.of(engine)] * group.size

    @property
    def unfinished(self) -> int:
        """Outputs of all replicas that have not ended."""
        if self.router is None:
            return self.engine.unfinished
        return sum(len(routed.outputs) for routed in self._routed.values())

    def add(self, request: Request) -> int:
        """Take a request in and return its id. Raises ValueError as `Engine.add` does."""
        if self.router is None:
            return self.engine.add(request)
        self.engine.check(request)
        replica, local_id = self.router.assign(request), -1
        number, self._next_id = self._next_id, self._next_id + 1
        if replica == self.group.rank:
            local_id = self.engine.add(request)
            self._global_ids[local_id] = number
        outputs = {i: Completion.begin(request, number, i) for i in range(request.n)}
        self._routed[number] = _Routed(request, replica, local_id, outputs)
        return number

    def step(self) -> list[Completion]:
        """Compute one step of each replica that has work; return the outputs that have a new token
        or ended, as `Engine.step` does.

        Raises:
            ValueError: ranks that were told different requests.
        """
        if self.router is None:
            return self.engine.step()
        # After `Engine.pause` an output may be there twice.
        found = {(c.request_id, c.index): c for c in self.engine.step()}
        news = [self._news(completion) for completion in found.values()]
        *numbers, stats = EngineLoad.of(self.engine)
        load = [*numbers, list(vars(stats).values())]
        message = [self.router.load, [one for one in news if one], load]
        parts = all_gather_json(message, self.group)
        if any(sent != parts[0][0] for sent, *_ in parts):
            raise ValueError(
                f"the {self.group.size} data-parallel replicas have assigned requests differently: "
                "give all of their ranks the same requests, in one order and between the same steps"
            )
        self._loads = [EngineLoad(*one[:-1], CacheStats(*one[-1])) for *_, one in parts]
        return [self._completed(*one) for _, part, *_ in parts for one in part]

    def abort(self, request_id: int) -> list[Completion]:
        """End all outputs of a request now; return them. An id that has ended does nothing."""
        if self.router is None:
            return self.engine.abort(request_id)
        routed = self._routed.get(request_id)
        if routed is None:
            return []
        if routed.local_id >= 0:
            self.engine.abort(routed.local_id)
        ended = list(routed.outputs.values())
        for completion in ended:
            self._end(completion, "abort")
        return ended

    def finish(self, request_id: int, index: int) -> None:
        """End one output now, with the reason "stop": the caller saw its end in the text."""
        if self.router is None:
            self.engine.finish(request_id, index)
        routed = self._routed.get(request_id)
        if routed is not None and index in routed.outputs:
            if routed.local_id >= 0:
                self.engine.finish(routed.local_id, index)
            self._end(routed.outputs[index], "stop")

    def forget_cached(self) -> None:
        """Give up what the prefix caches hold."""
        self.engine.scheduler.forget_cached()
        self._forget_prefixes()

    def pause(self, *, keep_cache: bool = True) -> None:
        """Do as `Engine.pause`."""
        self.engine.pause(keep_cache=keep_cache)
        if not keep_cache:
            self._forget_prefixes()

    def sleep(self, weights: Iterable[Tensor] = ()) -> None:
        """Do as `Engine.sleep`."""
        self.engine.sleep(weights)
        self._forget_prefixes()

    def weights_replaced(self) -> None:
        """Do as `Engine.weights_replaced`."""
        self.engine.weights_replaced()
        self._forget_prefixes()

    def loads(self) -> list[EngineLoad]:
        """Return what each replica has to do; of several, as of the last step."""
        return [EngineLoad.of(self.engine)] if self.router is None else list(self._loads)

    def stats(self) -> list[CacheStats]:
        """Return what the scheduler and the prefix cache of each replica did, as `loads` does."""
        return [load.stats for load in self.loads()]

    def _forget_prefixes(self) -> None:
        if self.router is not None:
            self.router.forget_prefixes()

    def _news(self, completion: Completion) -> list[Any]:
        """Return what an output of this rank's engine has that was not exchanged yet; nothing if
        it has been aborted meanwhile."""
        number = self._global_ids.get(completion.request_id, -1)
        if number < 0 or completion.index not in self._routed[number].outputs:
            return []
        known = self._routed[number].outputs[completion.index]
        mine, sent = vars(completion), vars(known)
        tails = [None if mine[n] is None else mine[n][len(sent[n]) :] for n in _GROWING]
        return [
            number,
            completion.index,
            completion.cached_tokens,
            completion.finish_reason,
            tails,
        ]

    def _completed(
        self, number: int, index: int, cached: int, reason: str, tails: Sequence[Any]
    ) -> Completion:
        """Add what a step of some replica found to what all ranks know of an output."""
        completion = self._routed[number].outputs[index]
        completion.cached_tokens = cached
        for name, tail in zip(_GROWING, tails, strict=True):
            if tail and name.endswith("top_logprobs"):
                tail = [[(token, logprob) for token, logprob in one] for one in tail]
            if tail:
                vars(completion)[name] += tail
        if reason:
            self._end(completion, reason)
        return completion

    def _end(self, completion: Completion, reason: str) -> None:
        """Finish an output on this rank."""
        assert self.router is not None
        completion.finish_reason = reason
        routed = self._routed[completion.request_id]
        self.router.output_ended(routed.replica, routed.request)
        del routed.outputs[completion.index]
        if not routed.outputs:
            del self._routed[completion.request_id]
            self._global_ids.pop(routed.local_id, None)
