# SPDX-License-Identifier: Apache-2.0
"""All supported architectures, in the order in which an export tries them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megatron.hf.architecture import Architecture
from megatron.hf.families import deepseek, glm, llama, nemotron, plain_mlp, qwen

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        architecture.model_type: architecture
        for architecture in (
            llama.LLAMA,
            llama.MISTRAL,
            qwen.QWEN2,
            llama.SEED_OSS,
            qwen.QWEN3,
            llama.MIXTRAL,
            qwen.QWEN2_MOE,
            qwen.QWEN3_MOE,
            deepseek.DEEPSEEK_V3,
            deepseek.KIMI_K2,
            qwen.QWEN3_NEXT,
            nemotron.MAMBA2,
            nemotron.NEMOTRON_H,
            plain_mlp.ARCEE,
            plain_mlp.JAIS2,
            plain_mlp.NEMOTRON,
            plain_mlp.STARCODER2,
            plain_mlp.PERSIMMON,
            glm.GLM,
            llama.HELIUM,
            llama.ERNIE4_5,
            llama.STABLELM,
            llama.PHI3,
        )
    }
)
