# SPDX-License-Identifier: Apache-2.0
"""The layers of a transformer: norm, attention, MLP."""

from megatron.core.backend import LayerBuild
from megatron.core.transformer.attention import (
    AttentionConfig,
    CacheShapes,
    KeyValueCache,
    RopeConfig,
    RopeTable,
    RotaryEmbedding,
    SelfAttention,
    WindowAttentionConfig,
)
from megatron.core.transformer.latent_attention import LatentAttention, LatentAttentionConfig
from megatron.core.transformer.mlp import MLP, MLPConfig
from megatron.core.transformer.norm import Norm, NormConfig
from megatron.core.transformer.recompute import Recompute

__all__ = [
    "MLP",
    "AttentionConfig",
    "CacheShapes",
    "KeyValueCache",
    "LatentAttention",
    "LatentAttentionConfig",
    "LayerBuild",
    "MLPConfig",
    "Norm",
    "NormConfig",
    "Recompute",
    "RopeConfig",
    "RopeTable",
    "RotaryEmbedding",
    "SelfAttention",
    "WindowAttentionConfig",
]
