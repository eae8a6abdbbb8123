# SPDX-License-Identifier: Apache-2.0
"""Generation for a few requests in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from megatron.core.inference import (
    Completion,
    Engine,
    EngineConfig,
    EngineRequest,
    SamplingParams,
)
from megatron.core.inference import generate as generate_all
from megatron.core.models import GPTModel


def engine_of(model: GPTModel, **config: Any) -> Engine:
    """Return an engine around a model with room for 64 blocks; `config` is of `EngineConfig`."""
    return Engine(model, EngineConfig(**{"num_blocks": 64} | config))


def assert_same_completion(got: Completion, expected: Completion) -> None:
    """Check equal tokens, finish reasons, epochs and alternatives, and close log-probabilities."""
    for name in ("index", "tokens", "finish_reason", "epochs"):
        assert getattr(got, name) == getattr(expected, name), name
    for name in ("logprobs", "prompt_logprobs"):
        a, b = getattr(got, name), getattr(expected, name)
        assert a == b if b is None else a == pytest.approx(b, rel=1e-4, abs=1e-5), name
    for name in ("top_logprobs", "prompt_top_logprobs"):
        token_ids, expected_ids = (
            [[token for token, _ in top] for top in getattr(c, name) or ()] for c in (got, expected)
        )
        assert token_ids == expected_ids, name


def generate(
    model: GPTModel,
    requests: Sequence[EngineRequest],
    *,
    max_new_tokens: int,
    sampling: SamplingParams,
    stop_tokens: Collection[int] = (),
    **config: Any,
) -> list[Completion]:
    """Return the finished completions of requests that are added at once.

    Args:
        model, requests: the model and its prompts.
        max_new_tokens, sampling, stop_tokens: parameters of every request.
        config: fields of `EngineConfig`.
    """
    shared = {
        "max_new_tokens": max_new_tokens,
        "sampling": sampling,
        "stop_tokens": frozenset(stop_tokens),
    }
    batch = [dataclasses.replace(request, **shared) for request in requests]
    return [outputs[0] for outputs in generate_all(engine_of(model, **config), batch)]
