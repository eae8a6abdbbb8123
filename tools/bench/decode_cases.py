# SPDX-License-Identifier: Apache-2.0
"""Cases of decoding on a GPU: the share of the copy bandwidth that its kernels reach.

A token reads and writes the state of its layer, or the keys and values of its row; this traffic
dominates a decode step. As in a model, layers run one after another, each with its own memory, and
the whole step is one CUDA graph; figures are per layer. The target is 80 % of that bandwidth from
32 rows on; 1 row is reported without a target, because it has too few bytes to fill the device.
Sampling is a separate launch outside the graph; it reads a row of logits at least once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from megatron.core.ops.paged_attention import PagedBatch, paged_attention, paged_latent_attention
from megatron.core.ops.recurrence import (
    DecodeMemory,
    OutputNorm,
    PrologueWeights,
    UnitLayout,
    recurrence_decode,
)
from megatron.core.ops.sampling import choose_tokens
from tools.bench.cases import DECODE, MCORE, Case, register, require_same
from tools.bench.harness import Bench
from tools.bench.table import DECODE_ROWS, DECODE_SHARE, NO_DECODE_TARGET
from tools.bench.timing import Call

#: More layers than this are not needed, and fewer where their states fill this many bytes.
LAYERS, ENOUGH_BYTES = 48, 1 << 29
BF16_BOUND = 0.03
#: Rows for which a time of sampling is promised.
SAMPLING_ROWS = 64


def captured(bench: Bench, call: Call) -> Call:
    """Return the replay of a call that was captured as a CUDA graph; on a CPU the call."""
    if not bench.watch.on_gpu:
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


class Layer:
    """A recurrent layer's share of a decode step.

    Args:
        bench: the bench.
        parts: the columns of a unit.
        units: number of units.
        rows: sequences that decode a token.
    """

    def __init__(self, bench: Bench, unit: UnitLayout, units: int, rows: int) -> None:
        heads, width = units * unit.heads, unit.heads * unit.value_channels
        gates = torch.rand(2, heads, device=bench.device)
        self.unit_layout, self.source = unit, bench.drawn(rows, units, unit.width)
        weight = 0.3 * bench.drawn(units, unit.conv_channels, 4)
        self.weights = PrologueWeights(weight, None, gates[0], gates[1])
        self.memory = DecodeMemory(
            conv=bench.drawn(rows + 1, 3, units, unit.conv_channels),
            state=bench.drawn(
                rows + 1, heads, unit.key_channels, unit.value_channels, dtype=torch.float32
            ),
            slots=torch.randperm(rows, device=bench.device),
            arrival_counts=torch.zeros(rows + 1, units, device=bench.device, dtype=torch.int32),
        )
        self.norm = OutputNorm(
            gate=bench.drawn(rows, units, width),
            weight=torch.ones(unit.value_channels, device=bench.device, dtype=bench.dtype),
            eps=1e-6,
        )

    def __call__(self, implementation: str = "triton") -> torch.Tensor:
        """Take every row on by a token."""
        return recurrence_decode(
            self.source,
            self.weights,
            unit=self.unit_layout,
            memory=self.memory,
            norm=self.norm,
            implementation=implementation,
        )

    @property
    def moved_bytes(self) -> int:
        """What must be read and written; of the spare slot nothing."""
        rows = len(self.source)
        state_bytes = (self.memory.state.nbytes + self.memory.conv.nbytes) * rows // (rows + 1)
        return 2 * state_bytes + self.source.nbytes + 2 * self.norm.gate.nbytes


def recurrent(bench: Bench, rows: int) -> Iterator[Case]:
    """Time a gated delta net of Qwen3-Next for `rows` sequences."""
    rows = bench.sized(rows, min(rows, 3))
    units, heads, size = bench.sized((16, 2, 128), (2, 2, 8))
    unit = UnitLayout.delta(heads, size, size)
    layer_bench = Layer(bench, unit, units, rows)
    count = max(1, min(LAYERS, math.ceil(ENOUGH_BYTES / layer_bench.moved_bytes)))
    layers = [
        layer_bench,
        *(Layer(bench, unit, units, rows) for _ in range(bench.sized(count, 2) - 1)),
    ]
    agree(layer_bench)

    def step(implementation: str) -> Callable[[], None]:
        def run() -> None:
            for layer in layers:
                layer(implementation)

        return run

    calls = {
        MCORE: captured(bench, step("triton")),
        "reference": captured(bench, step("reference")),
    }
    promised = rows >= DECODE_ROWS
    layers_noted = f"{len(layers)} layers as one CUDA graph"
    yield Case(
        name=f"decode of a gated delta net, {rows} rows, fp32 states",
        mcore=calls.pop(MCORE),
        peers=calls,
        moved_bytes=sum(layer.moved_bytes for layer in layers),
        count=len(layers),
        unit="us",
        targets=[f"share >= {DECODE_SHARE}"] if promised else [],
        note=layers_noted if promised else f"{layers_noted}; {NO_DECODE_TARGET}",
    )


def agree(layer: Layer) -> None:
    """Raise ValueError unless kernel and reference update equal states to equal states."""
    state, conv = layer.memory.state, layer.memory.conv
    before = state.clone(), conv.clone()
    mcore = layer("triton"), state.clone()
    state.copy_(before[0])
    conv.copy_(before[1])
    peer = layer("reference"), state
    for what, got, expected in zip(("output", "state"), mcore, peer, strict=True):
        require_same(f"decode, {what}", got, expected)


def paged_batch(bench: Bench, rows: int, context: int, blocks: int) -> PagedBatch:
    """Return a new token of every row, with contexts of one length in blocks in no order."""
    table = torch.randperm(rows * blocks, device=bench.device).view(rows, blocks)
    return PagedBatch(
        block_table=table.int(),
        query_bounds=torch.arange(rows + 1, device=bench.device).int(),
        context_lengths=torch.full((rows,), context, device=bench.device).int(),
        max_query=1,
        max_context=context,
    )


def paged(bench: Bench) -> Iterator[Case]:
    """Time attention of one new token a row to long contexts in pages."""
    rows, context, size = bench.sized((64, 4096, 64), (2, 40, 16))
    heads, groups, features = bench.sized((32, 8, 128), (4, 2, 8))
    blocks = -(-context // size)
    caches = [bench.drawn(rows * blocks, size, groups, features) for _ in range(2)]
    query = bench.drawn(rows, heads, features)
    batch = paged_batch(bench, rows, context, blocks)
    rows_of_caches = (x[batch.block_table].flatten(1, 2)[:, :context] for x in caches)
    dense = [x.transpose(1, 2).contiguous() for x in rows_of_caches]

    def mcore() -> torch.Tensor:
        return paged_attention(query, *caches, batch=batch, implementation="triton")[0]

    def peer() -> torch.Tensor:
        out = F.scaled_dot_product_attention(query[:, :, None], *dense, enable_gqa=heads != groups)
        return out[:, :, 0]

    require_same("paged attention, ours and SDPA", mcore(), peer())
    yield Case(
        name=f"paged decode, {rows} rows of {context} tokens, {heads}/{groups} heads of {features}",
        mcore=captured(bench, mcore),
        peers={"SDPA without pages": captured(bench, peer)},
        moved_bytes=2 * rows * context * groups * features * bench.dtype.itemsize,
        unit="us",
        targets=[f"share >= {DECODE_SHARE}"],
    )


def latent(bench: Bench, rows: int) -> Iterator[Case]:
    """Time attention of one new token a row to latents in pages, as DeepSeek-V3 has them, against
    the two products of the formula on latents without pages."""
    rows = bench.sized(rows, 2)
    context, size, heads = bench.sized((4096, 64, 128), (40, 16, 4))
    rank, rotated = bench.sized((512, 64), (16, 8))
    blocks = -(-context // size)
    cache = bench.drawn(rows * blocks, size, rank + rotated)
    query = bench.drawn(rows, heads, rank + rotated)
    batch = paged_batch(bench, rows, context, blocks)
    dense = cache[batch.block_table].flatten(1, 2)[:, :context].contiguous()  # [rows, context, c]
    scale = (rank + rotated) ** -0.5

    def mcore() -> torch.Tensor:
        return paged_latent_attention(
            query,
            cache,
            batch=batch,
            scale=scale,
            value_features=rank,
            implementation="triton",
        )

    def peer() -> torch.Tensor:
        weights = (scale * (query @ dense.mT)).softmax(-1)  # [rows, heads, context]
        return weights @ dense[..., :rank]

    require_same("latent attention, ours and torch", mcore(), peer())
    yield Case(
        name=f"paged latent decode, {rows} rows of {context} tokens, {heads} heads",
        mcore=captured(bench, mcore),
        peers={"torch without pages": captured(bench, peer)},
        flops=2.0 * rows * context * heads * (2 * rank + rotated),
        moved_bytes=rows * context * (rank + rotated) * bench.dtype.itemsize,
        unit="us",
    )


@dataclass(frozen=True)
class TopP:
    """Filters of the requests in the sampling bench."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.9
    min_p: float = 0.0


def sampling(bench: Bench, rows: int) -> Iterator[Case]:
    """Time drawing a token of each row from its top-p set, and its log-probability."""
    rows, size = bench.sized((rows, 131072), (2, 300))
    logits = 3 * bench.drawn(rows, size, dtype=torch.float32)
    draws = [(n + 0.5) / rows for n in range(rows)]
    uniform = torch.tensor(draws, device=bench.device)
    filters, none = [TopP()] * rows, [0] * rows

    def mcore() -> torch.Tensor:
        return choose_tokens(
            logits, logits, filters, draws, num_top=none, implementation="triton"
        ).tokens

    def by_sorting() -> torch.Tensor:
        """As samplers do that sort: probabilities in order, their sums, the first beyond."""
        logprobs = logits.log_softmax(-1)
        ordered, ids = (logits / TopP.temperature).softmax(-1).sort(-1, descending=True)
        sums = ordered.cumsum(-1)
        ordered = ordered.masked_fill(sums - ordered >= TopP.top_p, 0.0)
        sums = ordered.cumsum(-1)
        at = torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True)
        tokens = ids.gather(1, at.clamp(max=size - 1))
        logprobs.gather(1, tokens)
        return tokens.squeeze(1)

    # Both draw by the same number, in another order of the tokens: only frequencies agree.
    yield Case(
        name=f"top-p sampling, {rows} rows of {size:,} logits",
        mcore=mcore,
        peers={"torch.sort": by_sorting},
        moved_bytes=logits.nbytes,
        targets=["ms <= 0.3"] if rows == SAMPLING_ROWS else [],
    )


for number in (256, 32, 1):
    register(f"{number} row{'s' * (number > 1)}", DECODE)(partial(recurrent, rows=number))
register("paged attention", DECODE)(paged)
for number in (1, 64):
    register(f"latent attention, {number} rows", DECODE)(partial(latent, rows=number))
for number in (16, SAMPLING_ROWS, 256):
    register(f"sampling, {number} rows", DECODE)(partial(sampling, rows=number))
