# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism against a dense MLP with the same FLOPs per token, on gloo ranks.

python -m tools.bench.moe [--ranks 4] [--dtype float32] [--rounds 7]
"""

from __future__ import annotations

import time
from typing import Literal

import torch

from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tools.bench import gloo_ranks
from tools.bench.gloo_ranks import CPU, STEP, Measured
from tools.bench.harness import run_rows
from tools.bench.layer_steps import McoreLayer
from tools.bench.moe_layers import SHAPES, MoELayer, Shape, dense_layer
from tools.bench.table import Row

WARMUP_ROUNDS = 2
EXPERTS, DENSE = "experts", "dense"
FORWARD_BACKWARD = "forward and backward"
#: What rows call the measured phases, and their targets.
PHASES = {
    FORWARD_BACKWARD: ("ms of forward and backward", ""),
    STEP: ("ms, gradients reduced", "<= 1.05"),
    CPU: ("cpu ms of all ranks, gradients reduced", ""),
}


def race(
    rank: int, world: int, shape: Shape, dtype: torch.dtype, rounds: int
) -> dict[str, list[Measured]]:
    """Run both layers in turns, as one rank."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, ep=world), rank=rank)
    experts = MoELayer(shape, dtype, groups=groups, balanced=True)
    counts = experts.rows_of_experts()
    if len(set(counts)) > 1:
        raise ValueError(f"rows of experts {counts} must be balanced: give tokens that divide")

    def step(layer: McoreLayer) -> Measured:
        start = time.perf_counter()
        layer.forward_and_backward()
        seconds = time.perf_counter() - start
        layer.engine.finish()
        return {FORWARD_BACKWARD: seconds}

    dense = dense_layer(shape, groups)
    variants = {EXPERTS: lambda index: step(experts), DENSE: lambda index: step(dense)}
    return gloo_ranks.take_turns(variants, rounds=rounds, warmup=WARMUP_ROUNDS)


def rows(
    quick: bool = False,
    *,
    ranks: int = 4,
    dtype: Literal["float32", "bfloat16"] = "float32",
    rounds: int = 7,
) -> list[Row]:
    """Measure two shapes, or the smallest alone with `quick`: the slowest rank's milliseconds."""
    table_rows = []
    for name in ("S",) if quick else ("M", "W"):
        sizes = SHAPES[name]
        measured = gloo_ranks.run(race, ranks, sizes, getattr(torch, dtype), rounds)
        size = f"{dtype}, h {sizes.hidden} f {sizes.ffn} t {sizes.tokens} a rank"
        for phase, (what, target) in PHASES.items():
            sides = (gloo_ranks.over_ranks(measured, side, phase) for side in (EXPERTS, DENSE))
            what = f"ep {ranks} on {ranks} ranks, {size}: {what} / dense"
            table_rows.append(gloo_ranks.row("moe", what, *sides, target=target))
    return table_rows


if __name__ == "__main__":
    run_rows(rows, __doc__)
