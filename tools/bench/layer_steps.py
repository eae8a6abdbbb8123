# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of one layer: ours with its gradient buffers, and a peer's with our weights
and inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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

Results = Mapping[str, torch.Tensor]


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


class PeerLayer:
    """A layer of transformers with the inputs of ours.

    Args:
        module: the layer, which has the weights of ours.
        mcore: our layer.
        gradients: returns the gradients of the module's weights by our names, in our shapes.
        autocast: fp32 weights and inputs, products in bf16.
    """

    def __init__(
        self,
        module: nn.Module,
        mcore: McoreLayer,
        gradients: Callable[[nn.Module], Results],
        *,
        autocast: bool = False,
    ) -> None:
        dtype = torch.float32 if autocast else mcore.x.dtype
        self.module, self.autocast, self._gradients = module.to(dtype), autocast, gradients
        self.x = mcore.x.detach().to(dtype).transpose(0, 1).contiguous().requires_grad_()
        self.grad_output = mcore.grad_output.transpose(0, 1).contiguous()

    def __call__(self) -> torch.Tensor:
        """Run forward and backward; return the output."""
        self.module.zero_grad(set_to_none=True)
        self.x.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            out = self.module(self.x)
        out.backward(self.grad_output.to(out.dtype))
        return out

    def results(self) -> dict[str, torch.Tensor]:
        """Return the output and every gradient of a step, as `McoreLayer.results`."""
        out = self().detach().transpose(0, 1)
        assert self.x.grad is not None
        gradients = self._gradients(self.module)
        return {"output": out, "input": self.x.grad.transpose(0, 1), **gradients}


def check(mcore: McoreLayer, peer: PeerLayer, bound: float, *, order: float = torch.inf) -> None:
    """Raise ValueError unless both compute the same.

    Args:
        bound: largest norm of a difference, relative to the norm of the peer's tensor.
        order: of the norms.
    """
    mcore_results, peer_results = mcore.results(), peer.results()
    if mcore_results.keys() != peer_results.keys():
        raise ValueError(f"compared {sorted(mcore_results)} with {sorted(peer_results)}")
    for name, tensor in mcore_results.items():
        expected = peer_results[name].double().view_as(tensor)
        error = float((tensor.double() - expected).norm(order) / expected.norm(order))
        if not error <= bound:
            raise ValueError(f"{name}: error {error:.2g} > {bound}: the race is void")
