# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of one of our layers with its gradient buffers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megatron.core.backend import LOCAL
from megatron.core.context_parallel import SequenceLayout
from megatron.core.context_parallel.layout import ContextParallel
from megatron.core.distributed import DataParallel, DataParallelConfig
from megatron.core.initialize import InitSpec
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.tensor_parallel import TensorParallelRegion
from megatron.core.transformer import LayerBuild
from megatron.core.weight_gather import WeightStore


class McoreLayer:
    """One of our layers on one rank of some groups.

    Args:
        declare: returns the layer, its weights declared.
        size: tokens of this rank and hidden features.
        dtype: of weights and inputs.
        groups: the process groups; None is a single process.

    Attributes:
        x: the input [s, 1, h].
        grad_output: the gradient of the output [s, 1, h].
    """

    def __init__(
        self,
        declare: Callable[[LayerBuild], nn.Module],
        size: tuple[int, int],
        *,
        dtype: torch.dtype = torch.float32,
        groups: ProcessGroupCollection | None = None,
    ) -> None:
        groups = groups or ProcessGroupCollection.single()
        self.store = WeightStore(groups, seed=1, dtype=dtype)
        build = LayerBuild(
            store=self.store,
            region=TensorParallelRegion(groups["tp"]),
            backend=LOCAL,
            hidden_size=size[1],
            init=InitSpec.normal(0.05),
            output_init=InitSpec.normal(0.05),
            context=ContextParallel(group=groups["cp"]),
        )
        with self.store.unit("layer"):
            self.layer = declare(build)
        config = DataParallelConfig()
        self.store.materialize(config.storage())
        self.engine = DataParallel(self.store, groups, config=config)
        source = torch.Generator().manual_seed(2 + groups.rank)
        x, grad = (torch.randn(size[0], 1, size[1], generator=source) for _ in range(2))
        self.x, self.grad_output = x.to(dtype).requires_grad_(), grad.to(dtype)
        self.layout = SequenceLayout.of_rows(size[0])

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
        out.backward(self.grad_output)
        return out

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights by name."""
        return {name: handle.get() for name, handle in self.store.handles.items()}

    def results(self) -> dict[str, torch.Tensor]:
        """Return the output and every gradient of a step."""
        out, gradients = self().detach(), {}
        for name, handle in self.store.handles.items():
            if handle.main_grad is not None:
                gradients[name] = handle.main_grad
        assert self.x.grad is not None
        return {"output": out, "input": self.x.grad, **gradients}
