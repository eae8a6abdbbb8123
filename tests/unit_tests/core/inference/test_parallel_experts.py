# SPDX-License-Identifier: Apache-2.0
"""Experts of the optimized forward, sharded over the sequence-parallel ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.comm import trace
from megatron.core.inference import EngineRequest, generate
from megatron.core.models import GPTModel, InferenceOptimizedModel
from megatron.core.moe import MoEConfig, RouterConfig
from tests.support.closeness import assert_close_by_metric
from tests.support.inputs import one_thread
from tests.support.ranks import run_ranks
from tests.unit_tests.core.inference.test_engine import GREEDY, engine_of, gpt

EXPERTS = MoEConfig(
    num_experts=4,
    ffn_hidden_size=16,
    router=RouterConfig(topk=2, score_function="sigmoid", expert_bias=True),
    shared_ffn_hidden_size=12,
    shared_gate=True,
)
MODELS = {
    "shared": EXPERTS,
    "no shared": replace(EXPERTS, shared_ffn_hidden_size=None, shared_gate=False),
}
NEW = 4
PROMPTS = ((5, 6, 7), (8, 9, 10, 11), (12, 13))


def model_of(moe: MoEConfig, groups: ProcessGroupCollection, **layout: bool) -> GPTModel:
    config = gpt(4, pattern="*EE-", moe=moe)
    return GPTModel(config, groups, dtype=torch.float32, seed=3, **layout)


def generate_tokens(
    model: GPTModel, count: int, multiple: int = 1
) -> tuple[list[list[int]], torch.Tensor]:
    """Return the tokens and log-probabilities of the first `count` prompts."""
    engine = engine_of(model, max_num_batched_tokens=500, token_multiple=multiple)
    engine.runner.model = InferenceOptimizedModel(model)
    batch = [EngineRequest(prompt=p, max_new_tokens=NEW, sampling=GREEDY) for p in PROMPTS[:count]]
    outputs = [completions[0] for completions in generate(engine, batch)]
    logprobs = torch.tensor([x for output in outputs for x in output.logprobs])
    return [output.tokens for output in outputs], logprobs


def generate_on_rank(rank: int, world: int, sizes: dict[str, int], names: list[str]) -> dict:
    grid = RankGrid(world_size=world, tp=world, **sizes)
    groups, runs = ProcessGroupCollection.create(grid, rank=rank), {}
    for name in names:
        model = model_of(MODELS[name], groups, sequence_parallel=True)
        for count in (1, 3):
            with one_thread(), trace(groups) as records:
                outputs = generate_tokens(model, count, world)
            runs[name, count] = outputs, Counter(record.kind for record in records)
    return runs


@pytest.mark.parametrize(
    ("sizes", "names"), [({}, ["shared", "no shared"]), ({"etp": 1, "ep": 2}, ["shared"])]
)
def test_experts_on_sequence_parallel_ranks_match_one_process(
    sizes: dict[str, int], names: list[str]
) -> None:
    for runs in run_ranks(generate_on_rank, 2, sizes, names):
        for (name, count), ((tokens, logprobs), collectives) in runs.items():
            with one_thread():
                expected = generate_tokens(
                    model_of(MODELS[name], ProcessGroupCollection.single()), count
                )
            assert tokens == expected[0]
            assert_close_by_metric(f"{name} {count}", logprobs, expected[1], bound=1e-5)
            # A block has one of each; the embedding scatters, the final norm and logits gather.
            assert collectives["reduce_scatter"] == 5 * NEW
            assert collectives["all_gather"] == 6 * NEW
            assert not collectives["all_to_all"]
