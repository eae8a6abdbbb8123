# SPDX-License-Identifier: Apache-2.0
"""Self-attention: multi-head, grouped-query or multi-query, heads sharded over tp.

hidden [s, b, h] → q|k|v [s, b, (n + 2g)·d/tp] → norm, rotate → attention → [s, b, n·d/tp] → output
[s, b, h]. The norm of queries and keys is of each head, or of the whole projection (as in OLMo 2).
With an output gate, q|k|v|gate is one product, and attention's result is multiplied by
sigmoid(gate) before the output projection (Qiu et al. 2025, arXiv 2505.06708; as in Qwen3-Next).

With context parallelism s is s/cp everywhere, and only attention uses the tokens of other ranks.

With fewer kv heads than tp ranks, each kv head is replicated on tp/g consecutive ranks, whose query
heads share it; the gradient plan sums the partial gradients of the replicas (`weight_sharding`).

`CoreAttention` is the softmax attention of a rank's heads, shared by all attention layers. The
model's `RotaryEmbedding` computes the cosines and sines of a microbatch's positions once for all
layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from megatron.core.backend import AttentionLayer, Backend, LayerBuild, Mixer
from megatron.core.context_parallel import SequenceLayout
from megatron.core.context_parallel.attention import Attend, context_attention, context_problems
from megatron.core.context_parallel.layout import ContextParallel, PagedRows
from megatron.core.initialize import InitSpec
from megatron.core.ops.dropout import AttentionDropout, dropout_key
from megatron.core.ops.rope import (
    RopeScaling,
    RopeTable,
    inverse_frequencies,
    split_heads,
    tabulate,
)
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.norm import Norm, NormConfig, QueryKeyNorm
from megatron.core.weight_gather.handle import WeightHandle
from megatron.core.weight_sharding import Shard, WeightSharding


@dataclass(frozen=True, kw_only=True)
class CacheShapes:
    """Shapes of the cache entries of a layer, or of all layers of a rank.

    Args:
        attention: per attention layer the entry of a token: (g, d) for keys and for values with g
            KV heads of size d, or (c,) for a latent.
        states: per recurrent mixer, by name, shape and dtype of the state of a sequence.
        dtype: dtype of keys, values and latents.
        windows: per attention layer its window in tokens, None for full attention; empty means full
            attention in all layers.
        cpu_dtype: dtype in which a CPU multiplies 16-bit attention operands.
    """

    attention: tuple[tuple[int, ...], ...] = ()
    states: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    windows: tuple[int | None, ...] = ()
    cpu_dtype: torch.dtype | None = None

    @staticmethod
    def of_layers(layers: Iterable[CacheShapes], dtype: torch.dtype) -> CacheShapes:
        """Return the shapes of several layers together, in their order.

        Args:
            layers: shapes of each layer.
            dtype: dtype of activations.
        """
        layers = list(layers)
        attention = [layer for layer in layers if layer.attention]
        return CacheShapes(
            attention=tuple(shape for layer in attention for shape in layer.attention),
            states={name: state for layer in layers for name, state in layer.states.items()},
            dtype=dtype,
            windows=tuple(window for layer in attention for window in layer.windows),
            cpu_dtype=attention[-1].cpu_dtype if attention else None,
        )

    @property
    def page_entries(self) -> tuple[tuple[int, ...], ...]:
        """Per attention layer the page entry of a token: (2g, d) for keys and values, (c,) for a
        latent."""
        return tuple((2 * s[0], s[1]) if len(s) == 2 else s for s in self.attention)

    @property
    def window(self) -> int | None:
        """Largest window of any layer, in tokens; None if no layer has a window."""
        return max((window for window in self.windows if window is not None), default=None)

    @property
    def has_full_attention(self) -> bool:
        """Whether some layer attends to all tokens."""
        return bool(self.attention) and (not self.windows or None in self.windows)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the pages of all layers."""
        return sum(self._entry_bytes)

    @property
    def windowed_token_bytes(self) -> int:
        """Bytes of a token in the pages of the layers with a window."""
        pairs = zip(self._entry_bytes, self.windows, strict=False)
        return sum(size for size, window in pairs if window is not None)

    @property
    def _entry_bytes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) * self.dtype.itemsize for shape in self.page_entries)

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence in the state slots of all mixers."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.states.values())


@dataclass(frozen=True, eq=False, kw_only=True)
class CoreAttention:
    """Attention of projected queries, keys and values, over this rank's tokens or the tokens of all
    cp ranks. It has no weights.

    Args:
        backend: the backend of the layer.
        layer: the backend's attention layer, if it has one.
        context: context-parallel settings and group.
        scale: factor on the logits.
        softcap: bound of the logits before the mask, see `ops.attention`; None for none.
        window: number of tokens that a query sees, itself and those before it; None means all.
        rate: dropout probability of an attention weight in training.
        dropout_key: dropout key of the layer, from `ops.dropout.dropout_key`.
        head_offset: index of this rank's first query head among the heads of all tp ranks.
    """

    backend: Backend
    layer: AttentionLayer | None
    context: ContextParallel
    scale: float
    softcap: float | None
    window: int | None
    rate: float
    dropout_key: int
    head_offset: int

    def cache_shapes(self, entry: tuple[int, ...], dtype: torch.dtype) -> CacheShapes:
        """Return the shapes of a layer whose tokens have cache entries of shape `entry`."""
        cpu_dtype = self.context.cpu_dtype
        return CacheShapes(
            attention=(entry,), dtype=dtype, windows=(self.window,), cpu_dtype=cpu_dtype
        )

    @staticmethod
    def of(
        name: str,
        build: LayerBuild,
        *,
        heads: int,
        scale: float,
        rate: float,
        softcap: float | None = None,
        window: int | None = None,
    ) -> CoreAttention:
        """Build the core attention of the layer `name`.

        Args:
            heads: number of query heads of this rank, n/tp.
            scale, rate, softcap, window: see the class.

        Raises:
            ValueError: the backend's attention layer has no soft cap.
        """
        make = build.backend.attention_layer
        if make is not None and softcap is not None:
            raise ValueError(
                f"this backend's attention has no soft cap {softcap} of logits: use the local one"
            )
        return CoreAttention(
            backend=build.backend,
            layer=None if make is None else make(scale=scale, window=window),
            context=build.context,
            scale=scale,
            softcap=softcap,
            window=window,
            rate=rate,
            dropout_key=dropout_key(build.seed, name, "attention"),
            head_offset=build.region.group.rank * heads,
        )

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: SequenceLayout,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return [s, b, n/tp, d].

        Args:
            query: [s, b, n/tp, d].
            key, value: [s, b, g/tp, d].
            layout: positions and documents of the tokens.
            sinks: learned logits [n/tp]; None without sinks.
        """
        dropout = None
        if self.rate and layout.sample_ids is not None:
            dropout = self._dropout(layout)
        if self.layer is not None and dropout is None and self.context.group.size == 1:
            out = self.layer(query, key, value, layout, sinks=sinks)
            if out is not None:
                return out
        # Documents given by boundaries rather than ids are attended to one by one.
        by_document = layout.documents is not None and layout.document_ids is None
        if by_document or self.context.group.size > 1:
            if self.backend.batch_invariant:
                raise ValueError(
                    "batch-invariant attention supports neither packed documents nor context "
                    f"parallelism, here of {self.context.group.size} ranks: put each document "
                    "into a separate row, on one context-parallel rank"
                )
            attend = Attend(
                layout=layout,
                group=self.context.group,
                scale=self.scale,
                softcap=self.softcap,
                window=self.window,
                dropout=dropout,
                cpu_dtype=self.context.cpu_dtype,
            )
            engine = self.context.engine
            return context_attention(query, key, value, attend=attend, engine=engine, sinks=sinks)
        documents, (cu_seqlens, longest) = layout.documents, (None, None)
        if documents is not None and documents[0][-1] == len(query):  # else there is padding
            cu_seqlens, longest = layout.cu_seqlens(query.shape[1])
        return self.backend.attention(
            query,
            key,
            value,
            causal=True,
            scale=self.scale,
            softcap=self.softcap,
            window=self.window,
            sinks=sinks,
            document_ids=layout.document_ids,
            cu_seqlens=cu_seqlens,
            max_seqlen=longest,
            dropout=dropout,
        )[0]

    def _dropout(self, layout: SequenceLayout) -> AttentionDropout:
        assert layout.sample_ids is not None
        return AttentionDropout(
            rate=self.rate,
            key=self.dropout_key,
            sample_ids=layout.sample_ids,
            head_offset=self.head_offset,
            sample_length=layout.sample_length,
        )


#: Initial positions of a cached rotary table; it doubles on demand.
CACHED_POSITIONS = 4096


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021).

    Args:
        base: base of the frequencies; the longest wavelength is about 2π·base tokens.
        percent: fraction of each head's features that is rotated.
        interleaved: rotate pairs of adjacent features instead of features half a head apart.
        scaling: scaling of the wavelengths for longer contexts; None for none.
        query_scale_beta: β of the factor 1 + β ln(1 + ⌊p / L⌋) on the queries of position p, which
            keeps attention sharp in long contexts (Llama 4); 0 for none.
        query_scale_length: L, in tokens.
    """

    base: float = 10000.0
    percent: float = 1.0
    interleaved: bool = False
    scaling: RopeScaling | None = None
    query_scale_beta: float = 0.0
    query_scale_length: int = 8192

    def __post_init__(self) -> None:
        if self.query_scale_beta < 0.0 or self.query_scale_length < 1:
            raise ValueError(
                f"query_scale_beta {self.query_scale_beta} must not be negative, and "
                f"query_scale_length {self.query_scale_length} must be at least 1"
            )
        if not (self.base > 1.0 and 0.0 < self.percent <= 1.0):
            raise ValueError(
                f"rotary base {self.base} must be above 1 and rotary percent "
                f"{self.percent} in (0, 1]"
            )

    def rotary_features(self, head_size: int) -> int:
        """Return the number of rotated features per head. Raises ValueError if it is odd."""
        features = int(head_size * self.percent)
        if features < 2 or features % 2:
            raise ValueError(
                f"{self.percent} of {head_size} features per head is {features}: rotary position "
                "embedding needs an even number of features"
            )
        return features


class RotaryEmbedding:
    """Computes rotary tables for positions; the frequencies are computed once.

    Args:
        config: settings of the frequencies.
        head_size: features of a head.
        device: device of the positions.
    """

    def __init__(
        self, config: RopeConfig, head_size: int, *, device: torch.device | str | None = None
    ) -> None:
        self.config = config
        self.frequencies = inverse_frequencies(
            config.rotary_features(head_size),
            base=config.base,
            scaling=config.scaling,
            device=None if device is None else torch.device(device),
        )
        self._table: RopeTable | None = None

    def __call__(self, positions: torch.Tensor) -> RopeTable:
        """Return the table for positions int64 [s] or [s, b]."""
        cos, sin = tabulate(positions, self.frequencies, self.config.scaling)
        return RopeTable(cos, sin, self.config.interleaved, self._query_scale(positions))

    def cached(self, positions: torch.Tensor, *, end: int) -> RopeTable:
        """Return the table for positions int64 [t] as rows of a cached table.

        Args:
            end: exclusive upper bound of the positions, known on the host.
        """
        if self._table is None or end > len(self._table.cos):
            size = max(CACHED_POSITIONS, 1 << (end - 1).bit_length())
            self._table = self(torch.arange(size, device=self.frequencies.device))
        cos, sin = (x.index_select(0, positions) for x in (self._table.cos, self._table.sin))
        scale = self._table.query_scale
        if scale is not None:
            scale = scale.index_select(0, positions)
        return RopeTable(cos, sin, self.config.interleaved, scale)

    def _query_scale(self, positions: torch.Tensor) -> torch.Tensor | None:
        beta, length = self.config.query_scale_beta, self.config.query_scale_length
        if not beta:
            return None
        return torch.log1p((positions // length).float()).mul_(beta).add_(1.0)


@dataclass(frozen=True, kw_only=True)
class WindowAttentionConfig:
    """How the attention of `W` blocks differs from the attention of `*` blocks.

    Args:
        window, sinks, rotary: as in `AttentionConfig`.
        rope: rotary position embedding of `W` blocks; None uses the model's.
        pattern: per layer of a GPT "*" or "W"; empty for a hybrid, whose pattern has both symbols.
    """

    window: int | None = None
    sinks: bool = False
    rotary: bool = True
    rope: RopeConfig | None = None
    pattern: str = ""

    def problems(self) -> list[str]:
        """Return a message for each invalid setting."""
        problems = []
        if self.window is not None and self.window < 1:
            problems.append(f"window of W blocks {self.window}: use at least 1, or None for none")
        if self.rope is not None and not self.rotary:
            problems.append(
                "W blocks without rotary positions have a rotary embedding: leave out one"
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Shape of an attention layer.

    Args:
        num_attention_heads: number of query heads n.
        num_query_groups: number of key-value heads g; g = n is multi-head, 1 multi-query attention.
        kv_channels: features per head d (may differ from hidden / heads).
        qkv_bias, output_bias: whether the projections have biases.
        qk_norm: normalise queries and keys.
        qk_norm_scope: whether a norm is of each "head", with one weight for all, or of all heads
            of the "projection".
        dropout: dropout probability of an attention weight in training.
        window: number of tokens that a query sees, itself and those before it; None means all.
        sinks: whether each query head has an attention sink, a learned logit in the softmax without
            a value (Xiao et al. 2023, arXiv 2309.17453; as in gpt-oss).
        output_gate: whether each output feature of a head is multiplied by the sigmoid of a learned
            projection of the hidden state; the projection has a bias if queries have one.
        rotary: whether queries and keys are rotated in a model with rotary position embedding.
        second: how attention of `W` blocks differs; None without such blocks.
        softmax_scale: factor on the attention logits; None is 1 / sqrt(d).
        softcap: bound c of the attention logits x, which become c tanh(x / c); None for none.
    """

    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    qk_norm_scope: Literal["head", "projection"] = "head"
    dropout: float = 0.0
    window: int | None = None
    sinks: bool = False
    output_gate: bool = False
    rotary: bool = True
    second: WindowAttentionConfig | None = None
    softmax_scale: float | None = None
    softcap: float | None = None

    @property
    def window_block(self) -> AttentionConfig:
        """Shape of attention in `W` blocks."""
        assert self.second is not None
        settings = {name: getattr(self.second, name) for name in ("window", "sinks", "rotary")}
        return dataclasses.replace(self, **settings, second=None)

    @property
    def scale(self) -> float:
        """Factor on the attention logits."""
        if self.softmax_scale is not None:
            return self.softmax_scale
        return 1 / math.sqrt(self.kv_channels)

    @property
    def rope_features(self) -> int:
        """Features of a head for the rotary table."""
        return self.kv_channels

    def problems(self, tp: int, *, cp: int = 1, engine: str = "auto") -> list[str]:
        """Return a message for each invalid setting, such as head counts that do not divide evenly.

        Args:
            tp, cp: tensor and context parallel size.
            engine: communication of context parallelism.
        """
        problems = []
        n, g = self.num_attention_heads, self.num_query_groups
        if min(n, g, self.kv_channels) < 1:
            return [f"attention heads {n}, query groups {g}, channels {self.kv_channels}: use >= 1"]
        if n % g:
            problems.append(f"num-query-groups {g} must divide num-attention-heads {n}")
        if n % tp:
            problems.append(
                f"num-attention-heads {n} must be divisible by tensor-model-parallel-size {tp}"
            )
        if g % tp and tp % g:
            problems.append(
                f"num-query-groups {g} must divide tensor-model-parallel-size {tp} "
                "or be a multiple of it"
            )
        if self.qk_norm_scope not in ("head", "projection"):
            problems.append(f"qk_norm_scope {self.qk_norm_scope!r}: use head or projection")
        elif self.qk_norm_scope == "projection" and not self.qk_norm:
            problems.append("qk_norm_scope 'projection' without qk_norm: leave out one")
        if not 0.0 <= self.dropout < 1.0:
            problems.append(f"attention-dropout {self.dropout} must be in [0, 1)")
        if self.window is not None and self.window < 1:
            problems.append(
                f"attention window {self.window}: use at least 1, or None for no window"
            )
        if self.softmax_scale is not None and not 0.0 < self.softmax_scale < math.inf:
            problems.append(f"softmax-scale {self.softmax_scale}: use a positive number")
        if self.softcap is not None and not 0.0 < self.softcap < math.inf:
            problems.append(f"attn-logit-softcapping {self.softcap}: use a positive number")
        if self.second is not None:
            problems += self.second.problems()
        if not problems:
            heads, groups = n // tp, max(1, g // tp)
            problems += context_problems(engine, heads=heads, groups=groups, cp=cp)
        return problems


class KeyValueCache(Protocol):
    """Interface of a KV cache during generation: stores new tokens, then attends.

    `t` new tokens of all sequences are packed; `rows` assigns them to sequences.
    """

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key_value: torch.Tensor,
        rows: PagedRows,
        core: CoreAttention,
        *,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Store the key and value heads [t, 2g/tp, d] of a layer; return attention [t, n/tp, d] of
        the queries [t, n/tp, d] to all cached tokens of their sequences, the new ones included."""
        ...

    def attend_latent(
        self,
        layer: int,
        query: torch.Tensor,
        latent: torch.Tensor,
        rows: PagedRows,
        core: CoreAttention,
        *,
        value_features: int,
    ) -> torch.Tensor:
        """Store latents [t, c] of a layer, shared by all heads; return attention [t, n/tp,
        value_features] of queries [t, n/tp, c] to the latents of their sequences, whose first
        features are the values."""
        ...


class SelfAttention(Mixer):
    """Self-attention of a sequence.

    Args:
        name: prefix of the names of its weights.
        layer: index among the attention layers, for the cache.
        in_window_block: whether the layer is the mixer of a `W` block.
    """

    decodes_gathered = True

    def __init__(
        self,
        name: str,
        layer: int,
        *,
        config: AttentionConfig,
        norm: NormConfig,
        build: LayerBuild,
        in_window_block: bool = False,
    ) -> None:
        super().__init__()
        group = build.region.group
        context = build.context
        problems = config.problems(group.size, cp=context.group.size, engine=context.engine)
        if problems:
            raise ValueError("; ".join(problems))
        self.layer, self.config, self._in_window_block = layer, config, in_window_block
        n, g, d = config.num_attention_heads, config.num_query_groups, config.kv_channels
        self.heads = n // group.size
        self.kv_heads = max(1, g // group.size)
        kv_heads_and_shards = (g, min(g, group.size))
        heads_and_shards = {
            "query": (n, None),
            "key": kv_heads_and_shards,
            "value": kv_heads_and_shards,
        }
        if config.output_gate:
            heads_and_shards["gate"] = (n, None)
        projections = [
            (f"{name}.{projection}", heads * d, num_shards)
            for projection, (heads, num_shards) in heads_and_shards.items()
        ]
        self.qkv = build.column_linear(f"{name}.qkv", projections, bias=config.qkv_bias)
        self.output = build.row_linear(f"{name}.output", n * d, bias=config.output_bias)
        self.query_norm: Norm | None = None
        self.key_norm: Norm | None = None
        self.query_key_norm: QueryKeyNorm | None = None
        options: dict[str, Any] = {"config": norm, "build": build}
        if config.qk_norm and config.qk_norm_scope == "projection":
            self.query_key_norm = QueryKeyNorm(name, heads=n, groups=g, channels=d, **options)
        elif config.qk_norm:  # one weight for all heads; each rank has some of the heads
            options["gradient"] = "partial"
            self.query_norm = Norm(f"{name}.query_norm", d, **options)
            self.key_norm = Norm(f"{name}.key_norm", d, **options)
        self.sinks: WeightHandle | None = None
        if config.sinks:
            shard = Shard(axis="tp", dim=0)
            sharding = WeightSharding.of(f"{name}.sinks", (n,), shard, weight_decay=False)
            self.sinks = build.store.declare(sharding, InitSpec.constant(0.0))
        self._sigmoid = build.backend.elementwise(torch.sigmoid)
        self.core = CoreAttention.of(
            name,
            build,
            heads=self.heads,
            scale=config.scale,
            rate=config.dropout,
            softcap=config.softcap,
            window=config.window,
        )

    def cache_shapes(self, dtype: torch.dtype) -> CacheShapes:
        """Return the shape of a token's cached keys, and of its cached values: (g/tp, d).

        Args:
            dtype: dtype of activations.
        """
        return self.core.cache_shapes((self.kv_heads, self.config.kv_channels), dtype)

    def forward(
        self,
        hidden: torch.Tensor,
        layout: SequenceLayout,
        *,
        rope: RopeTable | None = None,
        window_rope: RopeTable | None = None,
        cache: KeyValueCache | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Return [s, b, h] from hidden [s, b, h] ([s/tp, b, h] both under sequence parallelism)."""
        if self._in_window_block:
            rope = window_rope
        mixed = self.qkv(hidden)  # [s, b, (n + 2g)·d/tp], with gates (2n + 2g)·d/tp
        heads, d = self.heads, self.config.kv_channels
        mixed = mixed.view(*mixed.shape[:2], -1, d)  # [s, b, (n + 2g)/tp, d]
        sizes = [heads, self.kv_heads, self.kv_heads]
        if self.config.output_gate:
            sizes.append(heads)
        rotation = None if self.config.qk_norm else rope
        query, key, value, *gates = split_heads(mixed, sizes, rotation)
        if self.query_key_norm is not None:
            query, key = self.query_key_norm(query, key)  # [s, b, n/tp or g/tp, d]
        elif self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if rope is not None and self.config.qk_norm:
            query, key = rope.rotate(query), rope.rotate(key)
        if rope is not None:
            query = rope.scale(query)
        if cache is None:
            out = self.core(query, key, value, layout, sinks=self._sinks())  # [s, b, n/tp, d]
        else:
            key_value = torch.cat([key[:, 0], value[:, 0]], 1)  # [t, 2g/tp, d]
            out = self._attend_cached(query[:, 0], key_value, layout, cache).unsqueeze(1)
        return self.output(self._gated(out, gates))

    def decode(
        self,
        x: torch.Tensor,
        layout: SequenceLayout,
        *,
        cache: KeyValueCache,
        rope: RopeTable | None = None,
        window_rope: RopeTable | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, RowParallelLinear]:
        """See `Mixer.decode`: queries and keys are rotated in place, and the cache takes keys and
        values as they lie in the projection's output."""
        if self._in_window_block:
            rope = window_rope
        n, g = self.heads, self.kv_heads
        mixed = self.qkv.weight.linear(x, self.qkv.bias)
        mixed = mixed.view(len(x), -1, self.config.kv_channels)  # [t, (n + 2g)/tp, d]
        query, key_value, *gates = mixed.split([n, 2 * g, n][: 2 + self.config.output_gate], dim=1)
        if self.query_key_norm is not None:
            key = key_value[:, :g]
            normed_query, normed_key = self.query_key_norm(query, key)
            query.copy_(normed_query)
            key.copy_(normed_key)
        elif self.query_norm is not None and self.key_norm is not None:
            for norm, heads in ((self.query_norm, query), (self.key_norm, key_value[:, :g])):
                heads.copy_(norm(heads))
        if rope is not None:
            rope.rotate_(mixed[:, : n + g])
            rope.scale_(query)
        return self._gated(self._attend_cached(query, key_value, layout, cache), gates), self.output

    def _sinks(self) -> torch.Tensor | None:
        # In fp32, so that their gradient is not rounded.
        return None if self.sinks is None else self.sinks.use(torch.float32)  # [n/tp]

    def _attend_cached(
        self,
        query: torch.Tensor,
        key_value: torch.Tensor,
        layout: SequenceLayout,
        cache: KeyValueCache,
    ) -> torch.Tensor:
        """Return [t, n/tp, d], see `KeyValueCache.attend`."""
        # The property raises the error of a layout without rows.
        rows = layout.paged or layout.rows_with_past
        return cache.attend(self.layer, query, key_value, rows, self.core, sinks=self._sinks())

    def _gated(self, out: torch.Tensor, gates: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the input [..., n/tp · d] of the output projection from heads [..., n/tp, d]."""
        for gate in gates:
            out = out * self._sigmoid(gate)
        return out.flatten(-2)
