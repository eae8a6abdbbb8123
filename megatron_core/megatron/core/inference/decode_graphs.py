# SPDX-License-Identifier: Apache-2.0
"""DecodeGraphs: steps that choose a token after each of theirs, as CUDA graphs.

There is one graph for each of a few numbers of tokens (buckets). It runs over buffers that stay:
the numbers of a plan are copied to them in one piece, the graph is launched, and the logits are
where they always are. A step takes the smallest bucket that holds it. What is left over is padding:
no context, no slot of the cache and none of states, so it touches nothing of others. What a step
chooses by, random numbers and parameters, stays outside, and so changes freely.

A graph takes every token for a row of its own. So k drafts of a row and the token before them are
k + 1 rows that share their blocks, each of which sees one token more than the row before it.
Recurrent mixers compute drafts one after the other: with them such steps run eagerly.

A bucket is recorded when it is first needed, with padding alone, after running so once: what is
made at first use, such as rotary tables, is there then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.core.context_parallel.layout import PagedRows
from megatron.core.device import Recorder, pin
from megatron.core.inference.cache import PagedCache
from megatron.core.inference.scheduler import BatchPlan, SharedStep
from megatron.core.ops.paged_attention import PagedBatch


@dataclass
class GraphStats:
    """What graphs did.

    Args:
        captured: how many buckets were recorded.
        replayed: steps that were launched as a graph.
        eager: steps that were none for a graph.
        seconds: that recording took.
        buffers: whose addresses are compared before each replay with those of the recording: the
            pages of each layer, states, and the inputs.
        compared: addresses that were, in all replays; all were equal.
    """

    captured: int = 0
    replayed: int = 0
    eager: int = 0
    seconds: float = 0.0
    buffers: int = 0
    compared: int = 0

    def __str__(self) -> str:
        return (
            f"CUDA graphs: {self.captured} captured in {self.seconds:.2f} s, "
            f"{self.replayed:,} steps replayed with {self.buffers:,} buffers at the addresses of "
            f"the recording, {self.eager:,} eager"
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class DecodeInputs:
    """What a recorded step of b rows reads; buffers that stay.

    Args:
        tokens, positions: int32 [b], as in `BatchPlan`.
        paged: whose tokens they are.
    """

    tokens: Tensor
    positions: Tensor
    paged: PagedRows


class DecodeGraphs:
    """Run decode steps as graphs.

    Args:
        forward: inputs to hidden states [b, 1, h] and logits fp32 [b, V].
        make_recorder: returns a new recorder, one for each bucket.
        cache: that the forward pass reads and writes.
        max_rows: rows of the largest bucket.
        row_multiple: rows of each are a multiple of this.
        max_context: tokens of the longest row.
        shares_experts: with ranks of other replicas: all of them launch graphs of one bucket
            together, and a rank without tokens one of padding alone (`join`).

    Raises:
        RuntimeError: when called, a buffer is elsewhere than when the graph was recorded.
    """

    def __init__(
        self,
        forward: Callable[[DecodeInputs], tuple[Tensor, Tensor]],
        make_recorder: Callable[[], Recorder],
        *,
        cache: PagedCache,
        max_rows: int,
        row_multiple: int,
        max_context: int,
        shares_experts: bool = False,
    ) -> None:
        self.buckets = buckets_of(max_rows, row_multiple)
        self.stats = GraphStats()
        self._forward, self._make_recorder = forward, make_recorder
        self._cache = cache
        self._max_context, self._max_blocks = max_context, -(-max_context // cache.block_size)
        self._device, self._cpu_dtype = cache.device, cache.shapes.cpu_dtype
        self._takes_drafts, self._shares_experts = not cache.shapes.states, shares_experts
        self._graphs: dict[int, _Graph] = {}

    def takes(self, plan: BatchPlan) -> bool:
        """Whether a step is one for a graph."""
        count = len(plan.tokens)
        every = len(plan.chosen_after) + plan.padding == count  # token has one chosen after it
        fits = count <= self.buckets[-1]  # a grammar may force more tokens than drafts are made
        return every and fits and (self._takes_drafts or not any(plan.drafts))

    def launches(self, plan: BatchPlan, shared: SharedStep | None) -> bool:
        """Whether a step is launched as a graph, on all ranks that share experts; counts it if
        not."""
        takes = self.takes(plan) if shared is None else not shared.eager
        self.stats.eager += not takes
        return takes

    def __call__(self, plan: BatchPlan, shared: SharedStep | None = None) -> tuple[Tensor, Tensor]:
        """Return hidden states [t, 1, h] and logits fp32 [t, V] of all tokens of a step. The next
        step overwrites them.

        Args:
            plan: one that it `takes`.
            shared: the bucket holds the tokens of the rank that has most.
        """
        count = len(plan.tokens)
        size, graph = self._graph(count if shared is None else shared.most_tokens)
        rows = np.repeat(np.arange(len(plan.state_slots)), np.diff(plan.query_bounds))
        contexts = np.where(plan.slot_mapping < 0, 0, plan.positions + 1)
        states = plan.state_slots[rows]
        numbers = self._padding(size)
        given = plan.tokens, plan.positions, plan.slot_mapping, states, contexts
        for into, array in zip(numbers, given, strict=False):
            into[:count] = array
        numbers[-1].reshape(size, -1)[:count, : plan.block_table.shape[1]] = plan.block_table[rows]
        hidden, logits = self._launched(graph, numbers)
        return hidden[:count], logits[:count]

    def join(self, most_tokens: int) -> None:
        """Launch the graph that other ranks do, of which one has so many tokens."""
        size, graph = self._graph(most_tokens)
        self._launched(graph, self._padding(size))

    def _graph(self, count: int) -> tuple[int, _Graph]:
        """Return the smallest bucket of so many tokens, and its graph."""
        size = next(bucket for bucket in self.buckets if bucket >= count)
        if size not in self._graphs:
            start = time.perf_counter()
            self._graphs[size] = self._captured(size)
            self.stats.captured += 1
            self.stats.seconds += time.perf_counter() - start
        return size, self._graphs[size]

    def _launched(self, graph: _Graph, numbers: list[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Launch a graph over numbers; return its results."""
        graph.fill(numbers)
        self._check_addresses(graph)
        graph.recorder.replay()
        self.stats.replayed += 1
        assert graph.found is not None
        return graph.found

    def forget(self) -> None:
        """Record all anew: the cache has another address."""
        self._graphs.clear()

    def _check_addresses(self, graph: _Graph) -> None:
        """Raise RuntimeError if a graph would read or write where its buffers are no more."""
        found = graph.addresses(self._cache)
        moved = sum(a != b for a, b in zip(found, graph.recorded_at, strict=True))
        if moved:
            raise RuntimeError(
                f"{moved} of {len(found)} buffers of a graph of decode steps are at another "
                "address than when it was recorded: `forget` before the cache is allocated anew"
            )
        self.stats.buffers = len(found)
        self.stats.compared += len(found)

    def _padding(self, size: int) -> list[np.ndarray]:
        """Return the numbers of rows that are padding, in the order of a graph's buffers."""
        fills = (0, 0, -1, -1, 0)
        table = np.zeros(size * self._max_blocks, dtype=np.int32)
        return [*(np.full(size, fill, dtype=np.int32) for fill in fills), table]

    def _captured(self, size: int) -> _Graph:
        padding = self._padding(size)
        flat = torch.empty(sum(x.size for x in padding), dtype=torch.int32, device=self._device)
        tokens, positions, slots, states, contexts, table = flat.split([x.size for x in padding])
        bounds = torch.arange(size + 1, dtype=torch.int32, device=self._device)

        def run() -> tuple[Tensor, Tensor]:
            batch = PagedBatch(
                block_table=table.view(size, -1),
                query_bounds=bounds,
                context_lengths=contexts,
                max_query=1,
                max_context=self._max_context,
                cpu_dtype=self._cpu_dtype,
                recorded=True,
            )
            paged = PagedRows(
                batch=batch,
                slot_mapping=slots.long(),
                state_slots=states.long(),
                decode_rows=size,
                prefill=None,
                most_tokens=size if self._shares_experts else None,
            )
            return self._forward(DecodeInputs(tokens=tokens, positions=positions, paged=paged))

        graph = _Graph(flat, self._make_recorder(), self._device)
        graph.fill(padding)
        run()

        def record() -> None:
            graph.found = run()

        graph.recorder.capture(record)
        graph.recorded_at = graph.addresses(self._cache)
        return graph


class _Graph:
    """A bucket: its buffers, and its recording."""

    def __init__(self, flat: Tensor, recorder: Recorder, device: torch.device) -> None:
        self.recorder = recorder
        self._flat, self._device = flat, device
        self.found: tuple[Tensor, Tensor] | None = None
        self.recorded_at: tuple[int, ...] = ()

    def addresses(self, cache: PagedCache) -> tuple[int, ...]:
        """Return where the cache and the inputs are now."""
        return (*cache.addresses, self._flat.data_ptr())

    def fill(self, numbers: list[np.ndarray]) -> None:
        """Copy numbers to the buffers, in one piece."""
        host = pin(torch.from_numpy(np.concatenate(numbers)), self._device)
        self._flat.copy_(host, non_blocking=True)


def buckets_of(max_rows: int, multiple: int) -> tuple[int, ...]:
    """Return the numbers of rows that there are graphs for: powers of two and the most, each
    rounded up to a multiple."""
    sizes = {max_rows, *(1 << n for n in range(max_rows.bit_length()))}
    return tuple(sorted({-(-size // multiple) * multiple for size in sizes}))
