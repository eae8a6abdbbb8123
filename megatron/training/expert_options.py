# SPDX-License-Identifier: Apache-2.0
"""From a run's options to the core's configs of experts and of latent attention."""

from __future__ import annotations

import math

from megatron.core.moe.config import MoEConfig, RouterConfig
from megatron.core.transformer import LatentAttentionConfig
from megatron.training.config import Config


def moe_config(config: Config) -> MoEConfig | None:
    """Return the shape of the mixtures of experts; None where there are none."""
    experts, model = config.experts, config.model
    if experts.num_experts is None:
        return None
    return MoEConfig(
        num_experts=experts.num_experts,
        ffn_hidden_size=experts.moe_ffn_hidden_size or model.inner_features,
        router=_router(config),
        gated=model.swiglu,
        activation=activation(config),
        capacity_factor=experts.moe_expert_capacity_factor,
        drop_policy=experts.moe_token_drop_policy,
        shared_ffn_hidden_size=experts.moe_shared_expert_intermediate_size,
        shared_gate=experts.moe_shared_expert_gate,
    )


def activation(config: Config) -> str:
    """Return the activation of MLPs and experts."""
    if config.model.swiglu:
        return "silu"
    return "squared_relu" if config.model.squared_relu else "gelu"


def _router(config: Config) -> RouterConfig:
    chosen = config.experts
    groups = chosen.moe_router_group_topk or 1
    balances = chosen.moe_aux_loss_coeff > 0
    factor = chosen.moe_router_topk_scaling_factor
    return RouterConfig(
        topk=chosen.moe_router_topk,
        score_function=chosen.moe_router_score_function,
        normalize=not chosen.moe_router_pre_softmax,
        scaling_factor=1.0 if factor is None else factor,
        num_groups=chosen.moe_router_num_groups,
        group_topk=chosen.moe_router_group_topk,
        group_candidates=max(1, chosen.moe_router_topk // groups),
        expert_bias=chosen.moe_router_enable_expert_bias,
        bias_update_rate=chosen.moe_router_bias_update_rate,
        balance=chosen.moe_router_load_balancing_type if balances else "none",
        aux_loss_coeff=chosen.moe_aux_loss_coeff,
        z_loss_coeff=chosen.moe_z_loss_coeff,
        jitter=chosen.moe_input_jitter_eps,
    )


def latent_config(config: Config) -> LatentAttentionConfig:
    """Return the shape of latent attention."""
    latent, scale = config.attention, 1.0
    assert config.model.num_attention_heads is not None
    if config.position.position_embedding_type == "yarn":
        factor = config.position.yarn_rotary_scaling_factor
        scale = yarn_growth(factor, latent.mscale_all_dim) ** 2
    return LatentAttentionConfig(
        num_attention_heads=config.model.num_attention_heads,
        q_lora_rank=latent.q_lora_rank,
        kv_lora_rank=latent.kv_lora_rank,
        nope_channels=latent.qk_head_dim,
        rope_channels=latent.qk_pos_emb_head_dim,
        value_channels=latent.v_head_dim,
        dropout=latent.attention_dropout,
        scale_factor=scale,
    )


def yarn_attention_factor(config: Config) -> float | None:
    """Return what yarn multiplies cosine and sine by; None leaves that to its own rule.

    With latent attention the softmax scale has a part of the growth already.
    """
    position, latent = config.position, config.attention
    if position.yarn_attention_factor is not None or not latent.multi_latent_attention:
        return position.yarn_attention_factor
    factor = position.yarn_rotary_scaling_factor
    return yarn_growth(factor, latent.mscale) / yarn_growth(factor, latent.mscale_all_dim)


def yarn_growth(factor: float, mscale: float) -> float:
    """Return 0.1 · mscale · ln(factor) + 1 (Peng et al. 2023, section 3.4), 1 where nothing is
    stretched."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
