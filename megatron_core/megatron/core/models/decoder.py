# SPDX-License-Identifier: Apache-2.0
"""Decoder: a stack of pre-norm residual blocks built from a layer pattern, or a range of them.

Each block is delta = mixer(norm(stream)), stream += delta. The addition is fused into the next
block's norm, which reads both anyway, so the stream is read and written once a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import torch
from torch import nn

from megatron.core.comm.conjugates import own_rows
from megatron.core.context_parallel import SequenceLayout
from megatron.core.models.layer_pattern import (
    ATTENTION,
    DELTA_NET,
    DENSE,
    EXPERTS,
    LATENT,
    MAMBA,
    layer_blocks,
    symbol_problems,
    symbols_of,
)
from megatron.core.moe import MoE, MoEConfig
from megatron.core.ops.dropout import dropout, dropout_key
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba2 import Mamba2
from megatron.core.ssm.mixer_config import GatedDeltaNetConfig, Mamba2Config
from megatron.core.tensor_parallel import ColumnParallelLinear
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
    """What the blocks of a pattern are.

    Args:
        pattern: one symbol a block; a `|` between blocks, where a pipeline stage ends, means
            nothing here.
        attention, mlp, moe, delta_net, mamba: the shapes of the blocks; None where no block is one.
        norm: of every block, and the final one.
        hidden_dropout: probability of dropping an element of a block's output in training.
    """

    pattern: str
    attention: AttentionConfig | LatentAttentionConfig | None
    mlp: MLPConfig | None
    norm: NormConfig
    moe: MoEConfig | None = None
    delta_net: GatedDeltaNetConfig | None = None
    mamba: Mamba2Config | None = None
    hidden_dropout: float = 0.0

    def __post_init__(self) -> None:
        shapes = {name: vars(self)[name] for name in _SHAPES}
        problems = symbol_problems(self.pattern)
        if problems := problems or missing_shapes(self.pattern, **shapes):
            raise ValueError("; ".join(problems))
        if not 0.0 <= self.hidden_dropout < 1.0:
            raise ValueError(f"hidden-dropout {self.hidden_dropout} must be in [0, 1)")


_SHAPES = ("attention", "mlp", "moe", "delta_net", "mamba")


def missing_shapes(
    symbols: str,
    *,
    attention: AttentionConfig | LatentAttentionConfig | None,
    mlp: MLPConfig | None,
    moe: MoEConfig | None,
    delta_net: GatedDeltaNetConfig | None,
    mamba: Mamba2Config | None,
) -> list[str]:
    """List the blocks of a pattern whose shape is not given, or of another kind."""
    latent = isinstance(attention, LatentAttentionConfig)
    shapes = {
        ATTENTION: None if latent else attention,
        LATENT: attention if latent else None,
        DENSE: mlp,
        DELTA_NET: delta_net,
        MAMBA: mamba,
    }
    mends = {
        ATTENTION: "attention is latent, write '+'" if latent else "give the shape of attention",
        LATENT: "give the shape of latent attention, or write '*' for attention of heads",
        DENSE: "give the shape of MLPs",
        DELTA_NET: "give the shape of gated delta nets",
        MAMBA: "give the shape of Mamba-2",
    }
    problems = [
        f"layer pattern {symbols!r} has {symbol!r}: {mends[symbol]}"
        for symbol, shape in shapes.items()
        if symbol in symbols and shape is None
    ]
    if EXPERTS in symbols and moe is None:
        problems.append("layers with experts need num-experts, and num-experts such layers")
    return problems


class HiddenDropout(nn.Module):
    """Dropout of [s, b, h] activations outside tensor-parallel blocks.

    What is dropped is a function of sample and place in its row. `HiddenDropout.of` makes none for
    a rate of 0.
    """

    @staticmethod
    def of(name: str, rate: float, *, build: LayerBuild) -> HiddenDropout | None:
        """Make that of the block `name`; None if it drops nothing."""
        return HiddenDropout(name, rate, build=build) if rate else None

    def __init__(self, name: str, rate: float, *, build: LayerBuild) -> None:
        super().__init__()
        self.rate, self.region = rate, build.region
        self.key = dropout_key(build.seed, name, "hidden")

    def forward(self, x: torch.Tensor, layout: SequenceLayout) -> torch.Tensor:
        """Return x [s, b, h] ([s/tp, b, h] under sequence parallelism) with elements dropped."""
        if layout.sample_ids is None:
            return x
        # Not the positions: those of a row's documents repeat, and would drop the same features.
        positions, numbers = layout.sample_positions, layout.sample_numbers
        samples = layout.sample_ids
        if numbers is not None:
            samples = samples.index_select(0, numbers).unsqueeze(1)  # [s, 1]
        if self.region.scatters:
            positions = own_rows(positions, self.region.group)  # [s/tp]
            samples = samples if numbers is None else own_rows(samples, self.region.group)
        return dropout(x, rate=self.rate, key=self.key, sample_ids=samples, position_ids=positions)


class DecoderBlock(nn.Module):
    """One mixer with its norm and dropout.

    Attributes:
        handles: of its weights.
        recomputes: compute the normalised stream again in backward instead of keeping it.
    """

    def __init__(
        self,
        name: str,
        norm: Norm,
        *,
        mixer: nn.Module,
        drop: HiddenDropout | None,
        handles: Sequence[WeightHandle],
    ) -> None:
        super().__init__()
        self.name, self.norm, self.mixer, self.drop = name, norm, mixer, drop
        first_product = _first_product(mixer)
        self._norm_in_mixer = first_product is not None and first_product.take_norm(norm)
        self.handles, self.recomputes = tuple(handles), False

    def forward(
        self,
        delta: torch.Tensor,
        stream: torch.Tensor | None,
        layout: SequenceLayout,
        **context: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add delta to the stream; return (this block's delta, the stream), each [s/tp, b, h]."""
        if self._norm_in_mixer:
            normed = stream = delta if stream is None else stream + delta
        elif stream is None:
            normed, stream = self.norm(delta), delta
        else:
            normed, stream = self.norm(delta, stream)
        mixed = self.mixer(normed, layout, **context)
        if self.recomputes and torch.is_grad_enabled() and not self._norm_in_mixer:
            source = stream.detach()  # the norm keeps it as well
            discard_until_backward(normed, lambda: self.norm(source), used_by=mixed)
        return mixed if self.drop is None else self.drop(mixed, layout), stream


def _first_product(mixer: nn.Module) -> ColumnParallelLinear | None:
    """Return the column parallel layer that alone reads a mixer's input; None if several do."""
    if isinstance(mixer, SelfAttention):
        return mixer.qkv
    return mixer.input if isinstance(mixer, MLP) else None


class Decoder(nn.Module):
    """Blocks of a pattern and the final norm.

    Names, initial values and dropout of a block are functions of its place in the whole pattern, so
    they do not depend on where that is split.

    Args:
        name: prefix of all weights; block i of the pattern is `{name}.blocks.{i}`.
        blocks: [first, last) of the pattern's blocks; None is all of them.
        normed: whether the final norm follows them. Without it the result is the stream.
        first_attention: number of the first attention layer, for a cache that other decoders use.

    Attributes:
        layers: [first, last) of `blocks` for each layer; a layer is the unit in which sharded
            weights are gathered. Of a layer that the range splits, the blocks inside count as one.
        end_attention: one above the number of the last attention layer.
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
        symbols = symbols_of(config.pattern)
        start, stop = blocks or (0, len(symbols))
        if not 0 <= start <= stop <= len(symbols):
            raise ValueError(f"blocks [{start}, {stop}) of a pattern of {len(symbols)}")
        self.layers: list[tuple[int, int]] = []
        self.blocks = nn.ModuleList()
        self.end_attention = first_attention
        layers = layer_blocks(symbols)
        self._all_layers = len(layers)
        for layer, (first_block, last_block) in enumerate(layers):
            inside = range(max(first_block, start), min(last_block, stop))
            if not inside:
                continue
            self.layers.append((inside.start - start, inside.stop - start))
            layer_build = dataclasses.replace(
                build, backend=build.backend.of_layer(layer, len(layers))
            )
            with build.store.unit(f"{name}.layers.{layer}"):
                for i in inside:
                    prefix = f"{name}.blocks.{i}"
                    self.blocks.append(self._block(symbols[i], prefix=prefix, build=layer_build))
        self.final_norm: Norm | None = None
        if normed:
            self.final_norm = Norm(
                f"{name}.final_norm", build.hidden_size, config=config.norm, build=build
            )
        self.set_recompute(Recompute())

    def _block(self, symbol: str, *, prefix: str, build: LayerBuild) -> DecoderBlock:
        """Build the next block; the names of its weights start by `prefix`."""
        config = self.config
        norm = Norm(f"{prefix}.norm", build.hidden_size, config=config.norm, build=build)
        mixer = self._mixer(symbol, prefix=prefix, build=build)
        drop = HiddenDropout.of(prefix, config.hidden_dropout, build=build)
        # The block's weights are the last ones: looking at all of them would be quadratic.
        latest = takewhile(
            lambda item: item[0].startswith(f"{prefix}."), reversed(build.store.handles.items())
        )
        handles = [handle for _, handle in latest][::-1]
        return DecoderBlock(prefix, norm, mixer=mixer, drop=drop, handles=handles)

    def _mixer(self, symbol: str, *, prefix: str, build: LayerBuild) -> nn.Module:
        """Build what a block does; attention layers are numbered, for their caches."""
        config = self.config
        if symbol == EXPERTS:
            assert config.moe is not None
            return MoE(f"{prefix}.moe", config=config.moe, build=build)
        if symbol == DENSE:
            assert config.mlp is not None
            return MLP(f"{prefix}.mlp", config=config.mlp, build=build)
        shared = {"norm": config.norm, "build": build}
        if symbol == DELTA_NET:
            assert config.delta_net is not None
            return GatedDeltaNet(f"{prefix}.delta_net", config=config.delta_net, **shared)
        if symbol == MAMBA:
            assert config.mamba is not None
            return Mamba2(f"{prefix}.mamba", config=config.mamba, **shared)
        at = self.end_attention
        self.end_attention += 1
        if isinstance(config.attention, LatentAttentionConfig):
            return LatentAttention(f"{prefix}.attention", at, config=config.attention, **shared)
        assert config.attention is not None
        return SelfAttention(f"{prefix}.attention", at, config=config.attention, **shared)

    def set_recompute(self, recompute: Recompute) -> None:
        """Choose what is computed again in backward; it changes no value.

        A range of the pattern's blocks has its own runs of layers; where it has fewer layers than a
        run, the run is what there is.

        Raises:
            ValueError: more layers than the whole pattern has.
        """
        recompute.runs(self._all_layers)
        layers = len(self.layers)
        if layers and recompute.num_layers is not None:
            recompute = dataclasses.replace(recompute, num_layers=min(recompute.num_layers, layers))
        self.runs = [
            (self.layers[first_layer][0], self.layers[end_layer - 1][1], recomputes)
            for first_layer, end_layer, recomputes in (recompute.runs(layers) if layers else ())
        ]
        selective = recompute.granularity == "selective"
        for block in self.blocks:
            block.recomputes = selective
            if isinstance(block.mixer, (MLP, MoE)):
                block.mixer.recomputes = selective

    def forward(
        self,
        hidden: torch.Tensor,
        layout: SequenceLayout,
        *,
        rope: RopeTable | None = None,
        cache: KeyValueCache | None = None,
        aux_factor: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the stream [s, b, h], normalised if the final norm is here, from `hidden`.

        Both are [s/tp, b, h] under sequence parallelism.

        Args:
            hidden: [s, b, h], the embeddings or the stream after the blocks before these.
            cache: of the keys and values of these attention blocks, numbered from 0.
            aux_factor: fp32 scalar, the factor of routers' auxiliary losses in the step's loss;
                None adds none.
        """
        context = {"layout": layout, "rope": rope, "cache": cache, "aux_factor": aux_factor}
        delta, stream = hidden, None
        for first_block, end_block, recomputes in self.runs:
            blocks = list(self.blocks)[first_block:end_block]
            run = partial(_through, blocks, **context)
            if recomputes and cache is None and torch.is_grad_enabled():
                anchors = [handle.anchor for block in blocks for handle in block.handles]
                delta, stream = recomputed(run, delta, stream, anchors=anchors)
            else:
                delta, stream = run(delta, stream)
        if self.final_norm is None:
            # The norm would have rounded this sum to the stream's dtype as well, so a split changes
            # no bit of the forward. In backward the norm joins both gradients of the sum before it
            # rounds; after a split autograd joins them rounded. In fp32 that is the same, in bf16
            # one rounding more a split.
            return delta if stream is None else stream + delta
        return self.final_norm(delta) if stream is None else self.final_norm(delta, stream)[0]


def _through(
    blocks: Sequence[nn.Module],
    delta: torch.Tensor,
    stream: torch.Tensor | None,
    **context: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return delta and stream, each [s/tp, b, h], after one block or more."""
    for block in blocks:
        delta, stream = block(delta, stream, **context)
    assert stream is not None
    return delta, stream
