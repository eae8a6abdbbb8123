# SPDX-License-Identifier: Apache-2.0
"""Generation with a key/value cache against a full forward for every token."""

from dataclasses import replace

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.inference import Completion, EngineRequest, SamplingParams
from megatron.core.inference.sampling import SampleRow, sample
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.transformer import AttentionConfig, MLPConfig, NormConfig, RopeConfig
from tests.support.nan_memory import nan_memory
from tests.support.one_batch import generate
from tests.support.ranks import run_ranks

VOCABULARY, STOP = 61, 19
PROMPTS = [(5,), (7, 3, 60, 1, 2, 9, 4), (0, 11, 12), (44, 43, 42, 41, 40)]
GREEDY = SamplingParams(temperature=0)
RANDOM = SamplingParams(temperature=1.3, top_k=40, top_p=0.95, seed=9)


ATTENTION = AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=10)
#: Models that exercise the cache: heads, positions, biases, the output layer's weight.
MODELS = {
    "grouped": GPTConfig(
        num_layers=3,
        hidden_size=24,
        vocab_size=VOCABULARY,
        attention=replace(ATTENTION, qk_norm=True),
        mlp=MLPConfig(ffn_hidden_size=40),
        init_std=0.5,
    ),
    "multi_query_partial_rope_tied": GPTConfig(
        num_layers=2,
        hidden_size=20,
        vocab_size=VOCABULARY,
        attention=replace(ATTENTION, num_query_groups=1, qkv_bias=True, output_bias=True),
        mlp=MLPConfig(ffn_hidden_size=36, gated=False, activation="gelu", bias=True),
        norm=NormConfig(kind="LayerNorm"),
        rope=RopeConfig(percent=0.4, interleaved=True),
        tied=True,
        hidden_dropout=0.5,  # must be off during generation
        init_std=0.4,
    ),
    "window_and_sinks": GPTConfig(
        num_layers=2,
        hidden_size=24,
        vocab_size=VOCABULARY,
        attention=replace(ATTENTION, window=4, sinks=True),
        mlp=MLPConfig(ffn_hidden_size=40),
        init_std=0.5,
    ),
    "learned_positions": GPTConfig(
        num_layers=2,
        hidden_size=24,
        vocab_size=VOCABULARY,
        attention=ATTENTION,
        mlp=MLPConfig(ffn_hidden_size=40),
        rope=None,
        max_position_embeddings=19,  # the longest prompt and its 12 tokens
        init_std=0.5,
    ),
}


def make_model(name: str, groups: ProcessGroupCollection | None = None) -> GPTModel:
    """Return the model with padded vocabulary on `groups`, or the reference without padding."""
    if groups is None:
        return GPTModel(MODELS[name], ProcessGroupCollection.single(), seed=3)
    return GPTModel(MODELS[name], groups, seed=3, vocab_multiple=8)


@pytest.fixture(scope="module")
def model() -> GPTModel:
    return make_model("grouped")


def requests(prompts: list[tuple[int, ...]]) -> list[EngineRequest]:
    return [EngineRequest(prompt=p, sequence=100 + i) for i, p in enumerate(prompts)]


def generate_without_cache(
    model: GPTModel, request: EngineRequest, num_tokens: int, params: SamplingParams
):
    """Generate for one prompt, with a full forward over the sequence for every token."""
    tokens = list(request.prompt)
    completion = Completion(finish_reason="length")
    for _ in range(num_tokens):
        with torch.no_grad():
            logits = model.full_logits(torch.tensor([tokens]))[-1]
        row = SampleRow(
            params=params,
            sequence=request.sequence,
            position=len(tokens),
            prompt=request.prompt,
            output=completion.tokens,
        )
        sampled = sample(logits, [row])
        tokens.append(sampled.tokens.item())
        completion.tokens.append(sampled.tokens.item())
        completion.logprobs.append(sampled.logprobs.item())
    return completion


def assert_same(got: Completion, expected: Completion) -> None:
    assert got.tokens == expected.tokens
    assert got.finish_reason == expected.finish_reason
    torch.testing.assert_close(
        torch.tensor(got.logprobs), torch.tensor(expected.logprobs), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
@pytest.mark.parametrize("name", MODELS)
def test_batched_prompts_match_each_prompt_without_cache(name: str, params: SamplingParams) -> None:
    model, reference = make_model(name, ProcessGroupCollection.single()), make_model(name)
    batch = requests(PROMPTS)
    with nan_memory():  # unwritten elements of the cache are NaN
        assert torch.zeros(1).new_empty(5).isnan().all()
        got = generate(model, batch, max_new_tokens=12, sampling=params)
    for request, completion in zip(batch, got, strict=True):
        assert_same(completion, generate_without_cache(reference, request, 12, params))
    assert len({t for c in got for t in c.tokens}) > 8  # the outputs are diverse


@pytest.mark.parametrize("name", MODELS)
def test_chunked_prefill_matches_whole_prompts(name: str) -> None:
    model, batch = make_model(name), requests(PROMPTS)
    whole = generate(model, batch, max_new_tokens=6, sampling=GREEDY)
    for chunk in (1, 3):
        options = {"max_new_tokens": 6, "sampling": GREEDY, "max_num_seqs": 1}
        options["max_num_batched_tokens"] = chunk
        with nan_memory():
            chunked = generate(model, batch, **options)
        for completion, expected in zip(chunked, whole, strict=True):
            assert_same(completion, expected)


def generate_on_rank(rank: int, world: int, name: str) -> list[list[Completion]]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    model = make_model(name, groups)
    return [
        generate(model, requests(PROMPTS), max_new_tokens=9, sampling=params, stop_tokens=(STOP,))
        for params in (GREEDY, RANDOM)
    ]


@pytest.mark.parametrize(("name", "world"), [("grouped", 4), ("multi_query_partial_rope_tied", 2)])
def test_tensor_parallel_ranks_match_one_process(name: str, world: int) -> None:
    single = make_model(name)
    ranks = run_ranks(generate_on_rank, world, name)
    for rank in ranks:
        assert rank == ranks[0]
    assert {c.finish_reason for batch in ranks[0] for c in batch} == {"stop", "length"}
    for got, params in zip(ranks[0], (GREEDY, RANDOM), strict=True):
        expected = generate(
            single, requests(PROMPTS), max_new_tokens=9, sampling=params, stop_tokens=(STOP,)
        )
        for completion, reference in zip(got, expected, strict=True):
            assert_same(completion, reference)


def test_batch_composition_does_not_change_outputs(model: GPTModel) -> None:
    batch = requests(PROMPTS)
    whole = generate(model, batch, max_new_tokens=8, sampling=RANDOM)
    mixed = generate(model, [batch[2], batch[0]], max_new_tokens=8, sampling=RANDOM)
    assert_same(mixed[0], whole[2])
    assert_same(mixed[1], whole[0])


def test_early_stop_does_not_change_other_sequences(model: GPTModel) -> None:
    batch = requests(PROMPTS)
    endless = generate(model, batch, max_new_tokens=10, sampling=RANDOM)
    stop = endless[1].tokens[2]
    got = generate(model, batch, max_new_tokens=10, sampling=RANDOM, stop_tokens=(stop,))
    num_stopped = 0
    for completion, whole in zip(got, endless, strict=True):
        if stop in whole.tokens:
            num_stopped += 1
            end = whole.tokens.index(stop) + 1
            truncated = Completion(
                tokens=whole.tokens[:end], logprobs=whole.logprobs[:end], finish_reason="stop"
            )
            assert_same(completion, truncated)
        else:
            assert_same(completion, whole)
    assert 0 < num_stopped < len(batch)
