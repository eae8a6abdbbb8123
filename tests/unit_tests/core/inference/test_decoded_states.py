# SPDX-License-Identifier: Apache-2.0
"""Every token is chosen from the hidden state that a full forward computes at its position.

The tests compare hidden states, because logits are rounded to fp32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.comm import trace
from megatron.core.inference import Completion, Engine, generate, model_runner
from megatron.core.inference.sampling import Sampled, SampleRow
from megatron.core.models import GPTModel, InferenceOptimizedModel
from megatron.core.transformer import MLPConfig, NormConfig, RopeConfig
from tests.support.closeness import assert_close_by_metric
from tests.support.inputs import one_thread
from tests.support.nan_memory import nan_memory
from tests.support.ranks import run_ranks
from tests.unit_tests.core.inference.test_engine import (
    FAMILIES,
    HEADS,
    NEW,
    engine_of,
    gpt,
    model_of,
    prompts,
    requests,
)

#: The hidden states [1, h] that the tokens of one prompt were chosen from.
States = list[torch.Tensor]


def decode_prompts(engine: Engine) -> tuple[list[Completion], list[States]]:
    """Generate for the usual prompts; return the completions and their hidden states."""
    states_by_prompt: dict[Sequence[int], States] = {}
    project, sample, projected = engine.runner.logits, model_runner.sample, []

    def recording_project(hidden: torch.Tensor) -> torch.Tensor:
        projected.append(hidden.clone())
        return project(hidden)

    def recording_sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> Sampled:
        for row, state in zip(rows, projected.pop(), strict=True):
            states_by_prompt.setdefault(row.prompt, []).append(state)
        return sample(logits, rows)

    with (
        mock.patch.object(engine.runner, "logits", recording_project),
        mock.patch.object(model_runner, "sample", recording_sample),
    ):
        completions = [outputs[0] for outputs in generate(engine, requests())]
    return completions, [states_by_prompt[prompt] for prompt in prompts()]


def compare_with_full_forward(
    model: GPTModel, completions: Sequence[Completion], states: Sequence[States]
) -> None:
    bound = 1e-10 if model.store.dtype == torch.float64 else 1e-5
    for prompt, completion, prompt_states in zip(prompts(), completions, states, strict=True):
        with torch.no_grad():
            whole = model(torch.tensor([[*prompt, *completion.tokens]]))
        assert len(prompt_states) == NEW
        expected = whole[len(prompt) - 1 : -1]
        assert_close_by_metric("states", torch.stack(prompt_states), expected, bound=bound)


@pytest.mark.parametrize("max_num_batched_tokens", [7, 500])
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_match_for_all_chunk_and_block_sizes(
    family: str, block_size: int, max_num_batched_tokens: int
) -> None:
    model = model_of(family)
    engine = engine_of(model, block_size=block_size, max_num_batched_tokens=max_num_batched_tokens)
    completions, states = decode_prompts(engine)
    compare_with_full_forward(model, completions, states)
    assert engine.stats.hit > 0 or block_size > 16


#: Heads, norms, positions and biases that no family of the engine tests has.
UNCOMMON_MODELS = {
    "one key head, partial rope, biases": gpt(
        attention=replace(HEADS, num_query_groups=1, qkv_bias=True, output_bias=True),
        mlp=MLPConfig(ffn_hidden_size=36, gated=False, activation="gelu", bias=True),
        norm=NormConfig(kind="LayerNorm"),
        rope=RopeConfig(percent=0.4, interleaved=True),
        tied=True,
        hidden_dropout=0.5,  # off during generation
    ),
    "learned positions": gpt(rope=None, max_position_embeddings=40 + NEW),
}


@pytest.mark.parametrize("name", UNCOMMON_MODELS)
def test_states_match_with_other_heads_and_positions(name: str) -> None:
    groups = ProcessGroupCollection.single()
    model = GPTModel(UNCOMMON_MODELS[name], groups, dtype=torch.float64, seed=3, vocab_multiple=8)
    with nan_memory():
        completions, states = decode_prompts(engine_of(model, max_num_batched_tokens=7))
    compare_with_full_forward(model, completions, states)


@pytest.mark.parametrize("max_num_batched_tokens", [7, 500])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_match_in_the_optimized_forward(family: str, max_num_batched_tokens: int) -> None:
    model = model_of(family)
    engine = engine_of(model, block_size=16, max_num_batched_tokens=max_num_batched_tokens)
    engine.runner.model = InferenceOptimizedModel(model)
    completions, states = decode_prompts(engine)
    compare_with_full_forward(model, completions, states)
    assert engine.stats.hit > 0


def decode_on_rank(
    rank: int, world: int, sequence_parallel: bool, optimized: bool
) -> dict[str, tuple]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    outputs = {}
    for family in FAMILIES:
        if world == 4 and family == "hybrid":  # its two heads do not divide over four ranks
            continue
        model = model_of(family, groups, sequence_parallel=sequence_parallel)
        multiple = world if sequence_parallel else 1
        engine = engine_of(model, max_num_batched_tokens=30, token_multiple=multiple)
        if optimized:
            engine.runner.model = InferenceOptimizedModel(model)
        with one_thread(), trace(groups) as records:
            completions, states = decode_prompts(engine)
        outputs[family] = (
            completions,
            states,
            Counter(record.kind for record in records),
            engine.stats.steps,
        )
    return outputs


#: Number of blocks, each of which gathers the tokens of all ranks and scatters them again.
MIXERS = {"gqa": 4, "window and sinks": 4, "latent": 4, "hybrid": 6}


@pytest.mark.parametrize(("world", "sequence_parallel"), [(2, False), (2, True), (4, True)])
@pytest.mark.parametrize("optimized", [False, True])
def test_states_match_on_tensor_parallel_ranks(
    world: int, sequence_parallel: bool, optimized: bool
) -> None:
    for outputs in run_ranks(decode_on_rank, world, sequence_parallel, optimized):
        for family, (completions, states, collectives, steps) in outputs.items():
            compare_with_full_forward(model_of(family), completions, states)
            if sequence_parallel and family in MIXERS:
                # The embedding scatters as well.
                assert collectives["reduce_scatter"] == (MIXERS[family] + 1) * steps
            if sequence_parallel and family == "gqa":
                # The final hidden states are gathered as well, and logits where a token is chosen.
                assert 5 * steps < collectives["all_gather"] <= 6 * steps
