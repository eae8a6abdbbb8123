# SPDX-License-Identifier: Apache-2.0
"""Memory sizes of an engine: limits in error messages are exact, and sizes fit the memory."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from megatron.core.inference import EngineConfig
from megatron.core.inference.cache import CacheSizes
from megatron.core.transformer import CacheShapes

#: Shapes with no states, states smaller than a block, and states as large as several blocks.
ATTENTION = [(), ((1, 4),), ((2, 64), (24,))]
STATES = [{}, {"a": ((3, 5), torch.float32)}, {"a": ((4, 16, 32), torch.float32)}]
ENGINES = [
    EngineConfig(
        max_num_seqs=rows, block_size=block, prefix_caching=cached, num_speculative_tokens=n
    )
    for rows, block, cached, n in itertools.product((1, 3), (16, 64), (False, True), (0, 2, 40))
]


def shapes() -> list[CacheShapes]:
    return [
        CacheShapes(attention=attention, states=states)
        for attention, states in itertools.product(ATTENTION, STATES)
        if attention or states
    ]


def with_memory(engine: EngineConfig, memory: int) -> EngineConfig:
    return EngineConfig(
        max_num_seqs=engine.max_num_seqs, block_size=engine.block_size, memory_bytes=memory,
        prefix_caching=engine.prefix_caching,
        num_speculative_tokens=engine.num_speculative_tokens, max_model_len=128,
    )  # fmt: skip


def cache_bytes(engine: EngineConfig, shapes: CacheShapes, blocks: int, slots: int) -> int:
    """Return the bytes of pages and states; the additional state slot is for padding."""
    pages = blocks * engine.block_size * shapes.token_bytes
    return pages + ((slots + 1) * shapes.state_bytes if shapes.states else 0)


@pytest.mark.parametrize("shape", shapes(), ids=repr)
def test_error_names_the_minimum_accepted_memory(shape):
    for engine in ENGINES:
        with pytest.raises(ValueError, match="give at least") as error:
            with_memory(engine, 0).sizes(shape)
        min_memory = int(re.search(r"at least ([\d,]+)", str(error.value))[1].replace(",", ""))
        with pytest.raises(ValueError, match=f"at least {min_memory:,}"):
            with_memory(engine, min_memory - 1).sizes(shape)
        blocks, slots = with_memory(engine, min_memory).sizes(shape)
        assert blocks * engine.block_size > engine.num_speculative_tokens
        assert slots >= engine.max_num_seqs or not shape.states
        assert cache_bytes(engine, shape, blocks if shape.attention else 0, slots) <= min_memory


@pytest.mark.parametrize("shape", shapes(), ids=repr)
def test_any_accepted_memory_provides_blocks(shape):
    """Snapshots of states share the memory with blocks, and must leave room for them."""
    for engine in ENGINES:
        min_memory = cache_bytes(
            engine, shape, 64 // engine.block_size, 2 * engine.max_num_seqs + 1
        )
        for memory in {
            min_memory + extra
            for extra in (0, 1, shape.state_bytes, 4 * min_memory, 64 * min_memory)
        }:
            blocks, slots = with_memory(engine, memory).sizes(shape)
            assert blocks >= 1
            assert cache_bytes(engine, shape, blocks if shape.attention else 0, slots) <= memory


@pytest.mark.parametrize(("blocks", "step_tokens"), [(1, 8), (1, 64), (4, 32)])
def test_error_names_the_maximum_number_of_drafts(blocks, step_tokens):
    sizes = CacheSizes(num_blocks=blocks)

    def check(count: int) -> None:
        sizes.check_drafts(
            EngineConfig(max_num_batched_tokens=step_tokens, num_speculative_tokens=count)
        )

    with pytest.raises(ValueError, match="at most") as error:
        check(1000)
    max_drafts = int(re.search(r"at most (\d+)", str(error.value))[1])
    check(max_drafts)
    with pytest.raises(ValueError, match=f"at most {max_drafts}"):
        check(max_drafts + 1)
