# SPDX-License-Identifier: Apache-2.0
"""Record the steps of the optimized forward."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.models import InferenceOptimizedModel


def note_optimized_steps(steps: list[int]) -> None:
    """Append the number of tokens of each optimized forward of this process to `steps`."""
    forward = InferenceOptimizedModel.__call__

    def noted(model: InferenceOptimizedModel, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        steps.append(tokens.shape[1])
        return forward(model, tokens, **options)

    InferenceOptimizedModel.__call__ = noted
