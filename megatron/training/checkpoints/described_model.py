# SPDX-License-Identifier: Apache-2.0
"""The model that flags describe, for a folder that does not say what model it is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron.core.models.gpt import GPTConfig
from megatron.training.checkpoints.options import ConvertToNativeConfig
from megatron.training.config import Config
from megatron.training.config.check import check
from megatron.training.config.model_table import gpt_config
from megatron.training.config.resolve import resolve
from megatron.training.data.vocabulary import read_vocabulary
from megatron.training.options.schema import build, flatten, options

_SECTIONS = ("model", "attention", "position", "experts", "tokenizer")

#: What a run needs and a model does not depend on.
_ANY_RUN = {"micro-batch-size": 1, "train-iters": 1, "lr": 1e-3, "mock-data": True}


class DescribedModel(NamedTuple):
    """A model, its options by flag name, and how to make its tokenizer again."""

    config: GPTConfig
    options: Mapping[str, Any]
    tokenizer: Mapping[str, Any]


def described_model(chosen: ConvertToNativeConfig) -> DescribedModel:
    """Return the model of some flags, as pretraining would build it. Raises ValueError."""
    wanted = [option for option in options(Config) if option.section in _SECTIONS]
    given = flatten(chosen)
    length = chosen.model.max_position_embeddings or 1
    described = {option.name: given[option.name] for option in wanted}
    config = build(Config, {**described, **_ANY_RUN, "seq-length": length})
    if problems := check(config, 1):
        raise ValueError("; ".join(problems))
    if chosen.tokenizer.vocab_size is None and chosen.tokenizer.tokenizer_model is None:
        raise ValueError("missing --vocab-size: give it without padding, or give --tokenizer-model")
    resolved = resolve(config, 1).config
    vocabulary = read_vocabulary(resolved.tokenizer, ())
    found = flatten(resolved)
    kept = {option.name: found[option.name] for option in wanted}
    if chosen.model.max_position_embeddings is None:
        del kept["max-position-embeddings"]  # derived from a length that nobody gave
    kept["vocab-size"] = vocabulary.size
    return DescribedModel(gpt_config(resolved, vocabulary.size), kept, vocabulary.tokenizer)
