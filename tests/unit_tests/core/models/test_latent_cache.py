# SPDX-License-Identifier: Apache-2.0
"""Decoding with a cache of latents against running the whole sequence anew: values and bytes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.context_parallel import SequenceLayout
from megatron.core.inference.cache import KVCache
from megatron.core.inference.engine import Request
from megatron.core.inference.sampling import SamplingParams
from megatron.core.models.gpt import GPTConfig, GPTModel
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from megatron.core.transformer import LatentAttentionConfig, MLPConfig, RopeConfig
from tests.support.closeness import assert_close_by_metric
from tests.support.inputs import generator, one_thread
from tests.support.nan_memory import nan_memory
from tests.support.one_batch import generate
from tests.support.ranks import run_ranks
from tests.unit_tests.core.inference.test_generation import assert_same, without_cache

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
        dropout=0.5,  # must not act while generating
        scale_factor=1.3,
    ),
    mlp=MLPConfig(ffn_hidden_size=36),
    rope=RopeConfig(base=200.0, interleaved=True),
    init_std=0.4,
)
KEPT = 23 + 6
PROMPTS = [(5,), (7, 3, 60, 1, 2, 9, 4), (0, 11, 12), (44, 43, 42, 41, 40)]
RANDOM = SamplingParams(temperature=1.3, top_k=40, top_p=0.95, seed=9)


def changed(**changes) -> GPTConfig:
    """Return the configuration with another shape of attention."""
    return dataclasses.replace(CONFIG, attention=dataclasses.replace(CONFIG.attention, **changes))


def model_of(
    config: GPTConfig, groups: ProcessGroupCollection | None = None, **options: bool
) -> GPTModel:
    """Return a model whose norms are off one."""
    model = GPTModel(config, groups or ProcessGroupCollection.single(), seed=3, **options)
    for name, handle in model.store.handles.items():
        if "norm" in name:
            weight = handle.get()
            weight += 0.3 * torch.randn(weight.shape, generator=generator(2, *name.encode()))
    return model


def in_steps(model: GPTModel, tokens: torch.Tensor, steps, documents=None):
    """Return logits [s, b, V] of tokens [b, s] given to a cache so many at a time, and the
    cache."""
    cache, logits, start = KVCache(tokens.shape[1]), [], 0
    with torch.no_grad(), nan_memory():
        for count in steps:
            stop = start + count
            known = None if documents is None else documents[:stop]
            layout = SequenceLayout(torch.arange(start, stop), known)
            logits.append(model.full_logits(tokens[:, start:stop], cache=cache, layout=layout))
            start = stop
    assert start == tokens.shape[1]
    return torch.cat(logits), cache


CONFIGS = {
    "low rank": CONFIG,
    "direct, halves": dataclasses.replace(changed(q_lora_rank=None), rope=RopeConfig(base=200.0)),
    "wide values": changed(value_channels=29),
    "no positions": dataclasses.replace(CONFIG, rope=None),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("packed", [False, True])
def test_every_position_is_that_of_the_whole_sequence(name: str, packed: bool):
    tokens = torch.randint(0, 61, (3, 13), generator=generator(1))
    documents = None
    if packed:
        documents = (torch.arange(13)[:, None] >= torch.tensor([4, 9, 13])).int()  # [s, b]
    with one_thread():
        model = model_of(CONFIGS[name])
        calls = []
        for block in model.decoder.blocks[::2]:
            block.mixer.kv_up.register_forward_pre_hook(lambda *_: calls.append(0))
        with torch.no_grad():
            whole = model.full_logits(tokens, layout=SequenceLayout(torch.arange(13), documents))
            plain = model.full_logits(tokens)
        assert ((whole - plain).abs().max() > 0.1) == packed
        for steps in ([5] + [1] * 8, [1, 1, 3, 1, 5, 2]):
            calls.clear()
            got, cache = in_steps(model, tokens, steps, documents)
            assert_close_by_metric(f"{steps}", got, whole)
            # Keys and values of heads are made for the empty cache alone.
            assert len(calls) == CONFIG.num_layers
            assert cache.num_bytes == CONFIG.num_layers * 13 * 3 * KEPT * 4


def test_a_cache_keeps_the_same_whatever_the_heads():
    tokens = torch.randint(0, 61, (2, 7), generator=generator(1))
    sizes = set()
    for heads in (1, 4, 12):
        sizes.add(
            in_steps(model_of(changed(num_attention_heads=heads)), tokens, [6, 1])[1].num_bytes
        )
    assert sizes == {CONFIG.num_layers * 7 * 2 * KEPT * 4}


class _Largest(TorchDispatchMode):
    """The most elements of a tensor that an op has made, with the op's name."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it is to import it first, for seconds

    def __init__(self) -> None:
        super().__init__()
        self.found = (0, "")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        given = {x.data_ptr() for x in tree_leaves([args, kwargs]) if torch.is_tensor(x)}
        for made in tree_leaves(results):
            if torch.is_tensor(made) and made.untyped_storage().data_ptr() not in given:
                views = any(r.alias_info is not None for r in function._schema.returns)
                if not views:
                    self.found = max(self.found, (made.numel(), str(function)))
        return results


def test_a_step_copies_no_weight():
    config = changed(num_attention_heads=8)
    with one_thread(), torch.no_grad():
        model = model_of(config)
        tokens = torch.randint(0, 61, (2, 5), generator=generator(1))
        cache = KVCache(6)
        model.full_logits(tokens, cache=cache)
        with _Largest() as largest:
            model.full_logits(tokens[:, :1], cache=cache, layout=SequenceLayout(torch.tensor([5])))
    attention = config.attention
    smallest = 8 * attention.nope_channels * attention.kv_lora_rank
    assert 8 * 2 * KEPT <= largest.found[0] < smallest / 4, largest.found


def test_a_padded_batch_equals_each_prompt_alone_without_a_cache():
    batch = [Request(prompt=p, sequence=100 + i) for i, p in enumerate(PROMPTS)]
    with one_thread():
        model = model_of(CONFIG)
        with nan_memory():
            got = generate(model, batch, max_new_tokens=8, sampling=RANDOM)
        for request, completion in zip(batch, got, strict=True):
            assert_same(completion, without_cache(model, request, 8, RANDOM))
    assert len({token for c in got for token in c.tokens}) > 8


def on_rank(rank: int, world: int) -> tuple:
    """Decode on a tensor parallel rank."""
    groups = ProcessGroupCollection.create(RankGrid(world_size=world, tp=world), rank=rank)
    model = model_of(CONFIG, groups)
    batch = [Request(prompt=p, sequence=100 + i) for i, p in enumerate(PROMPTS)]
    tokens = torch.randint(0, 61, (3, 13), generator=generator(1))
    logits, cache = in_steps(model, tokens, [4, 1, 3, 1, 4])
    # With the sequence cut between blocks, steps must divide over the ranks.
    cut = model_of(CONFIG, groups, sequence_parallel=True)
    even, _ = in_steps(cut, tokens[:, :12], [4, 2, 6])
    completions = generate(model, batch, max_new_tokens=6, sampling=RANDOM)
    return logits, even, cache.num_bytes, completions


def test_tensor_parallel_ranks_decode_what_one_process_does():
    tokens = torch.randint(0, 61, (3, 13), generator=generator(1))
    batch = [Request(prompt=p, sequence=100 + i) for i, p in enumerate(PROMPTS)]
    ranks = run_ranks(on_rank, 2)
    with one_thread():
        model = model_of(CONFIG)
        wanted = generate(model, batch, max_new_tokens=6, sampling=RANDOM)
        with torch.no_grad():
            whole = model.full_logits(tokens)
    for logits, even, num_bytes, completions in ranks:
        assert_close_by_metric("logits", logits, whole)
        assert_close_by_metric("sequence parallel", even, whole[:12])
        assert num_bytes == CONFIG.num_layers * 13 * 3 * KEPT * 4
        for completion, reference in zip(completions, wanted, strict=True):
            assert_same(completion, reference)
