# SPDX-License-Identifier: Apache-2.0
"""Decoding with a cache of latents against full forwards: values and bytes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.inference import EngineRequest, SamplingParams
from megatron.core.models import GPTConfig, GPTModel
from megatron.core.transformer import LatentAttentionConfig, MLPConfig, RopeConfig
from tests.support.closeness import assert_close_by_metric
from tests.support.inputs import generator, one_thread
from tests.support.nan_memory import nan_memory
from tests.support.one_batch import assert_same_completion, generate
from tests.support.paged_steps import PagedSteps
from tests.support.ranks import run_ranks

CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=22,
    vocab_size=61,
    attention=LatentAttentionConfig(
        num_attention_heads=4,
        q_lora_rank=14,
        kv_lora_rank=23,
        nope_channels=15,
        rope_channels=6,
        value_channels=17,
        dropout=0.5,  # must be off during generation
        scale_factor=1.3,
    ),
    mlp=MLPConfig(ffn_hidden_size=36),
    rope=RopeConfig(base=200.0, interleaved=True),
    init_std=0.4,
)
CACHED_FEATURES = 23 + 6
PROMPTS = [(5,), (7, 3, 60, 1, 2, 9, 4), (0, 11, 12), (44, 43, 42, 41, 40)]
RANDOM = SamplingParams(temperature=1.3, top_k=40, top_p=0.95, seed=9)


def config_with(**changes) -> GPTConfig:
    """Return the configuration with changed attention."""
    return dataclasses.replace(CONFIG, attention=dataclasses.replace(CONFIG.attention, **changes))


def model_of(
    config: GPTConfig, groups: ProcessGroupCollection | None = None, **options: bool
) -> GPTModel:
    """Return a model whose norm weights differ from one."""
    model = GPTModel(config, groups or ProcessGroupCollection.single(), seed=3, **options)
    for name, handle in model.store.handles.items():
        if "norm" in name:
            weight = handle.get()
            weight += 0.3 * torch.randn(weight.shape, generator=generator(2, *name.encode()))
    return model


def logits_in_steps(
    model: GPTModel, tokens: torch.Tensor, steps
) -> tuple[torch.Tensor, PagedSteps]:
    """Return logits [s, b, V] of tokens [b, s] fed in steps, and the feeder with its cache."""
    rows, length = tokens.shape
    feeder = PagedSteps(model.cache_shapes, rows=rows, length=length)
    logits = torch.zeros(length, rows, 61)
    with torch.no_grad(), nan_memory():
        for count in steps:
            layout = feeder.layout([count] * rows)
            new_tokens = feeder.packed(tokens.t())[None]
            feeder.unpacked(
                model.full_logits(new_tokens, cache=feeder.cache, layout=layout)[:, 0], logits
            )
    assert feeder.num_fed == [length] * rows
    return logits, feeder


CONFIGS = {
    "low rank": CONFIG,
    "direct, halves": dataclasses.replace(
        config_with(q_lora_rank=None), rope=RopeConfig(base=200.0)
    ),
    "large values": config_with(value_channels=29),
    "no positions": dataclasses.replace(CONFIG, rope=None),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_decoded_logits_match_full_forward(name: str):
    tokens = torch.randint(0, 61, (3, 13), generator=generator(1))
    with one_thread():
        model = model_of(CONFIGS[name])
        with torch.no_grad():
            whole = model.full_logits(tokens)
        calls = []
        for block in model.decoder.blocks[::2]:
            block.mixer.kv_up.register_forward_pre_hook(lambda *_: calls.append(0))
        for steps in ([5] + [1] * 8, [1, 1, 3, 1, 5, 2]):
            got, _ = logits_in_steps(model, tokens, steps)
            assert_close_by_metric(f"{steps}", got, whole)
        assert not calls  # keys and values per head are never materialized


def test_cache_size_does_not_depend_on_the_heads():
    for heads in (1, 4, 12):
        model = model_of(config_with(num_attention_heads=heads))
        assert model.cache_shapes.token_bytes == CONFIG.num_layers * CACHED_FEATURES * 4


class _LargestTensor(TorchDispatchMode):
    """The largest tensor that an operation allocates: its number of elements and the op's name."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping dynamo imports it, which takes seconds

    def __init__(self) -> None:
        super().__init__()
        self.largest = (0, "")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        argument_pointers = {
            x.data_ptr() for x in tree_leaves([args, kwargs]) if torch.is_tensor(x)
        }
        for tensor in tree_leaves(outputs):
            if (
                torch.is_tensor(tensor)
                and tensor.untyped_storage().data_ptr() not in argument_pointers
            ):
                views = any(r.alias_info is not None for r in function._schema.returns)
                if not views:
                    self.largest = max(self.largest, (tensor.numel(), str(function)))
        return outputs


def test_decode_step_copies_no_weight():
    config = config_with(num_attention_heads=8)
    with one_thread(), torch.no_grad():
        model = model_of(config)
        tokens = torch.randint(0, 61, (2, 6), generator=generator(1))
        feeder = PagedSteps(model.cache_shapes, rows=2, length=6)
        for count in (5, 1):
            layout = feeder.layout([count] * 2)
            new_tokens = feeder.packed(tokens.t())[None]
            with _LargestTensor() as recorder:
                model.full_logits(new_tokens, cache=feeder.cache, layout=layout)
    attention = config.attention
    smallest_weight = 8 * attention.nope_channels * attention.kv_lora_rank
    assert 8 * 2 * CACHED_FEATURES <= recorder.largest[0] < smallest_weight / 4, recorder.largest


def on_rank(rank: int, world: int) -> tuple:
    """Decode on a tensor parallel rank."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    model = model_of(CONFIG, groups)
    batch = [EngineRequest(prompt=p, sequence=100 + i) for i, p in enumerate(PROMPTS)]
    tokens = torch.randint(0, 61, (3, 13), generator=generator(1))
    logits, _ = logits_in_steps(model, tokens, [4, 1, 3, 1, 4])
    # With sequence parallelism, steps must divide over the ranks.
    sequence_parallel_model = model_of(CONFIG, groups, sequence_parallel=True)
    even, _ = logits_in_steps(sequence_parallel_model, tokens[:2, :12], [4, 2, 6])
    completions = generate(model, batch, max_new_tokens=6, sampling=RANDOM)
    return logits, even, completions


def test_tensor_parallel_decode_matches_one_process():
    tokens = torch.randint(0, 61, (3, 13), generator=generator(1))
    batch = [EngineRequest(prompt=p, sequence=100 + i) for i, p in enumerate(PROMPTS)]
    ranks = run_ranks(on_rank, 2)
    with one_thread():
        model = model_of(CONFIG)
        expected = generate(model, batch, max_new_tokens=6, sampling=RANDOM)
        with torch.no_grad():
            whole = model.full_logits(tokens)
    for logits, even, completions in ranks:
        assert_close_by_metric("logits", logits, whole)
        assert_close_by_metric("sequence parallel", even, whole[:12, :2])
        for completion, reference in zip(completions, expected, strict=True):
            assert_same_completion(completion, reference)
