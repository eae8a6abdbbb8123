# SPDX-License-Identifier: Apache-2.0
"""The products of experts on a GPU, against torch's grouped products of the same rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.core.initialize import InitSpec
from megatron.core.ops.swiglu import gated
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.weight_gather import RowRuns, WeightStore, grouped_linear
from megatron.core.weight_sharding import WeightSharding
from tools.bench.gpu_bench import MCORE, Bench, require_same

PEER = "grouped_mm"
BF16_BOUND = 0.03
#: (tokens, experts of each, experts, features, features inside an expert) of rows in the order of
#: their experts, and the TFLOP/s that were published for their forward pass.
SHAPES = (
    ((32768, 8, 128, 2048, 768), 242),
    ((32768, 10, 512, 2048, 512), 181),
)
TINY = (((9, 2, 4, 16, 8), 1),)


def products(bench: Bench) -> None:
    """Race gate and up, SwiGLU and down of experts, forward."""
    for shape, published in bench.sized(SHAPES, TINY):
        products_of(bench, *shape, published=published)


def products_of(
    bench: Bench, tokens: int, topk: int, experts: int, hidden: int, ffn: int, *, published: float
) -> None:
    """Race one shape; every expert is as likely as any other, so that runs differ in length.

    Args:
        bench: the bench that takes the rows.
        tokens: number of tokens, each routed to `topk` experts.
        topk, experts: router configuration.
        hidden, ffn: hidden size of the model and of an expert.
        published: best published TFLOP/s of other libraries.
    """
    store = WeightStore(
        ProcessGroupCollection.single(), seed=1, dtype=bench.dtype, device=bench.device
    )
    handles = [
        store.declare(WeightSharding.of(name, shape, expert=True), InitSpec.normal(hidden**-0.5))
        for name, shape in (("up", (experts, 2 * ffn, hidden)), ("down", (experts, hidden, ffn)))
    ]
    store.materialize()
    up, down = (handle.get().transpose(1, 2) for handle in handles)
    chosen = torch.randint(0, experts, (tokens * topk,), device=bench.device)
    runs = RowRuns.of(torch.bincount(chosen, minlength=experts))
    rows = bench.drawn(tokens * topk, hidden)

    def mcore() -> torch.Tensor:
        inner = gated(grouped_linear(handles[0], rows, runs), "silu")
        return grouped_linear(handles[1], inner, runs)

    def by_torch() -> torch.Tensor:
        gate, inner = F.grouped_mm(rows, up, offs=runs.ends).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * inner, down, offs=runs.ends)

    with torch.no_grad():
        require_same(f"experts, ours and {PEER}", mcore(), by_torch(), BF16_BOUND)
        flops = 6.0 * tokens * topk * hidden * ffn
        bench.race(
            f"{experts} experts of {ffn}, {tokens:,} tokens of {hidden}, top {topk}, forward",
            {MCORE: mcore, PEER: by_torch},
            flops=flops,
            targets=[f"{PEER} >= 1.0", f"ms <= {flops / published / 1e9:.4g}"],
            note=f"published: {published} TFLOP/s",
        )
