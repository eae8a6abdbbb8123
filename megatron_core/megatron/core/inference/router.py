# SPDX-License-Identifier: Apache-2.0
"""Data-parallel replicas of the engine: request routing and exchange of outputs.

    >>> replicas = Replicas(engine, groups.host_group("dp"))
    >>> request_id = replicas.add(EngineRequest(prompt=(5, 6, 7), max_new_tokens=20))
    >>> outputs = Completions()
    >>> while replicas.unfinished:
    ...     outputs.add(replicas.step())
    >>> len(outputs[request_id, 0].tokens)
    20

All ranks of all replicas add the same requests between the same steps. `RequestRouter` assigns each
request to a replica, equally on all ranks, and the engine of the replica serves it. After each step
the replicas exchange their deltas, one JSON message each, so that all ranks return the same
deltas. The exchange runs on the hosts and overlaps with the next step of an asynchronous engine.
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
from megatron.core.inference.engine import Engine
from megatron.core.inference.kv_cache_manager import hash_blocks
from megatron.core.inference.request_state import SchedulerStats
from megatron.core.inference.requests import EngineRequest, OutputDelta
from megatron.core.process_groups import Group

#: Bytes of the first collective of a message; a longer message takes a second collective.
FIRST_BYTES = 4096
_LENGTH = struct.Struct("<I")


def all_gather_json(message: Any, group: Group) -> list[Any]:
    """All-gather a JSON-serialisable message from each rank.

    Args:
        message: message of this rank.
        group: group whose collectives take CPU tensors.
    """
    if group.size == 1:
        return [message]
    data = json.dumps(message, separators=(",", ":")).encode()
    framed = _LENGTH.pack(len(data)) + data
    # All ranks see all lengths, so they agree on whether a second collective follows.
    frames = _all_gather_bytes(framed, FIRST_BYTES, group)
    lengths = [_LENGTH.unpack_from(frame)[0] + _LENGTH.size for frame in frames]
    if max(lengths) > FIRST_BYTES:
        tails = _all_gather_bytes(framed[FIRST_BYTES:], max(lengths) - FIRST_BYTES, group)
        frames = [frame + tail for frame, tail in zip(frames, tails, strict=True)]
    pairs = zip(frames, lengths, strict=True)
    return [json.loads(frame[_LENGTH.size : length]) for frame, length in pairs]


def _all_gather_bytes(data: bytes, size: int, group: Group) -> list[bytes]:
    """Return the first `size` bytes of each rank's data, padded with zeros."""
    padded = bytearray(data[:size].ljust(size, b"\0"))
    gathered = all_gather(torch.frombuffer(padded, dtype=torch.uint8), group)
    return [row.numpy().tobytes() for row in gathered.view(group.size, size)]


class RequestRouter:
    """Assign requests to replicas.

    The router uses only the requests and their ends, never an engine, so all ranks assign requests
    equally. It prefers, in this order:

    1. replicas that can run all outputs of the request now;
    2. the longest prefix, in full blocks, of the prompts sent to the replica before, so that each
       prefix is computed by one replica while it has room;
    3. the fewest outstanding tokens: prompts and new tokens of all unfinished outputs;
    4. the lowest replica index.

    Args:
        replicas: number of replicas.
        max_num_seqs: largest number of running sequences per replica.
        block_size: tokens per cache block.
        num_blocks: cache blocks per replica, which is also the number of recently sent prompt
            blocks that the router remembers; 0 disables prefix affinity.

    Attributes:
        requests: number of requests sent to each replica.
        matched: prompt tokens with a prefix match, per replica.
    """

    def __init__(
        self, replicas: int, *, max_num_seqs: int, block_size: int, num_blocks: int
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._block_size, self._num_blocks = block_size, num_blocks
        self._num_seqs, self._tokens = [0] * replicas, [0] * replicas
        self._sent: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(replicas)]
        self.requests, self.matched = [0] * replicas, [0] * replicas

    @property
    def load(self) -> list[list[int]]:
        """Requests sent to each replica, and outstanding tokens of each replica."""
        return [self.requests, self._tokens]

    def assign(self, request: EngineRequest) -> int:
        """Choose the replica of a request and count the request as sent to it."""
        hashes = (
            hash_blocks(request.prompt, self._block_size, salt=request.cache_salt)
            if self._num_blocks
            else []
        )
        replicas = range(len(self._num_seqs))
        free = [r for r in replicas if self._num_seqs[r] + request.n <= self._max_num_seqs]
        shared = [self._num_shared_blocks(sent, hashes) for sent in self._sent]
        chosen = min(free or replicas, key=lambda r: (-shared[r], self._tokens[r], r))
        self._num_seqs[chosen] += request.n
        self._tokens[chosen] += request.n * self._cost(request)
        self.requests[chosen] += 1
        self.matched[chosen] += shared[chosen] * self._block_size
        sent = self._sent[chosen]
        # Reversed, as in `BlockPool.release`: the last block is evicted before the first.
        for block_hash in reversed(hashes):
            sent[block_hash] = None
            sent.move_to_end(block_hash)
        while len(sent) > self._num_blocks:
            sent.popitem(last=False)
        return chosen

    def output_ended(self, replica: int, request: EngineRequest) -> None:
        """Record that an output of a request has finished."""
        self._num_seqs[replica] -= 1
        self._tokens[replica] -= self._cost(request)

    def forget_prefixes(self) -> None:
        """Forget all sent prompts, because the prefix caches have been emptied."""
        for sent in self._sent:
            sent.clear()

    @staticmethod
    def _cost(request: EngineRequest) -> int:
        return request.max_length

    @staticmethod
    def _num_shared_blocks(sent: OrderedDict[bytes, None], hashes: Sequence[bytes]) -> int:
        """Return the number of leading prompt blocks that were sent before."""
        for count, block_hash in enumerate(hashes):
            if block_hash not in sent:
                return count
        return len(hashes)


class EngineLoad(NamedTuple):
    """Load of an engine between two steps.

    Args:
        running: number of running outputs.
        waiting: number of waiting outputs.
        used_blocks: referenced cache blocks.
        num_blocks: all cache blocks.
        stats: counters since the start.
    """

    running: int
    waiting: int
    used_blocks: int
    num_blocks: int
    stats: SchedulerStats

    @staticmethod
    def from_engine(engine: Engine) -> EngineLoad:
        """Return the current load of an engine."""
        scheduler = engine.scheduler
        pool = scheduler.kv_cache.pool
        num_blocks, available = pool.num_blocks, pool.available
        return EngineLoad(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            used_blocks=num_blocks - available,
            num_blocks=num_blocks,
            stats=engine.stats,
        )


@dataclass(eq=False)
class _RoutedRequest:
    """A request and its replica.

    Args:
        request: the request.
        replica: index of the replica that serves it.
        unfinished: indices of the unfinished outputs, equal on all ranks.
    """

    request: EngineRequest
    replica: int
    unfinished: set[int]


class Replicas:
    """Data-parallel engines behind the interface of one engine.

    All ranks construct it and call its methods in the same order with the same requests.

    Args:
        engine: engine of this rank; its replica may have tensor and pipeline parallel ranks.
        group: host group of the ranks with the same tensor and pipeline rank in each replica; see
            `ProcessGroupCollection.host_group`.

    Attributes:
        router: assigns requests to replicas; None for a single replica.
    """

    def __init__(self, engine: Engine, group: Group) -> None:
        self.engine, self.group = engine, group
        self.router: RequestRouter | None = None
        if group.size > 1:
            config, pool = engine.config, engine.scheduler.kv_cache.pool
            self.router = RequestRouter(
                group.size,
                max_num_seqs=config.max_num_seqs,
                block_size=config.block_size,
                num_blocks=pool.num_blocks if config.prefix_caching else 0,
            )
        self._routed: dict[int, _RoutedRequest] = {}  # by request id
        self._next_id = 0
        self._loads = [EngineLoad.from_engine(engine)] * group.size

    @property
    def unfinished(self) -> int:
        """Number of unfinished outputs of all replicas."""
        if self.router is None:
            return self.engine.unfinished
        return sum(len(routed.unfinished) for routed in self._routed.values())

    def add(self, request: EngineRequest) -> int:
        """Queue a request and return its id.

        Raises:
            ValueError: as in `Engine.add`.
        """
        if self.router is None:
            return self.engine.add(request)
        # All ranks check before the router counts the request, so that all raise or none.
        self.engine.check(request)
        request, request_id = request.with_id(self._next_id, self._routed)
        self._next_id = max(self._next_id, request_id + 1)
        replica = self.router.assign(request)
        if replica == self.group.rank:
            self.engine.add(request)
        self._routed[request_id] = _RoutedRequest(request, replica, set(range(request.n)))
        return request_id

    def step(self) -> list[OutputDelta]:
        """Compute one step of each replica that has work; return the new tokens of each output, as
        `Engine.step` does.

        Raises:
            ValueError: the ranks have added different requests.
        """
        if self.router is None:
            return self.engine.step()
        deltas = self.engine.step()
        *counts, stats = EngineLoad.from_engine(self.engine)
        load = [*counts, list(vars(stats).values())]
        message = [self.router.load, deltas, load]
        messages = all_gather_json(message, self.group)
        if any(router_load != messages[0][0] for router_load, *_ in messages):
            raise ValueError(
                f"the {self.group.size} data-parallel replicas have assigned requests "
                "differently: give all of their ranks the same requests, in the same order "
                "and between the same steps"
            )
        loads = (load for *_, load in messages)
        self._loads = [EngineLoad._make((*load[:-1], SchedulerStats(*load[-1]))) for load in loads]
        exchanged = [OutputDelta.from_json(delta) for _, deltas, _ in messages for delta in deltas]
        for delta in exchanged:
            if delta.finish_reason:
                self._end(delta.request_id, delta.index)
        return exchanged

    def abort(self, request_id: int) -> list[OutputDelta]:
        """Abort the unfinished outputs of a request; return their last deltas, [] if the request
        has finished."""
        if self.router is None:
            return self.engine.abort(request_id)
        routed = self._routed.get(request_id)
        if routed is None:
            return []
        # Deltas that only the replica has are dropped: all ranks must return the same.
        self.engine.abort(request_id)
        indices = sorted(routed.unfinished)
        for index in indices:
            self._end(request_id, index)
        return [OutputDelta(request_id, index, finish_reason="abort") for index in indices]

    def finish(self, request_id: int, index: int) -> None:
        """End one output, because the caller detected a stop string; no delta of it follows."""
        self.engine.finish(request_id, index)
        if request_id in self._routed and index in self._routed[request_id].unfinished:
            self._end(request_id, index)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix caches."""
        self.engine.scheduler.reset_prefix_cache()
        self._forget_prefixes()

    def pause(self, *, keep_cache: bool = True) -> None:
        """Pause the engine; see `Engine.pause`."""
        self.engine.pause(keep_cache=keep_cache)
        if not keep_cache:
            self._forget_prefixes()

    def sleep(self, weights: Iterable[Tensor] = ()) -> None:
        """Put the engine to sleep; see `Engine.sleep`."""
        self.engine.sleep(weights)
        self._forget_prefixes()

    def weights_replaced(self) -> None:
        """Update the engine after new weights; see `Engine.weights_replaced`."""
        self.engine.weights_replaced()
        self._forget_prefixes()

    def loads(self) -> list[EngineLoad]:
        """Return the load of each replica; with several replicas as of the last step."""
        return [EngineLoad.from_engine(self.engine)] if self.router is None else list(self._loads)

    def stats(self) -> list[SchedulerStats]:
        """Return the counters of each replica, as of the same time as `loads`."""
        return [load.stats for load in self.loads()]

    def _forget_prefixes(self) -> None:
        if self.router is not None:
            self.router.forget_prefixes()

    def _end(self, request_id: int, index: int) -> None:
        """Record on this rank that an output has ended."""
        assert self.router is not None
        routed = self._routed[request_id]
        self.router.output_ended(routed.replica, routed.request)
        routed.unfinished.discard(index)
        if not routed.unfinished:
            del self._routed[request_id]
