# SPDX-License-Identifier: Apache-2.0
"""Norm: RMSNorm or LayerNorm over the last dimension, with the residual addition before it.

`QueryKeyNorm` is the RMSNorm of all queries, and of all keys, of a token (as in OLMo 2), where a
norm of each head is a `Norm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from megatron.core.backend import LayerBuild
from megatron.core.comm.collectives import all_reduce
from megatron.core.initialize import InitSpec
from megatron.core.ops.backend_choice import accumulation_dtype, apply_function
from megatron.core.ops.nvls import RowNorm
from megatron.core.ops.rmsnorm.cpu import rms_norm_inference
from megatron.core.weight_gather import WeightHandle
from megatron.core.weight_sharding import GradientKind, Shard, WeightSharding

NORMS = ("RMSNorm", "LayerNorm")
PLACEMENTS = ("pre", "post", "both")

#: Dtypes in which a CPU normalises without a cast.
_EXACT_DTYPES = frozenset({torch.float32, torch.float64})


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """Settings of a norm.

    Args:
        kind: "RMSNorm" (Zhang & Sennrich 2019) or "LayerNorm".
        bias: whether a LayerNorm has a bias; an RMSNorm has none.
        epsilon: term added to the mean square or the variance.
        zero_centered: store the weight as weight - 1.
        placement: the decoder's blocks normalise their input ("pre"), their output before the
            residual addition ("post", as in OLMo 2), or "both" (as in Gemma 2). Other norms ignore
            it.
    """

    kind: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    bias: bool = True
    epsilon: float = 1e-5
    zero_centered: bool = False
    placement: Literal["pre", "post", "both"] = "pre"

    @property
    def has_bias(self) -> bool:
        """Whether norms have a bias."""
        return self.kind == "LayerNorm" and self.bias

    def __post_init__(self) -> None:
        if self.kind not in NORMS:
            raise ValueError(f"normalization {self.kind!r}: use one of {', '.join(NORMS)}")
        if not self.epsilon > 0.0:
            raise ValueError(f"norm epsilon is {self.epsilon}: use a positive number")
        if self.placement not in PLACEMENTS:
            raise ValueError(
                f"norm placement {self.placement!r}: use one of {', '.join(PLACEMENTS)}"
            )


class Norm(nn.Module):
    """Norm over [..., size] with a weight that every tp rank replicates.

    Args:
        gradient: reduction of the weight's gradient over tp; None uses the region's (outside of
            tensor-parallel blocks).
    """

    def __init__(
        self,
        name: str,
        size: int,
        *,
        config: NormConfig,
        build: LayerBuild,
        gradient: GradientKind | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        kind = gradient or build.region.replicated_gradient

        def declare(parameter: str, value: float):
            sharding = WeightSharding.of(
                f"{name}.{parameter}", (size,), gradient={"tp": kind}, weight_decay=False
            )
            return build.store.declare(sharding, InitSpec.constant(value))

        self.weight = declare("weight", 0.0 if config.zero_centered else 1.0)
        self.bias = declare("bias", 0.0) if config.has_bias else None
        is_rms_norm = config.kind == "RMSNorm"
        make = build.backend.rms_norm if is_rms_norm else build.backend.layer_norm
        self._normalise = make(eps=config.epsilon, zero_centered=config.zero_centered)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return norm(x), or (norm(x + residual), x + residual); both in x's dtype."""
        if self.bias is None:
            return self._normalise(x, self.weight, residual=residual)
        return self._normalise(x, self.weight, self.bias, residual=residual)

    def decode(
        self, delta: torch.Tensor | None, stream: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (norm(delta + stream), delta + stream), [t, h], outside of autograd.

        One input may be None. `delta` may be overwritten.
        """
        total = stream if delta is None else delta
        assert total is not None
        residual = None if delta is None else stream
        exact = total.device.type == "cpu" and total.dtype in _EXACT_DTYPES
        if self.config.kind == "LayerNorm" or not exact:
            return self(total, residual) if residual is not None else (self(total), total)
        if residual is not None:
            total.add_(residual)
        weight = self.weight.use(torch.float32)
        zero_centered = self.config.zero_centered
        return rms_norm_inference(total, self.config.epsilon, zero_centered, weight), total

    def for_fused_kernel(self) -> RowNorm | None:
        """Return the parameters of the kernel that reduces, normalises and gathers; None for
        LayerNorm."""
        if self.config.kind == "LayerNorm":
            return None
        weight = self.weight.use(torch.float32)
        return RowNorm(weight, self.config.epsilon, float(self.config.zero_centered))


class QueryKeyNorm(nn.Module):
    """RMSNorm of the queries of all heads together, and of the keys, in any layout of heads.

    A weight has a factor for each feature of each head, and is sharded over tp with the heads. With
    several tp ranks, the sums of squares of queries and keys are all-reduced together. A key head
    that several ranks hold has a share of one rank in them.

    Args:
        name: prefix of both weights.
        heads, groups: number of query heads n and of key heads g of all ranks.
        channels: features d of a head.
    """

    def __init__(
        self,
        name: str,
        *,
        heads: int,
        groups: int,
        channels: int,
        config: NormConfig,
        build: LayerBuild,
    ) -> None:
        super().__init__()
        if config.kind != "RMSNorm":
            raise ValueError(f"normalization {config.kind!r} of whole projections: use RMSNorm")
        self.config, self._group = config, build.region.group
        tp = self._group.size

        def declare(weight: str, size: int, shards: int) -> WeightHandle:
            sharding = WeightSharding.of(
                f"{name}.{weight}.weight",
                (size,),
                Shard(axis="tp", dim=0, count=shards),
                weight_decay=False,
            )
            value = 0.0 if config.zero_centered else 1.0
            return build.store.declare(sharding, InitSpec.constant(value))

        self.query = declare("query_norm", heads * channels, tp)
        self.key = declare("key_norm", groups * channels, min(groups, tp))
        # Squares that the sums over tp contain: replicated key heads occur several times.
        key_heads = max(groups, tp) if tp > 1 else groups
        self._sizes = (heads * channels, key_heads * channels)
        self._normalise = build.backend.rms_norm(
            eps=config.epsilon, zero_centered=config.zero_centered
        )

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised query [..., n/tp, d] and key [..., g/tp, d]."""
        if self._group.size == 1:
            normed = []
            for x, weight in ((query, self.query), (key, self.key)):
                rows = self._normalise(x.flatten(-2), weight)
                assert isinstance(rows, torch.Tensor)
                normed.append(rows.view_as(x))
            return normed[0], normed[1]
        dtype = accumulation_dtype(query.dtype)
        weights = []
        for handle, heads in ((self.query, query), (self.key, key)):
            weight = handle.use(dtype).view(heads.shape[-2:])
            weights.append(weight + 1 if self.config.zero_centered else weight)
        return apply_function(
            _QueryKeyNorm, query, key, *weights, self._group, self.config.epsilon, self._sizes
        )


class _QueryKeyNorm(torch.autograd.Function):
    """y = x r w for queries and keys, r = 1 / sqrt(S / size + eps), S = sum over tp of x².

    dgrad: r (g w) - x r³ / size · T, with T = sum over tp of g w x; wgrad: sum over tokens of
    g x r. In T a replicated key head occurs with the gradients of all its replicas, each of the
    queries of one rank; as in S, it is divided among them by `size`. Saves x, w and r.
    """

    @staticmethod
    def forward(ctx, query, key, query_weight, key_weight, group, eps, sizes):
        dtype, pairs = query_weight.dtype, ((query, query_weight), (key, key_weight))
        values = (x.to(dtype) for x, _ in pairs)
        scale = _QueryKeyNorm._mean(((x, x) for x in values), sizes, group).add_(eps).rsqrt_()
        ctx.save_for_backward(query, key, query_weight, key_weight, scale)
        ctx.group, ctx.sizes = group, sizes
        return tuple(
            (x * scale[..., i, None, None] * weight).to(x.dtype)
            for i, (x, weight) in enumerate(pairs)
        )

    @staticmethod
    def backward(ctx, *grads):
        *operands, scale = ctx.saved_tensors
        values = [x.to(scale.dtype) for x in operands[:2]]
        weights = operands[2:]
        weighted = [g * w for g, w in zip(grads, weights, strict=True)]
        means = _QueryKeyNorm._mean(zip(weighted, values, strict=True), ctx.sizes, ctx.group)
        means.mul_(scale.pow(3))
        inputs, wgrads = [], []
        for i, (x, grad) in enumerate(zip(values, grads, strict=True)):
            r, correction = scale[..., i, None, None], means[..., i, None, None]
            inputs.append((weighted[i] * r - x * correction).to(operands[i].dtype))
            wgrads.append((grad * (x * r)).flatten(0, -3).sum(0))
        return *inputs, *wgrads, None, None, None

    @staticmethod
    def _mean(pairs, sizes, group):
        """Return the sums over tp of x y / size [..., 2] for pairs (x, y) of [..., heads, d]."""
        sums = [(x * y).sum((-2, -1)) / size for (x, y), size in zip(pairs, sizes, strict=True)]
        means = torch.stack(sums, -1)
        return all_reduce(means, group, out=means)
