# SPDX-License-Identifier: Apache-2.0
"""Hybrid models with states by slot, fed in chunks, against full forwards of each sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.inference import EngineRequest, SamplingParams
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.ops.recurrence import delta_recurrence, state_space_recurrence
from megatron.core.ssm import (
    GatedDeltaNet,
    GatedDeltaNetConfig,
    Mamba2,
    Mamba2Config,
    ShortConv,
    ShortConvConfig,
)
from megatron.core.ssm.mixer import LinearRecurrentMixer, RecurrentMixer
from megatron.core.transformer import AttentionConfig, MLPConfig
from tests.support.closeness import relative_error
from tests.support.inputs import generator
from tests.support.nan_memory import nan_memory
from tests.support.one_batch import assert_same_completion, engine_of, generate
from tests.support.paged_steps import PagedSteps
from tests.support.ranks import run_ranks

PROMPTS = [(5,), (7, 3, 60, 1, 2, 9, 4), (0, 11, 12), (44, 43, 42, 41, 40)]
GREEDY = SamplingParams(temperature=0)
RANDOM = SamplingParams(temperature=1.3, top_k=40, top_p=0.95, seed=9)
CHUNK, LENGTH, STOP = 8, 20, 19
CONFIG = GPTConfig(
    num_layers=8,
    pattern="G-*-M-C-",
    hidden_size=22,
    vocab_size=61,
    attention=AttentionConfig(num_attention_heads=4, num_query_groups=2, kv_channels=10),
    mlp=MLPConfig(ffn_hidden_size=40),
    delta_net=GatedDeltaNetConfig(
        num_key_heads=2, num_value_heads=4, key_channels=6, value_channels=5
    ),
    mamba=Mamba2Config(num_heads=4, head_channels=7, state_channels=3),  # one group for two ranks
    short_conv=ShortConvConfig(bias=True),
    init_std=0.5,
)
#: Number of elements in a state slot of the delta net, of Mamba-2 and of the short convolution.
DELTA = {"conv": 3 * (2 * (6 + 6 + 2 * 5)), "state": 4 * 6 * 5}
MAMBA = {"conv": 3 * (4 * 7 + 2 * 3), "state": 4 * 3 * 7}
SHORT_CONV = 2 * 22
NUM_ELEMENTS = sum(DELTA.values()) + sum(MAMBA.values()) + SHORT_CONV
#: Elements that all ranks have: rows of B and C.
SHARED = 3 * 2 * 3


def make_model(
    dtype: torch.dtype = torch.float64,
    groups: ProcessGroupCollection | None = None,
    config: GPTConfig = CONFIG,
) -> GPTModel:
    """Return the model with short chunks and with all weights away from their initial values."""
    model = GPTModel(config, groups or ProcessGroupCollection.single(), dtype=dtype)
    for handle in model.store.handles.values():
        for chunk in model.store.chunks(handle):
            noise = torch.randn(chunk.shape, generator=generator(5, *chunk.name.encode()))
            values = 0.4 * noise
            if "norm" in chunk.name:
                values = 1 + 0.2 * noise
            elif "A_log" in chunk.name:
                values = 0.3 * noise - 1.5  # slow decay: states retain more than a few tokens
            ranges = zip(chunk.offsets, chunk.tensor.shape, strict=True)
            chunk.tensor.copy_(values[tuple(slice(i, i + n) for i, n in ranges)])
    for mixer in recurrent_mixers(model)[:2]:
        assert isinstance(mixer, LinearRecurrentMixer)
        sizes = {"chunk_size": CHUNK}
        delta = isinstance(mixer, GatedDeltaNet)
        mixer.recurrence = delta_recurrence(**sizes) if delta else state_space_recurrence(**sizes)
    return model


def recurrent_mixers(model: GPTModel) -> list[RecurrentMixer]:
    mixers = [b.mixer for b in model.decoder.blocks if isinstance(b.mixer, RecurrentMixer)]
    assert [type(m) for m in mixers] == [GatedDeltaNet, Mamba2, ShortConv]
    return mixers


@pytest.fixture(scope="module")
def model() -> GPTModel:
    return make_model()


def requests(prompts: list[tuple[int, ...]] = PROMPTS) -> list[EngineRequest]:
    return [EngineRequest(prompt=p, sequence=100 + i) for i, p in enumerate(prompts)]


def feed_in_chunks(model: GPTModel, rows: list[torch.Tensor], steps: list[int]) -> torch.Tensor:
    """Return logits [s, b, V] of rows of tokens that are fed in chunks; zeros after a row's end.

    `steps` are chunk sizes of the longest row. Shorter rows start later, so that all rows end
    together.
    """
    length = max(len(row) for row in rows)
    feeder = PagedSteps(model.cache_shapes, rows=len(rows), length=length)
    tokens = torch.stack([torch.nn.functional.pad(r, (0, length - len(r))) for r in rows], 1)
    logits = torch.zeros(length, len(rows), 61, dtype=torch.float64)
    start = 0
    for count in steps:
        # A shorter row starts later, so that a step has rows at different positions.
        counts = [
            max(0, min(count, len(row) - feeder.num_fed[n], start + count - (length - len(row))))
            for n, row in enumerate(rows)
        ]
        layout = feeder.layout(counts)
        with torch.no_grad():
            hidden = model(feeder.packed(tokens)[None], layout=layout, cache=feeder.cache)
            feeder.unpacked(model.head(hidden)[:, 0].double(), logits)
        start += count
    assert feeder.num_fed == [len(row) for row in rows]
    return logits


def random_tokens(length: int, *key: int) -> torch.Tensor:
    return torch.randint(0, 61, (length,), generator=generator(3, *key))


def assert_chunks_match_full_forward(
    model: GPTModel, rows: list[torch.Tensor], splits: Iterable[list[int]]
) -> None:
    """Feed rows in chunks, split in several ways; compare with full forwards."""
    with nan_memory(), torch.no_grad():
        whole = [model.logits(tokens[None])[:, 0] for tokens in rows]
        for steps in splits:
            got = feed_in_chunks(model, rows, steps)
            for row, expected in enumerate(whole):
                error = relative_error(got[: len(expected), row], expected)
                assert error < 1e-10, (steps, row, error)


def test_prompt_split_anywhere_matches_whole_sequence(model: GPTModel) -> None:
    rows = [random_tokens(LENGTH), random_tokens(LENGTH - 7, 1)]
    splits = [[cut, 17 - cut, 1, 1, 1] for cut in range(1, 2 * CHUNK)]
    splits += [[3, 1, 1, 7, 2, 1, 5], [1] * LENGTH]
    assert_chunks_match_full_forward(model, rows, splits)


@pytest.mark.parametrize("width", [1, 2, 6])
def test_prompt_splits_match_for_other_conv_widths(width: int) -> None:
    config = replace(
        CONFIG,
        delta_net=replace(CONFIG.delta_net, conv_width=width),
        mamba=replace(CONFIG.mamba, conv_width=width, bias=True, conv_bias=False),
        short_conv=ShortConvConfig(conv_width=width),
    )
    splits = [[cut, 10 - cut, 1, 1] for cut in (1, 3, 6)]
    assert_chunks_match_full_forward(
        make_model(config=config), [random_tokens(12), random_tokens(5, 1)], splits
    )


@pytest.mark.slow
def test_prompt_split_below_two_default_chunks_matches_whole() -> None:
    model = make_model()
    model.decoder.blocks[0].mixer.recurrence = delta_recurrence()
    model.decoder.blocks[4].mixer.recurrence = state_space_recurrence()
    rows = [random_tokens(259), random_tokens(170, 1)]
    assert_chunks_match_full_forward(model, rows, ([cut, 257 - cut, 1, 1] for cut in range(1, 256)))


def test_cache_is_allocated_only_for_layers_that_need_it(model: GPTModel) -> None:
    shapes = model.cache_shapes
    assert shapes.token_bytes == 2 * (10 + 10) * 8  # one layer of attention of four
    assert shapes.state_bytes == NUM_ELEMENTS * 8
    cache = engine_of(model, num_blocks=5, max_num_seqs=2, prefix_caching=False).cache
    assert cache.num_bytes == 5 * 16 * shapes.token_bytes + (2 + 1) * shapes.state_bytes


def test_bf16_models_have_fp32_states_and_bf16_conv_rows() -> None:
    shapes = make_model(torch.bfloat16).cache_shapes
    dtypes = {name.rsplit(".", 1)[1]: dtype for name, (_, dtype) in shapes.states.items()}
    assert dtypes == {"conv": torch.bfloat16, "state": torch.float32}
    conv_size = DELTA["conv"] + MAMBA["conv"] + SHORT_CONV
    state_size = DELTA["state"] + MAMBA["state"]
    assert shapes.state_bytes == 2 * conv_size + 4 * state_size


@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 5, 3)])
def test_row_without_tokens_keeps_its_states(model: GPTModel, counts: tuple[int, ...]) -> None:
    for mixer in recurrent_mixers(model):
        x = torch.randn(12, 3, 22, generator=generator(7), dtype=torch.float64)
        steps = PagedSteps(mixer.cache_shapes(torch.float64), rows=3, length=12)
        buffers = list(steps.cache.states._buffers.values())
        with torch.no_grad():
            layout = steps.layout((4, 4, 4))
            mixer(steps.packed(x)[:, None], layout, cache=steps.cache)
            before = [b.clone() for b in buffers]
            layout = steps.layout((0, *counts[1:]))
            absent = steps.slots[0]
            for buffer in buffers:
                buffer[absent] = math.nan
            out = mixer(steps.packed(x)[:, None], layout, cache=steps.cache)
        assert out.isfinite().all()
        for buffer, old in zip(buffers, before, strict=True):
            assert buffer[absent].isnan().all()
            assert not torch.equal(buffer[steps.slots[1]], old[steps.slots[1]])


def test_chunked_prefill_bounds_activation_size(model: GPTModel) -> None:
    (request,) = requests([tuple(random_tokens(60).tolist())])
    largest = {}
    for chunk in (60, 4):
        sizes: list[int] = []

        def record_sizes(_, __, out: object, sizes: list[int] = sizes) -> None:
            sizes += [tensor.numel() for tensor in (out if isinstance(out, tuple) else (out,))]

        options = {"sampling": GREEDY, "max_new_tokens": 1, "max_num_seqs": 1}
        hook = register_module_forward_hook(record_sizes)
        try:
            generate(
                model, [request], max_num_batched_tokens=chunk, prefix_caching=False, **options
            )
        finally:
            hook.remove()
        largest[chunk] = max(sizes)
    assert largest[60] == 60 * 2 * 40  # up and gate of an MLP
    assert largest[4] == 4 * 2 * 40


def generate_on_rank(rank: int, world: int) -> tuple[list[list[list[int]]], int]:
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    model = make_model(groups=groups)
    options = {"max_new_tokens": 9, "stop_tokens": (STOP,)}
    batches = [
        generate(
            model,
            requests(),
            sampling=params,
            max_num_batched_tokens=chunk,
            max_num_seqs=3,
            **options,
        )
        for params, chunk in ((GREEDY, 2048), (RANDOM, 3))
    ]
    return batches, model.cache_shapes.state_bytes


def test_tensor_parallel_ranks_match_one_process(model: GPTModel) -> None:
    ranks = run_ranks(generate_on_rank, 2)
    expected_bytes = ((NUM_ELEMENTS - SHARED) // 2 + SHARED) * 8
    for batches, num_bytes in ranks:
        assert batches == ranks[0][0]
        assert num_bytes == expected_bytes  # heads and their states are sharded
    for got, params in zip(ranks[0][0], (GREEDY, RANDOM), strict=True):
        options = {"max_new_tokens": 9, "sampling": params, "stop_tokens": (STOP,)}
        expected = generate(model, requests(), **options)
        for completion, reference in zip(got, expected, strict=True):
            assert_same_completion(completion, reference)
