# SPDX-License-Identifier: Apache-2.0
"""Blocks of a KV cache: hashes of their tokens, the pool of blocks, and groups of layers.

Blocks are allocated on demand from a `BlockPool`. A full block is identified by a hash of all
tokens up to its end, so sequences with a common prefix share blocks. A block without references
stays in the prefix cache until memory is needed. Blocks are evicted in LRU order, and the last
block of a sequence before its first, so that a block is never evicted before the blocks that
continue it.

Attention layers with and without a window are two groups, each with a pool and a block table of its
own (`BlockGroup`).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


def hash_blocks(
    tokens: Sequence[int],
    block_size: int,
    *,
    prefix_hashes: Sequence[bytes] = (),
    salt: str = "",
) -> list[bytes]:
    """Return the hash of each full block of a sequence.

    A hash is SHA-256 of the previous block's hash and the tokens of the block, so equal hashes mean
    equal prefixes.

    Args:
        tokens: token ids of the sequence.
        block_size: tokens per block.
        prefix_hashes: hashes of the first blocks, to avoid computing them again.
        salt: separates the hashes of equal sequences; see `EngineRequest.cache_salt`.
    """
    # The salt takes the place of the parent of the first block, so it is part of every hash.
    salt_hash = hashlib.sha256(salt.encode()).digest() if salt else b""
    hashes = list(prefix_hashes)
    for index in range(len(hashes), len(tokens) // block_size):
        block_tokens = np.asarray(
            tokens[index * block_size : (index + 1) * block_size], dtype=np.int64
        )
        parent_hash = hashes[-1] if hashes else salt_hash
        hashes.append(hashlib.sha256(parent_hash + block_tokens.tobytes()).digest())
    return hashes


class BlockPool:
    """The blocks of a cache, each free, in use, or idle (cached without references).

    Args:
        num_blocks: number of blocks.

    Attributes:
        evicted: number of idle blocks that were evicted.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a cache of {num_blocks} blocks: use a positive number")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.evicted = 0

    @property
    def available(self) -> int:
        """Number of blocks that `allocate` can return, free or idle."""
        return len(self._free) + len(self._idle)

    @property
    def references(self) -> int:
        """Total number of references."""
        return sum(self._references)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` block ids with one reference each; None, without effect, if fewer are
        available."""
        if count > self.available:
            return None
        block_ids = []
        for _ in range(count):
            # Free blocks first: an idle block may still serve a later request.
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                self._forget(block)
                self.evicted += 1
            self._references[block] = 1
            block_ids.append(block)
        return block_ids

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block. Idle blocks become used again."""
        for block in blocks:
            self._references[block] += 1
            self._idle.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each block of a sequence, in sequence order.

        Raises:
            ValueError: a block has no reference.
        """
        # Reversed: the last block becomes the least recently used and is evicted first.
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise ValueError(
                    f"block {block} of {self.num_blocks} is not in use: release it once"
                )
            self._references[block] -= 1
            # A block without a hash cannot be found any more, so it is free at once.
            if self._references[block] == 0:
                if self._hashes[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None

    def publish(self, block: int, block_hash: bytes) -> None:
        """Add a full block to the prefix cache, unless the hash has a block already."""
        if block_hash not in self._published and self._hashes[block] is None:
            self._published[block_hash], self._hashes[block] = block, block_hash

    def find(self, block_hash: bytes) -> int | None:
        """Return the cached block of a hash, or None."""
        return self._published.get(block_hash)

    def forget_all(self) -> None:
        """Empty the prefix cache, because the weights have changed."""
        for block in list(self._published.values()):
            self._forget(block)
        self._free += self._idle
        self._idle.clear()

    def _forget(self, block: int) -> None:
        block_hash, self._hashes[block] = self._hashes[block], None
        if block_hash is not None:
            del self._published[block_hash]


class BlockGroup:
    """The blocks of the attention layers that share a block table.

    Args:
        num_blocks: number of blocks.
        block_size: tokens per block.
        window: largest attention window of the layers, in tokens; None with full attention.
        max_per_sequence: largest number of blocks that a sequence holds; None without a bound.

    Attributes:
        pool: the blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        window: int | None = None,
        max_per_sequence: int | None = None,
    ) -> None:
        self.pool, self.window = BlockPool(num_blocks), window
        self._block_size, self._max_per_sequence = block_size, max_per_sequence

    def num_unseen(self, num_tokens: int) -> int:
        """Return how many leading blocks no query sees after `num_tokens` tokens."""
        if self.window is None:
            return 0
        return max(0, num_tokens + 1 - self.window) // self._block_size

    def num_missing(self, num_blocks: int) -> int:
        """Return how many blocks a sequence needs at once to compute `num_blocks` blocks."""
        return (
            num_blocks
            if self._max_per_sequence is None
            else min(num_blocks, self._max_per_sequence)
        )

    def longest_prefix(self, block_hashes: Sequence[bytes], length: int) -> int:
        """Return the largest number of blocks, at most `length`, after which a sequence can
        continue: the prefix cache has all of its blocks that later queries see."""
        if self.window is None:
            cached = (n for n in range(length) if self.pool.find(block_hashes[n]) is None)
            return next(cached, length)
        # From the end: a missing block ends a shorter prefix, whose window starts earlier.
        block = length - 1
        while block >= self.num_unseen(length * self._block_size):
            if self.pool.find(block_hashes[block]) is None:
                length = block
            block -= 1
        return length

    def cached_blocks(self, block_hashes: Sequence[bytes], length: int) -> list[int]:
        """Return the blocks of a prefix of `longest_prefix`; -1 for a block that no query sees."""
        num_unseen = self.num_unseen(length * self._block_size)
        seen = [self.pool.find(block_hash) for block_hash in block_hashes[num_unseen:length]]
        assert None not in seen, "the prefix is cached"
        return [-1] * num_unseen + [block for block in seen if block is not None]
