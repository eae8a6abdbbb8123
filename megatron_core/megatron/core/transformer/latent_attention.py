# SPDX-License-Identifier: Apache-2.0
"""LatentAttention: multi-head latent attention (DeepSeek-AI 2024, section 2.1.1).

Queries, and keys with values, pass through low-rank vectors (latents). The rotary position
embedding has separate features; all heads share the rotary features of keys.

hidden [s, b, h] → query latent | latent | key rope, norms → up, heads sharded over tp: query [s, b,
n/tp, nope + rope], key nope | value [s, b, n/tp, nope + v] → attention → [s, b, n·v/tp] → output
[s, b, h]

A cache stores the normalised latent c of a token and its rotated key features, shared by all heads.
New tokens attend to it as in multi-query attention: with keys K c and values V c of a head,

    q · (K c) = (Kᵀ q) · c        Σ p V c = V Σ p c

so K is applied to the queries and V to the result, and keys and values of heads are never computed.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron.core.backend import LayerBuild, Mixer
from megatron.core.comm.conjugates import copy_to_group, gather_from_group
from megatron.core.context_parallel import SequenceLayout, context_problems
from megatron.core.ops.matmul.batch_invariant import tiled_bmm
from megatron.core.tensor_parallel import ReplicatedLinear
from megatron.core.transformer.attention import CacheShapes, CoreAttention, KeyValueCache, RopeTable
from megatron.core.transformer.norm import Norm, NormConfig


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Shape of a latent attention layer.

    Args:
        num_attention_heads: number of query heads n.
        q_lora_rank: rank of the query latent; None computes queries directly.
        kv_lora_rank: rank of the latent of keys and values.
        nope_channels: features of a query or key head without rotary embedding.
        rope_channels: features of a query or key head with rotary embedding; keys share them.
        value_channels: features of a value head.
        dropout: dropout probability of an attention weight in training.
        scale_factor: factor on the softmax scale 1 / sqrt(nope + rope channels); yarn's squared
            mscale.
        norm_epsilon: epsilon of the norms of latents; None uses the epsilon of the model's norms.
    """

    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_channels: int
    rope_channels: int
    value_channels: int
    dropout: float = 0.0
    scale_factor: float = 1.0
    norm_epsilon: float | None = None

    @property
    def query_channels(self) -> int:
        """Features of a query or key head."""
        return self.nope_channels + self.rope_channels

    @property
    def rope_features(self) -> int:
        """Features of a head for the rotary table."""
        return self.rope_channels

    def problems(self, tp: int, *, cp: int = 1, engine: str = "auto") -> list[str]:
        """Return a message for each invalid setting, such as sizes or heads that do not divide
        evenly.

        Args:
            tp, cp: tensor and context parallel size.
            engine: communication of context parallelism.
        """
        problems = []
        sizes = (
            self.num_attention_heads,
            1 if self.q_lora_rank is None else self.q_lora_rank,
            self.kv_lora_rank,
            self.nope_channels,
            self.rope_channels,
            self.value_channels,
        )
        if min(sizes) < 1:
            problems.append(f"latent attention of {sizes} heads and features: use >= 1")
        elif self.num_attention_heads % tp:
            problems.append(
                f"num-attention-heads {self.num_attention_heads} must be divisible by "
                f"tensor-model-parallel-size {tp}"
            )
        if not 0.0 <= self.dropout < 1.0:
            problems.append(f"attention-dropout {self.dropout} must be in [0, 1)")
        if not self.scale_factor > 0.0:
            problems.append(f"softmax scale factor {self.scale_factor} must be positive")
        if self.norm_epsilon is not None and not self.norm_epsilon > 0.0:
            problems.append(f"norm epsilon is {self.norm_epsilon}: use a positive number")
        if not problems:  # every query head has a key head
            heads = self.num_attention_heads // tp
            problems += context_problems(engine, heads=heads, groups=heads, cp=cp)
        return problems


class LatentAttention(Mixer):
    """Latent self-attention of a sequence.

    Args:
        name: prefix of the names of its weights.
        layer: index among the attention layers, for the cache.
        norm: norm of latents; the config's epsilon overrides its epsilon.
    """

    def __init__(
        self,
        name: str,
        layer: int,
        *,
        config: LatentAttentionConfig,
        norm: NormConfig,
        build: LayerBuild,
    ) -> None:
        super().__init__()
        group, context = build.region.group, build.context
        problems = config.problems(group.size, cp=context.group.size, engine=context.engine)
        if problems:
            raise ValueError("; ".join(problems))
        self.layer, self.config, self.region = layer, config, build.region
        self.heads = config.num_attention_heads // group.size
        channels = config.query_channels
        self.core = CoreAttention.of(
            name,
            build,
            heads=self.heads,
            scale=config.scale_factor / math.sqrt(channels),
            rate=config.dropout,
        )
        # Attention uses one head size: smaller key or value heads are padded with zeros.
        self.width = max(channels, config.value_channels)
        self._declare(name, norm, build=build)

    def _declare(self, name: str, norm: NormConfig, *, build: LayerBuild) -> None:
        """Declare the projections and the norms."""
        config, n = self.config, self.config.num_attention_heads
        if config.norm_epsilon is not None:
            norm = dataclasses.replace(norm, epsilon=config.norm_epsilon)
        rank = config.kv_lora_rank
        down = [(f"{name}.kv_down", rank), (f"{name}.key_rope", config.rope_channels)]
        query, query_input = f"{name}.query", build.hidden_size
        self.query_norm: Norm | None = None
        if config.q_lora_rank is not None:
            down.insert(0, (f"{name}.query_down", config.q_lora_rank))
            query, query_input = f"{name}.query_up", config.q_lora_rank
            self.query_norm = Norm(f"{name}.query_norm", query_input, config=norm, build=build)
        self.down = ReplicatedLinear(
            f"{name}.down",
            down,
            input_size=build.hidden_size,
            store=build.store,
            region=build.region,
            init=build.init,
            gtp="mla_down_proj" in build.backend.gtp_opt_in_modules,
        )
        self.kv_norm = Norm(f"{name}.kv_norm", rank, config=norm, build=build)
        self.query = build.column_linear(
            query, [(query, n * config.query_channels, None)], input_size=query_input
        )
        self.kv_up = build.column_linear(
            f"{name}.kv_up",
            [
                (f"{name}.key_up", n * config.nope_channels, None),
                (f"{name}.value_up", n * config.value_channels, None),
            ],
            input_size=rank,
        )
        self.output = build.row_linear(f"{name}.output", n * config.value_channels)

    def cache_shapes(self, dtype: torch.dtype) -> CacheShapes:
        """Return the shape of a token's cached latent and key features, shared by all heads:
        (kv_lora + rope,).

        Args:
            dtype: dtype of activations.
        """
        entry = (self.config.kv_lora_rank + self.config.rope_channels,)
        return self.core.cache_shapes(entry, dtype)

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
        config = self.config
        query, latent, key_rope = self._project(hidden)
        # `split` rather than slices: its backward is one concatenation instead of a sum of padded
        # gradients.
        nope, rotated = query.split([config.nope_channels, config.rope_channels], dim=-1)
        if rope is not None:
            rotated, key_rope = rope.rotate(rotated), rope.rotate(key_rope)
            nope, rotated = rope.scale(nope), rope.scale(rotated)
        if cache is not None:
            if self.region.scatters:
                latent = gather_from_group(latent, self.region.group)  # [s, b, kv_lora]
            cached = torch.cat([latent, key_rope[:, :, 0]], dim=-1)  # [t, 1, kv_lora + rope]
            return self.output(self._absorbed(nope, rotated, cached, layout=layout, cache=cache))
        if self.core.backend.batch_invariant:  # the same computation as in generation
            cached = torch.cat([latent, key_rope[:, :, 0]], dim=-1)  # [s, b, kv_lora + rope]
            return self.output(self._absorbed(nope, rotated, cached, layout=layout))
        query = self._joined(nope, rotated)  # [s, b, n/tp, d], d the width
        sizes = [self.heads * config.nope_channels, self.heads * config.value_channels]
        nope, value = self.kv_up(latent).split(sizes, dim=-1)  # [s, b, n/tp · nope or v]
        key = self._joined(nope.unflatten(-1, (self.heads, -1)), key_rope)  # [s, b, n/tp, d]
        value = value.unflatten(-1, (self.heads, -1))  # [s, b, n/tp, v]
        if zeros := self.width - config.value_channels:
            value = F.pad(value, (0, zeros))  # [s, b, n/tp, d]
        out = self.core(query, key, value, layout)  # [s, b, n/tp, d]
        return self.output(out.narrow(-1, 0, config.value_channels).flatten(2))

    def _project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries [s, b, n/tp, nope + rope], the normalised latent [s, b, kv_lora] and key
        features [s, b, 1, rope], before rotation.

        Under sequence parallelism, hidden and the latent are [s/tp, b, ...].
        """
        config, group = self.config, self.region.group
        sizes = [config.kv_lora_rank, config.rope_channels]
        latents = self.down(hidden)  # [s, b, q_lora + kv_lora + rope]
        if self.query_norm is None:
            latent, key_rope = latents.split(sizes, dim=-1)
            query = self.query(hidden)  # [s, b, n/tp · (nope + rope)]
        else:
            query_latent, latent, key_rope = latents.split([config.q_lora_rank, *sizes], dim=-1)
            query = self.query(self.query_norm(query_latent))
        if self.region.scatters:
            key_rope = gather_from_group(key_rope, group, partial_gradient=True)  # [s, b, rope]
        elif group.size > 1:
            key_rope = copy_to_group(key_rope, group)  # its gradient: the sum over tp
        return query.unflatten(-1, (self.heads, -1)), self.kv_norm(latent), key_rope.unsqueeze(2)

    def _joined(self, nope: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
        """Return heads [s, b, n/tp, d] with both kinds of features, padded with zeros.

        Args:
            nope: [s, b, n/tp, nope].
            rotated: [s, b, n/tp, rope], or [s, b, 1, rope] shared by all heads.
        """
        heads = (*nope.shape[:3], -1)
        features = [nope, rotated.expand(heads)]
        if zeros := self.width - self.config.query_channels:
            features.append(nope.new_zeros(1).expand(*heads[:3], zeros))
        return torch.cat(features, dim=-1)

    def _absorbed(
        self,
        nope: torch.Tensor,
        rotated: torch.Tensor,
        cached: torch.Tensor,
        *,
        layout: SequenceLayout,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        """Return attention of new tokens to all cached tokens, [s, b, n·v/tp]; see the module
        docstring.

        Args:
            nope: query features [s, b, n/tp, nope]; b is 1 with a cache.
            rotated: rotated query features [s, b, n/tp, rope].
            cached: latent and key features of these tokens [s, b, kv_lora + rope], to be cached.
            cache: the cache; None attends to these tokens alone.
        """
        rank, key_rows = self.config.kv_lora_rank, self.heads * self.config.nope_channels
        up = self.kv_up.weight.use() if cache is None else self.kv_up.weight.get()
        key_up = up[:key_rows].view(self.heads, -1, rank)  # [n/tp, nope, kv_lora]
        absorbed = self._by_head(nope.flatten(0, 1), key_up).view(*nope.shape[:3], rank)
        query = torch.cat([absorbed, rotated], dim=-1)  # [s, b, n/tp, kv_lora + rope]
        if cache is None:
            key_value = cached.unsqueeze(2)  # one head
            out = self.core(query, key_value, key_value, layout).flatten(0, 1)[..., :rank]
        else:
            out = cache.attend_latent(
                self.layer,
                query[:, 0],
                cached[:, 0],
                layout.rows_with_past,
                self.core,
                value_features=rank,
            )  # [t, n/tp, kv_lora]
        up = up if cache is None else self.kv_up.weight.get()
        value_up = up[key_rows:].view(self.heads, -1, rank)  # [n/tp, v, kv_lora]
        return self._by_head(out, value_up.transpose(1, 2)).reshape(*nope.shape[:2], -1)

    def _by_head(self, x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        """Return x [t, n/tp, a] times the matrix of each head [n/tp, a, c]: [t, n/tp, c]."""
        if self.core.backend.batch_invariant:
            dtype = self.kv_up.weight.product_dtype
            return tiled_bmm(x.to(dtype), matrices.to(dtype)).to(x.dtype)
        return torch.bmm(x.transpose(0, 1), matrices).transpose(0, 1)
