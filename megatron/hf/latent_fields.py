# SPDX-License-Identifier: Apache-2.0
"""Latent attention in config.json of DeepSeek-V3: read and written."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import LatentAttentionConfig, RopeConfig
from megatron.hf.fields import Fields
from megatron.hf.rope_fields import scaling_fields
from megatron.training.config.model_table import yarn_magnitude, yarn_weight

#: Of the norms of low-rank vectors in transformers, whatever rms_norm_eps says.
LOW_RANK_EPSILON = 1e-6


def read_latent(fields: Fields) -> LatentAttentionConfig:
    """Read the shape of latent attention. Raises ValueError."""
    heads = fields.count("num_attention_heads")
    rope, nope = fields.count("qk_rope_head_dim"), fields.count("qk_nope_head_dim")
    fields.must_be("num_key_value_heads", heads)
    fields.must_be("head_dim", rope)
    fields.must_be("qk_head_dim", nope + rope)
    same = fields.number("rms_norm_eps", LOW_RANK_EPSILON) == LOW_RANK_EPSILON
    if "q_lora_rank" not in fields.raw:
        fields.refuse("q_lora_rank", "expected a positive integer, or null")
    return LatentAttentionConfig(
        num_attention_heads=heads,
        q_lora_rank=fields.count("q_lora_rank", 0) or None,
        kv_lora_rank=fields.count("kv_lora_rank"),
        nope_channels=nope,
        rope_channels=rope,
        value_channels=fields.count("v_head_dim"),
        scale_factor=_scale_factor(fields),
        norm_epsilon=None if same else LOW_RANK_EPSILON,
    )


def write_latent(attention: LatentAttentionConfig, rope: RopeConfig | None) -> dict[str, Any]:
    """Return the fields of latent attention; `rope_scaling` is not among them."""
    return {
        "num_key_value_heads": attention.num_attention_heads,
        "q_lora_rank": attention.q_lora_rank,
        "kv_lora_rank": attention.kv_lora_rank,
        "qk_nope_head_dim": attention.nope_channels,
        "qk_rope_head_dim": attention.rope_channels,
        "v_head_dim": attention.value_channels,
        "rope_interleave": rope is not None and rope.interleaved,
    }


def write_scale_factor(attention: LatentAttentionConfig, rope: RopeConfig | None) -> dict[str, Any]:
    """Return the field of rope_scaling that makes the softmax scale; none where there is none.

    A scale that no field can make is left out, and shows when what was written is read back.
    """
    scaling = None if rope is None else rope.scaling
    if scaling is None or scaling.kind != "yarn":
        return {}
    weight = yarn_weight(attention.scale_factor, scaling.factor)
    return {"mscale_all_dim": weight} if weight else {}


def _scale_factor(fields: Fields) -> float:
    """Return the factor of the softmax scale: the square of yarn's magnitude for all features."""
    chosen = scaling_fields(fields)
    kind = chosen.raw.get("rope_type", chosen.raw.get("type", "default"))
    if kind == "default" or not chosen.raw.get("mscale_all_dim"):
        return 1.0
    if kind != "yarn":
        chosen.refuse("mscale_all_dim", "supported is yarn's")
    return yarn_magnitude(chosen.number("factor"), chosen.number("mscale_all_dim")) ** 2
