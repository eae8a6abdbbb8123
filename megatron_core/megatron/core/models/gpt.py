# SPDX-License-Identifier: Apache-2.0
"""GPT: token embedding, a decoder of attention and MLP blocks, a tied or own vocabulary head."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from megatron.core.backend import LOCAL, Backend
from megatron.core.context_parallel import SequenceLayout
from megatron.core.initialize import InitSpec
from megatron.core.models.decoder import ATTENTION, DENSE, Decoder, DecoderConfig, HiddenDropout
from megatron.core.ops.rope import RopeScaling
from megatron.core.process_groups import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    TensorParallelRegion,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from megatron.core.tensor_parallel.embedding import vocabulary_sharding
from megatron.core.transformer import (
    AttentionConfig,
    KeyValueCache,
    LayerBuild,
    MLPConfig,
    NormConfig,
    RopeConfig,
    RopeTable,
)
from megatron.core.weight_gather import Storage, WeightStore


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Everything that decides a GPT's logical weights and its function; nothing about ranks.

    Args:
        num_layers: L, each an attention and an MLP block.
        hidden_size: h.
        vocab_size: V, without padding.
        attention, mlp, norm: shapes of the parts.
        rope: rotary position embedding; None gives no positions at all.
        tied: one weight for the embedding and the head.
        hidden_dropout: probability of dropping an element of the embedding or of a block's output.
        init_std: standard deviation of initial weights; output projections have init_std / sqrt(2
            L).
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    attention: AttentionConfig
    mlp: MLPConfig
    norm: NormConfig = field(default_factory=NormConfig)
    rope: RopeConfig | None = field(default_factory=RopeConfig)
    tied: bool = False
    hidden_dropout: float = 0.0
    init_std: float = 0.02

    def problems(self, *, tp: int = 1) -> list[str]:
        """List everything that is wrong with this model on `tp` ranks; empty if nothing is."""
        found = []
        for name, size in (
            ("num_layers", self.num_layers),
            ("hidden_size", self.hidden_size),
            ("vocab_size", self.vocab_size),
        ):
            if size < 1:
                found.append(f"{name} is {size}: use a positive integer")
        if self.vocab_size < tp:
            found.append(
                f"vocab_size {self.vocab_size} is less than tensor-model-parallel-size {tp}"
            )
        if not 0.0 <= self.hidden_dropout < 1.0:
            found.append(f"hidden-dropout {self.hidden_dropout} must be in [0, 1)")
        found += self.attention.problems(tp) + self.mlp.problems(tp)
        if self.rope is not None:
            try:
                self.rope.rotary_features(self.attention.kv_channels)
            except ValueError as error:
                found.append(str(error))
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the config as plain JSON values."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> GPTConfig:
        """Rebuild a config from `to_json`. Raises ValueError for unknown or missing fields."""
        fields = dict(data)
        try:
            fields["attention"] = AttentionConfig(**fields["attention"])
            fields["mlp"] = MLPConfig(**fields["mlp"])
            fields["norm"] = NormConfig(**fields["norm"])
            if fields["rope"] is not None:
                rope = dict(fields["rope"])
                if rope["scaling"] is not None:
                    rope["scaling"] = RopeScaling(**rope["scaling"])
                fields["rope"] = RopeConfig(**rope)
            return GPTConfig(**fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the configuration of a GPT of this version: {error}") from error


class GPTModel(nn.Module):
    """A GPT on this rank's part of the grid.

    Weights are not `nn.Parameter`s of the module: they live in `store` (flat buckets) and are
    reached by name through `store.handles`. Build `DataParallel(model.store, groups)` for
    gradients, `Optimizer` over that.

    Args:
        config: the model.
        groups: the process groups; `ProcessGroupCollection.single()` for one process.
        sequence_parallel: cut activations between blocks along the sequence over tp.
        seed: of initial values and dropout.
        dtype, device: of the weights and activations.
        vocab_multiple: each rank's vocabulary rows are padded to a multiple of this; changes no
            result.
        storage: how the weights are stored; `DataParallelConfig.storage()` for training.
        backend: the implementations of the parts.
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
    ) -> None:
        super().__init__()
        problems = config.problems(tp=groups["tp"].size)
        if problems:
            raise ValueError("; ".join(problems))
        self.config, self.groups = config, groups
        self.store = WeightStore(groups, seed=seed, dtype=dtype, device=device)
        region = TensorParallelRegion(groups["tp"], sequence_parallel)
        build = LayerBuild(
            store=self.store,
            region=region,
            backend=backend,
            hidden_size=config.hidden_size,
            init=InitSpec.normal(config.init_std),
            output_init=InitSpec.normal(config.init_std / math.sqrt(2 * config.num_layers)),
            seed=seed,
        )
        rows = vocabulary_sharding(
            "embedding.weight", config.vocab_size, config.hidden_size, row_multiple=vocab_multiple
        )
        ends = {"store": self.store, "region": region, "init": build.init}
        self.embedding = VocabParallelEmbedding(rows, **ends)
        self.embedding_dropout = HiddenDropout("embedding", config.hidden_dropout, build=build)
        self.decoder = Decoder(
            "decoder",
            DecoderConfig(
                pattern=(ATTENTION + DENSE) * config.num_layers,
                attention=config.attention,
                mlp=config.mlp,
                norm=config.norm,
                hidden_dropout=config.hidden_dropout,
            ),
            build=build,
        )
        head = vocabulary_sharding(
            "head.weight", config.vocab_size, config.hidden_size, row_multiple=vocab_multiple
        )
        self.head = VocabParallelHead(rows if config.tied else head, **ends)
        self.store.materialize(storage)

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        layout: SequenceLayout | None = None,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        """Return the final hidden states [s, b, h] ([s/tp, b, h] with sequence parallelism).

        Args:
            tokens: int64 [b, s].
            layout: positions, documents, samples; None is whole sequences without dropout.
            cache: of keys and values, while generating.
        """
        layout = layout or SequenceLayout.dense(tokens.shape[1], device=tokens.device)
        rope = None
        if self.config.rope is not None:
            rope = RopeTable.of(
                self.config.rope, layout.positions, self.config.attention.kv_channels
            )
        hidden = self.embedding(tokens.t())  # [s, b, h]
        hidden = self.embedding_dropout(hidden, layout)
        return self.decoder(hidden, layout, rope=rope, cache=cache)

    def loss(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        token_weights: torch.Tensor,
        *,
        sample_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (sum of token_weights · nll, nll [b, s]).

        Args:
            tokens, labels: int64 [b, s].
            token_weights: fp32 [b, s], the factor of each token's loss; 0 masks it.
            sample_ids: int64 [b], global sample numbers; None turns dropout off.
            positions: int64 [b, s], position of each token in its document; None is 0 … s-1.
            document_ids: int [b, s]; tokens see only their own document. None is one a row.
        """
        layout = SequenceLayout.packed(
            tokens.shape[1],
            positions=positions,
            document_ids=document_ids,
            sample_ids=sample_ids,
            device=tokens.device,
        )
        hidden = self(tokens, layout=layout)
        loss, nll = self.head.loss(hidden, labels.t(), token_weights.t())
        return loss, nll.t()

    def logits(
        self,
        tokens: torch.Tensor,
        *,
        cache: KeyValueCache | None = None,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return this rank's logits [s, b, V/tp], padding columns included.

        Args:
            tokens: int64 [b, s].
            cache: of keys and values; `tokens` are then what follows it.
            positions: int64 [s] or [s, b]; None is 0 … s-1.
            document_ids: int [s_k, b].
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        layout = SequenceLayout(positions, document_ids)
        return self.head(self(tokens, layout=layout, cache=cache))

    def full_logits(self, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the logits of the whole vocabulary, fp32 [s, b, V], on every tp rank."""
        return self.head.whole(self.logits(tokens, **options))
