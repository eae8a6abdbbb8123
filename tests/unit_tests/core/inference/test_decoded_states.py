# SPDX-License-Identifier: Apache-2.0
"""Every token is chosen from the hidden state that the whole sequence, run at once, has there.

Hidden states and not logits, which are one product with them: those are rounded to fp32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from unittest import mock

import pytest
import torch

from megatron.core.comm import trace
from megatron.core.inference import engine as engine_module
from megatron.core.inference.engine import Completion, Engine, generate
from megatron.core.inference.sampling import Sampled, SampleRow
from megatron.core.models.gpt import GPTModel
from megatron.core.models.inference_optimized import InferenceOptimizedModel
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tests.support.closeness import assert_close_by_metric
from tests.support.inputs import one_thread
from tests.support.ranks import run_ranks
from tests.unit_tests.core.inference.test_engine import (
    FAMILIES,
    NEW,
    engine_of,
    model_of,
    prompts,
    requests,
)

#: Of one prompt, the hidden states [1, h] that its tokens were chosen from.
States = list[torch.Tensor]


@pytest.fixture(autouse=True)
def on_one_thread():
    with one_thread():
        yield


def decoded(engine: Engine) -> tuple[list[Completion], list[States]]:
    """Generate for the usual prompts; return what was said, and what from."""
    found: dict[Sequence[int], States] = {}
    project, sample, projected = engine.logits, engine_module.sample, []

    def projecting(hidden: torch.Tensor) -> torch.Tensor:
        projected.append(hidden.clone())
        return project(hidden)

    def choosing(logits: torch.Tensor, asked: Sequence[SampleRow]) -> Sampled:
        for row, state in zip(asked, projected.pop(), strict=True):
            found.setdefault(row.prompt, []).append(state)
        return sample(logits, asked)

    with (
        mock.patch.object(engine, "logits", projecting),
        mock.patch.object(engine_module, "sample", choosing),
    ):
        said = [outputs[0] for outputs in generate(engine, requests())]
    return said, [found[prompt] for prompt in prompts()]


def compare(model: GPTModel, said: Sequence[Completion], states: Sequence[States]) -> None:
    bound = 1e-10 if model.store.dtype == torch.float64 else 1e-5
    for prompt, completion, found in zip(prompts(), said, states, strict=True):
        with torch.no_grad():
            whole = model(torch.tensor([[*prompt, *completion.tokens]]))
        assert len(found) == NEW
        wanted = whole[len(prompt) - 1 : -1]
        assert_close_by_metric("states", torch.stack(found), wanted, bound=bound)


@pytest.mark.parametrize("max_num_batched_tokens", [7, 500])
@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_for_any_chunk_and_block(
    family: str, block_size: int, max_num_batched_tokens: int
) -> None:
    model = model_of(family)
    engine = engine_of(model, block_size=block_size, max_num_batched_tokens=max_num_batched_tokens)
    said, states = decoded(engine)
    compare(model, said, states)
    assert engine.stats.hit > 0 or block_size > 16


@pytest.mark.parametrize("max_num_batched_tokens", [7, 500])
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_in_the_optimized_forward(family: str, max_num_batched_tokens: int) -> None:
    model = model_of(family)
    engine = engine_of(model, block_size=16, max_num_batched_tokens=max_num_batched_tokens)
    engine.model = InferenceOptimizedModel(model)
    said, states = decoded(engine)
    compare(model, said, states)
    assert engine.stats.hit > 0


def on_a_rank(rank: int, world: int, sequence_parallel: bool, optimized: bool) -> dict[str, tuple]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    found = {}
    for family in FAMILIES:
        if world == 4 and family == "hybrid":  # it has two heads
            continue
        model = model_of(family, groups, sequence_parallel=sequence_parallel)
        multiple = world if sequence_parallel else 1
        engine = engine_of(model, max_num_batched_tokens=30, token_multiple=multiple)
        if optimized:
            engine.model = InferenceOptimizedModel(model)
        with one_thread(), trace(groups) as records:
            said, states = decoded(engine)
        found[family] = said, states, Counter(record.kind for record in records), engine.stats.steps
    return found


#: Blocks, each of which brings the tokens of all ranks together and cuts them again.
MIXERS = {"gqa": 4, "window and sinks": 4, "latent": 4, "hybrid": 6}


@pytest.mark.parametrize(("world", "sequence_parallel"), [(2, False), (2, True), (4, True)])
@pytest.mark.parametrize("optimized", [False, True])
def test_they_are_on_tensor_parallel_ranks(
    world: int, sequence_parallel: bool, optimized: bool
) -> None:
    for found in run_ranks(on_a_rank, world, sequence_parallel, optimized):
        for family, (said, states, collectives, steps) in found.items():
            compare(model_of(family), said, states)
            if sequence_parallel and family in MIXERS:
                # The embedding cuts as well.
                assert collectives["reduce_scatter"] == (MIXERS[family] + 1) * steps
            if sequence_parallel and family == "gqa":
                # The last hidden states are gathered as well, and logits where a token is chosen.
                assert 5 * steps < collectives["all_gather"] <= 6 * steps
