# SPDX-License-Identifier: Apache-2.0
"""GPTConfig: everything that decides a GPT, and nothing about ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.models.decoder import DecoderConfig
from megatron.core.models.pattern import ATTENTION, DENSE
from megatron.core.ops.rope import RopeScaling
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig, RopeConfig


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

    def problems(self, *, tp: int = 1, cp: int = 1, engine: str = "auto") -> list[str]:
        """List everything that is wrong with this model on tp · cp ranks; empty if nothing is.

        Args:
            tp, cp: ranks that share weights, and tokens of a row.
            engine: of context parallelism.
        """
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
        found += self.attention.problems(tp, cp=cp, engine=engine) + self.mlp.problems(tp)
        if self.rope is not None:
            try:
                self.rope.rotary_features(self.attention.kv_channels)
            except ValueError as error:
                found.append(str(error))
        return found

    @property
    def decoder(self) -> DecoderConfig:
        """What its blocks are."""
        return DecoderConfig(
            pattern=(ATTENTION + DENSE) * self.num_layers,
            attention=self.attention,
            mlp=self.mlp,
            norm=self.norm,
            hidden_dropout=self.hidden_dropout,
        )

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
