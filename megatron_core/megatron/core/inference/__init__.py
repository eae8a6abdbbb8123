# SPDX-License-Identifier: Apache-2.0
"""Text generation on a trained model: continuous batching over a paged cache; no HTTP, no files."""

from megatron.core.inference.cache import EngineConfig
from megatron.core.inference.engine import Engine, generate
from megatron.core.inference.requests import (
    Completion,
    Completions,
    EngineRequest,
    OutputDelta,
)
from megatron.core.inference.sampling import SamplingParams
from megatron.core.inference.text_stream import TextStream

__all__ = [
    "Completion",
    "Completions",
    "Engine",
    "EngineConfig",
    "EngineRequest",
    "OutputDelta",
    "SamplingParams",
    "TextStream",
    "generate",
]
