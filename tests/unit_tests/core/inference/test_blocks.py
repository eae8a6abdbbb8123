# SPDX-License-Identifier: Apache-2.0
"""The pool of blocks by random events, against a model of it that keeps all in plain sets."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from megatron.core.inference.blocks import BlockPool, hash_blocks


def check(pool: BlockPool, rows: list[list[int]], known: dict[bytes, int]) -> None:
    """References are those of the rows, and what nobody refers to can be allocated."""
    held = Counter(block for row in rows for block in row)
    assert pool.references == held.total()
    assert pool.available == pool.num_blocks - len(held)
    for digest, block in known.items():
        assert pool.find(digest) in (block, None)


@pytest.mark.parametrize("seed", range(4))
def test_a_hundred_thousand_random_events_leak_nothing(seed: int) -> None:
    source = random.Random(seed)
    pool = BlockPool(source.choice((1, 7, 40)))
    rows: list[list[int]] = []
    known: dict[bytes, int] = {}  # what was published; the block that a digest may be found in
    evicted = found_again = refused = 0
    for number in range(25_000):
        event = source.random()
        if event < 0.35:
            count = source.randint(1, 4)
            before, room = pool.evicted, pool.available
            got = pool.allocate(count)
            if got is None:
                assert count > room
                refused += 1
                continue
            assert len(set(got)) == count <= room
            assert not set(got) & {block for row in rows for block in row}
            evicted += pool.evicted - before
            known = {d: b for d, b in known.items() if b not in got}
            rows.append(got)
        elif event < 0.55 and rows:
            row = source.choice(rows)
            block = source.choice(row)
            digest = number.to_bytes(4, "big")
            pool.publish(block, digest)
            if pool.find(digest) == block:
                known[digest] = block
            else:  # it has one already
                assert block in known.values()
        elif event < 0.7 and known:
            digest = source.choice(list(known))
            block = pool.find(digest)
            assert block == known[digest]
            pool.share([block])
            rows.append([block])
            found_again += 1
        elif event < 0.705:
            pool.forget_all()
            known.clear()
        elif rows:
            pool.release(rows.pop(source.randrange(len(rows))))
        if number % 50 == 0:
            check(pool, rows, known)
    for row in rows:
        pool.release(row)
    check(pool, [], known)
    assert min(evicted, found_again, refused) > 0
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
