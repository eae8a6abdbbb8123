# SPDX-License-Identifier: Apache-2.0
"""The inference engine on the GPU: eager, graphed and asynchronous steps choose the CPU's tokens;
sampling, sleep, new weights; symmetric memory and quantized weights."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.comm.symmetric_memory import Arena, TorchMemory
from megatron.core.device import CudaRecorder, GraphMemory
from megatron.core.inference import (
    Completion,
    Engine,
    EngineConfig,
    EngineRequest,
    SamplingParams,
)
from megatron.core.inference import generate as generate_all
from megatron.core.inference.model_runner import EngineFeatures
from megatron.core.inference.sampling import SampleRow, sample
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.moe import MoEConfig, RouterConfig
from megatron.core.ops.paged_attention import paged_latent_attention
from megatron.core.ssm import GatedDeltaNetConfig, Mamba2Config
from megatron.core.transformer import AttentionConfig, LatentAttentionConfig, MLPConfig, RopeConfig
from megatron.core.weight_gather.gather_format import gather_formats, shard_amax
from tests.support.closeness import assert_close_by_metric
from tests.support.gpu_agreement import BOUND, DTYPES, REHEARSES, sized
from tests.support.nan_memory import nan_memory
from tests.support.paged_rows import moved, paged_rows

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
FEATURES = sized(64, 16)
GPT = GPTConfig(
    num_layers=sized(4, 2),
    hidden_size=sized(256, 32),
    vocab_size=sized(1003, 67),
    attention=AttentionConfig(
        num_attention_heads=4, num_query_groups=2, kv_channels=FEATURES, qk_norm=True
    ),
    mlp=MLPConfig(ffn_hidden_size=sized(512, 48)),
    rope=RopeConfig(),
    init_std=0.1,
)
MODELS = {
    "gpt": GPT,
    "window and sinks": dataclasses.replace(
        GPT, attention=dataclasses.replace(GPT.attention, window=20, sinks=True)
    ),
    "latent": dataclasses.replace(
        GPT,
        attention=LatentAttentionConfig(
            num_attention_heads=4,
            q_lora_rank=sized(96, 12),
            kv_lora_rank=sized(64, 16),
            nope_channels=sized(48, 8),
            rope_channels=sized(16, 4),
            value_channels=sized(48, 8),
        ),
    ),
    "experts": dataclasses.replace(
        GPT,
        ffn_pattern="E" * GPT.num_layers,
        moe=MoEConfig(num_experts=8, ffn_hidden_size=sized(128, 16), router=RouterConfig(topk=2)),
    ),
    "hybrid": dataclasses.replace(
        GPT,
        num_layers=6,
        ffn_pattern="",
        pattern="G-*-M-",
        delta_net=GatedDeltaNetConfig(
            num_key_heads=2, num_value_heads=4, key_channels=FEATURES, value_channels=FEATURES
        ),
        mamba=Mamba2Config(
            num_heads=4, head_channels=FEATURES, state_channels=FEATURES, num_groups=2
        ),
    ),
}
#: (asynchronous, with CUDA graphs)
STEP_MODES = list(itertools.product((False, True), (False,) if REHEARSES else (False, True)))
GREEDY = SamplingParams(temperature=0, logprobs=1)
SAMPLED = SamplingParams(
    temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=5
)
NEW_TOKENS = sized(24, 6)


def build(name: str, device: torch.device, dtype: torch.dtype) -> GPTModel:
    return GPTModel(
        MODELS[name], ProcessGroupCollection.single(), seed=3, dtype=dtype, device=device
    )


def engine_for(model: GPTModel, *, asynchronous: bool = False, graphs: bool = False) -> Engine:
    device = model.store.device
    recorder = partial(CudaRecorder, device, "the engine's graphs", memory=GraphMemory())
    return Engine(
        model,
        EngineConfig(max_num_seqs=8, num_blocks=64, asynchronous=asynchronous),
        features=EngineFeatures(make_recorder=recorder if graphs else None),
    )


def completions_of(engine: Engine, sampling: SamplingParams = GREEDY) -> list[Completion]:
    """Return the completions of five prompts of different lengths; two share a prefix."""
    vocabulary = engine.runner.model.config.vocab_size
    generator = torch.Generator().manual_seed(1)
    prompts = [
        tuple(torch.randint(0, vocabulary, (n,), generator=generator).tolist())
        for n in (1, 7, sized(90, 40), 33)
    ]
    requests = [
        EngineRequest(prompt=prompt, max_new_tokens=NEW_TOKENS, sampling=sampling, sequence=100 + n)
        for n, prompt in enumerate([*prompts, (*prompts[2][:35], 1, 2)])
    ]
    return [completion for (completion,) in generate_all(engine, requests)]


def completions_by_mode(
    model: GPTModel, sampling: SamplingParams
) -> dict[tuple[bool, bool], list[Completion]]:
    completions = {}
    for asynchronous, graphs in STEP_MODES:
        engine = engine_for(model, asynchronous=asynchronous, graphs=graphs)
        completions[asynchronous, graphs] = completions_of(engine, sampling)
        if graphs:
            assert engine.graphs.replayed > NEW_TOKENS // 2
    return completions


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", MODELS)
def test_every_step_mode_chooses_the_same_tokens(device, name, sampling):
    completions = completions_by_mode(build(name, device, torch.float32), sampling)
    expected = completions[STEP_MODES[0]]
    for mode, actual in completions.items():
        assert [c.tokens for c in actual] == [c.tokens for c in expected], mode
        for expected_completion, completion in zip(expected, actual, strict=True):
            assert expected_completion.logprobs == pytest.approx(completion.logprobs, abs=2e-4), (
                mode
            )


@pytest.mark.machine
@pytest.mark.parametrize("name", MODELS)
def test_step_modes_differ_only_at_ties(device, name):
    """Graphs pad a batch, so bf16 products may round differently: tokens are equal up to the first
    tie within rounding."""
    completions = completions_by_mode(build(name, device, torch.bfloat16), GREEDY)
    expected = completions[STEP_MODES[0]]
    for mode, actual in completions.items():
        for expected_completion, completion in zip(expected, actual, strict=True):
            pairs = zip(expected_completion.tokens, completion.tokens, strict=True)
            length = next((n for n, (a, b) in enumerate(pairs) if a != b), NEW_TOKENS)
            expected_logprobs, logprobs = (
                expected_completion.logprobs[: length + 1],
                completion.logprobs[: length + 1],
            )
            assert expected_logprobs == pytest.approx(logprobs, abs=0.1), (mode, length)
        assert [c.tokens[0] for c in actual] == [c.tokens[0] for c in expected], mode


@pytest.mark.parametrize("name", MODELS)
def test_tokens_match_the_cpu(device, name):
    """In fp32 the two best logits of each step are further apart than rounding."""
    gpu_completions = completions_of(engine_for(build(name, device, torch.float32)))
    cpu_completions = completions_of(engine_for(build(name, CPU, torch.float32)))
    assert [c.tokens for c in gpu_completions] == [c.tokens for c in cpu_completions]
    for on_gpu, on_cpu in zip(gpu_completions, cpu_completions, strict=True):
        assert on_gpu.logprobs == pytest.approx(on_cpu.logprobs, abs=2e-4)


SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, logprobs=3),
    "top-k": SamplingParams(temperature=0.7, top_k=5, seed=1),
    "top-p": SamplingParams(temperature=1.3, top_p=0.8, seed=2, logprobs=2),
    "min-p": SamplingParams(temperature=1.0, min_p=0.1, seed=3),
    "all": SamplingParams(
        temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.2,
        presence_penalty=0.3, frequency_penalty=0.2, logit_bias={3: 2.0, 9: -50.0}, seed=4,
    ),
}  # fmt: skip


def sample_rows(count: int, names: list[str]) -> list[SampleRow]:
    return [
        SampleRow(
            params=SAMPLINGS[names[n % len(names)]], sequence=n, position=3 * n,
            prompt=(1, 2, 3), output=(5, 5, n % 7),
        )
        for n in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("names", [[name] for name in SAMPLINGS] + [list(SAMPLINGS)], ids=str)
def test_samples_match_the_cpu(device, names):
    """Draws depend on seed, sequence and position; probabilities are fp64 on any device."""
    rows = sample_rows(sized(64, 10), names)
    generator = torch.Generator().manual_seed(7)
    logits = 3 * torch.randn(len(rows), sized(32003, 211), generator=generator)
    expected, actual = sample(logits, rows), sample(logits.to(device), rows)
    assert actual.tokens.tolist() == expected.tokens.tolist()
    assert len(set(actual.tokens.tolist())) > len(rows) // 8
    assert actual.logprobs.tolist() == pytest.approx(expected.logprobs.tolist(), abs=1e-5)


LENGTHS = {
    "decode": sized(((1, 1, 1, 0, 1), (2000, 1, 777, 0, 64)), ((1, 1, 0, 1), (50, 1, 0, 33))),
    "mixed": sized(((1, 300, 17, 0), (900, 300, 700, 0)), ((1, 18, 5, 0), (20, 18, 37, 0))),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_paged_latent_attention_matches_reference(device, lengths, dtype):
    new, contexts = LENGTHS[lengths]
    heads, values = sized(16, 3), sized(512, 16)
    rows = paged_rows(
        new, contexts, heads=(heads, 1), features=values + sized(64, 8), block_size=sized(64, 16)
    )
    rows = moved(rows, CPU, dtype)  # both implementations read rounded inputs
    options = {"scale": 0.05, "value_features": values}

    def attend(implementation, kind):
        typed_rows = moved(rows, device, kind)
        return paged_latent_attention(
            typed_rows.query,
            typed_rows.caches[0][:, :, 0],
            batch=typed_rows.batch,
            implementation=implementation,
            **options,
        )

    with nan_memory():
        out = attend("triton", dtype)
    expected = attend("reference", torch.float64)
    assert_close_by_metric("out", out, expected, bound=BOUND[dtype])


@pytest.mark.parametrize("name", ["gpt", "hybrid"])
@pytest.mark.parametrize("graphs", [False] if REHEARSES else [False, True])
def test_engine_sleeps_and_wakes(device, name, graphs):
    model = build(name, device, DTYPES[-1])
    engine = engine_for(model, graphs=graphs)
    expected = [c.tokens for c in completions_of(engine)]
    before = None if REHEARSES else torch.cuda.memory_allocated(device)
    engine.sleep(list(model.parameters()))
    assert not any(weight.untyped_storage().size() for weight in model.parameters())
    if before is not None:
        weights = sum(weight.nbytes for weight in model.parameters())
        assert torch.cuda.memory_allocated(device) <= before - weights
    engine.wake()
    assert [c.tokens for c in completions_of(engine)] == expected


@pytest.mark.parametrize("graphs", [False] if REHEARSES else [False, True])
def test_new_weights_apply_from_the_next_request(device, graphs):
    """Graphs captured with the old weights read the new ones at the same addresses."""
    model, updated = (build("gpt", device, torch.float32) for _ in range(2))
    with torch.no_grad():
        for weight in updated.parameters():
            weight.mul_(1.1).add_(0.01)
    engine = engine_for(model, graphs=graphs)
    old_tokens = [c.tokens for c in completions_of(engine)]
    with torch.no_grad():
        for weight, new_weight in zip(model.parameters(), updated.parameters(), strict=True):
            weight.copy_(new_weight)
    engine.weights_replaced()
    expected = [c.tokens for c in completions_of(engine_for(updated))]
    assert expected != old_tokens
    assert [c.tokens for c in completions_of(engine)] == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4"])
def test_quantized_weights_match_the_cpu_bytes(device, name, dtype):
    """Ranks exchange encoded shards, so the codes must not depend on the device."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(sized(512, 96), sized(1000, 40), generator=generator).to(dtype)
    blocks = ("2d",) if name == "fp8" else ("2d", "1d")
    for gather_format in itertools.chain(
        *(gather_formats(name, scale_blocks=kind) for kind in blocks)
    ):
        amax = shard_amax(weight) if gather_format.needs_amax else None
        cpu_codes = gather_format.encode(weight, amax=amax)
        gpu_amax = None if amax is None else amax.to(device)
        gpu_codes = gather_format.encode(weight.to(device), amax=gpu_amax)
        assert torch.equal(gpu_codes.cpu(), cpu_codes), gather_format
        shape = (weight.shape[0], weight.shape[1])
        decoded = gather_format.decode(gpu_codes, shape, dtype=dtype, amax=gpu_amax).cpu()
        assert torch.equal(
            decoded, gather_format.decode(cpu_codes, shape, dtype=dtype, amax=amax)
        ), gather_format


@pytest.mark.machine
@pytest.mark.parametrize("name", ["gpt", "experts", "latent"])
def test_decode_step_synchronizes_once(device, name):
    """A step waits only for the event of the chosen tokens."""
    engine = engine_for(build(name, device, torch.bfloat16), graphs=True)
    for n in range(4):
        engine.add(EngineRequest(prompt=(3, 4, 5 + n), max_new_tokens=30, sampling=GREEDY))
    for _ in range(6):  # prefill and graph capture
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.graphs.replayed >= 8


@pytest.mark.machine
def test_symmetric_memory_works_on_one_rank(device):
    """Peer-to-peer kernels and, if supported, multicast kernels in a group of one rank."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        groups = ProcessGroupCollection.create(RankGrid(world_size=1), rank=0)
        group = dataclasses.replace(groups["tp"], handle=dist.group.WORLD)
        memory = TorchMemory(device)
        assert memory.problem() == ""
        halves = [memory.exchange(memory.allocate(1 << 20, 1 << 14), group) for _ in range(2)]
        x = torch.randn(64, 256, device=device)
        for algorithm in ("p2p", *(("multimem",) if halves[0].multicast else ())):
            arena = Arena(group, (halves[0], halves[1]), algorithm)
            for _ in range(3):
                gathered, reduced = arena.all_gather(x), arena.reduce_scatter(x)
                same = bool(torch.equal(gathered, x)) and bool(torch.equal(reduced, x))
                assert same, algorithm
    finally:
        dist.destroy_process_group()
