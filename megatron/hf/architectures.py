# SPDX-License-Identifier: Apache-2.0
"""All supported architectures, in the order in which an export tries them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megatron.hf.architecture import Architecture
from megatron.hf.families import (
    cohere,
    deepseek,
    ernie,
    falcon,
    gemma,
    glm,
    gpt,
    gpt_oss,
    granite,
    lfm2,
    llama,
    nemotron,
    olmo,
    plain_mlp,
    qwen,
    window_mixes,
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        architecture.model_type: architecture
        for architecture in (
            llama.LLAMA,
            llama.MISTRAL,
            window_mixes.MINISTRAL,
            window_mixes.CWM,
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
            deepseek.DEEPSEEK_V2,
            deepseek.GLM4_MOE_LITE,
            deepseek.YOUTU,
            glm.GLM4_MOE,
            glm.SOLAR_OPEN,
            ernie.ERNIE4_5_MOE,
            ernie.HY_V3,
            qwen.QWEN3_5,
            qwen.QWEN3_5_MOE,
            nemotron.BAMBA,
            glm.DOTS1,
            gpt.GPT_BIGCODE,
            gpt.GPT2,
            llama.MINISTRAL3,
            window_mixes.SMOLLM3,
            granite.GRANITE,
            granite.GRANITEMOE,
            granite.GRANITEMOESHARED,
            granite.GRANITEMOEHYBRID,
            gemma.GEMMA,
            gemma.GEMMA2,
            gemma.GEMMA3,
            lfm2.LFM2,
            lfm2.LFM2_MOE,
            olmo.OLMO2,
            olmo.OLMO3,
            olmo.OLMOE,
            olmo.EXAONE4,
            olmo.GLM4,
            olmo.MINIMAX_M2,
            gpt_oss.GPT_OSS,
            cohere.COHERE,
            cohere.COHERE2,
            falcon.FALCON_H1,
        )
    }
)
