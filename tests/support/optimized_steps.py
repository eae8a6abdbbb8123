# SPDX-License-Identifier: Apache-2.0
"""Whether a command ran the optimized forward."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.models.inference_optimized import InferenceOptimizedModel


def note_optimized_steps(steps: list[int]) -> None:
    """Have each step of the optimized forward add its number of tokens, in this process."""
    forward = InferenceOptimizedModel.__call__

    def noted(model: InferenceOptimizedModel, tokens: torch.Tensor, **more: Any) -> torch.Tensor:
        steps.append(tokens.shape[1])
        return forward(model, tokens, **more)

    InferenceOptimizedModel.__call__ = noted
