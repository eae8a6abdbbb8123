# SPDX-License-Identifier: Apache-2.0
"""Cases of a mixture of experts, forward and backward, against transformers' Mixtral block.

Eight experts, two a token. Both sides have the same weights and inputs; their outputs and gradients
are compared first. transformers runs with each of its implementations of experts on this device.
The floor is the time of the bare matrix products in the same dtype, each into memory of its own:
no implementation on these products is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tools.bench.cases import CPU, Case, register
from tools.bench.harness import Bench
from tools.bench.moe_layers import COPIES, EXPERTS, SHAPES, McoreLayer

#: What transformers offers and a CPU can run in reasonable time: its "batched_mm" copies a matrix
#: for every row and takes seconds.
WAYS = ("grouped_mm", "eager")
#: Largest difference over largest value in fp32. Rounding in bf16 sends some tokens to another
#: expert, so there the norm of the difference over that of the values; a term that is missing or
#: counted twice makes half of it or more.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 0.1}
#: The row of the floor.
PRODUCTS = "bare products"


class PeerLayer:
    """transformers' Mixtral block with our weights.

    Args:
        ours: whose weights and inputs to take.
        way: its `experts_implementation`.
        autocast: fp32 weights, products in bf16.
    """

    def __init__(self, mcore: McoreLayer, way: str, *, autocast: bool = False) -> None:
        # Here: a GPU bench imports this module where transformers is not installed.
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

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


@register("mixture of experts", CPU)
def layers(bench: Bench) -> Iterator[Case]:
    """Layers of three sizes; with `quick` the smallest alone."""
    for name in ("S",) if bench.quick else ("S", "M", "L"):
        torch.manual_seed(0)
        shape = SHAPES[name]
        mcore = McoreLayer(shape, bench.dtype)
        modes = (False, True) if bench.dtype == torch.bfloat16 else (False,)
        peers = {
            f"transformers {way}{', autocast' * autocast}": PeerLayer(mcore, way, autocast=autocast)
            for autocast in modes
            for way in WAYS
        }
        for peer in peers.values():
            check(mcore, peer)
        yield Case(
            name=f"{EXPERTS} experts of {shape.ffn}, {shape.tokens} tokens of {shape.hidden}, top "
            f"{COPIES}, forward + backward",
            mcore=mcore,
            peers={**peers, PRODUCTS: Products.like(mcore)},
            targets=[f"{PRODUCTS} >= 0.85"],
        )
