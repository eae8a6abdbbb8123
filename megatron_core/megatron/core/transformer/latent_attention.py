# SPDX-License-Identifier: Apache-2.0
"""LatentAttention: multi-head latent attention (DeepSeek-AI 2024, section 2.1.1).

Queries, and keys with values, pass through vectors of low rank; the rotary position embedding has
features of its own, for keys one set for all heads. A cache keeps the low-rank vector of a token
and its rotated features, for all heads together.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Shape of a latent attention layer.

    Args:
        num_attention_heads: n.
        q_lora_rank: features of a token's low-rank query vector; None computes queries directly.
        kv_lora_rank: features of a token's low-rank vector of keys and values.
        nope_channels: features of a head's query and key that do not rotate.
        rope_channels: features that do; those of keys are the same for all heads.
        value_channels: features of a head's value.
        dropout: probability of dropping an attention weight in training.
        scale_factor: of the softmax scale 1 / sqrt(nope + rope channels); yarn's squared mscale.
    """

    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_channels: int
    rope_channels: int
    value_channels: int
    dropout: float = 0.0
    scale_factor: float = 1.0

    @property
    def rope_features(self) -> int:
        """Features of a head that the rotary table is made for."""
        return self.rope_channels

    def problems(self, tp: int, *, cp: int = 1, engine: str = "auto") -> list[str]:
        """List what cannot be on `tp` ranks that share heads and `cp` that share tokens."""
        found = []
        sizes = (
            self.num_attention_heads,
            self.q_lora_rank or 1,
            self.kv_lora_rank,
            self.nope_channels,
            self.rope_channels,
            self.value_channels,
        )
        if min(sizes) < 1:
            found.append(f"latent attention of {sizes} heads and features: use >= 1")
        elif self.num_attention_heads % tp:
            found.append(
                f"num-attention-heads {self.num_attention_heads} must divide by "
                f"tensor-model-parallel-size {tp}"
            )
        if not 0.0 <= self.dropout < 1.0:
            found.append(f"attention-dropout {self.dropout} must be in [0, 1)")
        return found


class LatentAttention(nn.Module):
    """Latent attention of a sequence over itself."""
