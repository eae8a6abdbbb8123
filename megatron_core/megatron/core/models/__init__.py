# SPDX-License-Identifier: Apache-2.0
"""Models: one decoder built from a layer pattern, and presets of it.

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from megatron.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from megatron.core.models.decoder import Decoder as Decoder
    from megatron.core.models.decoder import DecoderConfig as DecoderConfig
    from megatron.core.models.gpt import GPTModel as GPTModel
    from megatron.core.models.gpt import MultiTokenPrediction as MultiTokenPrediction
    from megatron.core.models.gpt_config import GPTConfig as GPTConfig
    from megatron.core.models.gpt_config import MTPConfig as MTPConfig
    from megatron.core.models.gpt_config import Multipliers as Multipliers
    from megatron.core.models.gpt_config import mamba2 as mamba2
    from megatron.core.models.gpt_config import nemotron_h as nemotron_h
    from megatron.core.models.gpt_config import qwen3_next as qwen3_next
    from megatron.core.models.inference_optimized import (
        InferenceOptimizedModel as InferenceOptimizedModel,
    )
    from megatron.core.models.layer_pattern import Pattern as Pattern

__getattr__, __dir__, __all__ = lazy_exports(__name__)
