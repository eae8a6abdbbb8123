# SPDX-License-Identifier: Apache-2.0
"""The engine against full forwards of each sequence: families, cache layouts, reported values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from megatron.core import Backend, Group, ProcessGroupCollection, RankGrid
from megatron.core.backend import LOCAL, with_batch_invariance
from megatron.core.cpu_graph import CpuGraph
from megatron.core.device import Recorder
from megatron.core.inference import (
    Completions,
    Engine,
    EngineConfig,
    EngineRequest,
    SamplingParams,
    generate,
)
from megatron.core.inference.cache import MAX_SEQUENCE_TOKENS
from megatron.core.inference.model_runner import EngineFeatures
from megatron.core.inference.request_state import SchedulerStats
from megatron.core.inference.requests import check_request
from megatron.core.inference.router import Replicas
from megatron.core.inference.sampling import SampleRow, sample
from megatron.core.inference.speculation import DraftModel, MultiTokenHeads, NGramLookup, Proposer
from megatron.core.inference.stages import PipelineGroups
from megatron.core.models import GPTConfig, GPTModel, InferenceOptimizedModel
from megatron.core.models.gpt_config import MTPConfig, Multipliers
from megatron.core.models.layer_pattern import StageSplit
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.ssm import GatedDeltaNetConfig, Mamba2Config
from megatron.core.transformer import (
    AttentionConfig,
    CacheShapes,
    LatentAttentionConfig,
    MLPConfig,
    NormConfig,
    RopeConfig,
    WindowAttentionConfig,
)
from tests.support.covering_array import Constraint, covering_array
from tests.support.inputs import generator, one_thread
from tests.support.nan_memory import nan_memory
from tests.support.op_tape import OpTape, TapeRecorder
from tests.support.ranks import run_ranks
from tests.support.stub_model import StubModel

VOCABULARY, NEW = 61, 17
GREEDY = SamplingParams(temperature=0)
HEADS = AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=10)


def gpt(layers: int = 2, **fields) -> GPTConfig:
    """Return a small model configuration."""
    return GPTConfig(
        **{
            "num_layers": layers,
            "hidden_size": 24,
            "vocab_size": VOCABULARY,
            "attention": HEADS,
            "mlp": MLPConfig(ffn_hidden_size=40),
            "init_std": 0.5,
        }
        | fields
    )


LATENT = LatentAttentionConfig(
    num_attention_heads=4,
    q_lora_rank=14,
    kv_lora_rank=23,
    nope_channels=15,
    rope_channels=6,
    value_channels=17,
)
MULTIPLIERS = Multipliers(embedding=1.7, residual=0.6, logits=0.8)
FAMILIES = {
    "gqa": gpt(
        attention=replace(HEADS, qk_norm=True, softmax_scale=0.25, softcap=1.5),
        multipliers=replace(MULTIPLIERS, logits_softcap=3.0),
        rope=RopeConfig(query_scale_beta=0.7, query_scale_length=6),
    ),
    "window and sinks": gpt(
        attention=replace(
            HEADS,
            window=20,
            sinks=True,
            qk_norm=True,
            qk_norm_scope="projection",
            softcap=2.0,
        ),
        norm=NormConfig(placement="post"),
        multipliers=MULTIPLIERS,
    ),
    "experts": gpt(  # and two kinds of attention
        4,
        multipliers=MULTIPLIERS,
        pattern="WE*-",
        attention=replace(
            HEADS,
            second=WindowAttentionConfig(window=20, sinks=True, rope=RopeConfig(base=500.0)),
        ),
        moe=MoEConfig(router=RouterConfig(topk=2), num_experts=4, ffn_hidden_size=16),
        norm=NormConfig(placement="both"),
    ),
    "latent": gpt(
        attention=LATENT, rope=RopeConfig(base=200.0, query_scale_beta=0.7, query_scale_length=6)
    ),
    "hybrid": gpt(
        6,
        pattern="G-*-M-",
        attention=replace(HEADS, window=30),
        delta_net=GatedDeltaNetConfig(
            num_key_heads=2, num_value_heads=4, key_channels=6, value_channels=5
        ),
        mamba=Mamba2Config(num_heads=4, head_channels=6, state_channels=4, num_groups=2),
    ),
}


def model_of(
    family: str, groups: ProcessGroupCollection | None = None, depths: int = 0, **layout
) -> GPTModel:
    groups, config = groups or ProcessGroupCollection.single(), FAMILIES[family]
    if depths:  # MTP layers change no weight of the main model
        blocks = {"hybrid": "G*-", "experts": "*-"}.get(family, "")
        config = replace(config, mtp=MTPConfig(num_layers=depths, pattern=blocks))
    dtype = torch.float32 if family == "experts" else torch.float64  # routers compute in fp32
    split = None
    if groups["pp"].size > 1:
        shape = {"blocks_of_layer": config.layer_blocks}
        split = StageSplit.balanced(config.blocks, groups["pp"].size, **shape)
    return GPTModel(config, groups, dtype=dtype, seed=3, split=split, **layout)


def draft_model_of(family: str, groups: ProcessGroupCollection | None = None) -> GPTModel:
    """Return a model that often, but not always, predicts the tokens of `model_of`."""
    model = model_of(family, groups)
    with torch.no_grad():
        for n, weight in enumerate(model.parameters()):
            weight *= 1 + 0.2 * math.sin(n)
    return model


def speculative_engine(
    kind: str,
    family: str,
    groups: ProcessGroupCollection | None = None,
    *,
    backend: Backend = LOCAL,
    **options,
) -> Engine:
    """Return a family's engine with a draft proposer, built by `engine_of` with `options`."""
    if kind == "heads":
        model = model_of(family, groups, depths=2, backend=backend)
        return engine_of(model, MultiTokenHeads(model, num_layers=2), **options)
    proposer = NGramLookup(longest=3, shortest=1)
    if kind == "draft":
        if groups is not None and groups["pp"].size > 1:  # whole on the first stage
            is_first_stage = groups["pp"].rank == 0
            proposer = DraftModel(
                engine_of(draft_model_of(family)) if is_first_stage else None, list
            )
        else:
            draft_model = draft_model_of(family, groups)
            proposer = DraftModel(engine_of(draft_model), draft_model.store.tensors)
    return engine_of(model_of(family, groups, backend=backend), proposer, **options)


def prompts() -> list[tuple[int, ...]]:
    """Return prompts of many lengths, three with the same first 35 tokens."""
    tokens = [
        tuple(torch.randint(0, VOCABULARY, (n,), generator=generator(1, n)).tolist())
        for n in (1, 7, 40, 33)
    ]
    shared = tokens[2][:35]
    return [*tokens, (*shared, 1, 2, 3), (*shared, 4)]


def requests(params: SamplingParams = GREEDY, **fields) -> list[EngineRequest]:
    return [
        EngineRequest(prompt=p, max_new_tokens=NEW, sampling=params, sequence=100 + i, **fields)
        for i, p in enumerate(prompts())
    ]


@functools.cache
def whole_model(family: str) -> GPTModel:
    """Return the cached single-process model; tests must not change it."""
    return model_of(family)


@functools.cache
def full_forward_outputs(
    family: str, sampling: str, prompt: tuple[int, ...], sequence: int, output: tuple[int, ...]
) -> tuple[list, list]:
    """Return the tokens and log-probabilities sampled after the prompt and each output prefix.

    They come from one forward pass over the full sequence, without a cache.
    """
    with torch.no_grad():
        logits = whole_model(family).full_logits(torch.tensor([[*prompt, *output]]))[:, 0]
    rows = [
        SampleRow(
            params=SAMPLING[sampling],
            sequence=sequence,
            position=len(prompt) + index,
            prompt=prompt,
            output=output[:index],
            mask=allowed(output[:index]) if sampling == "grammar" else None,
        )
        for index in range(len(output))
    ]
    sampled = sample(logits[len(prompt) - 1 : -1], rows)
    return sampled.tokens.tolist(), sampled.logprobs.tolist()


def engine_of(
    model: GPTModel,
    proposer: Proposer | None = None,
    make_recorder: Callable[[], Recorder] | None = None,
    **config,
) -> Engine:
    drafts = {MultiTokenHeads: 2, type(None): 0}.get(type(proposer), 3)
    sizes = {"num_blocks": 64, "max_num_seqs": 6, "num_speculative_tokens": drafts}
    groups = model.groups
    shares_experts = not set(groups["etp_ep"].ranks) <= set(groups["tp"].ranks)
    return Engine(
        model,
        EngineConfig(**sizes | config),
        features=EngineFeatures(
            proposer=proposer,
            make_recorder=make_recorder,
            pipeline=PipelineGroups.from_groups(groups),
            expert_peers=groups.host_group("etp_ep") if shares_experts else None,
        ),
    )


#: Feature values; a row of the covering array has each allowed pair of values.
FACTORS = {
    "family": tuple(FAMILIES),
    "block_size": (16, 64),
    "max_num_batched_tokens": (7, 500),
    "memory": ("plenty", "scarce"),
    "prefix_caching": (True, False),
    "sampling": ("greedy", "drawn", "penalties", "grammar"),
    "n": (1, 2),
    "abort": (False, True),
    "asynchronous": (False, True),
    "speculation": ("off", "ngram", "draft", "heads"),
    "batch_invariant": (False, True),
    "graphs": (None, "CUDA", "CPU"),
    # Pipeline stages; experts over two replicas.
    "ranks": ("one", "pp", "ep"),
}
DRAWN = SamplingParams(temperature=1.3, top_k=40, top_p=0.95, min_p=0.001, seed=9)
SAMPLING = {
    "greedy": replace(GREEDY, logprobs=2),
    "drawn": DRAWN,
    "penalties": replace(
        DRAWN, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
    ),
    "grammar": GREEDY,
}
ODD_TOKENS = torch.arange(VOCABULARY) % 2 == 1


def allowed(tokens: Sequence[int]) -> torch.Tensor:
    """Allow odd tokens; at the second and third of four positions allow a single token."""
    single = torch.arange(VOCABULARY) == 2 * len(tokens) + 1
    return single if len(tokens) % 4 in (1, 2) else ODD_TOKENS


def forced(tokens: Sequence[int]) -> list[int]:
    """Return the tokens that have to follow, and one more, which may be wrong although allowed."""
    num_forced = {1: 2, 2: 1}.get(len(tokens) % 4, 0)
    return [*(2 * n + 1 for n in range(len(tokens), len(tokens) + num_forced)), 7]


#: Allowed combinations. Drafts of a model need the tokens of the finished step.
CONSTRAINTS = [
    Constraint(
        ("asynchronous", "speculation"),
        lambda asynchronous, kind: not asynchronous or kind in ("off", "ngram"),
    ),
    Constraint(("graphs", "batch_invariant"), lambda graphs, tiles: not graphs or not tiles),
    Constraint(("ranks", "graphs"), lambda ranks, graphs: ranks == "one" or not graphs),
    Constraint(
        ("ranks", "asynchronous"), lambda ranks, asynchronous: ranks != "pp" or not asynchronous
    ),
    Constraint(("ranks", "family"), lambda ranks, family: ranks != "ep" or family == "experts"),
    Constraint(
        ("ranks", "speculation"), lambda ranks, kind: ranks != "ep" or kind in ("off", "ngram")
    ),
]
ROWS = covering_array(
    FACTORS, CONSTRAINTS, seed=4, cost=lambda row: 1.0 if row["ranks"] == "one" else 2.0
)
SINGLE_RANK_ROWS = [row for row in ROWS if row["ranks"] == "one"]


def engine_of_row(row: dict, groups: ProcessGroupCollection | None = None) -> Engine:
    """Return the engine of a row of the covering array, on one rank of `groups`."""
    backend = with_batch_invariance(LOCAL) if row["batch_invariant"] else LOCAL
    max_length = 40 + NEW
    blocks = -(-max_length // row["block_size"]) + 1 if row["memory"] == "scarce" else 64
    sizes = {
        "num_blocks": blocks,
        "block_size": row["block_size"],
        "max_num_batched_tokens": row["max_num_batched_tokens"],
        "prefix_caching": row["prefix_caching"],
        "asynchronous": row["asynchronous"],
    }
    if has_graphs(row):
        cpu = row["graphs"] == "CPU"
        sizes["make_recorder"] = CpuGraph if cpu else lambda: TapeRecorder(OpTape())
    if row["speculation"] == "off":
        engine = engine_of(model_of(row["family"], groups, backend=backend), **sizes)
    else:
        engine = speculative_engine(
            row["speculation"], row["family"], groups, backend=backend, **sizes
        )
    if row["graphs"] == "CPU":
        engine.runner.model = InferenceOptimizedModel(engine.runner.model)
    return engine


def has_graphs(row: dict) -> bool:
    """Return whether an engine of this row records graphs.

    A CUDA graph cannot call the host, and without a GPU the host reads the tokens per expert.
    """
    return row["graphs"] is not None and (row["graphs"], row["family"]) != ("CUDA", "experts")


def waits_for_tokens(row: dict) -> bool:
    """Return whether no step of a sequence is planned before its last token is on the host."""
    return row["sampling"] in ("penalties", "grammar")


def check_against_full_forward(row: dict, replicas: Replicas) -> int:
    """Generate for the requests of a row; compare each output with a full forward.

    Returns:
        The largest number of steps in flight between two calls of `step`.
    """
    params, grammar = SAMPLING[row["sampling"]], row["sampling"] == "grammar"
    batch = requests(params, n=row["n"], **({"mask": allowed, "forced": forced} if grammar else {}))
    with nan_memory():
        if row["abort"]:
            aborted_id = replicas.add(batch[2])
            for _ in range(3):
                replicas.step()
            assert {c.finish_reason for c in replicas.abort(aborted_id)} == {"abort"}
        ids = [replicas.add(request) for request in batch]
        completions, in_flight = Completions(), []
        while replicas.unfinished:
            completions.add(replicas.step())
            in_flight.append(len(replicas.engine._in_flight))
    for request, number in zip(batch, ids, strict=True):
        outputs = [completions[number, index] for index in range(request.n)]
        for index, got in enumerate(outputs):
            sequence = 0 if params.greedy else request.sequence + index
            assert len(got.tokens) == NEW
            tokens, logprobs = full_forward_outputs(
                row["family"], row["sampling"], request.prompt, sequence, tuple(got.tokens)
            )
            assert got.tokens == tokens
            assert got.logprobs == pytest.approx(logprobs, rel=1e-4, abs=1e-5)
            assert len(got.top_logprobs) == (NEW if params.logprobs else 0)
    assert replicas.engine.scheduler.kv_cache.pool.references == replicas.engine.unfinished == 0
    return max(in_flight)


@pytest.mark.parametrize("row", SINGLE_RANK_ROWS, ids=lambda row: row["family"])
def test_combined_features_match_full_forward(row: dict) -> None:
    engine, grammar = engine_of_row(row), row["sampling"] == "grammar"
    in_flight = check_against_full_forward(row, Replicas(engine, Group.single()))
    assert in_flight == row["asynchronous"] or waits_for_tokens(row)
    stats = engine.stats
    assert (engine.graphs is not None) == has_graphs(row)
    # A recurrent mixer's step with drafts cannot use a graph, and here some row always has a draft.
    eager = grammar and bool(engine.cache.shapes.states)
    assert engine.graphs is None or (engine.graphs.replayed > 0) != eager
    assert (stats.hit > 0) == (row["prefix_caching"] and row["block_size"] == 16)
    scarce = row["memory"] == "scarce" and row["block_size"] == 16
    assert stats.preempted > 0 if scarce else stats.preempted == 0
    assert (stats.forced > 0) == grammar
    if not grammar:  # with a grammar, forced tokens replace drafts
        assert (stats.drafted > 0) == (row["speculation"] != "off")
        assert (stats.accepted > 0) or row["speculation"] != "draft"


def stats_on_rank(rank: int, world: int, ranks: str) -> list[tuple[SchedulerStats, int]]:
    size = {"pp": world} if ranks == "pp" else {"ep": world}
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, **size), rank=rank)
    all_stats = []
    for row in (row for row in ROWS if row["ranks"] == ranks):
        with one_thread():
            replicas = Replicas(engine_of_row(row, groups), groups.host_group("dp"))
            in_flight = check_against_full_forward(row, replicas)
        all_stats.append((replicas.engine.stats, in_flight))
    return all_stats


@pytest.mark.parametrize("ranks", ["pp", "ep"])
def test_combined_features_on_two_ranks_match_single_sequence(ranks: str) -> None:
    rows = [row for row in ROWS if row["ranks"] == ranks]
    for all_stats in run_ranks(stats_on_rank, 2, ranks):
        for row, (stats, in_flight) in zip(rows, all_stats, strict=True):
            assert (stats.forced > 0) == (row["sampling"] == "grammar")
            if row["sampling"] != "grammar":  # with a grammar, forced tokens replace drafts
                assert (stats.drafted > 0) == (row["speculation"] != "off"), row
            if not waits_for_tokens(row):
                assert in_flight == (ranks == "pp" or row["asynchronous"])


def test_forced_tokens_beyond_graph_rows_run_eagerly() -> None:
    batch = [replace(request, mask=allowed, forced=forced) for request in requests()[:2]]
    outputs = []
    for make_recorder in (None, lambda: TapeRecorder(OpTape())):
        engine = engine_of(model_of("gqa"), make_recorder=make_recorder, max_num_seqs=1)
        outputs.append([request.tokens for (request,) in generate(engine, batch)])
        assert engine.stats.forced > 0
    assert engine.graphs is not None
    assert engine.graphs.eager > len(batch)  # not only prefill
    assert outputs[0] == outputs[1]


def tokens_on_rank(rank: int, world: int) -> dict[str, tuple[list[list[int]], int]]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    outputs = {}
    for family in FAMILIES:
        with one_thread():
            engine = engine_of(model_of(family, groups), max_num_batched_tokens=30, num_blocks=9)
            completions = generate(engine, requests(DRAWN))
        outputs[family] = [c.tokens for (c,) in completions], engine.stats.computed
    with one_thread():
        engine = speculative_engine("draft", "hybrid", groups, max_num_batched_tokens=30)
        completions = generate(engine, requests(DRAWN))
    outputs["drafts"] = [c.tokens for (c,) in completions], engine.stats.accepted
    return outputs


def test_tensor_parallel_tokens_match_one_process() -> None:
    ranks = run_ranks(tokens_on_rank, 2)
    for family in FAMILIES:
        engine = engine_of(model_of(family), max_num_batched_tokens=30, num_blocks=9)
        expected = [c.tokens for (c,) in generate(engine, requests(DRAWN))]
        for outputs in ranks:
            assert outputs[family] == (expected, engine.stats.computed)
    engine = speculative_engine("draft", "hybrid", max_num_batched_tokens=30)
    expected = [c.tokens for (c,) in generate(engine, requests(DRAWN))]
    assert 0 < engine.stats.accepted < engine.stats.drafted
    assert [outputs["drafts"] for outputs in ranks] == 2 * [(expected, engine.stats.accepted)]


@pytest.mark.parametrize("budget", [5, 500])
def test_prompt_logprobs_match_full_forward(budget: int) -> None:
    model = model_of("gqa")
    engine = engine_of(model, max_num_batched_tokens=budget)
    for _ in range(2):  # the second pass finds the prompts in the prefix cache
        batch = generate(engine, requests(prompt_logprobs=True, n=2))
        for outputs, prompt in zip(batch, prompts(), strict=True):
            ids = torch.tensor(prompt)
            with torch.no_grad():
                all_logprobs = model.full_logits(ids[None])[:, 0].log_softmax(-1)
            expected = all_logprobs[:-1].gather(1, ids[1:, None])[:, 0].tolist()
            for completion in outputs:
                assert completion.prompt_logprobs == pytest.approx(expected, rel=1e-6)
                order = all_logprobs[:-1].argsort(dim=-1, descending=True)
                assert (
                    completion.prompt_ranks
                    == (1 + order.argsort(-1)).gather(1, ids[1:, None])[:, 0].tolist()
                )


def test_whole_context_is_scored_without_a_new_token() -> None:
    model, prompt = model_of("gqa"), tuple(range(1, 17))
    engine = engine_of(model, num_blocks=1, block_size=16, max_model_len=16)
    scored = EngineRequest(prompt=prompt, max_new_tokens=0, prompt_logprobs=True)
    longer = EngineRequest(prompt=prompt, max_new_tokens=1, prompt_logprobs=True)
    [[completion]] = generate(engine, [scored])
    ids = torch.tensor(prompt)
    with torch.no_grad():
        all_logprobs = model.full_logits(ids[None])[:, 0].log_softmax(-1)
    expected = all_logprobs[:-1].gather(1, ids[1:, None])[:, 0].tolist()
    assert completion.prompt_logprobs == pytest.approx(expected, rel=1e-6)
    assert (completion.tokens, completion.finish_reason) == ([], "length")
    with pytest.raises(ValueError, match="too long"):
        engine.add(longer)


def test_nan_logits_end_only_their_request() -> None:
    engine = Engine(StubModel(VOCABULARY, nan_after=60), EngineConfig(num_blocks=9))
    batch = [EngineRequest(prompt=(token,), max_new_tokens=6, sampling=GREEDY) for token in (58, 3)]
    (failed,), (finished,) = generate(engine, batch)
    assert (failed.tokens, failed.finish_reason) == ([59, 60], "error")
    assert (finished.tokens, finished.finish_reason) == ([4, 5, 6, 7, 8, 9], "length")


def test_empty_mask_ends_only_its_request() -> None:
    engine = engine_of(model_of("gqa"))
    no_tokens = torch.zeros(VOCABULARY, dtype=torch.bool)
    masked, unmasked = requests()[:2]
    outputs = generate(engine, [replace(masked, mask=lambda _: no_tokens), unmasked])
    assert [c.finish_reason for (c,) in outputs] == ["error", "length"]


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"max_new_tokens": 0}, "max-new-tokens is 0"),
        ({"prompt": ()}, "the prompt has no tokens"),
        ({"n": 0}, "n is 0"),
        ({"max_new_tokens": -1, "prompt_logprobs": True}, "max-new-tokens is -1"),
        ({"prompt": (1,) * 9, "max_new_tokens": 0, "prompt_logprobs": True}, "too long: 9 tokens"),
        ({"max_new_tokens": 6}, r"too long: 3 tokens \+ 6 new .* limit of 8"),
        ({"max_new_tokens": 10**12}, "too long"),
        ({"prompt": (1, 61)}, "token id 61, outside the vocabulary of 61"),
        ({"prompt": (-1,)}, "token id -1"),
        ({"sampling": SamplingParams(logit_bias={61: 1.0})}, "logit-bias names token 61"),
    ],
)
def test_invalid_requests_are_refused(changes: dict, pattern: str) -> None:
    request = EngineRequest(**{"prompt": (1, 2, 3), "max_new_tokens": 2} | changes)
    with pytest.raises(ValueError, match=pattern):
        check_request(request, max_length=8, vocab_size=VOCABULARY)


def test_oversized_request_does_not_affect_others() -> None:
    engine = engine_of(model_of("gqa"), num_blocks=3)
    request, *_ = requests()
    engine.add(request)
    with pytest.raises(ValueError, match="60 tokens take 4 blocks of 16"):
        engine.add(replace(requests()[2], max_new_tokens=20))
    deltas = []
    while engine.unfinished:
        deltas = engine.step()
    assert deltas[0].finish_reason == "length"


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("family", ["window and sinks", "hybrid"])
def test_window_frees_the_blocks_outside_it(family: str, prefix_caching: bool) -> None:
    config = FAMILIES[family]
    config = replace(config, attention=replace(config.attention, window=20))
    model = GPTModel(config, ProcessGroupCollection.single(), seed=3)
    engine = engine_of(model, num_blocks=8, max_num_seqs=1, prefix_caching=prefix_caching)
    engine.add(EngineRequest(prompt=(5,) * 10, max_new_tokens=100, sampling=GREEDY))
    blocks_in_use = []
    while engine.unfinished:
        engine.step()
        blocks_in_use.append(engine.scheduler.kv_cache.pool.references)
    assert max(blocks_in_use) <= 3  # the window of 20 tokens spans two or three blocks of 16
    assert len(blocks_in_use) == 100


def test_attention_free_model_has_blocks_for_longest_rows() -> None:
    shapes = CacheShapes(states={"a": ((4,), torch.float32)})
    config = EngineConfig(max_num_seqs=3, memory_bytes=10**9)
    assert config.limited_to(100).sizes(shapes)[0] == 3 * 7
    assert config.sizes(shapes)[0] == 3 * MAX_SEQUENCE_TOKENS // 16


def test_memory_bytes_bound_the_cache() -> None:
    model = model_of("hybrid")
    for size in (300_000, 2_000_000):
        engine = engine_of(model, num_blocks=None, memory_bytes=size)
        assert 0.9 * size < engine.cache.num_bytes <= size
    with pytest.raises(ValueError, match="do not fit the states of 6 sequences"):
        engine_of(model, num_blocks=None, memory_bytes=model.cache_shapes.state_bytes * 6)
