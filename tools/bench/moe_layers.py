# SPDX-License-Identifier: Apache-2.0
"""Our layer with experts or a dense one of the same flops, alone, and a step of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.backend import LOCAL
from megatron.core.context_parallel import SequenceLayout
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.initialize import InitSpec
from megatron.core.moe import MoE, MoEConfig, RouterConfig
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.tensor_parallel import TensorParallelRegion
from megatron.core.transformer import MLP, LayerBuild, MLPConfig
from megatron.core.weight_gather import WeightStore

EXPERTS, COPIES = 8, 2


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A layer and its batch: hidden features, features of each expert, tokens."""

    hidden: int
    ffn: int
    tokens: int


SHAPES = {
    "S": Shape(hidden=256, ffn=768, tokens=1024),
    "M": Shape(hidden=512, ffn=1536, tokens=2048),
    "L": Shape(hidden=512, ffn=1792, tokens=4096),  # Mixtral's ratio of 3.5
    # Half of Mixtral's inner features: what a row costs to send is to what it costs to
    # multiply as 1 is to these.
    "W": Shape(hidden=256, ffn=7168, tokens=1024),
}


class McoreLayer:
    """A layer and its gradient buffers on one rank of some groups.

    Args:
        shape: shape of the layer, with the number of tokens of this rank.
        groups: the process groups; None is a single process.
        dense: an MLP as wide as the experts of a token together, instead of experts.
        balanced: inputs and a router that send as many tokens to each expert.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        *,
        groups: ProcessGroupCollection | None = None,
        dense: bool = False,
        balanced: bool = False,
    ) -> None:
        self.shape = shape
        groups = groups or ProcessGroupCollection.single()
        self.store = WeightStore(groups, seed=1, dtype=dtype)
        self.layer = _layer(shape, self.store, dense)
        strategy = DataParallelConfig()
        self.store.materialize(strategy.storage())
        self.engine = DataParallel(self.store, groups, config=strategy)
        source = torch.Generator().manual_seed(2 + groups.rank)
        size = (shape.tokens, 1, shape.hidden)  # [s, 1, h]
        x, pull = (torch.randn(size, generator=source) for _ in range(2))
        if balanced:
            _balance(x.squeeze(1))
            if not dense:
                router = self.store.handles["moe.router.weight"].get()
                router.copy_(torch.eye(EXPERTS, shape.hidden))
        self.x, self.pull = x.to(dtype).requires_grad_(), pull.to(dtype)
        self.layout = SequenceLayout.of_rows(shape.tokens)

    def __call__(self) -> torch.Tensor:
        """Run forward and backward and reduce the gradients; return the output."""
        out = self.forward_and_backward()
        self.engine.finish()
        return out

    def forward_and_backward(self) -> torch.Tensor:
        """Leave the gradients of this rank's tokens in their buffers; return the output."""
        self.x.grad = None
        self.engine.begin_step()
        out = self.layer(self.x, self.layout)
        self.engine.set_is_last_backward(True)
        out.backward(self.pull)
        return out

    def results(self) -> dict[str, torch.Tensor]:
        """Return the output and every gradient of a step."""
        out, store = self(), self.store
        assert self.x.grad is not None
        gradients = {
            n: handle.main_grad
            for n, handle in store.handles.items()
            if handle.main_grad is not None
        }
        return {"output": out.detach(), "input": self.x.grad, **self._named(gradients)}

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the router's [E, h], the gate and up [E, 2f, h] and the down weight [E, h, f]."""
        return self._named({name: h.get() for name, h in self.store.handles.items()})

    def _named(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        fused = tensors["moe.experts.input.weight"]  # [2E, f, h], a gate before its up
        return {
            "router": tensors["moe.router.weight"],
            "gate_up": fused.view(-1, 2 * fused.shape[1], fused.shape[2]),
            "down": tensors["moe.experts.down.weight"],
        }

    def rows_of_experts(self) -> list[int]:
        """Return the rows of each expert, counted by the router in an additional forward pass."""
        counted = self.layer.router.counted
        before = counted.clone()
        self.layer(self.x, self.layout)
        return [int(rows) for rows in (counted - before)[:EXPERTS]]


def _layer(shape: Shape, store: WeightStore, dense: bool) -> nn.Module:
    """Declare the layer's weights."""
    build = LayerBuild(
        store=store,
        region=TensorParallelRegion(store.groups["tp"]),
        backend=LOCAL,
        hidden_size=shape.hidden,
        init=InitSpec.normal(0.05),
        output_init=InitSpec.normal(0.05),
    )
    if dense:
        return MLP("mlp", config=MLPConfig(ffn_hidden_size=COPIES * shape.ffn), build=build)
    config = MoEConfig(
        num_experts=EXPERTS, ffn_hidden_size=shape.ffn, router=RouterConfig(topk=COPIES)
    )
    return MoE("moe", config=config, build=build)


def _balance(x: torch.Tensor) -> None:
    """Make the first features of x [t, h] the logits of experts that take turns."""
    tokens = torch.arange(len(x))
    x[:, :EXPERTS] = 0.0
    for copy in range(COPIES):
        ahead = copy * (1 + tokens // EXPERTS % (EXPERTS - 1))
        x[tokens, (tokens + ahead) % EXPERTS] = 3.0 - copy
