# SPDX-License-Identifier: Apache-2.0
"""Generation of one batch in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.inference.engine import Completion, LanguageModel, Request, stream
from megatron.core.inference.sampling import SamplingParams


def generate(
    model: LanguageModel,
    requests: Sequence[Request],
    *,
    max_new_tokens: int,
    sampling: SamplingParams,
    **options: Any,
) -> list[Completion]:
    """Generate for one batch and return the finished completions; arguments as for `stream`."""
    *_, completions = stream(
        model, requests, max_new_tokens=max_new_tokens, sampling=sampling, **options
    )
    return completions
