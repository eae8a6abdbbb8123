# SPDX-License-Identifier: Apache-2.0
"""`PlainGPT` with fp64 `nn.Parameter`s, trained by torch's DDP or FSDP2: a second reference.

It shares no code with the engine under test: different modules, buffers, collectives, and a
different rule for the mean over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tests.parity.plain_gpt import PlainGPT, Weights
from tests.support.inputs import Microbatch


class _Weights(nn.Module):
    """Parameters by their logical names; modules do not allow dots in names."""

    def __init__(self, weights: Weights, *prefixes: str) -> None:
        super().__init__()
        for name, value in weights.items():
            if name.startswith(prefixes):
                self.register_parameter(
                    name.replace(".", "/"), nn.Parameter(value.double().clone())
                )

    def by_name(self) -> dict[str, torch.Tensor]:
        """Return the parameters by their logical names."""
        return {
            name.replace("/", "."): value for name, value in self.named_parameters(recurse=False)
        }


class _Layer(_Weights):
    """One layer: the unit that FSDP2 gathers."""

    def __init__(self, plain: PlainGPT, weights: Weights, layer: int) -> None:
        self.names = [f"decoder.blocks.{2 * layer + i}" for i in range(2)]
        super().__init__(weights, *(f"{name}." for name in self.names))
        self.plain = plain

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights = self.by_name()
        hidden = hidden + self.plain.attention(weights, self.names[0], hidden)
        return hidden + self.plain.mlp(weights, self.names[1], hidden)


class WrappedGPT(_Weights):
    """The whole model; its direct parameters are outside the layers."""

    def __init__(self, plain: PlainGPT, weights: Weights) -> None:
        super().__init__(weights, "embedding.", "decoder.final_norm.", "head.")
        self.plain = plain
        self.layers = nn.ModuleList(_Layer(plain, weights, i) for i in range(plain.layers))

    def forward(self, batch: Microbatch) -> torch.Tensor:
        """Return the mean loss over the counted tokens of a microbatch."""
        weights = self.by_name()
        hidden = weights["embedding.weight"][batch.tokens]  # [b, s, h]
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.plain.norm_of(weights, "decoder.final_norm", hidden)
        logits = hidden @ weights["embedding.weight" if self.plain.tied else "head.weight"].T
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none")
        return (losses * batch.loss_mask).sum() / batch.loss_mask.sum()


def ddp(model: WrappedGPT) -> nn.Module:
    """Wrap in DistributedDataParallel with small buckets."""
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)


def fsdp2(model: WrappedGPT) -> nn.Module:
    """Apply `fully_shard` to every layer and to the whole model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(
    wrapped: nn.Module, steps: Sequence[Sequence[Microbatch]], *, lr: float
) -> list[dict[str, torch.Tensor]]:
    """Train by plain SGD; return the whole gradients of every step by logical name.

    Args:
        wrapped: result of `ddp` or `fsdp2`.
        steps: this rank's microbatches, by step.
    """
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=lr)
    gradients = []
    for batches in steps:
        for batch in batches:
            (wrapped(batch) / len(batches)).backward()
        gradients.append(_whole_gradients(wrapped))
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def stored_elements(wrapped: nn.Module) -> int:
    """Return how many elements of the parameters this rank stores."""
    return sum(_local(parameter).numel() for parameter in wrapped.parameters())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole_gradients(wrapped: nn.Module) -> dict[str, torch.Tensor]:
    from torch.distributed.tensor import DTensor

    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in wrapped.named_parameters():
        grad = parameter.grad
        assert grad is not None, f"{name} has no gradient"
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        gradients[name.rpartition(".")[2].replace("/", ".")] = whole.clone()
    return gradients
