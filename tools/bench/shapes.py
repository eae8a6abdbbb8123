# SPDX-License-Identifier: Apache-2.0
"""The model shapes and the training settings that every training variant shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Describe a Llama-like model (RMSNorm, RoPE, SwiGLU, GQA, untied) and its batch."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    batch: int
    sequence: int

    @property
    def tokens(self) -> int:
        """Return the tokens of one step."""
        return self.batch * self.sequence

    @property
    def parameters(self) -> int:
        """Return the number of weights."""
        head = self.hidden // self.heads
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * head
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "S": Shape(
            layers=4,
            hidden=256,
            ffn=768,
            heads=4,
            kv_heads=2,
            vocabulary=4096,
            batch=4,
            sequence=256,
        ),
        "M": Shape(
            layers=8,
            hidden=512,
            ffn=1536,
            heads=8,
            kv_heads=4,
            vocabulary=8192,
            batch=4,
            sequence=512,
        ),
    }
)

LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
INIT_STD, NORM_EPSILON, ROPE_BASE = 0.02, 1e-5, 10000.0
SEED = 1234
