# SPDX-License-Identifier: Apache-2.0
"""The digests of a checkpoint: xxh3-64, or BLAKE2b-64 where xxhash is not installed.

A digest's text says which it is: 16 hexadecimal digits are xxh3-64, `blake2b:` and 16 digits the
other, which every Python has but which takes about ten times as long. Either is read wherever its
algorithm is at hand.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

from megatron.core.dist_checkpointing.errors import CheckpointError

XXH3, BLAKE2B = "xxh3", "blake2b"


class Hasher(Protocol):
    """Digests a stream of pieces."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Take in a piece."""

    def hexdigest(self) -> str:
        """Return 16 hexadecimal digits over all pieces so far."""


def written_kind() -> str:
    """Return the kind of digest that this machine writes."""
    try:
        import xxhash  # noqa: F401
    except ImportError:
        return BLAKE2B
    return XXH3


def new_hasher(kind: str) -> Hasher:
    """Start a digest. Raises CheckpointError if its package is not installed."""
    if kind == BLAKE2B:
        return hashlib.blake2b(digest_size=8)
    try:
        import xxhash
    except ImportError:
        raise CheckpointError(
            "the checkpoint's digests are xxh3, which needs the package xxhash: pip install xxhash"
        ) from None
    return xxhash.xxh3_64()


def kind_of(text: str) -> str:
    """Return the kind of a digest by its text."""
    return BLAKE2B if text.startswith(f"{BLAKE2B}:") else XXH3


def text_of(hasher: Hasher, kind: str) -> str:
    """Return the text of a finished digest."""
    return hasher.hexdigest() if kind == XXH3 else f"{kind}:{hasher.hexdigest()}"


def digest(data: bytes | memoryview, kind: str | None = None) -> str:
    """Return the digest of `data`: of a kind, or of the one that this machine writes."""
    kind = kind or written_kind()
    hasher = new_hasher(kind)
    hasher.update(data)
    return text_of(hasher, kind)
