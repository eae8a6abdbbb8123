# SPDX-License-Identifier: Apache-2.0
"""Block pool of the paged KV cache: reference counts and the prefix cache.

A full block is identified by a hash of all tokens up to its end, so sequences with a common prefix
share blocks. A block without references stays in the prefix cache until memory is needed. Blocks
are evicted in LRU order, and the last block of a sequence before its first, so that a block is
never evicted before the blocks that continue it.

The pool is host bookkeeping only and touches no tensor.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


def hash_blocks(
    tokens: Sequence[int], block_size: int, *, prefix_hashes: Sequence[bytes] = ()
) -> list[bytes]:
    """Return the hash of each full block of a sequence.

    A hash is SHA-256 of the previous block's hash and the tokens of the block, so equal hashes mean
    equal prefixes.

    Args:
        tokens: token ids of the sequence.
        block_size: tokens per block.
        prefix_hashes: hashes of the first blocks, to avoid computing them again.
    """
    hashes = list(prefix_hashes)
    for index in range(len(hashes), len(tokens) // block_size):
        block_tokens = np.asarray(
            tokens[index * block_size : (index + 1) * block_size], dtype=np.int64
        )
        parent_hash = hashes[-1] if hashes else b""
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
