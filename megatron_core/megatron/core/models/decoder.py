# SPDX-License-Identifier: Apache-2.0
"""Decoder: a stack of residual blocks built from a layer pattern or a range of its blocks.

Each block computes delta = multiplier · post_norm(mixer(norm(stream))), stream += delta, with one
of the norms or both (`NormConfig.placement`). The addition is fused into the norm of the next
block, so each block reads and writes the stream only once. Parallel blocks of a pattern, such as
`(*-)`, have one norm of the input, and their delta is of the sum of their mixers' outputs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from megatron.core.backend import Mixer
from megatron.core.comm.collectives import all_reduce
from megatron.core.comm.conjugates import own_rows
from megatron.core.context_parallel import SequenceLayout
from megatron.core.models.layer_pattern import (
    ATTENTION,
    DELTA_NET,
    DENSE,
    EXPERTS,
    LATENT,
    MAMBA,
    SHORT_CONV,
    WINDOW,
    layer_blocks,
    parallel_groups,
    symbol_problems,
    symbols_of,
    without_stages,
)
from megatron.core.moe import MoE, MoEConfig
from megatron.core.ops.dropout import dropout, dropout_key
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba2 import Mamba2
from megatron.core.ssm.mixer_config import GatedDeltaNetConfig, Mamba2Config, ShortConvConfig
from megatron.core.ssm.short_conv import ShortConv
from megatron.core.tensor_parallel import ColumnParallelLinear, TensorParallelRegion
from megatron.core.transformer import (
    MLP,
    AttentionConfig,
    KeyValueCache,
    LatentAttention,
    LatentAttentionConfig,
    LayerBuild,
    MLPConfig,
    Norm,
    NormConfig,
    Recompute,
    RopeTable,
    SelfAttention,
)
from megatron.core.transformer.recompute import discard_until_backward, recomputed
from megatron.core.weight_gather.handle import WeightHandle


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Configuration of the blocks of a layer pattern.

    Args:
        pattern: one symbol per block; stage separators `|` are ignored.
        attention, mlp, moe, delta_net, mamba, short_conv: shapes of the blocks; None if the pattern
            has no such block.
        norm: shape of the norm of each block and of the final norm.
        hidden_dropout: dropout probability of block outputs in training.
        residual_multiplier: factor on block outputs.
        output_multipliers: factors on the outputs of mixers by their symbols; 1 for other symbols.
    """

    pattern: str
    attention: AttentionConfig | LatentAttentionConfig | None
    mlp: MLPConfig | None
    norm: NormConfig
    moe: MoEConfig | None = None
    delta_net: GatedDeltaNetConfig | None = None
    mamba: Mamba2Config | None = None
    short_conv: ShortConvConfig | None = None
    hidden_dropout: float = 0.0
    residual_multiplier: float = 1.0
    output_multipliers: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shapes = {name: vars(self)[name] for name in _SHAPES}
        problems = symbol_problems(self.pattern)
        if problems := problems or missing_shapes(self.pattern, **shapes):
            raise ValueError("; ".join(problems))
        if not 0.0 <= self.hidden_dropout < 1.0:
            raise ValueError(f"hidden-dropout {self.hidden_dropout} must be in [0, 1)")


_SHAPES = ("attention", "mlp", "moe", "delta_net", "mamba", "short_conv")


def missing_shapes(
    symbols: str,
    *,
    attention: AttentionConfig | LatentAttentionConfig | None,
    mlp: MLPConfig | None,
    moe: MoEConfig | None,
    delta_net: GatedDeltaNetConfig | None,
    mamba: Mamba2Config | None,
    short_conv: ShortConvConfig | None,
) -> list[str]:
    """List the blocks of a pattern without a shape, or with a shape of another kind."""
    latent = isinstance(attention, LatentAttentionConfig)
    shapes = {
        ATTENTION: None if latent else attention,
        WINDOW: None if isinstance(attention, LatentAttentionConfig | None) else attention.second,
        LATENT: attention if latent else None,
        DENSE: mlp,
        DELTA_NET: delta_net,
        MAMBA: mamba,
        SHORT_CONV: short_conv,
    }
    fixes = {
        ATTENTION: "attention is latent: write '+'"
        if latent
        else ("give the attention configuration"),
        WINDOW: "give the attention configuration with its `second` kind",
        LATENT: ("give the latent attention configuration, or write '*' for multi-head attention"),
        DENSE: "give the MLP configuration",
        DELTA_NET: "give the gated delta net configuration",
        MAMBA: "give the Mamba-2 configuration",
        SHORT_CONV: "give the short convolution configuration",
    }
    problems = [
        f"layer pattern {symbols!r} has {symbol!r}: {fixes[symbol]}"
        for symbol, shape in shapes.items()
        if symbol in symbols and shape is None
    ]
    if EXPERTS in symbols and moe is None:
        problems.append("layers with experts need num-experts, and num-experts needs such layers")
    return problems


class ParallelMixers(Mixer):
    """Several mixers of one input, whose outputs are summed, each with a factor.

    Args:
        mixers: the mixers and their factors.
        region: the tensor-parallel region of the block.
    """

    def __init__(self, mixers: Sequence[tuple[Mixer, float]], region: TensorParallelRegion) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(mixer for mixer, _ in mixers)
        self.factors, self.region = [factor for _, factor in mixers], region

    def forward(
        self, hidden: torch.Tensor, layout: SequenceLayout, **context: object
    ) -> torch.Tensor:
        """Return [s, b, h] from hidden [s, b, h] ([s/tp, b, h] both under sequence parallelism)."""
        outputs = [mixer(hidden, layout, **context) for mixer in self.mixers]
        return weighted_sum(outputs, self.factors)

    def decode(
        self, x: torch.Tensor, layout: SequenceLayout, **context: object
    ) -> tuple[torch.Tensor, None]:
        """See `Mixer.decode`. Without sequence parallelism the products of row-parallel layers are
        summed before they are reduced over tp."""
        if self.region.scatters:
            return self(x.unsqueeze(1), layout, **context).squeeze(1), None
        group = self.region.group
        partial_sums: list[torch.Tensor] = []
        outputs: list[torch.Tensor] = []
        for mixer, factor in zip(self.mixers, self.factors, strict=True):
            assert isinstance(mixer, Mixer)
            out, linear = mixer.decode(x, layout, **context)
            if linear is None:
                outputs.append(weighted_sum([out], [factor]))
            else:
                bias = linear.bias if group.rank == 0 else None
                product = linear.weight.linear(out, bias)
                partial_sums.append(weighted_sum([product], [factor]))
        if partial_sums:
            outputs.append(all_reduce(functools.reduce(torch.add, partial_sums), group))
        return functools.reduce(torch.add, outputs), None


def weighted_sum(terms: Sequence[torch.Tensor], factors: Sequence[float]) -> torch.Tensor:
    """Return the sum of tensors of one shape, each times its factor."""
    pairs = zip(terms, factors, strict=True)
    scaled = (term if factor == 1.0 else term * factor for term, factor in pairs)
    return functools.reduce(torch.add, scaled)


class HiddenDropout(nn.Module):
    """Dropout of [s, b, h] activations outside tensor-parallel blocks.

    The mask is a function of the sample and the position in its row only, so it does not depend on
    the parallel layout.
    """

    @staticmethod
    def create(name: str, rate: float, *, build: LayerBuild) -> HiddenDropout | None:
        """Return the dropout of block `name`; None for a rate of 0."""
        return HiddenDropout(name, rate, build=build) if rate else None

    def __init__(self, name: str, rate: float, *, build: LayerBuild) -> None:
        super().__init__()
        self.rate, self.region = rate, build.region
        self.key = dropout_key(build.seed, name, "hidden")

    def forward(self, x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        """Apply dropout to x [s, b, h], or [s/tp, b, h] with sequence parallelism."""
        if layout.sample_ids is None:
            return x
        # Not the position ids: they restart in each document of a row, so the documents would get
        # the same mask.
        positions, numbers = layout.sample_positions, layout.sample_numbers
        samples = layout.sample_ids
        if numbers is not None:
            samples = samples.index_select(0, numbers).unsqueeze(1)  # [s, 1]
        if self.region.scatters:
            positions = own_rows(positions, self.region.group)  # [s/tp]
            samples = samples if numbers is None else own_rows(samples, self.region.group)
        return dropout(x, rate=self.rate, key=self.key, sample_ids=samples, position_ids=positions)


class DecoderBlock(nn.Module):
    """A mixer, or several parallel ones, with norms and dropout.

    Args:
        multiplier: factor on the mixer's output.

    Attributes:
        norm, post_norm: norms of the mixer's input and of its output; None without them.
        handles: handles of the block's weights.
        recomputes: recompute the normalised stream in backward instead of saving it.
    """

    def __init__(
        self,
        name: str,
        norm: Norm | None,
        *,
        mixer: Mixer,
        post_norm: Norm | None,
        drop: HiddenDropout | None,
        handles: Sequence[WeightHandle],
        multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self.multiplier = multiplier
        self.name, self.norm, self.mixer, self.drop = name, norm, mixer, drop
        self.post_norm = post_norm
        first_product, self._norm_in_mixer = _first_product(mixer), False
        if first_product is not None and norm is not None:
            self._norm_in_mixer = first_product.take_norm(norm)
        self.handles, self.recomputes = tuple(handles), False

    @property
    def mixers(self) -> tuple[nn.Module, ...]:
        """The mixer, or the parallel mixers."""
        mixer = self.mixer
        return tuple(mixer.mixers) if isinstance(mixer, ParallelMixers) else (mixer,)

    def forward(
        self,
        delta: torch.Tensor,
        stream: torch.Tensor | None,
        layout: SequenceLayout,
        **context: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `delta` to the stream; return (delta of this block, stream), each [s/tp, b, h]."""
        norm = None if self._norm_in_mixer else self.norm
        if norm is None:
            normed = stream = delta if stream is None else stream + delta
        elif stream is None:
            normed, stream = norm(delta), delta
        else:
            normed, stream = norm(delta, stream)
        assert stream is not None
        mixed = self.mixer(normed, layout, **context)
        if self.recomputes and norm is not None and torch.is_grad_enabled():
            source = stream.detach()  # no extra memory: the norm saves it as well
            discard_until_backward(normed, lambda: norm(source), used_by=mixed)
        if self.post_norm is not None:
            mixed = self.post_norm(mixed)
        if self.multiplier != 1.0:
            mixed = mixed * self.multiplier
        return mixed if self.drop is None else self.drop(mixed, layout), stream


def _first_product(mixer: Mixer) -> ColumnParallelLinear | None:
    """Return the only layer that reads the mixer's input; None if several layers read it."""
    if isinstance(mixer, SelfAttention):
        return mixer.qkv
    return mixer.input if isinstance(mixer, MLP) else None


class Decoder(nn.Module):
    """Blocks of a layer pattern and the final norm.

    Names, initial values and dropout of a block depend only on its index in the whole pattern, not
    on the split over pipeline stages.

    Args:
        name: prefix of all weights; block i of the pattern is `{name}.blocks.{i}`.
        config: configuration of the blocks.
        build: build options of the model.
        blocks: block range [start, end) of the pattern; None means all blocks.
        normed: apply the final norm. Without it the result is the stream.
        first_attention: cache index of the first attention layer, if decoders share a cache.

    Attributes:
        blocks: the blocks; parallel blocks of the pattern are one.
        layers: range [start, end) in `blocks` of each layer. A layer is the unit of weight
            gathering. If the range splits a layer, its blocks inside the range form a layer.
        end_attention: cache index after the last attention layer.
    """

    def __init__(
        self,
        name: str,
        config: DecoderConfig,
        *,
        build: LayerBuild,
        blocks: tuple[int, int] | None = None,
        normed: bool = True,
        first_attention: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        symbols, groups = symbols_of(config.pattern), parallel_groups(config.pattern)
        start, stop = blocks or (0, len(symbols))
        if not 0 <= start <= stop <= len(symbols):
            raise ValueError(f"blocks [{start}, {stop}) of a pattern of {len(symbols)}")
        if any(begin < cut < end for begin, end in groups for cut in (start, stop)):
            raise ValueError(
                f"blocks [{start}, {stop}) of {config.pattern} divide parallel blocks: all of them "
                "are in one pipeline stage"
            )
        self.layers: list[tuple[int, int]] = []
        self.blocks = nn.ModuleList()
        self.end_attention = first_attention
        layers = layer_blocks(without_stages(config.pattern))
        self._all_layers = len(layers)
        for layer, (first_block, last_block) in enumerate(layers):
            inside = range(max(first_block, start), min(last_block, stop))
            if not inside:
                continue
            num_modules = len(self.blocks)
            layer_build = dataclasses.replace(
                build, backend=build.backend.of_layer(layer, len(layers))
            )
            with build.store.unit(f"{name}.layers.{layer}"):
                for group in groups:
                    if group[0] not in inside:
                        continue
                    prefixes = {f"{name}.blocks.{i}": symbols[i] for i in range(*group)}
                    self.blocks.append(self._block(prefixes, build=layer_build))
            self.layers.append((num_modules, len(self.blocks)))
        self.final_norm: Norm | None = None
        if normed:
            self.final_norm = Norm(
                f"{name}.final_norm", build.hidden_size, config=config.norm, build=build
            )
        self.set_recompute(Recompute())

    def _block(self, symbols: Mapping[str, str], *, build: LayerBuild) -> DecoderBlock:
        """Build the next block, or the next parallel blocks, from their symbols by the prefix of
        their weight names; the norms have the first prefix."""
        config, prefix = self.config, next(iter(symbols))

        def norm_of(name: str, placement: str) -> Norm | None:
            if config.norm.placement not in (placement, "both"):
                return None
            return Norm(f"{prefix}.{name}", build.hidden_size, config=config.norm, build=build)

        norm = norm_of("norm", "pre")
        mixers = [self._mixer(symbol, prefix=name, build=build) for name, symbol in symbols.items()]
        factors = [config.output_multipliers.get(symbol, 1.0) for symbol in symbols.values()]
        mixer = mixers[0]
        if factors != [1.0]:
            mixer = ParallelMixers(list(zip(mixers, factors, strict=True)), build.region)
        post_norm = norm_of("post_norm", "post")
        drop = HiddenDropout.create(prefix, config.hidden_dropout, build=build)
        # The block's weights were declared last. Scanning all weights would be quadratic in depth.
        starts = tuple(f"{name}." for name in symbols)
        latest = takewhile(lambda name: name.startswith(starts), reversed(build.store.handles))
        handles = [build.store.handles[name] for name in latest][::-1]
        return DecoderBlock(
            prefix,
            norm,
            mixer=mixer,
            post_norm=post_norm,
            drop=drop,
            handles=handles,
            multiplier=config.residual_multiplier,
        )

    def _mixer(self, symbol: str, *, prefix: str, build: LayerBuild) -> Mixer:
        """Build the mixer of a block; attention layers are numbered for their cache entries."""
        config = self.config
        if symbol == EXPERTS:
            assert config.moe is not None
            return MoE(f"{prefix}.moe", config=config.moe, build=build)
        if symbol == DENSE:
            assert config.mlp is not None
            return MLP(f"{prefix}.mlp", config=config.mlp, build=build)
        if symbol == SHORT_CONV:
            assert config.short_conv is not None
            return ShortConv(f"{prefix}.short_conv", config=config.short_conv, build=build)
        shared: dict[str, Any] = {"norm": config.norm, "build": build}
        if symbol == DELTA_NET:
            assert config.delta_net is not None
            return GatedDeltaNet(f"{prefix}.delta_net", config=config.delta_net, **shared)
        if symbol == MAMBA:
            assert config.mamba is not None
            return Mamba2(f"{prefix}.mamba", config=config.mamba, **shared)
        index = self.end_attention
        self.end_attention += 1
        if isinstance(config.attention, LatentAttentionConfig):
            return LatentAttention(f"{prefix}.attention", index, config=config.attention, **shared)
        assert config.attention is not None
        in_window_block = symbol == WINDOW
        return SelfAttention(
            f"{prefix}.attention",
            index,
            config=config.attention.window_block if in_window_block else config.attention,
            in_window_block=in_window_block,
            **shared,
        )

    def set_recompute(self, recompute: Recompute) -> None:
        """Set activation recomputation; it changes no value.

        A decoder on part of the pattern forms its own groups of layers. If it has fewer layers than
        a group, all its layers form one group.

        Raises:
            ValueError: `recompute` has more layers than the whole pattern.
        """
        recompute.runs(self._all_layers)
        layers = len(self.layers)
        if layers and recompute.num_layers is not None:
            recompute = dataclasses.replace(recompute, num_layers=min(recompute.num_layers, layers))
        self.runs: list[tuple[int, int, bool]] = [
            (self.layers[first_layer][0], self.layers[end_layer - 1][1], recomputes)
            for first_layer, end_layer, recomputes in (recompute.runs(layers) if layers else ())
        ]
        selective = recompute.granularity == "selective"
        for block in self.blocks:
            assert isinstance(block, DecoderBlock)
            block.recomputes = selective
            for mixer in block.mixers:
                if isinstance(mixer, (MLP, MoE)):
                    mixer.recomputes = selective

    def forward(
        self,
        hidden: torch.Tensor,
        layout: SequenceLayout,
        *,
        rope: RopeTable | None = None,
        window_rope: RopeTable | None = None,
        cache: KeyValueCache | None = None,
        aux_factor: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the stream [s, b, h] after the blocks, normalised if this decoder has the final
        norm. With sequence parallelism input and output are [s/tp, b, h].

        Args:
            hidden: [s, b, h], the embeddings or the stream of the previous decoder.
            layout: layout of the tokens.
            rope, window_rope: rotary tables of the layout for `*` or `+` and for `W` blocks; None
                without rotary positions.
            cache: cache of keys and values during generation.
            aux_factor: fp32 scalar, factor of the routers' auxiliary losses in the loss of the
                step; None disables them.
        """
        context = {"layout": layout, "rope": rope, "cache": cache, "aux_factor": aux_factor}
        if window_rope is not None:
            context["window_rope"] = window_rope
        delta, stream = hidden, None
        for first_block, end_block, recomputes in self.runs:
            blocks: list[Any] = list(self.blocks)[first_block:end_block]
            run = partial(_through, blocks, **context)
            if recomputes and cache is None and torch.is_grad_enabled():
                anchors = [handle.anchor for block in blocks for handle in block.handles]
                delta, stream = recomputed(run, delta, stream, anchors=anchors)
            else:
                delta, stream = run(delta, stream)
        if self.final_norm is None:
            # The norm would round this sum to the stream's dtype as well, so a split changes no bit
            # of the forward pass. In backward the norm adds both gradients of the sum before
            # rounding; across a split autograd adds rounded gradients. The results are equal in
            # fp32; in bf16 each split adds one rounding.
            return delta if stream is None else stream + delta
        return self.final_norm(delta) if stream is None else self.final_norm(delta, stream)[0]


def _through(
    blocks: Sequence[nn.Module],
    delta: torch.Tensor,
    stream: torch.Tensor | None,
    **context: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run several blocks; return delta and stream, each [s/tp, b, h]."""
    for block in blocks:
        delta, stream = block(delta, stream, **context)
    assert stream is not None
    return delta, stream
