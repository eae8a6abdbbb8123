# SPDX-License-Identifier: Apache-2.0
"""Our layer of experts, and a dense MLP with the same FLOPs per token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.moe import MoE, MoEConfig, RouterConfig
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.transformer import MLP, LayerBuild, MLPConfig
from tools.bench.layer_steps import McoreLayer

EXPERTS, COPIES = 8, 2


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A layer and its batch: hidden features, features of each expert, tokens of a rank."""

    hidden: int
    ffn: int
    tokens: int


SHAPES = {
    "S": Shape(hidden=256, ffn=768, tokens=1024),
    "M": Shape(hidden=512, ffn=1536, tokens=2048),
    "L": Shape(hidden=512, ffn=1792, tokens=4096),  # Mixtral's ratio of 3.5
    # Half of the inner features of Mixtral's experts, for the same ratio of transfer to compute.
    "W": Shape(hidden=256, ffn=7168, tokens=1024),
}


def dense_layer(shape: Shape, groups: ProcessGroupCollection) -> McoreLayer:
    """Return an MLP as wide as the experts of a token together."""
    config = MLPConfig(ffn_hidden_size=COPIES * shape.ffn)
    size = (shape.tokens, shape.hidden)
    return McoreLayer(lambda build: MLP("mlp", config=config, build=build), size, groups=groups)


class MoELayer(McoreLayer):
    """A layer of experts.

    Args:
        shape: shape of the layer, with the number of tokens of this rank.
        dtype: of weights and inputs.
        groups: the process groups; None is a single process.
        balanced: inputs and a router that send as many tokens to each expert.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        *,
        groups: ProcessGroupCollection | None = None,
        balanced: bool = False,
    ) -> None:
        config = MoEConfig(
            num_experts=EXPERTS, ffn_hidden_size=shape.ffn, router=RouterConfig(topk=COPIES)
        )

        def declare(build: LayerBuild) -> nn.Module:
            return MoE("moe", config=config, build=build)

        size = (shape.tokens, shape.hidden)
        super().__init__(declare, size, dtype=dtype, groups=groups)
        self.shape = shape
        if balanced:
            with torch.no_grad():
                _balance(self.x.squeeze(1))
            router = self.store.handles["moe.router.weight"].get()
            router.copy_(torch.eye(EXPERTS, shape.hidden))

    def rows_of_experts(self) -> list[int]:
        """Return the rows of each expert, counted by the router in an additional forward pass."""
        counted = self.layer.router.counted
        before = counted.clone()
        self.layer(self.x, self.layout)
        return [int(rows) for rows in (counted - before)[:EXPERTS]]


def _balance(x: torch.Tensor) -> None:
    """Make the first features of x [t, h] the logits of experts that take turns."""
    tokens = torch.arange(len(x))
    x[:, :EXPERTS] = 0.0
    for copy in range(COPIES):
        ahead = copy * (1 + tokens // EXPERTS % (EXPERTS - 1))
        x[tokens, (tokens + ahead) % EXPERTS] = 3.0 - copy
