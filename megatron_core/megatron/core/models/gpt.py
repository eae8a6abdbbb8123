# SPDX-License-Identifier: Apache-2.0
"""Language models of a layer pattern: embedding, decoder, vocabulary head, multi-token prediction.

`GPTModel` is any such model: alternating attention and MLPs are a GPT, a pattern with experts,
Mamba-2 or gated delta nets is a mixture of experts or a hybrid (`models/layer_pattern.py`).

Multi-token prediction (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2): layer k = 0 … D - 1
predicts token t + k + 2 at position t, where the main model predicts t + 1:

    x_k = projection([norm(embedding(token t + k + 1)), norm(h_(k-1))])
    h_k = final_norm(blocks_k(x_k))         h_(-1) are the main model's final hidden states
    logits = head(h_k)                      embedding and head are the main model's

    training loss = main loss + factor / D · sum over k of the loss of layer k

The token losses of an MTP layer are weighted as in the main loss: both are divided by the same
number of tokens. An MTP layer counts fewer tokens: its label must be in the row, in the same
document, and counted where the main model predicts it.

MTP layers run in training, and in generation that takes draft tokens from them. They follow the
main model's last layer, in one model chunk with the head, so with several pipeline stages both the
first and the last stage hold the embedding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron.core.backend import LOCAL, Backend
from megatron.core.comm import all_reduce
from megatron.core.context_parallel import SequenceLayout
from megatron.core.context_parallel.layout import ContextParallel
from megatron.core.initialize import InitSpec
from megatron.core.models.decoder import Decoder, DecoderBlock, HiddenDropout
from megatron.core.models.gpt_config import GPTConfig
from megatron.core.models.layer_pattern import StageSplit, symbols_of
from megatron.core.moe import MoE
from megatron.core.ops.backend_choice import apply_function
from megatron.core.process_groups import Group, ProcessGroupCollection
from megatron.core.ssm.mixer import RecurrentMixer
from megatron.core.tensor_parallel import (
    ReplicatedLinear,
    TensorParallelRegion,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from megatron.core.tensor_parallel.vocab_parallel import vocabulary_sharding
from megatron.core.transformer import (
    CacheShapes,
    KeyValueCache,
    LatentAttention,
    LayerBuild,
    Norm,
    Recompute,
    RopeConfig,
    RopeTable,
    RotaryEmbedding,
    SelfAttention,
)
from megatron.core.weight_gather import Storage, StoreModule, WeightStore
from megatron.core.weight_sharding import WeightSharding

__all__ = ["GPTConfig", "GPTModel", "logical_weights"]


def check_layout(layout: SequenceLayout, tokens: torch.Tensor, context: Group) -> None:
    """Raise ValueError unless the layout is of this rank's tokens.

    Args:
        tokens: int64 [b, s/cp].
        context: the ranks that share the tokens of a row.
    """
    cut, length = layout.sharding, layout.positions.shape[0]
    if context.size > 1 and cut is None:
        raise ValueError(
            f"{context.size} context parallel ranks need a sharded layout: pass "
            "SequenceLayout.make(cut, rank, ...) and this rank's tokens"
        )
    if cut is not None and (layout.rank, cut.size) != (context.rank, context.size):
        raise ValueError(
            f"the layout is for rank {layout.rank} of {cut.size}, but this is rank "
            f"{context.rank} of {context.size}: make it for this rank"
        )
    if layout.rows not in (None, tokens.shape[0]):
        raise ValueError(
            f"{tokens.shape[0]} rows of tokens, but the layout has {layout.rows}: make it for "
            "as many rows"
        )
    if length != tokens.shape[1]:
        raise ValueError(
            f"{tokens.shape[1]} tokens per row, but the layout has {length}: pass this rank's "
            "tokens, layout.local(tokens)"
        )
    padding = layout.padding
    if padding is not None and padding.shape[1] != tokens.shape[0]:
        raise ValueError(
            f"{tokens.shape[0]} rows of tokens, but the layout's padding has "
            f"{padding.shape[1]}: mark as many rows, SequenceLayout.with_padding [s, b]"
        )


class GPTModel(StoreModule):
    """A language model of a layer pattern (`config.pattern`; without one, a GPT), as this rank
    holds it: the whole model, or the chunks of its pipeline stage.

    Weights live in `store` (flat buckets) and are the parameters of this module, under their
    logical names, see `StoreModule`. One process may train them by an optimizer of torch; build
    `DataParallel(model.store, groups)` and `Optimizer` over that for everything else.

    Args:
        config: the model.
        groups: the process groups; `ProcessGroupCollection.single()` for one process.
        sequence_parallel: shard activations between blocks along the sequence over tp.
        seed: of initial values and dropout.
        dtype, device: of the weights and activations.
        vocab_multiple: each rank's vocabulary rows are padded to a multiple of this; changes no
            result.
        storage: how the weights are stored; `DataParallelConfig.storage()` for training.
        backend: the implementations of the parts.
        split: the blocks of every virtual pipeline stage; None is one even chunk on each rank.

    Raises:
        ValueError: the model, the groups and the split do not fit together.

    Attributes:
        decoders: of this rank's chunks. Chunk c is part c of the store.
        num_chunks: how many there are.
        position_embedding: of learned absolute positions; None if the model has none or it is on
            another stage.
        embedding_dropout: after the embedding; None if nothing is dropped or it is elsewhere.
        holds_embedding, holds_head: whether the first chunk starts with the embedding, and the last
            ends with the final norm and the head.
        vocab_size, device: of the weights, the vocabulary without padding.
        max_sequence_length: number of learned positions; None without them.
        multi_token: the multi-token prediction layers, after the head; None if there are none
            or they are elsewhere.
        rotary, window_rotary: rotary embeddings of `*` or `+` and of `W` blocks, the same object if
            they are equal; None without rotary positions.
        classifier: the classification head; None if the model has a vocabulary head or it is
            elsewhere.
        step_state: what of its layers changes once a step; None if nothing does.
    """

    def __init__(
        self,
        config: GPTConfig,
        groups: ProcessGroupCollection,
        *,
        sequence_parallel: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        vocab_multiple: int = 1,
        storage: Storage | None = None,
        backend: Backend = LOCAL,
        split: StageSplit | None = None,
    ) -> None:
        super().__init__()
        stages, stage, context = groups["pp"].size, groups["pp"].rank, _context(groups, backend)
        _check(config, groups, context)
        split = split or StageSplit.even(
            config.num_layers, stages, layer_blocks=config.layer_blocks
        )
        blocks = len(config.blocks)
        _check_split(split, stages, config.block_pattern)
        self.config, self.groups, self.split, self.num_chunks = config, groups, split, split.chunks
        self._context, self.step_state = context.group, backend.step_state
        self.holds_embedding, self.holds_head = stage == 0, stage == stages - 1
        chosen = {"dtype": dtype, "device": device, "cpu_dtype": backend.cpu_dtype}
        chosen["row_tiles"] = backend.batch_invariant
        self.store = WeightStore(groups, seed=seed, **chosen)
        self.vocab_size, self.device = config.vocab_size, self.store.device
        self.max_sequence_length = config.max_position_embeddings
        self.region = TensorParallelRegion(groups["tp"], sequence_parallel)
        self._layouts: dict[tuple[int, torch.device], SequenceLayout] = {}
        self.rotary = _rotary_embedding(config, config.attention_rope, device=device)
        self.window_rotary = self.rotary
        if config.window_rope != config.attention_rope:
            self.window_rotary = _rotary_embedding(config, config.window_rope, device=device)
        build = LayerBuild(
            store=self.store,
            region=self.region,
            backend=backend,
            hidden_size=config.hidden_size,
            init=InitSpec.normal(config.init_std),
            output_init=InitSpec.normal(config.init_std / math.sqrt(blocks)),
            seed=seed,
            context=context,
        )
        self._embedding: VocabParallelEmbedding | None = None
        self.position_embedding: PositionEmbedding | None = None
        self.embedding_dropout: HiddenDropout | None = None
        self._head: VocabParallelHead | None = None
        self.multi_token: MultiTokenPrediction | None = None
        self.classifier: ReplicatedLinear | None = None
        self.decoders = nn.ModuleList()
        for chunk in range(split.chunks):
            with self.store.model_chunk(chunk):
                self._declare(chunk, vocab_multiple, build=build)
        self.materialize(storage)

    def _declare(self, chunk: int, vocab_multiple: int, *, build: LayerBuild) -> None:
        """Declare what a chunk has."""
        config, stages = self.config, self.split.stages
        shape = (config.vocab_size, config.hidden_size)
        # Of one stage, a weight used at both ends is one with two uses; of more, both have it.
        shared = config.tied or config.mtp is not None
        end_stages = (0, stages - 1) if shared and stages > 1 else ()
        rows = vocabulary_sharding(
            "embedding.weight", *shape, row_multiple=vocab_multiple, stages=end_stages
        )
        ends = {"store": build.store, "region": build.region, "init": build.init}
        if self.holds_embedding and chunk == 0:
            factor = config.multipliers.embedding_in(build.store.dtype)
            self._embedding = VocabParallelEmbedding(rows, multiplier=factor, **ends)
            if config.max_position_embeddings is not None:
                self.position_embedding = PositionEmbedding(
                    config.max_position_embeddings, build=build
                )
            self.embedding_dropout = HiddenDropout.create(
                "embedding", config.hidden_dropout, build=build
            )
        is_last_chunk = self._is_last(chunk)
        decoder = Decoder(
            "decoder",
            config.decoder,
            build=build,
            blocks=self.split.blocks(self.groups["pp"].rank, chunk),
            normed=is_last_chunk,
        )
        self.decoders.append(decoder)
        if is_last_chunk and config.num_labels is not None:
            self.classifier = ReplicatedLinear(
                "score", (("score", config.num_labels),), input_size=config.hidden_size, **ends
            )
        elif is_last_chunk:
            top = vocabulary_sharding("head.weight", *shape, row_multiple=vocab_multiple)
            top = rows if config.tied else top
            factors = config.multipliers
            bounds = {"multiplier": factors.logits, "softcap": factors.logits_softcap}
            self._head = VocabParallelHead(top, **bounds, **ends)
            if config.mtp is not None:
                self.multi_token = MultiTokenPrediction(
                    config,
                    build=build,
                    embedding=rows,
                    head=top,
                    first_attention=decoder.end_attention,
                )

    # --- what this rank has -----------------------------------------------------------------------

    @property
    def decoder(self) -> Decoder:
        """The decoder of a model in one chunk. Raises ValueError if there are more."""
        if self.num_chunks > 1:
            raise ValueError(f"this rank has {self.num_chunks} chunks: use model.decoders")
        decoder = self.decoders[0]
        assert isinstance(decoder, Decoder)
        return decoder

    @functools.cached_property
    def embedding(self) -> VocabParallelEmbedding:
        """The embedding. Raises ValueError if it is on another pipeline stage."""
        return self._module_of_chunk(self._embedding, "embedding")

    @property
    def head(self) -> VocabParallelHead:
        """The head. Raises ValueError if it is on another pipeline stage, or the model has a
        classification head."""
        if self.config.num_labels is not None:
            raise ValueError("the model has a classification head, not a vocabulary head")
        return self._module_of_chunk(self._head, "head")

    @property
    def cache_shapes(self) -> CacheShapes:
        """Shapes of the cache entries of this rank's layers."""
        cached = (SelfAttention, LatentAttention, RecurrentMixer)
        layers = (layer for layer in self.modules() if isinstance(layer, cached))
        dtype = self.store.dtype
        return CacheShapes.of_layers((layer.cache_shapes(dtype) for layer in layers), dtype)

    @property
    def num_parameters(self) -> int:
        """Logical parameters of the whole model, of all pipeline stages."""
        return sum(math.prod(shape) for shape in logical_weights(self.config).values())

    @property
    def has_auxiliary_losses(self) -> bool:
        """Whether routers, on any stage, add something to the training loss by `aux_factor`."""
        return self.config.has_auxiliary_losses

    def set_recompute(self, recompute: Recompute) -> None:
        """Choose what is computed again in backward, in every chunk; it changes no value.

        Raises:
            ValueError: more layers than the whole model has.
        """
        for module in (*self.decoders, self.multi_token):
            if isinstance(module, (Decoder, MultiTokenPrediction)):
                module.set_recompute(recompute)

    def join_experts(self, max_tokens: int) -> None:
        """Take part in a step of generation of data-parallel ranks that share experts with this
        one, which has no tokens: of all layers only experts are computed, for the others'.

        Args:
            max_tokens: new tokens of the rank that has most.
        """
        for block in self.decoder.blocks:
            assert isinstance(block, DecoderBlock)
            for mixer in block.mixers:
                if isinstance(mixer, MoE):
                    mixer.join(max_tokens)

    def boundary_shape(self, tokens: torch.Tensor) -> tuple[int, int, int]:
        """Return the shape of what passes between chunks: s/tp with sequence parallelism, b, h.

        Its dtype is the store's.

        Args:
            tokens: int64 [b, s]; with context parallelism this rank's, s is s/cp then.
        """
        batch, length = tokens.shape
        num_shards = self.region.group.size if self.region.scatters else 1
        return length // num_shards, batch, self.config.hidden_size

    def _module_of_chunk(self, module: Any, name: str) -> Any:
        if module is None:
            at = self.groups["pp"]
            raise ValueError(f"the {name} is not on pipeline stage {at.rank} of {at.size}")
        return module

    def _is_last(self, chunk: int) -> bool:
        """Return whether the head is in a chunk of this rank."""
        return self.holds_head and chunk == self.num_chunks - 1

    # --- forward ----------------------------------------------------------------------------------

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        layout: SequenceLayout | None = None,
        cache: KeyValueCache | None = None,
        chunk: int = 0,
        hidden_states: torch.Tensor | None = None,
        aux_factor: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the hidden states after a chunk [s, b, h] ([s/tp, b, h] with sequence
        parallelism).

        After the last chunk of the model they are normalised: the final hidden states.

        Args:
            tokens: int64 [b, s]; with context parallelism this rank's, s is s/cp here and below.
            layout: of the tokens: positions, documents, samples; None is whole sequences of one
                document without dropout.
            cache: of the chunk's keys and values, while generating.
            chunk: of this rank.
            hidden_states: of `boundary_shape`, of the chunk before; None in the model's first.
            aux_factor: fp32 scalar, the factor of the routers' auxiliary losses, which are those
                of a mean over tokens, in the step's loss; None leaves them out.

        Raises:
            ValueError: no such chunk, `hidden_states` are missing or too much, or the layout is not
                of these tokens.
        """
        if not 0 <= chunk < self.num_chunks:
            raise ValueError(f"chunk {chunk} of the {self.num_chunks} on this rank")
        layout = self._layout_of(tokens, layout)
        if (self.holds_embedding and chunk == 0) != (hidden_states is None):
            requirement = "starts with the embedding: it takes no hidden states"
            if hidden_states is None:
                requirement = "needs those of the chunk before: give `hidden_states`"
            raise ValueError(
                f"chunk {chunk} of pipeline stage {self.groups['pp'].rank} {requirement}"
            )
        if hidden_states is None:
            assert self._embedding is not None
            hidden_states = self._embedding(tokens.t())  # [s, b, h]
            if self.position_embedding is not None:
                hidden_states = hidden_states + self.position_embedding(layout)
            if self.embedding_dropout is not None:
                hidden_states = self.embedding_dropout(hidden_states, layout)
        return self.decoders[chunk](
            hidden_states, layout, **self._ropes(layout), cache=cache, aux_factor=aux_factor
        )

    def _layout_of(self, tokens: torch.Tensor, layout: SequenceLayout | None) -> SequenceLayout:
        """Return the layout, checked; if None that of whole sequences, made once for each length.

        What the host makes for it is so copied to the device in the first step alone, and a CUDA
        graph of a later one holds no copy from memory that is gone when it is replayed.
        """
        if tokens.ndim != 2:
            raise ValueError(
                f"tokens {list(tokens.shape)} are not rows [b, s]: pass one row as "
                "tokens.unsqueeze(0)"
            )
        if layout is not None:
            check_layout(layout, tokens, self._context)
            return layout
        key = tokens.shape[1], tokens.device
        if key not in self._layouts:
            layout = SequenceLayout.of_rows(key[0], device=key[1])
            check_layout(layout, tokens, self._context)
            self._layouts[key] = layout
        return self._layouts[key]

    def _ropes(self, layout: SequenceLayout) -> dict[str, RopeTable]:
        """Return the rotary tables of a microbatch, by the names of `Decoder.forward`."""
        rotary, window_rotary, ropes = self.rotary, self.window_rotary, {}
        if rotary is not None:
            ropes["rope"] = rotary(layout.positions)
        if window_rotary is not None:
            is_shared = window_rotary is rotary
            ropes["window_rope"] = ropes["rope"] if is_shared else window_rotary(layout.positions)
        return ropes

    def loss(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        token_weights: torch.Tensor,
        *,
        layout: SequenceLayout | None = None,
        chunk: int = 0,
        hidden_states: torch.Tensor | None = None,
        mtp_targets: MTPTargets | None = None,
        aux_factor: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (sum of token_weights · nll, nll [b, s]) of the main model.

        With `mtp_targets`, the gradient of the first also includes the losses of the multi-token
        prediction layers. With context parallelism, both cover the local tokens: their sums over
        the ranks of cp are the loss and the nll of the rows.

        Args:
            tokens, labels: int64 [b, s].
            token_weights: fp32 [b, s], the factor of each token's loss; 0 masks it.
            layout, hidden_states, aux_factor: see `forward`.
            chunk: see `forward`; it is the model's last.
            mtp_targets: inputs and labels of multi-token prediction, with the same factor in its
                weights; None, as in evaluation, computes no MTP loss.

        Raises:
            ValueError: the chunk has no head, or `mtp_targets` or the labels do not match.
        """
        if not self._is_last(chunk):
            raise ValueError(
                f"chunk {chunk} of pipeline stage {self.groups['pp'].rank} has no head: its result "
                "is `hidden_states` of the next chunk"
            )
        final = self(
            tokens, layout=layout, chunk=chunk, hidden_states=hidden_states, aux_factor=aux_factor
        )
        loss, nll = self.head.loss(final, labels.t(), token_weights.t())
        if mtp_targets is None:
            return loss, nll.t()
        if self.multi_token is None:
            raise ValueError(
                "`mtp_targets` for a model without multi-token prediction: leave it out"
            )
        layout = self._layout_of(tokens, layout)
        extra = self.multi_token(
            final, mtp_targets, layout, **self._ropes(layout), aux_factor=aux_factor
        )
        return attach_mtp_loss(loss, extra), nll.t()

    def logits(
        self,
        tokens: torch.Tensor,
        *,
        layout: SequenceLayout | None = None,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        """Return this rank's logits [s, b, V/tp], padding columns included.

        Args:
            tokens: int64 [b, s].
            layout: see `forward`.
            cache: of keys and values; `tokens` are then what follows it.
        """
        return self.head(self(tokens, layout=layout, cache=cache))

    def predict_ahead(
        self,
        depth: int,
        hidden_states: torch.Tensor,
        tokens: torch.Tensor,
        *,
        layout: SequenceLayout,
        cache: KeyValueCache,
    ) -> torch.Tensor:
        """Return the hidden states [t, 1, h] of a multi-token prediction layer during generation;
        the head makes logits of them. Whole on every rank, also under sequence parallelism.

        Args:
            depth: k, index of the MTP layer, from 0.
            hidden_states: [t, 1, h], hidden states of MTP layer k - 1, or of the main model.
            tokens: int64 [1, t], at position t token t + k + 1.
            layout, cache: as of the model's own step.
        """
        mtp_layers = self._module_of_chunk(self.multi_token, "multi-token prediction").layers
        if self.region.scatters:
            hidden_states = hidden_states.chunk(self.region.group.size)[self.region.group.rank]
        hidden_states = mtp_layers[depth](
            hidden_states, tokens, layout, **self._ropes(layout), cache=cache, aux_factor=None
        )
        return self.head.gathered(hidden_states)

    def weights_replaced(self) -> None:
        """See `megatron.core.inference.model_runner.LanguageModel`."""
        for handle in self.store.handles.values():
            handle.weight_replaced()

    def full_logits(self, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the logits of the whole vocabulary, fp32 [s, b, V], on every tp rank."""
        return self.head.whole(self.logits(tokens, **options))


class PositionEmbedding(nn.Module):
    """Learned absolute positions (Vaswani et al. 2017, section 3.5): a [P, h] table, one row a
    position, whole on every tp rank.

    Args:
        positions: P.
    """

    def __init__(self, positions: int, *, build: LayerBuild) -> None:
        super().__init__()
        self.positions, self.region = positions, build.region
        sharding = WeightSharding.of(
            "embedding.position_embeddings.weight",
            (positions, build.hidden_size),
            gradient={"tp": build.region.replicated_gradient},
            gtp="position_embeddings" in build.backend.gtp_opt_in_modules,
        )
        self.weight = build.store.declare(sharding, build.init)

    def forward(self, layout: SequenceLayout) -> torch.Tensor:
        """Return [s, b, h] or, where all rows have the same positions, [s, 1, h] (this rank's s/tp
        under sequence parallelism).

        Raises:
            ValueError: a position outside of the table, on a CPU; a GPU is not waited for to look.
        """
        at = layout.positions  # [s] or [s, b]
        if at.device.type == "cpu" and at.numel() and int(at.max()) >= self.positions:
            raise ValueError(
                f"position {int(at.max())} exceeds the {self.positions} learned positions, 0 "
                f"to {self.positions - 1}: use shorter sequences"
            )
        return self._rows(layout)

    def decode(self, layout: SequenceLayout) -> torch.Tensor:
        """Do as `forward` in generation, with a bound of the positions that the host knows.

        Raises:
            ValueError: a sequence is longer than the table.
        """
        max_context = layout.rows_with_past.batch.max_context
        if max_context > self.positions:
            raise ValueError(
                f"a sequence of {max_context} tokens exceeds the {self.positions} "
                "learned positions: use shorter sequences"
            )
        return self._rows(layout)

    def _rows(self, layout: SequenceLayout) -> torch.Tensor:
        at = layout.positions
        if self.region.scatters:
            at = at.chunk(self.region.group.size)[self.region.group.rank]  # [s/tp] or [s/tp, b]
        rows = self.weight.embedding(at)
        return rows if at.ndim == 2 else rows.unsqueeze(1)


def _check(config: GPTConfig, groups: ProcessGroupCollection, context: ContextParallel) -> None:
    """Raise ValueError with everything that is wrong with a model on these ranks."""
    problems = config.problems(
        tp=groups["tp"].size,
        cp=context.group.size,
        engine=context.engine,
        etp=groups.grid.size("etp"),
        ep=groups.grid.ep,
        linear_mode=context.linear_mode,
    )
    if problems:
        raise ValueError("; ".join(problems))


def _rotary_embedding(
    config: GPTConfig, rope: RopeConfig | None, *, device: torch.device | str
) -> RotaryEmbedding | None:
    if rope is None:
        return None
    assert config.attention is not None
    return RotaryEmbedding(rope, config.attention.rope_features, device=device)


def _check_split(split: StageSplit, stages: int, pattern: str) -> None:
    """Raise ValueError unless a split is for this number of pipeline stages and these blocks."""
    blocks = len(symbols_of(pattern))
    if divided := split.divided_groups(pattern):
        raise ValueError(
            f"pipeline stages divide the parallel blocks {divided[0]} of {pattern}: split the "
            "model between blocks"
        )
    if (split.stages, split.num_blocks) != (stages, blocks):
        raise ValueError(
            f"the split assigns {split.num_blocks} blocks to {split.stages} pipeline "
            f"stages, but the model has {blocks} blocks and its groups {stages} stages"
        )


def _context(groups: ProcessGroupCollection, backend: Backend) -> ContextParallel:
    return ContextParallel(
        group=groups["cp"],
        engine=backend.context_engine,
        linear_mode=backend.linear_mode,
        cpu_dtype=backend.cpu_dtype,
    )


def logical_weights(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of a whole model by name; nothing is allocated."""
    model = GPTModel(
        config,
        ProcessGroupCollection.single(),
        device="meta",
        storage=Storage(initialize=False),
    )
    shardings = (handle.sharding for handle in model.store.handles.values())
    return {weight.name: weight.shape for sharding in shardings for weight in sharding.sub_weights}


@dataclass(frozen=True, eq=False)
class MTPTargets:
    """Inputs and labels of the multi-token prediction (MTP) layers for a microbatch.

    D is the number of MTP layers, k the index of a layer, t a position in a row. With context
    parallelism, s is the number of local tokens.

    Args:
        tokens: int64 [D, b, s], input token t + k + 1 of each row; 0 past the end of the row.
        labels: int64 [D, b, s], label token t + k + 2.
        weights: fp32 [D, b, s], factor of each token's loss; 0 excludes the token.
        padding: bool [D, b, s], True for padding of the microbatch, and where token t + k + 1
            belongs to another document. None if the microbatch has no padding: the routers of the
            MTP layers then count every token.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    padding: torch.Tensor | None = None

    def scaled(self, factor: torch.Tensor) -> MTPTargets:
        """Return the same targets with all weights times a factor."""
        return dataclasses.replace(self, weights=self.weights * factor)


def shift_targets(
    tokens: torch.Tensor,
    labels: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    num_layers: int,
    document_ids: torch.Tensor | None = None,
    padding: torch.Tensor | None = None,
) -> MTPTargets:
    """Shift the tokens and labels of whole rows for each MTP layer.

    Args:
        tokens, labels: int64 [b, s].
        loss_mask: fp32 [b, s], mask of the main loss.
        num_layers: D, the number of MTP layers.
        document_ids: int [b, s], nondecreasing along a row; None means one document per row.
        padding: bool [b, s], True for padding tokens; None means no padding.
    """
    shape = (num_layers, *tokens.shape)
    targets = MTPTargets(
        tokens.new_zeros(shape),
        labels.new_zeros(shape),
        loss_mask.new_zeros(shape),
        None if padding is None else padding.new_ones(shape),
    )
    for k in range(min(num_layers, tokens.shape[1] - 1)):
        near, far = slice(None, -k - 1), slice(k + 1, None)
        targets.tokens[k, :, near] = tokens[:, far]
        targets.labels[k, :, near] = labels[:, far]
        targets.weights[k, :, near] = loss_mask[:, far]
        if document_ids is not None:
            targets.weights[k, :, near] *= document_ids[:, near] == document_ids[:, far]
        if padding is not None and targets.padding is not None:
            targets.padding[k, :, near] = padding[:, near] | padding[:, far]
            if document_ids is not None:
                targets.padding[k, :, near] |= document_ids[:, near] != document_ids[:, far]
    return targets


class MultiTokenPrediction(nn.Module):
    """The multi-token prediction layers of a model.

    Args:
        config: configuration of the main model.
        build: build context of the main model.
        embedding, head: shardings of the main model's embedding and output head.
        first_attention: index of the first attention layer of the first MTP layer.

    Attributes:
        sums: fp64 [D, 2], sums of the weighted token losses and of the weights of each MTP layer
            since `take_mean_mtp_losses` cleared them.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        build: LayerBuild,
        embedding: WeightSharding,
        head: WeightSharding,
        first_attention: int,
    ) -> None:
        super().__init__()
        assert config.mtp is not None
        self.factor = config.mtp.loss_factor / config.mtp.num_layers
        vocab_arguments = {"store": build.store, "region": build.region, "init": build.init}
        factors = config.multipliers
        bounds = {"multiplier": factors.logits, "softcap": factors.logits_softcap}
        self.layers = nn.ModuleList()
        for k in range(config.mtp.num_layers):
            # Every MTP layer shares both weights with the main model, so they are declared outside
            # of the layer's unit.
            layer_embedding = VocabParallelEmbedding(
                embedding, multiplier=factors.embedding_in(build.store.dtype), **vocab_arguments
            )
            layer_head = VocabParallelHead(head, **bounds, **vocab_arguments)
            with build.store.unit(f"mtp.{k}"):
                layer = MultiTokenPredictionLayer(
                    f"mtp.{k}",
                    config=config,
                    build=build,
                    embedding=layer_embedding,
                    head=layer_head,
                    first_attention=first_attention,
                )
            self.layers.append(layer)
            first_attention = layer.decoder.end_attention
        self.sums = torch.zeros(len(self.layers), 2, dtype=torch.float64, device=build.store.device)

    def set_recompute(self, recompute: Recompute) -> None:
        """Set activation recomputation; a number of layers applies to each MTP layer separately."""
        for layer in self.layers:
            assert isinstance(layer, MultiTokenPredictionLayer)
            layer_recompute = recompute
            if recompute.num_layers is not None:
                num_layers = min(recompute.num_layers, len(layer.decoder.layers))
                layer_recompute = dataclasses.replace(recompute, num_layers=num_layers)
            layer.decoder.set_recompute(layer_recompute)

    def forward(
        self,
        hidden_states: torch.Tensor,
        mtp_targets: MTPTargets,
        layout: SequenceLayout,
        *,
        aux_factor: torch.Tensor | None,
        **ropes: RopeTable | None,
    ) -> torch.Tensor:
        """Return the sum of the scaled losses of all MTP layers, a scalar.

        Args:
            hidden_states: [s, b, h], final hidden states of the main model ([s/tp, b, h] under
                sequence parallelism).
            mtp_targets: inputs and labels of each MTP layer.
            layout: sequence layout of the microbatch.
            aux_factor: factor of the routers' auxiliary losses; None outside of training.
            ropes: rotary tables of the main model, see `Decoder.forward`.

        Raises:
            ValueError: the shapes of `mtp_targets` do not match the MTP layers or the tokens.
        """
        expected_shape = (
            len(self.layers),
            *mtp_targets.tokens.shape[1:2],
            layout.positions.shape[0],
        )
        tensors = [x for x in vars(mtp_targets).values() if x is not None]
        if any(tuple(x.shape) != expected_shape for x in tensors):
            shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
            raise ValueError(
                f"the targets of {expected_shape[0]} MTP layers for {expected_shape[2]} tokens per "
                f"row have the shapes {shapes}: create them with shift_targets(..., "
                f"num_layers={expected_shape[0]}) and shard them as the tokens"
            )
        losses = []
        for k, layer in enumerate(self.layers):
            assert isinstance(layer, MultiTokenPredictionLayer)
            layer_layout = layout
            if mtp_targets.padding is not None:
                layer_layout = layout.with_padding(mtp_targets.padding[k].t())
            hidden_states = layer(
                hidden_states, mtp_targets.tokens[k], layer_layout, aux_factor=aux_factor, **ropes
            )
            weights = mtp_targets.weights[k].t()  # [s, b]
            # With the factor in the weights, the incoming gradient is 1 and needs no extra pass.
            loss, nll = layer.head.loss(
                hidden_states, mtp_targets.labels[k].t(), weights * self.factor
            )
            losses.append(loss)
            self.sums[k] += torch.stack([(nll * weights).sum(), weights.sum()])
        return torch.stack(losses).sum()


class MultiTokenPredictionLayer(nn.Module):
    """A multi-token prediction layer: projection and blocks from the hidden states of the layer
    before to the head.

    The projection weight is replicated over the tensor-parallel ranks: with sequence parallelism,
    each rank projects its local tokens, without it, all tokens.
    """

    def __init__(
        self,
        name: str,
        *,
        config: GPTConfig,
        build: LayerBuild,
        embedding: VocabParallelEmbedding,
        head: VocabParallelHead,
        first_attention: int,
    ) -> None:
        super().__init__()
        self.embedding, self.head = embedding, head
        self.drop = HiddenDropout.create(f"{name}.embedding", config.hidden_dropout, build=build)
        size = build.hidden_size
        shared = {"config": config.norm, "build": build}
        self.embedding_norm = Norm(f"{name}.embedding_norm", size, **shared)
        self.hidden_norm = Norm(f"{name}.hidden_norm", size, **shared)
        sharding = WeightSharding.of(
            f"{name}.projection.weight",
            (size, 2 * size),
            gradient={"tp": build.region.replicated_gradient},
            gtp=True,
        )
        self.projection = build.store.declare(sharding, build.init)
        blocks = dataclasses.replace(config.decoder, pattern=config.mtp_blocks)
        self.decoder = Decoder(
            f"{name}.decoder", blocks, build=build, first_attention=first_attention
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        tokens: torch.Tensor,
        layout: SequenceLayout,
        *,
        aux_factor: torch.Tensor | None,
        cache: KeyValueCache | None = None,
        **ropes: RopeTable | None,
    ) -> torch.Tensor:
        """Return normalised hidden states from the layer before's, both [s, b, h]
        ([s/tp, b, h] under sequence parallelism).

        Args:
            tokens: int64 [b, s], input tokens, one position after the layer before.
            cache: of keys, values and states, while generating.
            ropes: rotary tables, see `Decoder.forward`.
        """
        embeddings = self.embedding(tokens.t())  # [s, b, h]
        if self.drop is not None:
            embeddings = self.drop(embeddings, layout)
        normed = self.embedding_norm(embeddings), self.hidden_norm(hidden_states)
        states_and_embeddings = torch.cat(normed, -1)  # [s, b, 2h]
        mixed = self.projection.linear(states_and_embeddings)  # [s, b, h]
        return self.decoder(mixed, layout, cache=cache, aux_factor=aux_factor, **ropes)


def attach_mtp_loss(loss: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
    """Return `loss` with the gradient of `loss + extra`; both are scalars."""
    return apply_function(_AttachMTPLoss, loss, extra)


class _AttachMTPLoss(torch.autograd.Function):
    """Forward: the loss. Backward: the incoming gradient, for both inputs. Saves nothing."""

    @staticmethod
    def forward(ctx, loss, extra):
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


def take_mean_mtp_losses(model: GPTModel) -> tuple[float, ...]:
    """Return the mean loss of each MTP layer since the last call; NaN for a layer without tokens.

    The mean is over the tokens of all ranks, weighted as in the training loss. Collective: every
    rank of the world calls it.
    """
    multi_token = model.multi_token
    shape = (model.config.mtp_num_layers, 2)
    sums = torch.zeros(shape, dtype=torch.float64, device=model.store.device)
    if multi_token is not None:
        sums.copy_(multi_token.sums)
        multi_token.sums.zero_()
    losses, weights = all_reduce(sums, model.groups["world"]).t()
    return tuple((losses / weights).tolist())
