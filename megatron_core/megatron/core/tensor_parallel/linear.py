# SPDX-License-Identifier: Apache-2.0
"""Column-parallel, row-parallel and replicated linear layers (Shoeybi et al. 2019, section 3).

| layer | weight | forward | dgrad | wgrad |
|---|---|---|---|---|
| column | [o/tp, h] | y = gather(x) Wᵀ | reduce(dy W) | dyᵀ gather(x) |
| row | [o, h/tp] | y = reduce(x Wᵀ) | gather(dy) W | gather(dy)ᵀ x |
| replicated | [o, h] | y = x Wᵀ | dy W | dyᵀ x |

Without sequence parallelism, gather is the identity and reduce an all-reduce; with it, gather is an
all-gather of the sequence and reduce a reduce-scatter. The column layer saves its sharded input,
[s/tp, b, h], and gathers it again in backward; its dgrad's reduction overlaps with the wgrad. In a
split backward the input stays sharded until the wgrad gathers it.

The replicated layer is for products outside of the tensor-parallel blocks, without communication.
Under sequence parallelism every rank has different tokens, and the gradient plan sums the weight
gradients; without it all ranks compute the same.

`TensorParallelRegion` is the tp group, and whether the sequence is sharded over it between blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from megatron.core.comm.collectives import (
    all_gather,
    all_gather_async,
    all_reduce_async,
    reduce_scatter_async,
)
from megatron.core.comm.conjugates import (
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_to_group,
)
from megatron.core.initialize import InitSpec
from megatron.core.ops.backend_choice import apply_function
from megatron.core.process_groups import Group
from megatron.core.weight_gather import WeightStore
from megatron.core.weight_gather.handle import accumulate_linear_grads
from megatron.core.weight_sharding import Shard, SubWeight, WeightSharding


@dataclass(frozen=True)
class TensorParallelRegion:
    """Layout of activations outside of tensor-parallel blocks.

    Args:
        group: the tp group.
        sequence_parallel: shard the sequence outside of blocks, s/tp per rank (Korthikanti et al.
            2022). Entering a block all-gathers the sequence, leaving it reduce-scatters.
    """

    group: Group
    sequence_parallel: bool = False

    @property
    def scatters(self) -> bool:
        """Whether the sequence is sharded: sequence parallelism on more than one rank."""
        return self.sequence_parallel and self.group.size > 1

    @property
    def replicated_gradient(self) -> Literal["identical", "partial"]:
        """Whether tp ranks compute identical or partial gradients of replicated weights outside of
        blocks."""
        return "partial" if self.scatters else "identical"

    def gathered(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden [s, b, h] replicated on every rank, from [s/tp, b, h] under sequence
        parallelism; its gradient is partial(tp)."""
        if self.group.size == 1:
            return hidden
        if self.scatters:
            return gather_from_group(hidden, self.group, partial_gradient=True)
        return copy_to_group(hidden, self.group)


class ReplicatedLinear(nn.Module):
    """y = x Wᵀ; several logical weights may be fused into one product.

    Args:
        name: name of the fused weight.
        outputs: (logical name, output features) of each logical weight.
        input_size: input features h.
        gtp: whether generalized tensor parallelism may shard the weight.
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
        gtp: bool = False,
    ) -> None:
        super().__init__()
        sub_weights = tuple(
            SubWeight(name=f"{output_name}.weight", shape=(size, input_size))
            for output_name, size in outputs
        )
        self.weight = store.declare(
            WeightSharding(
                name=f"{name}.weight",
                sub_weights=sub_weights,
                gradient={"tp": region.replicated_gradient},
                gtp=gtp,
            ),
            init,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., o] from x [..., h], the outputs of all logical weights concatenated."""
        return self.weight.linear(x)


class ColumnParallelLinear(nn.Module):
    """y = x Wᵀ + b, sharded by output features; several logical weights may be fused into one.

    Args:
        name: name of the fused weight and prefix of its bias.
        outputs: (logical name, output features, shards) of each logical weight; None means tp
            shards. Fewer shards than tp ranks (kv heads < tp) are replicated.
        input_size: input features h.
        interleave: number of units in which the logical weights are interleaved, see
            `WeightSharding`.
    """

    def __init__(
        self,
        name: str,
        outputs: Sequence[tuple[str, int, int | None]],
        *,
        input_size: int,
        store: WeightStore,
        region: TensorParallelRegion,
        init: InitSpec,
        bias: bool = False,
        interleave: int = 1,
    ) -> None:
        super().__init__()
        self.region = region

        def split_outputs(kind: str, *trailing: int) -> tuple[SubWeight, ...]:
            return tuple(
                SubWeight(
                    name=f"{output_name}.{kind}",
                    shape=(size, *trailing),
                    shards=(Shard(axis="tp", dim=0, count=num_shards),),
                )
                for output_name, size, num_shards in outputs
            )

        def sharding(kind: str, *trailing: int, **options: Any) -> WeightSharding:
            return WeightSharding(
                name=f"{name}.{kind}",
                sub_weights=split_outputs(kind, *trailing),
                interleave=interleave,
                **options,
            )

        self.weight = store.declare(sharding("weight", input_size, gtp=True), init)
        self.bias = None
        if bias:
            self.bias = store.declare(sharding("bias", weight_decay=False), InitSpec.constant(0.0))
        self.local_sizes = [
            size // (num_shards or region.group.size) for _, size, num_shards in outputs
        ]

    def take_norm(self, norm: nn.Module) -> bool:
        """Fuse `norm`, a `transformer.Norm` of the input, into this layer if the implementation
        supports it, and return whether it does. A fused norm must not be called itself."""
        return False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [s, b, o/tp] from x [s, b, h] ([s/tp, b, h] under sequence parallelism)."""
        if self.region.group.size == 1:
            return self.weight.linear(x, self.bias)
        bias_anchor = None if self.bias is None else self.bias.anchor
        return apply_function(
            _ColumnLinear, x, self.weight.anchor, bias_anchor, self.weight, self.bias, self.region
        )


class RowParallelLinear(nn.Module):
    """y = reduce(x Wᵀ) + b, sharded by input features; the bias is added once, after the
    reduction."""

    def __init__(
        self,
        name: str,
        *,
        input_size: int,
        output_size: int,
        store: WeightStore,
        region: TensorParallelRegion,
        init: InitSpec,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.region = region
        self.weight = store.declare(
            WeightSharding.of(
                f"{name}.weight", (output_size, input_size), Shard(axis="tp", dim=1), gtp=True
            ),
            init,
        )
        self.bias = None
        if bias:
            self.bias = store.declare(
                WeightSharding.of(
                    f"{name}.bias",
                    (output_size,),
                    gradient={"tp": region.replicated_gradient},
                    weight_decay=False,
                ),
                InitSpec.constant(0.0),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [s, b, o] ([s/tp, b, o] under sequence parallelism) from x [s, b, h/tp]."""
        if self.region.group.size == 1:
            return self.weight.linear(x, self.bias)
        partial = self.weight.linear(x)  # [s, b, o] partial(tp)
        if self.region.scatters:
            y = reduce_scatter_to_group(partial, self.region.group)  # [s/tp, b, o]
        else:
            y = reduce_from_group(partial, self.region.group)  # [s, b, o]
        return y if self.bias is None else y + self.bias.use()


class _ColumnLinear(torch.autograd.Function):
    """forward y = gather(x) Wᵀ + b; dgrad reduce(dy W); wgrad dyᵀ gather(x). Saves x before the
    gather."""

    @staticmethod
    def forward(ctx, x, anchor, bias_anchor, handle, bias, region):
        ctx.handle, ctx.bias, ctx.region = handle, bias, region
        ctx.save_for_backward(x if handle.trainable else None)
        whole = all_gather(x, region.group) if region.scatters else x  # [s, b, h]
        return handle.linear(whole, bias)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        region, handle = ctx.region, ctx.handle
        gathered = gather_input = None
        if region.scatters and handle.defers:
            gather_input = partial(all_gather, group=region.group)
        elif x is not None and region.scatters:
            gathered = all_gather_async(x, region.group)
        reduced = None
        if ctx.needs_input_grad[0]:
            dx = handle.dgrad(grad)  # [s, b, h] partial(tp)
            if region.scatters:
                reduced = reduce_scatter_async(dx, region.group)  # [s/tp, b, h]
            else:
                reduced = all_reduce_async(dx, region.group, out=dx)
        whole = x if gathered is None else gathered.wait()
        accumulate_linear_grads(handle, ctx.bias, grad, whole, gather_input=gather_input)
        return (None if reduced is None else reduced.wait()), None, None, None, None, None
