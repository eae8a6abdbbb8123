# SPDX-License-Identifier: Apache-2.0
"""DecodeGraphs: capture and replay of decode steps, which sample after each of their tokens.

A graph reads and writes static buffers. The arrays of a step are copied to its input buffer in one
transfer, the graph is replayed, and the logits are in the first rows of one buffer that all graphs
share. Sampling, with its random numbers and parameters, runs outside the graph.

| | CUDA graphs | `CpuGraph`, a list of operations |
|---|---|---|
| tokens of a step | padded to the next larger bucket | any number up to 16 |
| attention | captured; kernels read the lengths | called at each replay (piecewise) |

The remaining rows of a bucket are padding without context, cache slots and state slots, so they do
not touch other sequences. A graph is captured at first use, on padding only, after one eager run,
which creates lazily initialised tensors such as rotary tables. On a CPU only the first graph needs
the eager run. CPU graphs hold contexts up to 4,096 tokens; a longer context recaptures them.

A graph treats each token as a separate row. A token and its k drafts are k + 1 rows with the same
blocks, and each row attends to one token more than the previous row. Recurrent mixers compute
drafts sequentially, so with them steps with drafts run eagerly.
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
from megatron.core.inference.request_state import SchedulerOutput, SharedStep
from megatron.core.ops.paged_attention import PagedBatch

#: Largest CPU graph in tokens. In larger steps the Python overhead is small next to the compute,
#: and each graph keeps the results of its operations in memory.
CPU_TOKENS = 16

#: Largest context of the first CPU graphs, in tokens; it doubles when a step has a longer context.
CPU_CONTEXT = 4096


@dataclass
class GraphStats:
    """Counters of the graphs.

    Args:
        kind: kind of graphs.
        captured: number of captures.
        replayed: number of replayed steps.
        eager: number of eager steps.
        seconds: time spent in captures.
        buffers: number of buffers whose addresses are checked before each replay: the pages of each
            layer, the states, and the inputs.
        compared: total number of checked addresses, all equal to the captured addresses.
        refused: reason why capture failed, after which all steps run eagerly; "" otherwise.
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
            f"{self.replayed:,} steps replayed with {self.buffers:,} buffers at the recorded "
            f"addresses, {self.eager:,} eager{refused}"
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class DecodeInputs:
    """Static input buffers of a captured step with b rows.

    Args:
        tokens, positions: int32 [b], as in `SchedulerOutput`.
        paged: block tables, cache slots and state slots.
    """

    tokens: Tensor
    positions: Tensor
    paged: PagedRows


class DecodeGraphs:
    """Run decode steps as graphs.

    Args:
        forward: maps the inputs and an output buffer for the logits, fp32 [b, V], to hidden states
            [b, 1, h].
        make_recorder: returns a new recorder for each graph.
        cache: cache that the forward pass reads and writes.
        vocab_size: vocabulary size V.
        max_rows: rows of the largest graph.
        row_multiple: the rows of each graph are a multiple of this.
        max_context: longest sequence in tokens.
        shares_experts: data-parallel ranks share experts. All ranks replay graphs of the same
            bucket together, and a rank without tokens replays padding only (`join`).

    Raises:
        RuntimeError: at a call, a buffer has moved since the capture.
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
        self._context_limit = self._max_context = max_context
        self._device, self._cpu_dtype = cache.device, cache.shapes.cpu_dtype
        self._supports_drafts, self._shares_experts = not cache.shapes.states, shares_experts
        self._graphs: dict[int, _Graph] = {}
        self._next: Recorder | None = make_recorder()
        self._piecewise = isinstance(self._next, CpuGraph)
        if self._piecewise:
            max_rows = min(max_rows, CPU_TOKENS)
            self._max_context = min(max_context, CPU_CONTEXT)
        self.buckets = bucket_sizes(max_rows, row_multiple, all_sizes=self._piecewise)
        self._logits = torch.empty(
            (self.buckets[-1], vocab_size), dtype=torch.float32, device=self._device
        )
        self.stats = GraphStats("CPU" if self._piecewise else "CUDA")

    def supports(self, scheduler_output: SchedulerOutput) -> bool:
        """Return whether a step can run as a graph."""
        count = len(scheduler_output.tokens)
        samples_all = len(scheduler_output.logits_indices) + scheduler_output.padding == count
        fits = count <= self.buckets[-1]  # drafts and forced tokens may exceed the largest bucket
        return (
            samples_all
            and fits
            and (self._supports_drafts or not any(scheduler_output.draft_tokens))
        )

    def prepare(self, scheduler_output: SchedulerOutput, shared: SharedStep | None) -> bool:
        """Capture the graph of a step if needed; return False if the step must run eagerly.

        With shared experts all ranks return the same value.
        """
        supported = self.supports(scheduler_output) if shared is None else not shared.eager
        supported = supported and not self.stats.refused
        if supported:
            self._fit_context(int(scheduler_output.context_lengths.max()))
            try:
                self._graph(len(scheduler_output.tokens) if shared is None else shared.max_tokens)
            except CaptureError as error:
                self.stats.refused, supported = str(error), False
        self.stats.eager += not supported
        return supported

    def __call__(
        self, scheduler_output: SchedulerOutput, shared: SharedStep | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return hidden states [t, 1, h] and logits fp32 [t, V] of all tokens of a step.

        The results are views of static buffers, which the next step overwrites.

        Args:
            scheduler_output: step for which `prepare` has returned True.
            shared: agreement of the ranks that share experts. The bucket then holds the largest
                number of tokens on any rank.
        """
        count = len(scheduler_output.tokens)
        graph = self._graph(count if shared is None else shared.max_tokens)
        states, contexts, tables = (
            scheduler_output.state_slots,
            scheduler_output.context_lengths,
            scheduler_output.block_tables,
        )
        # With drafts the batch has fewer rows than tokens: repeat the rows, one per token.
        if len(contexts) < count:
            rows = np.repeat(np.arange(len(contexts)), np.diff(scheduler_output.query_bounds))
            contexts = np.where(
                scheduler_output.slot_mappings[0] < 0, 0, scheduler_output.positions + 1
            )
            # Row i of a sequence attends to its own position and all positions before.
            states, tables = states[rows], tables[:, rows]
        graph.fill(
            (
                scheduler_output.tokens,
                scheduler_output.positions,
                states,
                contexts,
                *scheduler_output.slot_mappings,
            ),
            tables,
        )
        hidden, logits = self._replay(graph)
        return hidden[:count], logits[:count]

    def join(self, max_tokens: int) -> None:
        """Replay the bucket of `max_tokens` tokens with padding only, for its collectives."""
        graph = self._graph(max_tokens)
        graph.fill()
        self._replay(graph)

    def _fit_context(self, context_length: int) -> None:
        """Drop the graphs if a context exceeds their maximum; the next use recaptures them."""
        if context_length > self._max_context:
            self._max_context = min(self._context_limit, 1 << (context_length - 1).bit_length())
            self.forget()

    def _graph(self, count: int) -> _Graph:
        """Return the graph of the smallest bucket for `count` tokens."""
        size = next(bucket for bucket in self.buckets if bucket >= count)
        if size not in self._graphs:
            start = time.perf_counter()
            self._graphs[size] = self._capture(size)
            self.stats.captured += 1
            self.stats.seconds += time.perf_counter() - start
        return self._graphs[size]

    def _replay(self, graph: _Graph) -> tuple[Tensor, Tensor]:
        """Replay a graph; return its hidden states and logits."""
        self._check_addresses(graph)
        graph.recorder.replay()
        self.stats.replayed += 1
        assert graph.outputs is not None
        return graph.outputs

    def forget(self) -> None:
        """Drop all graphs, because the cache has moved; the next use captures them again."""
        self._graphs.clear()

    def weights_replaced(self) -> None:
        """Drop graphs that read copies of weights, which are new tensors after a replacement."""
        # CUDA graphs read the weights themselves, whose addresses do not change.
        if self._piecewise:
            self.forget()

    def _check_addresses(self, graph: _Graph) -> None:
        """Raise RuntimeError if a buffer of a graph has moved since the capture."""
        # A replay uses the captured addresses without any check and would corrupt freed memory.
        addresses = graph.addresses(self._cache)
        if addresses != graph.captured_addresses:
            pairs = zip(addresses, graph.captured_addresses, strict=True)
            moved = sum(a != b for a, b in pairs)
            raise RuntimeError(
                f"{moved} of {len(addresses)} buffers of a decode graph have moved since it "
                "was recorded: call `forget` before the cache is reallocated"
            )
        self.stats.buffers = len(addresses)
        self.stats.compared += len(addresses)

    def _capture(self, size: int) -> _Graph:
        """Capture the graph of a bucket of `size` tokens."""
        recorder, self._next = self._next or self._make_recorder(), None
        blocks = -(-self._max_context // self._cache.block_size)
        graph = _Graph(recorder, size, blocks, device=self._device, groups=self._cache.num_groups)
        tokens, positions, states, contexts = graph.inputs[: len(_PADDING)]
        logits = self._logits[:size]
        bounds = torch.arange(size + 1, dtype=torch.int32, device=self._device)
        piecewise = recorder if isinstance(recorder, CpuGraph) else None

        def run(recording: CpuGraph | None = None) -> tuple[Tensor, Tensor]:
            # The rows of the first group refer to the rows of the second, so build them last.
            paged: PagedRows | None = None
            groups = zip(reversed(graph.block_tables), reversed(graph.slot_mappings), strict=True)
            for table, slots in groups:
                batch = PagedBatch(
                    block_table=table.view(size, -1),
                    query_bounds=bounds,
                    context_lengths=contexts,
                    max_query=1,
                    max_context=self._max_context,
                    cpu_dtype=self._cpu_dtype,
                    recorded=piecewise is None,
                )
                if recording:
                    graph.batches.append(batch)
                paged = PagedRows(
                    batch=batch,
                    slot_mapping=slots.long(),
                    state_slots=states.long(),
                    decode_rows=size,
                    prefill=None,
                    most_tokens=size if self._shares_experts else None,
                    graph=recording,
                    windowed=paged,
                )
            assert paged is not None, "there is a group"
            inputs = DecodeInputs(tokens=tokens, positions=positions, paged=paged)
            return self._forward(inputs, logits), logits

        graph.fill()
        # Run once outside the capture: lazily created tensors must not be allocated inside it.
        if not (self._piecewise and self._graphs):
            run()

        def record() -> None:
            graph.outputs = run(piecewise)

        graph.recorder.capture(record)
        graph.captured_addresses = graph.addresses(self._cache)
        return graph


#: Values of a padding row: token, position, state slot and context length.
_PADDING = (0, 0, -1, 0)


class _Graph:
    """The buffers and the recording of a bucket.

    Args:
        recorder: recorder of the graph.
        size: number of tokens.
        blocks: width of the block tables.
        device: device of the buffers.
        groups: number of groups of attention layers.

    Attributes:
        inputs: int32 [size] each: tokens, positions, state slots, context lengths and the cache
            slots of each group; then the block table [size * blocks] of each group.
        outputs: hidden states and logits.
        batches: batches whose lengths piecewise attention reads at each replay; empty if attention
            is captured.
        captured_addresses: addresses of the cache and the inputs at the capture.
    """

    def __init__(
        self,
        recorder: Recorder,
        size: int,
        blocks: int,
        *,
        device: torch.device,
        groups: int,
    ) -> None:
        self.recorder, self._device, self._groups = recorder, device, groups
        self._padding = (*_PADDING, *[-1] * groups, *[0] * groups)
        self._sizes = [size] * (len(_PADDING) + groups) + [size * blocks] * groups
        self._flat = torch.empty(sum(self._sizes), dtype=torch.int32, device=device)
        self.inputs = self._flat.split(self._sizes)
        # On a GPU `fill` uses a new staging buffer per step: the asynchronous copy of the previous
        # step may not have read its buffer yet.
        self._host = self._views(self._flat) if device.type == "cpu" else None
        self.outputs: tuple[Tensor, Tensor] | None = None
        self.batches: list[PagedBatch] = []
        self.captured_addresses: tuple[int, ...] = ()

    @property
    def slot_mappings(self) -> tuple[Tensor, ...]:
        """Cache slots of each group of attention layers."""
        return self.inputs[len(_PADDING) : -self._groups]

    @property
    def block_tables(self) -> tuple[Tensor, ...]:
        """Block table of each group of attention layers."""
        return self.inputs[-self._groups :]

    def addresses(self, cache: PagedCache) -> tuple[int, ...]:
        """Return the current addresses of the cache and the inputs."""
        return (*cache.addresses, self._flat.data_ptr())

    def fill(self, numbers: Sequence[np.ndarray] = (), tables: np.ndarray | None = None) -> None:
        """Write the input buffer, in one transfer on a GPU.

        Args:
            numbers: arrays [t] in the order of `inputs`, without the block tables.
            tables: block tables [groups, t, w]; None fills the buffer with padding only.
        """
        flat, views = self._flat, self._host
        if views is None:
            flat = pin(torch.empty_like(self._flat, device="cpu"), self._device)
            views = self._views(flat)
        count = 0 if tables is None else tables.shape[1]
        if self._host is None or count < len(views[0]):
            for view, fill in zip(views, self._padding, strict=True):
                view.fill(fill)
        # Rows beyond `count` hold padding, and table entries beyond a row's context are not read.
        if tables is not None:
            for view, array in zip(views, numbers, strict=False):
                view[:count] = array
            for view, table in zip(views[-self._groups :], tables, strict=True):
                view.reshape(len(views[0]), -1)[:count, : table.shape[1]] = table
        if flat is not self._flat:
            self._flat.copy_(flat, non_blocking=True)
        for batch in self.batches:
            batch.numbers_replaced()

    def _views(self, flat: Tensor) -> list[np.ndarray]:
        return [view.numpy() for view in flat.split(self._sizes)]


def bucket_sizes(max_rows: int, multiple: int, *, all_sizes: bool = False) -> tuple[int, ...]:
    """Return the sizes of the graphs: powers of two and `max_rows`, or all sizes up to `max_rows`,
    each rounded up to a multiple of `multiple`."""
    sizes = {max_rows, *(1 << n for n in range(max_rows.bit_length()))}
    if all_sizes:
        sizes = set(range(1, max_rows + 1))
    return tuple(sorted({-(-size // multiple) * multiple for size in sizes}))
