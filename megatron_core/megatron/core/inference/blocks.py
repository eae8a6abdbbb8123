# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a paged cache are whose: reference counts, and blocks that are kept for reuse.

A full block is known by the digest of all tokens up to its end, so rows that begin alike find each
other's blocks (a prefix cache). A block that no row refers to any more keeps its tokens until
memory is needed: the least recently used goes first, and of a row's blocks the last before the
first, so a block never goes before those that continue it.

Pure bookkeeping on the host: no tensor is touched.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


def block_digests(
    tokens: Sequence[int], block_size: int, *, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Return a digest for each full block of `tokens`: of these and of all tokens before them.

    SHA-256 of the digest before and the block's tokens, so equal digests mean equal prefixes.

    Args:
        tokens: of a row.
        block_size: tokens of a block.
        known: digests of its first blocks, which are not computed again.
    """
    found = list(known)
    for block in range(len(found), len(tokens) // block_size):
        part = np.asarray(tokens[block * block_size : (block + 1) * block_size], dtype=np.int64)
        before = found[-1] if found else b""
        found.append(hashlib.sha256(before + part.tobytes()).digest())
    return found


class BlockPool:
    """The blocks of a cache: free, referred to by rows, or idle (kept for reuse).

    Args:
        num_blocks: how many there are.

    Attributes:
        evicted: idle blocks whose tokens were given up for others.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a cache of {num_blocks} blocks: use a positive number")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._published: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self.evicted = 0

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give out: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def references(self) -> int:
        """References of all rows to all blocks."""
        return sum(self._references)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks with one reference each, or None and nothing if there are fewer."""
        if count > self.available:
            return None
        found = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                self._forget(block)
                self.evicted += 1
            self._references[block] = 1
            found.append(block)
        return found

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block; idle ones are in use again."""
        for block in blocks:
            self._references[block] += 1
            self._idle.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Take a reference from each block of a row, given in the row's order.

        Raises:
            ValueError: a block that nobody refers to.
        """
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise ValueError(f"block {block} of {self.num_blocks} is not in use: release once")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._digests[block] is None:
                    self._free.append(block)
                else:
                    self._idle[block] = None

    def publish(self, block: int, digest: bytes) -> None:
        """Let others find a full block of this digest; if there is one already, that stays."""
        if digest not in self._published and self._digests[block] is None:
            self._published[digest], self._digests[block] = block, digest

    def find(self, digest: bytes) -> int | None:
        """Return the block of this digest, or None."""
        return self._published.get(digest)

    def forget_all(self) -> None:
        """Let no block be found any more: the weights have changed."""
        for block in list(self._published.values()):
            self._forget(block)
        self._free += self._idle
        self._idle.clear()

    def _forget(self, block: int) -> None:
        digest, self._digests[block] = self._digests[block], None
        if digest is not None:
            del self._published[digest]
