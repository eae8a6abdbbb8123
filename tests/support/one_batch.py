# SPDX-License-Identifier: Apache-2.0
"""Generation for a few requests in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

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


def with_parameters(
    requests: Sequence[EngineRequest],
    *,
    max_new_tokens: int,
    sampling: SamplingParams,
    stop_tokens: Collection[int] = (),
) -> list[EngineRequest]:
    """Return the requests with the same parameters for all."""
    shared = {
        "max_new_tokens": max_new_tokens,
        "sampling": sampling,
        "stop_tokens": frozenset(stop_tokens),
    }
    return [dataclasses.replace(request, **shared) for request in requests]


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
    requests_with_parameters = with_parameters(
        requests, max_new_tokens=max_new_tokens, sampling=sampling, stop_tokens=stop_tokens
    )
    return [
        outputs[0] for outputs in generate_all(engine_of(model, **config), requests_with_parameters)
    ]
