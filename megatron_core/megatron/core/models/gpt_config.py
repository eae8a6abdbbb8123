# SPDX-License-Identifier: Apache-2.0
"""GPTConfig: everything that decides a GPT, and nothing about ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.models.decoder import DecoderConfig
from megatron.core.models.pattern import ATTENTION, DENSE, EXPERTS
from megatron.core.moe import MoEConfig
from megatron.core.ops.rope import RopeScaling
from megatron.core.transformer import (
    AttentionConfig,
    LatentAttentionConfig,
    MLPConfig,
    NormConfig,
    RopeConfig,
)


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Everything that decides a GPT's logical weights and its function; nothing about ranks.

    Args:
        num_layers: L, each an attention block and an MLP or a mixture of experts.
        hidden_size: h.
        vocab_size: V, without padding.
        attention, mlp, norm: shapes of the parts; attention may be latent.
        rope: rotary position embedding; None gives no positions at all.
        tied: one weight for the embedding and the head.
        hidden_dropout: probability of dropping an element of the embedding or of a block's output.
        init_std: standard deviation of initial weights; output projections have init_std / sqrt(2
            L).
        moe: shape of the mixtures of experts; None where no layer has one.
        ffn_pattern: what follows attention in each layer, "-" an MLP or "E" a mixture of experts;
            empty is the same in all, experts if `moe` is given.
        mtp_num_layers: depth D of multi-token prediction (DeepSeek-AI 2024, section 2.2): so many
            more layers predict the tokens after the next.
        mtp_loss_factor: of the mean of their D losses in the training loss.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    attention: AttentionConfig | LatentAttentionConfig
    mlp: MLPConfig
    norm: NormConfig = field(default_factory=NormConfig)
    rope: RopeConfig | None = field(default_factory=RopeConfig)
    tied: bool = False
    hidden_dropout: float = 0.0
    init_std: float = 0.02
    moe: MoEConfig | None = None
    ffn_pattern: str = ""
    mtp_num_layers: int = 0
    mtp_loss_factor: float = 0.1

    def __post_init__(self) -> None:
        if not self.ffn_pattern:
            everywhere = DENSE if self.moe is None else EXPERTS
            object.__setattr__(self, "ffn_pattern", everywhere * self.num_layers)

    def problems(
        self, *, tp: int = 1, cp: int = 1, engine: str = "auto", etp: int = 1, ep: int = 1
    ) -> list[str]:
        """List everything that is wrong with this model on these ranks; empty if nothing is.

        Args:
            tp, cp: ranks that share weights, and tokens of a row.
            engine: of context parallelism.
            etp, ep: ranks that share each expert's weights, and the experts.
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
                self.rope.rotary_features(self.attention.rope_features)
            except ValueError as error:
                found.append(str(error))
        return found + self._expert_problems(tp, etp, ep)

    def _expert_problems(self, tp: int, etp: int, ep: int) -> list[str]:
        found = []
        kinds = set(self.ffn_pattern)
        if len(self.ffn_pattern) != max(0, self.num_layers) or kinds - {DENSE, EXPERTS}:
            found.append(
                f"ffn_pattern {self.ffn_pattern!r} must have one of '-' and 'E' for each of the "
                f"{self.num_layers} layers"
            )
        if (EXPERTS in kinds) != (self.moe is not None):
            found.append("layers with experts need num-experts, and num-experts such layers")
        if self.moe is not None:
            found += self.moe.problems(tp=tp, etp=etp, ep=ep)
        elif ep > 1 or etp not in (1, tp):
            found.append(
                f"expert-model-parallel-size {ep} and expert-tensor-parallel-size {etp} without "
                "experts: give num-experts"
            )
        if self.mtp_num_layers < 0 or self.mtp_loss_factor < 0:
            found.append(
                f"mtp-num-layers {self.mtp_num_layers} and mtp-loss-scaling-factor "
                f"{self.mtp_loss_factor} must not be negative"
            )
        return found

    @property
    def decoder(self) -> DecoderConfig:
        """What its blocks are."""
        return DecoderConfig(
            pattern="".join(ATTENTION + kind for kind in self.ffn_pattern),
            attention=self.attention,
            mlp=self.mlp,
            moe=self.moe,
            norm=self.norm,
            hidden_dropout=self.hidden_dropout,
        )

    @property
    def router_names(self) -> tuple[str, ...]:
        """The names of all routers, in the order of the model."""
        if self.moe is None:
            return ()
        blocks = [2 * i + 1 for i, kind in enumerate(self.ffn_pattern) if kind == EXPERTS]
        names = [f"decoder.blocks.{block}.moe.router" for block in blocks]
        if self.ffn_pattern.endswith(EXPERTS):
            names += [f"mtp.{k}.decoder.blocks.1.moe.router" for k in range(self.mtp_num_layers)]
        return tuple(names)

    @property
    def has_auxiliary_losses(self) -> bool:
        """Whether routers add something to the training loss."""
        if self.moe is None:
            return False
        router = self.moe.router
        balances = router.balance != "none" and router.aux_loss_coeff > 0.0
        return balances or router.z_loss_coeff > 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the config as plain JSON values."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> GPTConfig:
        """Rebuild a config from `to_json`. Raises ValueError for unknown or missing fields."""
        fields = dict(data)
        try:
            latent = "kv_lora_rank" in fields["attention"]
            kind = LatentAttentionConfig if latent else AttentionConfig
            fields["attention"] = kind(**fields["attention"])
            if fields.get("moe") is not None:
                fields["moe"] = MoEConfig.from_json(fields["moe"])
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
