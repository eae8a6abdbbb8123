# SPDX-License-Identifier: Apache-2.0
"""SelfAttention: multi-head, grouped-query or multi-query attention, heads cut over tp.

hidden [s, b, h] → q|k|v [s, b, (n + 2g)·d/tp] → norm, rotate → attention → [s, b, n·d/tp] → output
[s, b, h]. With an output gate, q|k|v|gate is one product, and attention's result is multiplied by
sigmoid(gate) before the output projection (Qiu et al. 2025, arXiv 2505.06708; as in Qwen3-Next).

With context parallelism s is s/cp everywhere, and attention alone sees the tokens of other ranks.

With fewer kv heads than tp ranks each kv head is held by tp/g consecutive ranks, whose query heads
all use it; their gradients of it are addends, which the gradient plan sums (`weight_sharding`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from megatron.core.context_parallel import SequenceLayout
from megatron.core.context_parallel.setting import context_problems
from megatron.core.initialize import InitSpec
from megatron.core.ops.rope import apply_rope
from megatron.core.transformer.build import LayerBuild
from megatron.core.transformer.core_attention import CoreAttention
from megatron.core.transformer.norm import Norm, NormConfig
from megatron.core.transformer.rope import RopeTable
from megatron.core.weight_gather.handle import WeightHandle
from megatron.core.weight_sharding import Cut, WeightSharding


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Shape of an attention layer.

    Args:
        num_attention_heads: query heads n.
        num_query_groups: key-value heads g; n gives multi-head, 1 multi-query attention.
        kv_channels: features per head d (may differ from hidden / heads).
        qkv_bias, output_bias: whether the projections have biases.
        qk_norm: normalise each query and key head.
        dropout: probability of dropping an attention weight in training.
        window: tokens that a query sees, itself and those before it; None is all of them.
        sinks: whether each query head has a learned logit that takes probability and carries no
            value (Xiao et al. 2023, arXiv 2309.17453; as in gpt-oss).
        output_gate: whether each feature that a head puts out is multiplied by the sigmoid of a
            learned product with the hidden state; it has a bias where queries have one.
    """

    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    dropout: float = 0.0
    window: int | None = None
    sinks: bool = False
    output_gate: bool = False

    @property
    def rope_features(self) -> int:
        """Features of a head that the rotary table is made for."""
        return self.kv_channels

    def problems(self, tp: int, *, cp: int = 1, engine: str = "auto") -> list[str]:
        """List what cannot be: head counts that do not divide, a rate that is no probability.

        Args:
            tp, cp: ranks that share heads, and tokens of a row.
            engine: of context parallelism.
        """
        found = []
        n, g = self.num_attention_heads, self.num_query_groups
        if min(n, g, self.kv_channels) < 1:
            return [f"attention heads {n}, query groups {g}, channels {self.kv_channels}: use >= 1"]
        if n % g:
            found.append(f"num-query-groups {g} must divide num-attention-heads {n}")
        if n % tp:
            found.append(f"num-attention-heads {n} must divide by tensor-model-parallel-size {tp}")
        if g % tp and tp % g:
            found.append(
                f"num-query-groups {g} must divide tensor-model-parallel-size {tp} "
                "or be a multiple of it"
            )
        if not 0.0 <= self.dropout < 1.0:
            found.append(f"attention-dropout {self.dropout} must be in [0, 1)")
        if self.window is not None and self.window < 1:
            found.append(f"attention window {self.window}: use at least 1, or None for no window")
        if not found:
            heads, groups = n // tp, max(1, g // tp)
            found += context_problems(engine, heads=heads, groups=groups, cp=cp)
        return found


class KeyValueCache(Protocol):
    """What attention needs of a cache while generating."""

    def extend(
        self, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [s, b, g/tp, d] keys and values of a layer; return all so far, [s_k, b, g/tp,
        d]. Keys and values may differ in d, and it may be 0."""


class SelfAttention(nn.Module):
    """Attention of a sequence over itself.

    Args:
        name: prefix of its weights.
        layer: number of this layer among the attention layers, for the cache.
    """

    def __init__(
        self,
        name: str,
        layer: int,
        *,
        config: AttentionConfig,
        norm: NormConfig,
        build: LayerBuild,
    ) -> None:
        super().__init__()
        group = build.region.group
        context = build.context
        problems = config.problems(group.size, cp=context.group.size, engine=context.engine)
        if problems:
            raise ValueError("; ".join(problems))
        self.layer, self.config = layer, config
        n, g, d = config.num_attention_heads, config.num_query_groups, config.kv_channels
        self.heads = n // group.size
        self.kv_heads = max(1, g // group.size)
        of_groups = (g, min(g, group.size))
        cuts = {"query": (n, None), "key": of_groups, "value": of_groups}
        if config.output_gate:
            cuts["gate"] = (n, None)
        self.qkv = build.backend.column_linear(
            f"{name}.qkv",
            [(f"{name}.{part}", count * d, pieces) for part, (count, pieces) in cuts.items()],
            input_size=build.hidden_size,
            store=build.store,
            region=build.region,
            init=build.init,
            bias=config.qkv_bias,
        )
        self.output = build.backend.row_linear(
            f"{name}.output",
            input_size=n * d,
            output_size=build.hidden_size,
            store=build.store,
            region=build.region,
            init=build.output_init,
            bias=config.output_bias,
        )
        self.query_norm = self.key_norm = None
        if config.qk_norm:  # one weight for all heads, each rank sees some of them
            shared = {"config": norm, "build": build, "gradient": "partial"}
            self.query_norm = Norm(f"{name}.query_norm", d, **shared)
            self.key_norm = Norm(f"{name}.key_norm", d, **shared)
        self.sinks: WeightHandle | None = None
        if config.sinks:
            cut = Cut(axis="tp", dim=0)
            logits = WeightSharding.of(f"{name}.sinks", (n,), cut, weight_decay=False)
            self.sinks = build.store.declare(logits, InitSpec.constant(0.0))
        self.core = CoreAttention.of(
            name,
            build,
            heads=self.heads,
            channels=d,
            rate=config.dropout,
            window=config.window,
        )

    def forward(
        self,
        hidden: torch.Tensor,
        layout: SequenceLayout,
        *,
        rope: RopeTable | None = None,
        cache: KeyValueCache | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Return [s, b, h] from hidden [s, b, h] ([s/tp, b, h] both under sequence parallelism)."""
        mixed = self.qkv(hidden)  # [s, b, (n + 2g)·d/tp], with gates (2n + 2g)·d/tp
        heads, d = self.heads, self.config.kv_channels
        mixed = mixed.view(*mixed.shape[:2], -1, d)  # [s, b, (n + 2g)/tp, d]
        # Splits and not slices: their backward is one concatenation, not a sum of padded gradients.
        sizes = [heads + self.kv_heads, self.kv_heads]
        if self.config.output_gate:
            sizes.append(heads)
        both, value, *gates = mixed.split(sizes, dim=2)
        if self.query_norm is not None:
            query, key = both.split([heads, self.kv_heads], dim=2)
            query, key = self.query_norm(query), self.key_norm(key)  # [s, b, n/tp or g/tp, d]
            if rope is not None:
                query, key = self._rotate(query, rope), self._rotate(key, rope)
        else:
            if rope is not None:
                both = self._rotate(both, rope)
            query, key = both.split([heads, self.kv_heads], dim=2)
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)  # [s_k, b, g/tp, d]
        # fp32, so that their gradient arrives unrounded.
        sinks = None if self.sinks is None else self.sinks.use(torch.float32)  # [n/tp]
        out = self.core(query, key, value, layout, sinks=sinks)  # [s, b, n/tp, d]
        for gate in gates:
            out = out * gate.sigmoid()
        return self.output(out.reshape(*out.shape[:2], -1))

    @staticmethod
    def _rotate(x: torch.Tensor, rope: RopeTable) -> torch.Tensor:
        return apply_rope(x, rope.cos, rope.sin, interleaved=rope.interleaved)
