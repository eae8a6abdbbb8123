# SPDX-License-Identifier: Apache-2.0
"""How much memory an engine says it needs: exactly what it then takes."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from megatron.core.inference.cache import CacheShapes
from megatron.core.inference.sizes import CacheSizes, EngineConfig

#: Shapes whose states are smaller than a block, as large as several blocks, and absent.
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
        num_speculative_tokens=engine.num_speculative_tokens,
    )  # fmt: skip


def cache_bytes(engine: EngineConfig, shapes: CacheShapes, blocks: int, slots: int) -> int:
    """Return the bytes of pages and of states, whose last slot is no row's."""
    pages = blocks * engine.block_size * shapes.token_bytes
    return pages + ((slots + 1) * shapes.state_bytes if shapes.states else 0)


@pytest.mark.parametrize("shape", shapes(), ids=repr)
def test_the_memory_of_the_error_is_the_least_that_is_accepted(shape):
    for engine in ENGINES:
        with pytest.raises(ValueError, match="give at least") as refused:
            with_memory(engine, 0).sizes(shape, 128)
        least = int(re.search(r"at least ([\d,]+)", str(refused.value))[1].replace(",", ""))
        with pytest.raises(ValueError, match=f"at least {least:,}"):
            with_memory(engine, least - 1).sizes(shape, 128)
        blocks, slots = with_memory(engine, least).sizes(shape, 128)
        assert blocks * engine.block_size > engine.num_speculative_tokens
        assert slots >= engine.max_num_seqs or not shape.states
        assert cache_bytes(engine, shape, blocks if shape.attention else 0, slots) <= least


@pytest.mark.parametrize("shape", shapes(), ids=repr)
def test_no_amount_of_memory_leaves_an_engine_without_blocks(shape):
    """Snapshots of states take what blocks leave, and blocks what is left of a quarter."""
    for engine in ENGINES:
        least = cache_bytes(engine, shape, 64 // engine.block_size, 2 * engine.max_num_seqs + 1)
        for memory in {least + extra for extra in (0, 1, shape.state_bytes, 4 * least, 64 * least)}:
            blocks, slots = with_memory(engine, memory).sizes(shape, 128)
            assert blocks >= 1
            assert cache_bytes(engine, shape, blocks if shape.attention else 0, slots) <= memory


@pytest.mark.parametrize(("blocks", "step_tokens"), [(1, 8), (1, 64), (4, 32)])
def test_the_number_of_drafts_of_the_error_is_the_most_accepted(blocks, step_tokens):
    sizes = CacheSizes(num_blocks=blocks, num_slots=1, has_states=False, window=None)

    def check(count: int) -> None:
        sizes.check_drafts(
            EngineConfig(max_num_batched_tokens=step_tokens, num_speculative_tokens=count)
        )

    with pytest.raises(ValueError, match="at most") as refused:
        check(1000)
    most = int(re.search(r"at most (\d+)", str(refused.value))[1])
    check(most)
    with pytest.raises(ValueError, match=f"at most {most}"):
        check(most + 1)
