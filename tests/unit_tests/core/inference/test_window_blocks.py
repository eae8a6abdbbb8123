# SPDX-License-Identifier: Apache-2.0
"""Layers with a window have blocks of their own; a prefix needs the blocks of all layers."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron.core import ProcessGroupCollection
from megatron.core.inference import Completions, EngineConfig, EngineRequest, generate
from megatron.core.inference.block_pool import BlockGroup
from megatron.core.inference.speculation import NGramLookup
from megatron.core.models import GPTModel
from megatron.core.transformer import CacheShapes, WindowAttentionConfig
from tests.unit_tests.core.inference.test_engine import (
    GREEDY,
    HEADS,
    VOCABULARY,
    engine_of,
    gpt,
)
from tests.unit_tests.core.inference.test_prefill import check_accounting

WINDOW, BLOCK = 20, 16


def two_kinds_model(layers: int = 2, window: int = WINDOW, **fields) -> GPTModel:
    """Return a model whose even layers have a window."""
    second = WindowAttentionConfig(window=window, pattern="W*" * (layers // 2))
    config = gpt(layers, attention=replace(HEADS, second=second), **fields)
    return GPTModel(config, ProcessGroupCollection.single(), dtype=torch.float64, seed=3)


@pytest.fixture(scope="module")
def model() -> GPTModel:
    return two_kinds_model()


def greedy_tokens(model: GPTModel, prompt: tuple[int, ...], count: int) -> list[int]:
    """Return greedy tokens of full forward passes without a cache."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model.full_logits(torch.tensor([tokens]))[-1, 0].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("asynchronous", [False, True])
def test_requests_in_scarce_window_blocks_match_full_forwards(model, seed, asynchronous):
    """Preemption, prefixes, drafts, aborts and sleep, with window blocks for two sequences."""
    choose = random.Random(seed)
    prefix = [choose.randrange(VOCABULARY) for _ in range(70)]
    prompts = [tuple(prefix[: choose.randrange(1, 70)] + [n, n, n]) for n in range(8)]
    options = {"num_blocks": 24, "max_num_batched_tokens": 40, "asynchronous": asynchronous}
    proposer = None if asynchronous else NGramLookup(longest=3, shortest=1)
    with mock.patch.object(EngineConfig, "window_blocks", return_value=9 + 3 * asynchronous):
        engine = engine_of(model, proposer, block_size=BLOCK, **options)
    full, windowed = engine.scheduler.kv_cache.groups
    assert (full.window, windowed.window) == (None, WINDOW)
    outputs, ids = Completions(), {}
    for prompt in prompts:
        ids[engine.add(EngineRequest(prompt=prompt, max_new_tokens=24, sampling=GREEDY))] = prompt
        for _ in range(choose.randrange(4)):
            outputs.add(engine.step())
            if not asynchronous:
                check_accounting(engine)
    aborted = next(reversed(ids))
    outputs.add(engine.abort(aborted))
    engine.sleep()
    engine.wake()
    while engine.unfinished:
        outputs.add(engine.step())
    for request_id, prompt in ids.items():
        tokens = outputs[request_id, 0].tokens
        assert tokens == greedy_tokens(model, prompt, 24)[: len(tokens)]
        assert len(tokens) == 24 or request_id == aborted
    assert engine.stats.preempted > 0
    assert engine.stats.hit > 0
    assert [group.pool.references for group in (full, windowed)] == [0, 0]


def test_long_request_holds_its_window_only():
    """8,192 tokens, a window of 128 in every second layer: at most 0.55 of the bytes of caches
    with all tokens in all layers."""
    model = two_kinds_model(window=128)
    engine = engine_of(model, num_blocks=513, max_num_seqs=1, max_num_batched_tokens=512)
    prompt = tuple(torch.randint(0, VOCABULARY, (8150,)).tolist())
    engine.add(EngineRequest(prompt=prompt, max_new_tokens=42))
    max_windowed, chunk = 0, 512 // BLOCK
    while engine.unfinished:
        engine.step()
        groups = engine.scheduler.kv_cache.groups
        windowed = groups[1].pool.references
        max_windowed = max(max_windowed, windowed)
        assert windowed <= 128 // BLOCK + 1 + chunk
    assert max_windowed > 128 // BLOCK
    blocks_of_full_caches = 2 * -(-8192 // BLOCK)
    assert 512 + max_windowed <= 0.55 * blocks_of_full_caches
    allocated = engine.cache.num_bytes
    assert allocated < 0.7 * 2 * 513 * BLOCK * model.cache_shapes.token_bytes / 2


def test_prefix_without_its_window_is_computed_again(model):
    """Blocks of the full layers alone are not a cached prefix."""
    prompt = tuple(n % VOCABULARY for n in range(100))
    engine = engine_of(model, num_blocks=64, block_size=BLOCK)
    request = EngineRequest(prompt=prompt, max_new_tokens=3, sampling=GREEDY)
    expected = greedy_tokens(model, prompt, 3)

    def tokens_and_hits() -> tuple[list[int], int]:
        hit = engine.stats.hit
        ((completion,),) = generate(engine, [request])
        return completion.tokens, engine.stats.hit - hit

    assert tokens_and_hits() == (expected, 0)
    assert tokens_and_hits() == (expected, 96)
    _, windowed = engine.scheduler.kv_cache.groups
    windowed.pool.forget_all()
    assert tokens_and_hits() == (expected, 0)


@pytest.mark.parametrize("window", [None, 1, 15, 16, 17, 40, 1000])
def test_longest_prefix_is_the_longest_of_all_lengths(window):
    hashes, choose = [bytes([n]) for n in range(12)], random.Random(window)
    for _ in range(200):
        group = BlockGroup(12, BLOCK, window=window)
        cached = {n for n in range(12) if choose.random() < 0.7}
        for n in cached:
            (block,) = group.pool.allocate(1)
            group.pool.publish(block, hashes[n])
        lengths = [
            length
            for length in range(13)
            if cached >= set(range(group.num_unseen(length * BLOCK), length))
        ]
        limit = choose.randrange(13)
        length = group.longest_prefix(hashes, limit)
        assert length == max(n for n in lengths if n <= limit)
        blocks = group.cached_blocks(hashes, length)
        assert [block >= 0 for block in blocks] == [
            n >= group.num_unseen(length * BLOCK) for n in range(length)
        ]


@pytest.mark.parametrize("memory", [30_000, 100_000, 1_000_000, 30_000_000])
@pytest.mark.parametrize("windows", [(None, 100), (100, 100, None), (None, 1)])
def test_blocks_of_both_kinds_fill_the_memory(memory, windows):
    shapes = CacheShapes(attention=((2, 8),) * len(windows), windows=windows)
    config = EngineConfig(max_num_seqs=2, memory_bytes=memory, max_num_batched_tokens=64)
    window = shapes.window

    def page_bytes(blocks: int) -> int:
        full_bytes = shapes.token_bytes - shapes.windowed_token_bytes
        window_blocks = config.window_blocks(blocks, window)
        return BLOCK * (blocks * full_bytes + window_blocks * shapes.windowed_token_bytes)

    blocks, _ = config.sizes(shapes, window=window)
    assert page_bytes(blocks) <= memory < page_bytes(blocks + 1)
