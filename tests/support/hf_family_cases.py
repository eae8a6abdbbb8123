# SPDX-License-Identifier: Apache-2.0
"""Small models of further families: odd shapes, three query heads for each key head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_PARTIAL = {"rope_type": "default", "rope_theta": 500.0}
#: 48 features in heads of 8, for classes without their own head_dim.
_WHOLE = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}

#: name: (class in transformers, what its configuration has in addition to the shape)
FAMILY_CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("Arcee", {"attention_bias": True, "mlp_bias": True, "rope_parameters": _YARN}),
    "nemotron": (
        "Nemotron",
        {"rope_parameters": {**_PARTIAL, "partial_rotary_factor": 0.4}, "attention_bias": True},
    ),
    "jais2": ("Jais2", {"mlp_bias": False, "tie_word_embeddings": True}),
    "starcoder2": ("Starcoder2", {**_WHOLE, "sliding_window": 7}),
    "persimmon": ("Persimmon", {"num_attention_heads": 6}),
    "glm": ("Glm", {"head_dim": 12}),
    "helium": ("Helium", {**_WHOLE, "mlp_bias": True}),
    "ernie4_5": ("Ernie4_5", {"use_bias": True, "rope_parameters": _YARN}),
    "stablelm": ("StableLm", {**_WHOLE, "use_qkv_bias": True}),
    "phi3": (
        "Phi3",
        {
            **_WHOLE,
            "sliding_window": 7,
            "rope_parameters": {**_PARTIAL, "partial_rotary_factor": 0.75},
        },
    ),
}

#: Classes whose norms store the distance of the weight from one.
ZERO_CENTERED = frozenset({"Qwen3Next", "Nemotron", "Qwen3_5", "Qwen3_5Moe"})
