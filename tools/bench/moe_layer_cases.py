# SPDX-License-Identifier: Apache-2.0
"""Cases of a mixture of experts, forward and backward, against transformers' Mixtral block.

There are eight experts, and two for each token. Both sides have the same weights and inputs; their
outputs and gradients are compared first. transformers runs with each of its implementations of
experts on this device. The lower bound is the time of the bare matrix products in the same dtype,
each into its own memory: no implementation with these products is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tools.bench.cases import CPU, Case, register
from tools.bench.harness import Bench
from tools.bench.moe_layers import COPIES, EXPERTS, SHAPES, MoELayer

#: The implementations of transformers that a CPU runs in reasonable time: "batched_mm" copies a
#: matrix for every row and takes seconds.
WAYS = ("grouped_mm", "eager")
#: Bound and order of the norms of a comparison. Rounding in bf16 sends some tokens to another
#: expert, so bf16 compares 2-norms; a term that is missing or counted twice makes half of the norm
#: or more.
BOUNDS = {torch.float32: (2e-5, torch.inf), torch.bfloat16: (0.1, 2)}
#: The row of the lower bound.
PRODUCTS = "bare products"


class PeerLayer:
    """transformers' Mixtral block with our weights and inputs.

    Args:
        mcore: our layer.
        way: the block's `experts_implementation`.
        autocast: fp32 weights and inputs, products in bf16.
    """

    def __init__(self, mcore: MoELayer, way: str, *, autocast: bool = False) -> None:
        # Here: a GPU bench imports this module where transformers is not installed.
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        config = MixtralConfig(
            hidden_size=mcore.shape.hidden,
            intermediate_size=mcore.shape.ffn,
            num_local_experts=EXPERTS,
            num_experts_per_tok=COPIES,
        )
        config._experts_implementation = way
        dtype = torch.float32 if autocast else mcore.x.dtype
        self.block, self.autocast = MixtralSparseMoeBlock(config).to(dtype), autocast
        #: By our names; an expert's gate and up stand in one matrix, as in ours.
        self.weights = {
            "moe.router.weight": self.block.gate.weight,
            "moe.experts.input.weight": self.block.experts.gate_up_proj,
            "moe.experts.down.weight": self.block.experts.down_proj,
        }
        with torch.no_grad():
            for name, weight in mcore.weights().items():
                self.weights[name].copy_(weight.view_as(self.weights[name]))
        self.x = mcore.x.detach().to(dtype).transpose(0, 1).contiguous().requires_grad_()
        self.grad_output = mcore.grad_output.transpose(0, 1).contiguous()

    def __call__(self) -> torch.Tensor:
        """Run forward and backward; return the output."""
        self.block.zero_grad(set_to_none=True)
        self.x.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            out = self.block(self.x)
        out.backward(self.grad_output.to(out.dtype))
        return out

    def results(self) -> dict[str, torch.Tensor]:
        """Return the output and every gradient of a step, as `McoreLayer.results`."""
        out = self().detach().transpose(0, 1)
        assert self.x.grad is not None
        gradients = {name: weight.grad for name, weight in self.weights.items()}
        return {"output": out, "input": self.x.grad.transpose(0, 1), **gradients}


def check(mcore: MoELayer, peer: PeerLayer) -> None:
    """Raise ValueError unless both compute the same."""
    bound, order = BOUNDS[mcore.x.dtype]
    mcore_results, peer_results = mcore.results(), peer.results()
    if mcore_results.keys() != peer_results.keys():
        raise ValueError(f"compared {sorted(mcore_results)} with {sorted(peer_results)}")
    for name, tensor in mcore_results.items():
        expected = peer_results[name].double().view_as(tensor)
        error = float((tensor.double() - expected).norm(order) / expected.norm(order))
        if not error <= bound:
            raise ValueError(f"{name}: error {error:.2g} > {bound}: the race is void")


@dataclass(frozen=True)
class Products:
    """The six matrix products of the experts, with as many rows for each expert as in a run."""

    runs: list[dict[str, torch.Tensor]]

    @staticmethod
    def like(mcore: MoELayer) -> Products:
        """Make operands of the sizes that the experts of `mcore` have."""
        h, f, dtype, weights = mcore.shape.hidden, mcore.shape.ffn, mcore.x.dtype, mcore.weights()
        gate_up = weights["moe.experts.input.weight"].view(-1, 2 * f, h)
        runs = []
        for expert, rows in enumerate(mcore.rows_of_experts()):
            runs.append(
                {
                    "x": torch.randn(rows, h).to(dtype),
                    "inner": torch.randn(rows, 2 * f).to(dtype),
                    "active": torch.randn(rows, f).to(dtype),
                    "gate_up": gate_up[expert],
                    "down": weights["moe.experts.down.weight"][expert],
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
        mcore = MoELayer(shape, bench.dtype)
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
