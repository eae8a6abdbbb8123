# SPDX-License-Identifier: Apache-2.0
"""Cases of the products of experts, against torch's grouped products of the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from megatron.core.initialize import InitSpec
from megatron.core.ops.backend_choice import add_product_
from megatron.core.ops.grouped_mm import RowRuns, grouped_mm, grouped_wgrad_
from megatron.core.ops.swiglu import gated
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.weight_gather import WeightStore, grouped_linear
from megatron.core.weight_sharding import WeightSharding
from tools.bench.cases import GPU, Case, register, require_same
from tools.bench.harness import Bench

PEER = "grouped_mm"
#: (tokens, experts of each, experts, features, features inside an expert) of rows in the order of
#: their experts, and the TFLOP/s that were published for their forward pass.
SHAPES = (
    ((32768, 8, 128, 2048, 768), 242),
    ((32768, 10, 512, 2048, 512), 181),
)
TINY = (((9, 2, 4, 16, 8), 1),)


@register("experts", GPU)
def experts(bench: Bench) -> Iterator[Case]:
    """Gate and up, SwiGLU and down of experts, forward."""
    for shape, published in bench.sized(SHAPES, TINY):
        yield _layer_case(bench, *shape, published=published)


def _layer_case(
    bench: Bench, tokens: int, topk: int, experts: int, hidden: int, ffn: int, *, published: float
) -> Case:
    """Return the case of one shape; every expert is as likely as any other, so that their numbers
    of rows differ.

    Args:
        bench: the bench of the case.
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

    flops = 6.0 * tokens * topk * hidden * ffn
    with torch.no_grad():
        require_same(f"experts, ours and {PEER}", mcore(), by_torch())
    return Case(
        name=f"{experts} experts of {ffn}, {tokens:,} tokens of {hidden}, top {topk}, forward",
        mcore=torch.no_grad()(mcore),
        peers={PEER: torch.no_grad()(by_torch)},
        flops=flops,
        targets=[f"{PEER} >= 1.0", f"ms <= {flops / published / 1e9:.4g}"],
        note=f"published: {published} TFLOP/s",
    )


@register("grouped products", GPU)
def grouped_products(bench: Bench) -> Iterator[Case]:
    """The grouped products of experts with uneven loads: forward, and weight gradients added
    to a buffer in fp32, which torch's product rounds to bf16 first."""
    rows, experts, features, width = bench.sized((131072, 64, 2048, 1408), (29, 3, 40, 24))
    weights = torch.rand(experts, generator=torch.Generator().manual_seed(3)) + 0.2
    counts = (weights / weights.sum() * rows).long()
    counts[-1] += rows - counts.sum()
    runs = RowRuns.of(counts.to(bench.device))
    x, grad = bench.drawn(rows, features), bench.drawn(rows, width)
    matrices = bench.drawn(experts, width, features)
    total = torch.zeros(experts, width, features, device=bench.device)
    flops = 2.0 * rows * features * width
    name = f"{experts} experts of {width} x {features}, {rows:,} rows"

    def product(implementation: str | None) -> torch.Tensor:
        return grouped_mm(x, matrices, runs, transposed=True, implementation=implementation)

    def by_torch() -> None:
        total.add_(F.grouped_mm(grad.t(), x, offs=runs.ends))

    def by_loop() -> None:
        runs = (t.split(counts.tolist()) for t in (grad, x))
        for matrix, g, x_run in zip(total, *runs, strict=True):
            add_product_(matrix, g.t(), x_run)

    require_same(f"{name}, ours and our kernel", product(None), product("triton"))
    yield Case(
        name=f"{name}, forward",
        mcore=partial(product, None),
        peers={"Triton kernel": partial(product, "triton")},
        flops=flops,
    )
    add = partial(grouped_wgrad_, total, grad, x, runs, overwrite=False, implementation="triton")
    yield Case(
        name=f"{name}, weight gradients",
        mcore=add,
        peers={"torch grouped_mm, added": by_torch, "a loop of products": by_loop},
        flops=flops,
    )
