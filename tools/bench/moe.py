# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism against a dense MLP with the same FLOPs per token, on gloo ranks.

python -m tools.bench.moe [--ranks 4] [--shape M W] [--dtype float32] [--rounds 7]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tools.bench import gloo_ranks
from tools.bench.moe_layers import SHAPES, McoreLayer, Shape
from tools.bench.table import Row, compared, format_table

WARMUP_ROUNDS = 2
#: What a rank measures of a step: seconds up to the end of backward, all seconds, and those of its
#: processor.
Timing = tuple[float, float, float]


def measured(
    rank: int, world: int, shape: Shape, dtype: torch.dtype, rounds: int
) -> dict[str, list[Timing]]:
    """Return what every step of both layers took, as one rank."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, ep=world), rank=rank)
    layers = {
        name: McoreLayer(shape, dtype, groups=groups, dense=name == "dense", balanced=True)
        for name in ("experts", "dense")
    }
    counts = layers["experts"].rows_of_experts()
    if len(set(counts)) > 1:
        raise ValueError(f"rows of experts {counts} must be balanced: give tokens that divide")
    timings: dict[str, list[Timing]] = {name: [] for name in layers}
    for index in range(WARMUP_ROUNDS + rounds):
        for name in sorted(layers, reverse=bool(index % 2)):
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            layers[name].forward_and_backward()
            middle = time.perf_counter()
            layers[name].engine.finish()
            end = time.perf_counter()
            if index >= WARMUP_ROUNDS:
                cpu = time.process_time() - used
                timings[name].append((middle - start, end - start, cpu))
    return timings


def compare(world: int, shape: Shape, dtype: str, rounds: int) -> list[Row]:
    """Race both layers: milliseconds of the slowest rank, and processor seconds of all."""
    ranks = gloo_ranks.run(measured, world, shape, getattr(torch, dtype), rounds)
    table_rows = []
    size = f"{dtype}, h {shape.hidden} f {shape.ffn} t {shape.tokens} a rank"
    for index, (what, target) in enumerate(
        (
            ("ms of forward and backward", ""),
            ("ms, gradients reduced", "<= 1.05"),
            ("cpu ms of all ranks, gradients reduced", ""),
        )
    ):
        over = sum if index == 2 else max
        sides = [
            [over(step[index] for step in steps) for steps in zip(*all_ranks, strict=True)]
            for all_ranks in ([rank[name] for rank in ranks] for name in ("experts", "dense"))
        ]
        mcore, dense = (1e3 * statistics.median(side) for side in sides)
        table_rows.append(
            compared(
                bench="moe",
                what=f"ep {world} on {world} ranks, {size}: {what} / dense",
                mcore=mcore,
                peer=dense,
                ratio=statistics.median(a / b for a, b in zip(*sides, strict=True)),
                target=target,
            )
        )
    return table_rows


def rows(quick: bool) -> list[Row]:
    """Measure two shapes on four ranks; with `quick` the smallest alone."""
    shapes = ("S",) if quick else ("M", "W")
    return [row for name in shapes for row in compare(4, SHAPES[name], "float32", 7)]


def main() -> None:
    """Measure the selected shapes and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=["M", "W"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    table_rows = []
    for name in options.shape:
        table_rows += compare(options.ranks, SHAPES[name], options.dtype, options.rounds)
    print(format_table(table_rows))


if __name__ == "__main__":
    main()
