# SPDX-License-Identifier: Apache-2.0
"""The block pool under random events, against a model with plain sets."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from megatron.core.inference.kv_cache_manager import BlockPool, hash_blocks


def check_pool(pool: BlockPool, rows: list[list[int]], published: dict[bytes, int]) -> None:
    """Check that the rows' references are counted and unreferenced blocks are available."""
    references = Counter(block for row in rows for block in row)
    assert pool.references == references.total()
    assert pool.available == pool.num_blocks - len(references)
    for digest, block in published.items():
        assert pool.find(digest) in (block, None)


@pytest.mark.parametrize("seed", range(4))
def test_random_events_leak_no_blocks(seed: int) -> None:
    source = random.Random(seed)
    pool = BlockPool(source.choice((1, 7, 40)))
    rows: list[list[int]] = []
    published: dict[bytes, int] = {}  # digest -> the block that it was published for
    evicted = num_hits = refused = 0
    for number in range(25_000):
        event = source.random()
        if event < 0.35:
            count = source.randint(1, 4)
            before, available = pool.evicted, pool.available
            blocks = pool.allocate(count)
            if blocks is None:
                assert count > available
                refused += 1
                continue
            assert len(set(blocks)) == count <= available
            assert not set(blocks) & {block for row in rows for block in row}
            evicted += pool.evicted - before
            published = {d: b for d, b in published.items() if b not in blocks}
            rows.append(blocks)
        elif event < 0.55 and rows:
            row = source.choice(rows)
            block = source.choice(row)
            digest = number.to_bytes(4, "big")
            pool.publish(block, digest)
            if pool.find(digest) == block:
                published[digest] = block
            else:  # the block already has a digest
                assert block in published.values()
        elif event < 0.7 and published:
            digest = source.choice(list(published))
            block = pool.find(digest)
            assert block == published[digest]
            pool.share([block])
            rows.append([block])
            num_hits += 1
        elif event < 0.705:
            pool.forget_all()
            published.clear()
        elif rows:
            pool.release(rows.pop(source.randrange(len(rows))))
        if number % 50 == 0:
            check_pool(pool, rows, published)
    for row in rows:
        pool.release(row)
    check_pool(pool, [], published)
    assert min(evicted, num_hits, refused) > 0
    with pytest.raises(ValueError, match="is not in use"):
        pool.release([0])


def test_least_recently_used_block_is_evicted_from_row_end() -> None:
    pool = BlockPool(4)
    digests = hash_blocks(range(64), 16)
    blocks = pool.allocate(4)
    assert blocks is not None
    for block, digest in zip(blocks, digests, strict=True):
        pool.publish(block, digest)
    pool.release(blocks)
    for left in (3, 2, 1, 0):
        pool.allocate(1)
        assert [pool.find(d) is not None for d in digests] == [True] * left + [False] * (4 - left)
