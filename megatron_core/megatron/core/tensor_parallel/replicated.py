# SPDX-License-Identifier: Apache-2.0
"""ReplicatedLinear: a linear layer outside the tensor-parallel blocks, whole on every tp rank.

forward y = x Wᵀ; dgrad dx = dy W; wgrad dW = dyᵀ x. No communication: under sequence parallelism
every rank has tokens of its own, whose weight gradients the gradient plan sums; without it all
ranks compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron.core.initialize import InitSpec
from megatron.core.tensor_parallel.region import TensorParallelRegion
from megatron.core.weight_gather import WeightStore
from megatron.core.weight_sharding import Segment, WeightSharding


class ReplicatedLinear(nn.Module):
    """y = x Wᵀ; several logical weights may be fused into one product.

    Args:
        name: the fused weight's name.
        outputs: (logical name, output features) of each fused part.
        input_size: h.
    """

    def __init__(
        self,
        name: str,
        outputs: Sequence[tuple[str, int]],
        *,
        input_size: int,
        store: WeightStore,
        region: TensorParallelRegion,
        init: InitSpec,
    ) -> None:
        super().__init__()
        segments = tuple(
            Segment(name=f"{part}.weight", shape=(size, input_size)) for part, size in outputs
        )
        self.weight = store.declare(
            WeightSharding(
                name=f"{name}.weight",
                segments=segments,
                gradient={"tp": region.replicated_gradient},
            ),
            init,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., o] from x [..., h], the features of all parts one after the other."""
        return self.weight.linear(x)
