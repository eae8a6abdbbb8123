# SPDX-License-Identifier: Apache-2.0
"""Configurations of published hybrid models.

Without arguments each function returns the published model; arguments change its size.
examples/hybrid has the same models as options of pretrain_hybrid.
"""

from __future__ import annotations

from megatron.core.models.gpt_config import GPTConfig
from megatron.core.models.layer_pattern import EXPERTS
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.ssm.mixer_config import GatedDeltaNetConfig, Mamba2Config
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig, RopeConfig

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
        mtp_num_layers=mtp_num_layers,
        pattern=pattern,
        delta_net=delta_net or linear,
        mtp_pattern="*E" if mtp_num_layers else "",
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
