# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts, forward and backward, against transformers' Mixtral block.

python -m tools.bench.moe                              every shape and dtype
python -m tools.bench.moe --shape S --dtype bfloat16 --rounds 31
python -m tools.bench.moe --profile S                  where our time goes, by operator
python -m tools.bench.moe --ranks 4                    ep 4 against a dense MLP of the same flops

Eight experts, two a token. Both sides have the same weights and inputs and take turns in one
process; before the race their outputs and gradients are compared. transformers is run with each of
its ways to compute experts on this device. The floor is the time of the bare matrix products in the
same dtype, each into memory of its own: what no implementation on these products can be under.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from tools.bench import moe_ranks
from tools.bench.moe_layers import COPIES, EXPERTS, McoreLayer, Shape
from tools.bench.table import Row, compared, format_table

SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "S": Shape(hidden=256, ffn=768, tokens=1024),
        "M": Shape(hidden=512, ffn=1536, tokens=2048),
        "L": Shape(hidden=512, ffn=1792, tokens=4096),  # Mixtral's ratio of 3.5
        # Half of Mixtral's inner features: what a row costs to send is to what it costs to
        # multiply as 1 is to these.
        "W": Shape(hidden=256, ffn=7168, tokens=1024),
    }
)
#: What transformers offers and a CPU can run in reasonable time: its "batched_mm" copies a matrix
#: for every row and takes seconds.
WAYS = ("grouped_mm", "eager")
#: Largest difference over largest value in fp32. Rounding in bf16 sends some tokens to another
#: expert, so there the norm of the difference over that of the values; a term that is missing or
#: counted twice makes half of it or more.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 0.1}
#: The row of the floor.
PRODUCTS = "bare products"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Step = Callable[[], object]


class PeerLayer:
    """transformers' Mixtral block with our weights.

    Args:
        ours: whose weights and inputs to take.
        way: its `experts_implementation`.
        autocast: fp32 weights, products in bf16.
    """

    def __init__(self, mcore: McoreLayer, way: str, *, autocast: bool = False) -> None:
        shape, self.autocast = mcore.shape, autocast
        config = MixtralConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.ffn,
            num_local_experts=EXPERTS,
            num_experts_per_tok=COPIES,
        )
        config._experts_implementation = way
        dtype = torch.float32 if autocast else mcore.x.dtype
        self.block = MixtralSparseMoeBlock(config).to(dtype)
        weights = mcore.weights()
        with torch.no_grad():
            self.block.gate.weight.copy_(weights["router"])
            self.block.experts.gate_up_proj.copy_(weights["gate_up"])
            self.block.experts.down_proj.copy_(weights["down"])
        self.x = mcore.x.detach().to(dtype).transpose(0, 1).contiguous().requires_grad_()
        self.pull = mcore.pull.transpose(0, 1).contiguous()

    def __call__(self) -> torch.Tensor:
        """Run forward and backward; return the output."""
        self.block.zero_grad(set_to_none=True)
        self.x.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            out = self.block(self.x)
        out.backward(self.pull.to(out.dtype))
        return out

    def results(self) -> dict[str, torch.Tensor]:
        """Return output and gradients of a step, as `McoreLayer.results`."""
        out = self()
        experts = self.block.experts
        return {
            "output": out.detach().transpose(0, 1),
            "input": self.x.grad.transpose(0, 1),
            "router": self.block.gate.weight.grad,
            "gate_up": experts.gate_up_proj.grad,
            "down": experts.down_proj.grad,
        }


def check(mcore: McoreLayer, peer: PeerLayer) -> None:
    """Raise ValueError unless both compute the same."""
    mcore_results, peer_results = mcore.results(), peer.results()
    dtype = torch.bfloat16 if peer.autocast else mcore.x.dtype
    order = 2 if dtype is torch.bfloat16 else torch.inf
    for name, tensor in mcore_results.items():
        reference = peer_results[name].double()
        error = (tensor.double() - reference).norm(order) / reference.norm(order)
        if not error <= BOUNDS[dtype]:
            raise ValueError(f"{name}: error {error:.2g} > {BOUNDS[dtype]}: the race is void")


@dataclass(frozen=True)
class Products:
    """The six matrix products of the experts, alone, with as many rows an expert as in a run."""

    runs: list[dict[str, torch.Tensor]]

    @staticmethod
    def like(mcore: McoreLayer) -> Products:
        """Make operands of the sizes that the experts of `mcore` have."""
        h, f, dtype = mcore.shape.hidden, mcore.shape.ffn, mcore.x.dtype
        weights = mcore.weights()
        runs = []
        for expert, rows in enumerate(mcore.rows_of_experts()):
            runs.append(
                {
                    "x": torch.randn(rows, h).to(dtype),
                    "inner": torch.randn(rows, 2 * f).to(dtype),
                    "active": torch.randn(rows, f).to(dtype),
                    "gate_up": weights["gate_up"][expert],
                    "down": weights["down"][expert],
                    "d_gate_up": torch.empty(2 * f, h, dtype=dtype),
                    "d_down": torch.empty(h, f, dtype=dtype),
                    "d_x": torch.empty(rows, h, dtype=dtype),
                    "d_inner": torch.empty(rows, 2 * f, dtype=dtype),
                    "d_active": torch.empty(rows, f, dtype=dtype),
                }
            )
        return Products(runs)

    def __call__(self) -> None:
        """Multiply everything once."""
        with torch.no_grad():
            for run in self.runs:
                torch.mm(run["x"], run["gate_up"].t(), out=run["d_inner"])
                torch.mm(run["active"], run["down"].t(), out=run["d_x"])
                torch.mm(run["x"].t(), run["active"], out=run["d_down"])
                torch.mm(run["x"], run["down"], out=run["d_active"])
                torch.mm(run["inner"].t(), run["x"], out=run["d_gate_up"])
                torch.mm(run["inner"], run["gate_up"], out=run["d_x"])


def take_turns(
    steps: Mapping[str, Step], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return the seconds of every round of each step; the order rotates."""
    timings: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for index in range(rounds + 2):
        turn = index % len(names)
        for name in (*names[turn:], *names[:turn]):
            start = clock()
            steps[name]()
            if index >= 2:  # the first rounds warm up
                timings[name].append(clock() - start)
    return timings


def compare(
    shape: str, dtype: str, rounds: int, *, clock: Callable[[], float] = time.perf_counter
) -> list[Row]:
    """Race one shape: a row for each of transformers' ways and one for the bare products."""
    torch.manual_seed(0)
    mcore = McoreLayer(SHAPES[shape], getattr(torch, dtype))
    peers = {f"transformers {way}": PeerLayer(mcore, way) for way in WAYS}
    if dtype == "bfloat16":
        peers |= {
            f"transformers {way}, autocast": PeerLayer(mcore, way, autocast=True) for way in WAYS
        }
    for peer_layer in peers.values():
        check(mcore, peer_layer)
    steps = {"ours": mcore, **peers, PRODUCTS: Products.like(mcore)}
    seconds = take_turns(steps, rounds, clock)
    mcore_seconds = seconds.pop("ours")
    fastest = min(peers, key=lambda name: statistics.median(seconds[name]))
    return [
        compared(
            bench="moe",
            what=f"{dtype}, {shape}: runs/s / {name}{' (its fastest)' if name == fastest else ''}",
            ours=1 / statistics.median(mcore_seconds),
            peer=1 / statistics.median(peer_layer),
            ratio=statistics.median(b / a for a, b in zip(mcore_seconds, peer_layer, strict=True)),
            target=">= 0.85" if name == PRODUCTS else "",
        )
        for name, peer_layer in seconds.items()
    ]


def profile(shape: str, dtype: str) -> str:
    """Return the table of a profile of ten of our steps."""
    mcore = McoreLayer(SHAPES[shape], getattr(torch, dtype))
    for _ in range(3):
        mcore()
    with torch.profiler.profile() as torch_profile:
        for _ in range(10):
            mcore()
    return torch_profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30)


def rows(quick: bool) -> list[Row]:
    """Measure every shape; with `quick` the smallest alone."""
    table_rows = []
    for dtype in ("float32", "bfloat16"):
        for shape in ("S",) if quick else ("S", "M", "L"):
            table_rows += compare(shape, dtype, 7 if quick else 15)
    for shape in ("S",) if quick else ("M", "W"):
        table_rows += moe_ranks.compare(4, SHAPES[shape], "float32", 7)
    return table_rows


def main() -> None:
    """Measure the selected cases and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--ranks", type=int, help="race experts on so many ranks instead")
    parser.add_argument("--profile", choices=list(SHAPES))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.profile is not None:
        for dtype in arguments.dtype:
            print(profile(arguments.profile, dtype))
        return
    table_rows = []
    for dtype in arguments.dtype:
        for shape in arguments.shape:
            if arguments.ranks is not None:
                table_rows += moe_ranks.compare(
                    arguments.ranks, SHAPES[shape], dtype, arguments.rounds
                )
                continue
            table_rows += compare(shape, dtype, arguments.rounds, clock=CLOCKS[arguments.clock])
    print(format_table(table_rows))


if __name__ == "__main__":
    main()
