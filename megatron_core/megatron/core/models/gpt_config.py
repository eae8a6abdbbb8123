# SPDX-License-Identifier: Apache-2.0
"""GPTConfig: the configuration of a language model, independent of the parallel layout.

Also configurations of published hybrid models. Without arguments their functions return the
published model; arguments change its size. examples/hybrid has the same models as options of
pretrain_hybrid.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.core.models.decoder import DecoderConfig, missing_shapes
from megatron.core.models.layer_pattern import (
    ATTENTION,
    ATTENTIONS,
    DENSE,
    EXPERTS,
    GROUP_START,
    LATENT,
    MAMBA,
    WINDOW,
    symbol_problems,
    symbols_of,
)
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.ops.rope import RopeScaling
from megatron.core.ssm.mixer_config import (
    AUTO,
    GatedDeltaNetConfig,
    Mamba2Config,
    ShortConvConfig,
)
from megatron.core.transformer import (
    AttentionConfig,
    LatentAttentionConfig,
    MLPConfig,
    NormConfig,
    RopeConfig,
    WindowAttentionConfig,
)


@dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """Configuration of multi-token prediction (DeepSeek-AI 2024, section 2.2).

    Args:
        num_layers: number D of MTP layers.
        loss_factor: factor of the mean of the D MTP losses in the training loss.
        pattern: blocks of each MTP layer; empty means the blocks of a GPT's last layer.
    """

    num_layers: int
    loss_factor: float = 0.1
    pattern: str = ""

    def problems(self) -> list[str]:
        """List the problems of the numbers and of the pattern."""
        problems = symbol_problems(self.pattern) if self.pattern else []
        if GROUP_START in self.pattern:
            problems.append(f"multi-token prediction has no parallel blocks ({self.pattern})")
        if self.num_layers < 1:
            problems.append(f"mtp-num-layers {self.num_layers}: use a positive integer")
        if self.loss_factor < 0:
            problems.append(f"mtp-loss-scaling-factor {self.loss_factor} must not be negative")
        return problems


@dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Factors on activations, applied at run time and never folded into weights, and the soft cap
    of the logits.

    Args:
        embedding: factor on the token embeddings.
        rounds_embedding: round this factor to the dtype of the weights, as Gemma does.
        residual: factor on the output of each block before it is added to the stream.
        logits: factor on the logits.
        logits_softcap: bound c of the logits x, which become c tanh(x / c) after the factor; None
            for none.
        attention, mamba, mlp: factors on the outputs of attention, Mamba-2 and MLPs, before the sum
            of parallel blocks and a norm of the output.
    """

    embedding: float = 1.0
    rounds_embedding: bool = False
    residual: float = 1.0
    logits: float = 1.0
    logits_softcap: float | None = None
    attention: float = 1.0
    mamba: float = 1.0
    mlp: float = 1.0

    @property
    def outputs(self) -> dict[str, float]:
        """Factors on the outputs of mixers by their symbols; 1 for other symbols."""
        factors = dict.fromkeys(ATTENTIONS, self.attention)
        return {**factors, MAMBA: self.mamba, DENSE: self.mlp}

    def problems(self) -> list[str]:
        """Return a message for each number that is not positive."""
        names = ("embedding", "residual", "logits", "logits_softcap", "attention", "mamba", "mlp")
        return [
            f"multipliers.{name} is {value}: use a positive number"
            for name in names
            if (value := vars(self)[name]) is not None and not 0.0 < value < math.inf
        ]

    def embedding_in(self, dtype: torch.dtype) -> float:
        """Return the factor on embeddings of weights of a dtype."""
        if not self.rounds_embedding:
            return self.embedding
        return float(torch.tensor(self.embedding, dtype=dtype))


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Configuration of a model's logical weights and its function.

    A GPT has L layers of two blocks, attention and an MLP or experts. A hybrid has the blocks of
    its `pattern`.

    Args:
        num_layers: number of layers L of a GPT; number of blocks of a hybrid.
        hidden_size: hidden size h.
        vocab_size: vocabulary size V without padding.
        attention: shape of attention, possibly latent; None without attention blocks.
        mlp: shape of MLPs; None without MLP blocks.
        norm: shape of norms.
        rope: rotary position embedding; None without it.
        max_position_embeddings: number of positions P of a learned absolute position embedding,
            added to the token embedding; None without it.
        tied: share one weight between the embedding and the head.
        hidden_dropout: dropout probability of the embedding and of block outputs.
        init_std: standard deviation of initial weights; output projections use init_std /
            sqrt(number of blocks), where a GPT has 2 L blocks.
        moe: shape of the mixtures of experts; None without experts.
        ffn_pattern: per layer "-" for an MLP or "E" for experts; empty means experts in all layers
            if `moe` is set, otherwise MLPs. Empty for a hybrid.
        mtp: multi-token prediction; None without it.
        pattern: blocks of a hybrid, one symbol each (`layer_pattern.Pattern`); empty for a GPT.
        delta_net, mamba, short_conv: shapes of gated delta nets, of Mamba-2 and of short
            convolutions; None without such blocks.
        num_labels: number of labels of a classification head, which replaces the vocabulary head;
            None for a language model. A model with such a head cannot be trained.
        multipliers: factors on embeddings, block outputs and logits.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    attention: AttentionConfig | LatentAttentionConfig | None
    mlp: MLPConfig | None
    norm: NormConfig = field(default_factory=NormConfig)
    rope: RopeConfig | None = field(default_factory=RopeConfig)
    tied: bool = False
    hidden_dropout: float = 0.0
    init_std: float = 0.02
    moe: MoEConfig | None = None
    ffn_pattern: str = ""
    mtp: MTPConfig | None = None
    pattern: str = ""
    delta_net: GatedDeltaNetConfig | None = None
    mamba: Mamba2Config | None = None
    short_conv: ShortConvConfig | None = None
    max_position_embeddings: int | None = None
    num_labels: int | None = None
    multipliers: Multipliers = Multipliers()

    def __post_init__(self) -> None:
        if not self.ffn_pattern and not self.pattern:
            everywhere = DENSE if self.moe is None else EXPERTS
            object.__setattr__(self, "ffn_pattern", everywhere * self.num_layers)

    def problems(
        self,
        *,
        tp: int = 1,
        cp: int = 1,
        engine: str = "auto",
        etp: int = 1,
        ep: int = 1,
        linear_mode: str = AUTO,
    ) -> list[str]:
        """List the problems of this model on these ranks; empty for a valid combination.

        Args:
            tp, cp: tensor- and context-parallel sizes.
            engine: implementation of context parallelism in attention.
            etp, ep: expert-tensor- and expert-parallel sizes.
            linear_mode: implementation of context parallelism in recurrent mixers.
        """
        problems = []
        for name, size in (
            ("num_layers", self.num_layers),
            ("hidden_size", self.hidden_size),
            ("vocab_size", self.vocab_size),
        ):
            if size < 1:
                problems.append(f"{name} is {size}: use a positive integer")
        if self.vocab_size < tp:
            problems.append(
                f"vocab_size {self.vocab_size} is less than tensor-model-parallel-size {tp}"
            )
        if not 0.0 <= self.hidden_dropout < 1.0:
            problems.append(f"hidden-dropout {self.hidden_dropout} must be in [0, 1)")
        problems += self._pattern_problems()
        if self.attention is not None:
            problems += self.attention.problems(tp, cp=cp, engine=engine)
            problems += self._window_problems()
            of_projection = (
                isinstance(self.attention, AttentionConfig)
                and self.attention.qk_norm_scope == "projection"
            )
            if of_projection and self.norm.kind != "RMSNorm":
                problems.append(f"qk_norm_scope 'projection' with {self.norm.kind}: use RMSNorm")
        if self.mlp is not None:
            problems += self.mlp.problems(tp)
        for recurrent in (self.delta_net, self.mamba):
            if recurrent is not None:
                problems += recurrent.problems(tp, cp=cp, mode=linear_mode)
        if self.short_conv is not None:
            problems += self.short_conv.problems(tp, hidden_size=self.hidden_size)
        problems += self._label_problems() + self._position_problems()
        problems += self.multipliers.problems()
        return problems + self._expert_problems(tp, etp, ep)

    def _window_problems(self) -> list[str]:
        second = self.second_attention
        if second is None:
            return []
        problems, lengths = [], (0,) if self.pattern else (self.num_layers,)
        if WINDOW not in self.blocks + self.mtp_blocks:
            problems.append("attention.second without a 'W' block: leave it out")
        if set(second.pattern) - {ATTENTION, WINDOW} or len(second.pattern) not in lengths:
            problems.append(
                f"attention.second.pattern {second.pattern!r} must have one of '*' and 'W' for "
                f"each of the {self.num_layers} layers of a GPT, and be empty for a hybrid"
            )
        if second.rope is not None and self.rope is None:
            problems.append("attention.second.rope in a model without rotary positions")
        return problems

    def _label_problems(self) -> list[str]:
        if self.num_labels is None:
            return []
        problems = []
        if self.num_labels < 1:
            problems.append(f"num_labels is {self.num_labels}: use a positive integer")
        if self.tied or self.mtp is not None:
            problems.append(
                "tied embeddings and multi-token prediction need a vocabulary head, but the model "
                "has a classification head: leave one of them out"
            )
        return problems

    def _position_problems(self) -> list[str]:
        positions = self.max_position_embeddings
        if positions is None:
            return self._rope_problems()
        problems = []
        if positions < 1:
            problems.append(f"max_position_embeddings is {positions}: use a positive integer")
        if self.rope is not None:
            problems.append(
                "learned positions and rotary positions are mutually exclusive: "
                "leave one of them out"
            )
        if isinstance(self.attention, LatentAttentionConfig):
            problems.append("latent attention uses rotary positions: leave learned positions out")
        if self.mtp is not None:
            problems.append(
                "multi-token prediction embeds tokens without positions: use rotary "
                "positions or none"
            )
        return problems

    def _rope_problems(self) -> list[str]:
        if self.rope is None:
            return []
        if self.attention is None:
            return ["rotary positions without attention: leave rope out"]
        ropes = [rope for rope in (self.attention_rope, self.window_rope) if rope is not None]
        if not ropes:
            return ["rotary positions, but no block is rotary: leave rope out"]
        try:
            for rope in ropes:
                rope.rotary_features(self.attention.rope_features)
        except ValueError as error:
            return [str(error)]
        return []

    def _pattern_problems(self) -> list[str]:
        """List the problems of the pattern, the feed-forward pattern and the block shapes."""
        problems = []
        if self.pattern:
            problems += symbol_problems(self.pattern)
            num_blocks = len(symbols_of(self.pattern))
            if self.num_layers != num_blocks or self.ffn_pattern:
                problems.append(
                    f"pattern {self.pattern!r} has {num_blocks} blocks: num_layers "
                    f"must be that number, not {self.num_layers}, and ffn_pattern empty"
                )
        elif len(self.ffn_pattern) != max(0, self.num_layers) or set(self.ffn_pattern) - {
            DENSE,
            EXPERTS,
        }:
            problems.append(
                f"ffn_pattern {self.ffn_pattern!r} must have one of '-' and 'E' for each of the "
                f"{self.num_layers} layers"
            )
        if self.mtp is not None:
            problems += self.mtp.problems()
            if self.pattern and not self.mtp.pattern:
                problems.append(
                    f"{self.mtp.num_layers} multi-token prediction layers with the blocks '': "
                    "write the blocks of each layer after a '/' of the pattern"
                )
        return problems + self._missing_shapes()

    def _missing_shapes(self) -> list[str]:
        blocks = self.blocks + self.mtp_blocks
        return missing_shapes(blocks, attention=self.attention, **self._shapes)

    def _expert_problems(self, tp: int, etp: int, ep: int) -> list[str]:
        problems = []
        if self.moe is None:
            if ep > 1 or etp not in (1, tp):
                problems.append(
                    f"expert-model-parallel-size {ep} and expert-tensor-parallel-size {etp} "
                    "without experts: give num-experts"
                )
            return problems
        if EXPERTS not in self.blocks + self.mtp_blocks:
            problems.append(
                "layers with experts need num-experts, and num-experts needs such layers"
            )
        return problems + self.moe.problems(tp=tp, etp=etp, ep=ep)

    @property
    def blocks(self) -> str:
        """Symbols of all blocks of the model, without MTP layers."""
        if self.pattern:
            return symbols_of(self.pattern)
        latent, second = isinstance(self.attention, LatentAttentionConfig), self.second_attention
        attentions = (LATENT if latent else ATTENTION) * len(self.ffn_pattern)
        if second is not None and second.pattern:
            attentions = second.pattern
        return "".join(map(str.__add__, attentions, self.ffn_pattern))

    @property
    def block_pattern(self) -> str:
        """Symbols of all blocks with parentheses around parallel blocks."""
        return self.pattern or self.blocks

    @property
    def layer_blocks(self) -> int:
        """Number of blocks per layer of `num_layers`."""
        return 1 if self.pattern else 2

    @property
    def mtp_num_layers(self) -> int:
        """Number of MTP layers; 0 without MTP."""
        return 0 if self.mtp is None else self.mtp.num_layers

    @property
    def mtp_blocks(self) -> str:
        """Symbols of the blocks of each MTP layer; empty without MTP."""
        return "" if self.mtp is None else self.mtp.pattern or self.blocks[-2:]

    @property
    def _shapes(self) -> dict[str, Any]:
        return {
            "mlp": self.mlp,
            "moe": self.moe,
            "delta_net": self.delta_net,
            "mamba": self.mamba,
            "short_conv": self.short_conv,
        }

    @property
    def decoder(self) -> DecoderConfig:
        """Configuration of the decoder."""
        return DecoderConfig(
            pattern=self.block_pattern,
            attention=self.attention,
            norm=self.norm,
            hidden_dropout=self.hidden_dropout,
            residual_multiplier=self.multipliers.residual,
            output_multipliers=self.multipliers.outputs,
            **self._shapes,
        )

    @property
    def second_attention(self) -> WindowAttentionConfig | None:
        """How attention of `W` blocks differs; None without such blocks."""
        return self.attention.second if isinstance(self.attention, AttentionConfig) else None

    @property
    def attention_rope(self) -> RopeConfig | None:
        """Rotary position embedding of `*` and `+` blocks; None without it."""
        plain = isinstance(self.attention, AttentionConfig) and not self.attention.rotary
        return None if plain else self.rope

    @property
    def window_rope(self) -> RopeConfig | None:
        """Rotary position embedding of `W` blocks; None without it."""
        second = self.second_attention
        return (second.rope or self.rope) if second is not None and second.rotary else None

    @property
    def router_names(self) -> tuple[str, ...]:
        """Names of all routers in model order."""
        blocks_by_decoder = {"decoder": self.blocks}
        blocks_by_decoder |= {
            f"mtp.{k}.decoder": self.mtp_blocks for k in range(self.mtp_num_layers)
        }
        return tuple(
            f"{decoder}.blocks.{block}.moe.router"
            for decoder, symbols in blocks_by_decoder.items()
            for block, symbol in enumerate(symbols)
            if symbol == EXPERTS
        )

    def without_further_prediction(self) -> GPTConfig:
        """Return the configuration without MTP layers."""
        moe = self.moe if EXPERTS in self.blocks else None
        return dataclasses.replace(self, moe=moe, mtp=None)

    @property
    def has_auxiliary_losses(self) -> bool:
        """Whether routers add auxiliary losses to the training loss."""
        if self.moe is None:
            return False
        router = self.moe.router
        balances = router.balance != "none" and router.aux_loss_coeff > 0.0
        return balances or router.z_loss_coeff > 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the config as plain JSON values."""
        fields = dataclasses.asdict(self)
        # JSON has no infinity: store None, which `_mamba` reads as infinity.
        if fields["mamba"] is not None:
            limits = fields["mamba"]["dt_limit"]
            fields["mamba"]["dt_limit"] = [x if math.isfinite(x) else None for x in limits]
            if fields["mamba"]["multipliers"] is not None:
                fields["mamba"]["multipliers"] = list(fields["mamba"]["multipliers"])
        return fields

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> GPTConfig:
        """Restore a configuration from `to_json`.

        Raises:
            ValueError: a field is unknown or missing.
        """
        fields = _with_mtp(data)
        try:
            if fields["attention"] is not None:
                latent = "kv_lora_rank" in fields["attention"]
                shape = fields["attention"]
                fields["attention"] = (
                    LatentAttentionConfig(**shape) if latent else _attention(shape)
                )
            if fields.get("moe") is not None:
                fields["moe"] = MoEConfig.from_json(fields["moe"])
            if fields["mlp"] is not None:
                fields["mlp"] = MLPConfig(**fields["mlp"])
            if fields.get("delta_net") is not None:
                fields["delta_net"] = GatedDeltaNetConfig(**fields["delta_net"])
            if fields.get("mamba") is not None:
                fields["mamba"] = _mamba(fields["mamba"])
            if fields.get("mtp") is not None:
                fields["mtp"] = MTPConfig(**fields["mtp"])
            if fields.get("short_conv") is not None:
                fields["short_conv"] = ShortConvConfig(**fields["short_conv"])
            fields["multipliers"] = Multipliers(**fields.get("multipliers", {}))
            fields["norm"] = NormConfig(**fields["norm"])
            if fields["rope"] is not None:
                fields["rope"] = _rope(fields["rope"])
            config = GPTConfig(**fields)
            if missing := config._missing_shapes():
                raise TypeError("; ".join(missing))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the configuration of a GPT of this version: {error}") from error
        return config


def _with_mtp(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy in which the three MTP fields of older checkpoints are one, `mtp`."""
    older = {"mtp_num_layers": "num_layers", "mtp_loss_factor": "loss_factor"}
    older["mtp_pattern"] = "pattern"
    fields = {name: value for name, value in values.items() if name not in older}
    if values.get("mtp_num_layers"):
        fields["mtp"] = {older[name]: value for name, value in values.items() if name in older}
    return fields


def _attention(values: Mapping[str, Any]) -> AttentionConfig:
    """Restore the shape of attention from `to_json`."""
    second = values.get("second")
    if second is not None:
        rope = second.get("rope")
        second = WindowAttentionConfig(**{**second, "rope": None if rope is None else _rope(rope)})
    return AttentionConfig(**{**values, "second": second})


def _rope(values: Mapping[str, Any]) -> RopeConfig:
    """Restore a rotary position embedding from `to_json`."""
    scaling = values["scaling"]
    return RopeConfig(**{**values, "scaling": None if scaling is None else RopeScaling(**scaling)})


def _mamba(data: Mapping[str, Any]) -> Mamba2Config:
    """Restore the shape of Mamba-2 from `to_json`."""
    (low, high), multipliers = data["dt_limit"], data.get("multipliers")
    restored = {
        "dt_limit": (low, math.inf if high is None else high),
        "multipliers": None if multipliers is None else tuple(multipliers),
    }
    return Mamba2Config(**{**data, **restored})


#: Token mixers of four layers of Qwen3-Next: three gated delta nets, one attention.
QWEN3_NEXT_LAYERS = "GGG*"

#: Layer pattern of Nemotron-H-8B.
NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


def qwen3_next(
    *,
    num_layers: int = 48,
    hidden_size: int = 2048,
    vocab_size: int = 151_936,
    attention: AttentionConfig | None = None,
    delta_net: GatedDeltaNetConfig | None = None,
    moe: MoEConfig | None = None,
    mtp_num_layers: int = 0,
) -> GPTConfig:
    """Return Qwen3-Next, by default Qwen3-Next-80B-A3B: gated delta nets, every fourth layer gated
    attention, experts in all layers.

    Args:
        num_layers: number of layers of two blocks.
        hidden_size: hidden size h.
        vocab_size: vocabulary size V.
        attention, delta_net, moe: shapes of the blocks; None takes the published shape.
        mtp_num_layers: number of MTP layers, each an attention layer with experts; the published
            weights have one.
    """
    mixers = (QWEN3_NEXT_LAYERS[layer % 4] for layer in range(num_layers))
    pattern = "".join(mixer + EXPERTS for mixer in mixers)
    gated_attention = AttentionConfig(
        num_attention_heads=16,
        num_query_groups=2,
        kv_channels=256,
        qk_norm=True,
        output_gate=True,
    )
    linear = GatedDeltaNetConfig(
        num_key_heads=16, num_value_heads=32, key_channels=128, value_channels=128
    )
    router = RouterConfig(topk=10, group_candidates=10, balance="aux_loss", aux_loss_coeff=1e-3)
    experts = MoEConfig(
        num_experts=512,
        ffn_hidden_size=512,
        router=router,
        shared_ffn_hidden_size=512,
        shared_gate=True,
    )
    return GPTConfig(
        num_layers=len(pattern),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        attention=attention or gated_attention,
        mlp=None,
        norm=NormConfig(epsilon=1e-6, zero_centered=True),
        rope=RopeConfig(base=1e7, percent=0.25),
        moe=moe or experts,
        mtp=MTPConfig(num_layers=mtp_num_layers, pattern="*E") if mtp_num_layers else None,
        pattern=pattern,
        delta_net=delta_net or linear,
    )


def mamba2(
    *,
    num_layers: int = 64,
    hidden_size: int = 2560,
    vocab_size: int = 50_288,
    mamba: Mamba2Config | None = None,
) -> GPTConfig:
    """Return a Mamba-2 language model, by default mamba2-2.7b, with Mamba-2 blocks only.

    Args:
        num_layers: number of Mamba-2 blocks.
        hidden_size: hidden size h.
        vocab_size: vocabulary size V.
        mamba: shape of the blocks; None takes the published shape, 2 h features in heads of 64.
    """
    shape = Mamba2Config(
        num_heads=2 * hidden_size // 64, head_channels=64, state_channels=128, norm_groups=1
    )
    return GPTConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        attention=None,
        mlp=None,
        rope=None,
        tied=True,
        pattern="M" * num_layers,
        mamba=mamba or shape,
    )


def nemotron_h(
    *,
    pattern: str = NEMOTRON_H_8B,
    hidden_size: int = 4096,
    vocab_size: int = 131_072,
    ffn_hidden_size: int = 21_504,
    attention: AttentionConfig | None = None,
    mamba: Mamba2Config | None = None,
) -> GPTConfig:
    """Return Nemotron-H, by default Nemotron-H-8B: Mamba-2 and MLP blocks, and a few attention
    blocks without position embedding.

    Args:
        pattern: layer pattern of M, - and *.
        hidden_size: hidden size h.
        vocab_size: vocabulary size V.
        ffn_hidden_size: inner features of the MLPs, with squared ReLU.
        attention, mamba: shapes of the blocks; None takes the published shape.
    """
    grouped = AttentionConfig(num_attention_heads=32, num_query_groups=8, kv_channels=128)
    shape = Mamba2Config(
        num_heads=128, head_channels=64, state_channels=128, num_groups=8, norm_groups=8
    )
    return GPTConfig(
        num_layers=len(pattern),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        attention=attention or grouped,
        mlp=MLPConfig(ffn_hidden_size=ffn_hidden_size, gated=False, activation="squared_relu"),
        rope=None,
        pattern=pattern,
        mamba=mamba or shape,
    )
