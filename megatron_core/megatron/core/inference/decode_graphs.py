# SPDX-License-Identifier: Apache-2.0
"""DecodeGraphs: steps that choose a token after each of theirs, recorded once and launched again.

A graph runs over buffers that stay: the numbers of a plan are copied to them in one piece, the
graph is launched, and the logits are where they always are: in one buffer that all graphs write,
each its first rows. What a step chooses by, random numbers and parameters, stays outside, and so
changes freely.

| | CUDA graphs | `CpuGraph`, a list of operations |
|---|---|---|
| tokens of a step | of a few numbers (buckets), the smallest that holds it | any up to 16 |
| attention | recorded, kernels read the lengths | called at each replay (piecewise) |

What is left over of a bucket is padding: no context, no slot of the cache and none of states, so it
touches nothing of others. A graph is recorded when it is first needed, with padding alone, after
running so once: what is made at first use, such as rotary tables, is there then. On a CPU the first
graph does that for all, and for contexts of 4,096 tokens; a longer one has them recorded anew.

A graph takes every token for a row of its own. So k drafts of a row and the token before them are
k + 1 rows that share their blocks, each of which sees one token more than the row before it.
Recurrent mixers compute drafts one after the other: with them such steps run eagerly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatron.core.context_parallel.layout import PagedRows
from megatron.core.cpu_graph import CaptureError, CpuGraph
from megatron.core.device import Recorder, pin
from megatron.core.inference.cache import PagedCache
from megatron.core.inference.scheduler import BatchPlan, SharedStep
from megatron.core.ops.paged_attention import PagedBatch

#: Tokens of the largest step that a CPU records. The Python of larger ones is little next to what
#: they compute, and each graph keeps what its operations compute.
CPU_TOKENS = 16

#: The longest context of a CPU's first graphs; it doubles where a step has a longer one.
CPU_CONTEXT = 4096


@dataclass
class GraphStats:
    """What graphs did.

    Args:
        kind: of graphs.
        captured: how many were recorded.
        replayed: steps that were launched as a graph.
        eager: steps that were none for a graph.
        seconds: that recording took.
        buffers: whose addresses are compared before each replay with those of the recording: the
            pages of each layer, states, and the inputs.
        compared: addresses that were, in all replays; all were equal.
        refused: why steps cannot be recorded, and run eagerly; "" where they can.
    """

    kind: Literal["CUDA", "CPU"]
    captured: int = 0
    replayed: int = 0
    eager: int = 0
    seconds: float = 0.0
    buffers: int = 0
    compared: int = 0
    refused: str = ""

    def __str__(self) -> str:
        refused = f"; steps run eagerly since {self.refused}" if self.refused else ""
        return (
            f"{self.kind} graphs: {self.captured} captured in {self.seconds:.2f} s, "
            f"{self.replayed:,} steps replayed with {self.buffers:,} buffers at the addresses of "
            f"the recording, {self.eager:,} eager{refused}"
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
        forward: inputs, and where to write the logits, fp32 [b, V], to hidden states [b, 1, h].
        make_recorder: returns a new recorder, one for each graph.
        cache: that the forward pass reads and writes.
        vocab_size: V.
        max_rows: rows of the largest graph.
        row_multiple: rows of each are a multiple of this.
        max_context: tokens of the longest row.
        shares_experts: with ranks of other replicas: all of them launch graphs of one bucket
            together, and a rank without tokens one of padding alone (`join`).

    Raises:
        RuntimeError: when called, a buffer is elsewhere than when the graph was recorded.
    """

    def __init__(
        self,
        forward: Callable[[DecodeInputs, Tensor], Tensor],
        make_recorder: Callable[[], Recorder],
        *,
        cache: PagedCache,
        vocab_size: int,
        max_rows: int,
        row_multiple: int,
        max_context: int,
        shares_experts: bool = False,
    ) -> None:
        self._forward, self._make_recorder = forward, make_recorder
        self._cache = cache
        self._longest = self._max_context = max_context
        self._device, self._cpu_dtype = cache.device, cache.shapes.cpu_dtype
        self._takes_drafts, self._shares_experts = not cache.shapes.states, shares_experts
        self._graphs: dict[int, _Graph] = {}
        self._next: Recorder | None = make_recorder()
        self._piecewise = isinstance(self._next, CpuGraph)
        if self._piecewise:
            max_rows = min(max_rows, CPU_TOKENS)
            self._max_context = min(max_context, CPU_CONTEXT)
        self.buckets = buckets_of(max_rows, row_multiple, every=self._piecewise)
        self._logits = torch.empty(
            (self.buckets[-1], vocab_size), dtype=torch.float32, device=self._device
        )
        self.stats = GraphStats("CPU" if self._piecewise else "CUDA")

    def takes(self, plan: BatchPlan) -> bool:
        """Whether a step is one for a graph."""
        count = len(plan.tokens)
        every = len(plan.chosen_after) + plan.padding == count  # token has one chosen after it
        fits = count <= self.buckets[-1]  # drafts, and tokens that a grammar forces, may be more
        return every and fits and (self._takes_drafts or not any(plan.drafts))

    def launches(self, plan: BatchPlan, shared: SharedStep | None) -> bool:
        """Whether a step is launched as a graph, on all ranks that share experts; counts it if
        not."""
        takes = self.takes(plan) if shared is None else not shared.eager
        takes = takes and not self.stats.refused
        if takes:
            self._hold_contexts(int(plan.context_lengths.max()))
            try:
                self._graph(len(plan.tokens) if shared is None else shared.most_tokens)
            except CaptureError as error:
                self.stats.refused, takes = str(error), False
        self.stats.eager += not takes
        return takes

    def __call__(self, plan: BatchPlan, shared: SharedStep | None = None) -> tuple[Tensor, Tensor]:
        """Return hidden states [t, 1, h] and logits fp32 [t, V] of all tokens of a step. The next
        step overwrites them.

        Args:
            plan: one that it `launches`.
            shared: the bucket holds the tokens of the rank that has most.
        """
        count = len(plan.tokens)
        graph = self._graph(count if shared is None else shared.most_tokens)
        states, contexts, table = plan.state_slots, plan.context_lengths, plan.block_table
        if len(contexts) < count:  # drafts are rows of their own
            rows = np.repeat(np.arange(len(contexts)), np.diff(plan.query_bounds))
            contexts = np.where(plan.slot_mapping < 0, 0, plan.positions + 1)
            states, table = states[rows], table[rows]
        graph.fill((plan.tokens, plan.positions, plan.slot_mapping, states, contexts), table)
        hidden, logits = self._launched(graph)
        return hidden[:count], logits[:count]

    def join(self, most_tokens: int) -> None:
        """Launch the graph that other ranks do, of which one has so many tokens."""
        graph = self._graph(most_tokens)
        graph.fill()
        self._launched(graph)

    def _hold_contexts(self, longest: int) -> None:
        """Have graphs recorded anew if a context is longer than they were made for."""
        if longest > self._max_context:
            self._max_context = min(self._longest, 1 << (longest - 1).bit_length())
            self.forget()

    def _graph(self, count: int) -> _Graph:
        """Return the graph of the smallest bucket of so many tokens."""
        size = next(bucket for bucket in self.buckets if bucket >= count)
        if size not in self._graphs:
            start = time.perf_counter()
            self._graphs[size] = self._captured(size)
            self.stats.captured += 1
            self.stats.seconds += time.perf_counter() - start
        return self._graphs[size]

    def _launched(self, graph: _Graph) -> tuple[Tensor, Tensor]:
        """Launch a graph; return its results."""
        self._check_addresses(graph)
        graph.recorder.replay()
        self.stats.replayed += 1
        assert graph.found is not None
        return graph.found

    def forget(self) -> None:
        """Record all anew: the cache has another address."""
        self._graphs.clear()

    def weights_replaced(self) -> None:
        """Record what reads copies of weights anew: they are other tensors now. A GPU has none."""
        if self._piecewise:
            self.forget()

    def _check_addresses(self, graph: _Graph) -> None:
        """Raise RuntimeError if a graph would read or write where its buffers are no more."""
        found = graph.addresses(self._cache)
        if found != graph.recorded_at:
            moved = sum(a != b for a, b in zip(found, graph.recorded_at, strict=True))
            raise RuntimeError(
                f"{moved} of {len(found)} buffers of a graph of decode steps are at another "
                "address than when it was recorded: `forget` before the cache is allocated anew"
            )
        self.stats.buffers = len(found)
        self.stats.compared += len(found)

    def _captured(self, size: int) -> _Graph:
        recorder, self._next = self._next or self._make_recorder(), None
        blocks = -(-self._max_context // self._cache.block_size)
        graph = _Graph(recorder, size, blocks, self._device)
        tokens, positions, slots, states, contexts, table = graph.inputs
        logits = self._logits[:size]
        bounds = torch.arange(size + 1, dtype=torch.int32, device=self._device)
        piecewise = recorder if isinstance(recorder, CpuGraph) else None

        def run(recording: CpuGraph | None = None) -> tuple[Tensor, Tensor]:
            batch = PagedBatch(
                block_table=table.view(size, -1),
                query_bounds=bounds,
                context_lengths=contexts,
                max_query=1,
                max_context=self._max_context,
                cpu_dtype=self._cpu_dtype,
                recorded=piecewise is None,
            )
            graph.batch = batch if recording else None
            paged = PagedRows(
                batch=batch,
                slot_mapping=slots.long(),
                state_slots=states.long(),
                decode_rows=size,
                prefill=None,
                most_tokens=size if self._shares_experts else None,
                graph=recording,
            )
            inputs = DecodeInputs(tokens=tokens, positions=positions, paged=paged)
            return self._forward(inputs, logits), logits

        graph.fill()
        if not (self._piecewise and self._graphs):
            run()

        def record() -> None:
            graph.found = run(piecewise)

        graph.recorder.capture(record)
        graph.recorded_at = graph.addresses(self._cache)
        return graph


class _Graph:
    """A bucket: its buffers, and its recording.

    Args:
        recorder: that records it.
        size: its tokens.
        blocks: that a row's table names.

    Attributes:
        inputs: int32 [size] each, tokens, positions, slots of the cache and of states, lengths of
            contexts; and the table [size * blocks].
        found: hidden states and logits.
        batch: whose lengths attention reads at each replay; None if it is recorded.
        recorded_at: addresses at that time.
    """

    #: What padding has in place of each of the inputs.
    _PADDING = (0, 0, -1, -1, 0, 0)

    def __init__(self, recorder: Recorder, size: int, blocks: int, device: torch.device) -> None:
        self.recorder, self._device = recorder, device
        self._sizes = [*[size] * 5, size * blocks]
        self._flat = torch.empty(sum(self._sizes), dtype=torch.int32, device=device)
        self.inputs = self._flat.split(self._sizes)
        # A GPU may not have copied the numbers of the last step when those of the next are written.
        self._host = self._views(self._flat) if device.type == "cpu" else None
        self.found: tuple[Tensor, Tensor] | None = None
        self.batch: PagedBatch | None = None
        self.recorded_at: tuple[int, ...] = ()

    def addresses(self, cache: PagedCache) -> tuple[int, ...]:
        """Return where the cache and the inputs are now."""
        return (*cache.addresses, self._flat.data_ptr())

    def fill(self, numbers: Sequence[np.ndarray] = (), table: np.ndarray | None = None) -> None:
        """Write the inputs of some tokens, their table [t, w] last, followed by padding; copied to
        a GPU in one piece."""
        flat, views = self._flat, self._host
        if views is None:
            flat = pin(torch.empty_like(self._flat, device="cpu"), self._device)
            views = self._views(flat)
        count = 0 if table is None else len(table)
        if self._host is None or count < len(views[0]):
            for view, fill in zip(views, self._PADDING, strict=True):
                view.fill(fill)
        if table is not None:
            for view, array in zip(views, numbers, strict=False):
                view[:count] = array
            views[-1].reshape(len(views[0]), -1)[:count, : table.shape[1]] = table
        if flat is not self._flat:
            self._flat.copy_(flat, non_blocking=True)
        if self.batch is not None:
            self.batch.numbers_replaced()

    def _views(self, flat: Tensor) -> list[np.ndarray]:
        return [part.numpy() for part in flat.split(self._sizes)]


def buckets_of(max_rows: int, multiple: int, *, every: bool = False) -> tuple[int, ...]:
    """Return the numbers of rows that there are graphs for: powers of two and the most, each
    rounded up to a multiple; or every multiple."""
    sizes = {max_rows, *(1 << n for n in range(max_rows.bit_length()))}
    if every:
        sizes = set(range(1, max_rows + 1))
    return tuple(sorted({-(-size // multiple) * multiple for size in sizes}))
