# SPDX-License-Identifier: Apache-2.0
"""Tiles: where the chunks of sequences begin and end, as the kernels of recurrences read it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megatron.core.ops.sequences import Sequences


@dataclass(frozen=True, eq=False)
class Tiles:
    """Chunks of C tokens that never cross a sequence, numbered sequence after sequence.

    An empty sequence has no chunk.

    Args:
        size: C.
        count: n, of all sequences.
        sequence_count: N.
        tokens: t.
        first: int64 [n] on the device, the first token of each chunk.
        end: int64 [n], the token behind its last.
        begin: int64 [N + 1], the first chunk of each sequence, and n.
    """

    size: int
    count: int
    sequence_count: int
    tokens: int
    first: torch.Tensor
    end: torch.Tensor
    begin: torch.Tensor

    @classmethod
    def of(cls, sequences: Sequences, size: int) -> Tiles:
        """Return the tiles of `size` tokens, made once; the host does not wait.

        Raises:
            ValueError: an empty chunk.
        """
        if size < 1:
            raise ValueError(f"chunks of {size} tokens: use at least 1")
        return sequences.made(("tiles", size), lambda: cls._made(sequences, size))

    @classmethod
    def _made(cls, sequences: Sequences, size: int) -> Tiles:
        bounds = np.asarray(sequences.bounds, dtype=np.int64)
        counts = -(-np.diff(bounds) // size)  # chunks of each sequence
        begin = np.concatenate([[0], np.cumsum(counts)])
        number = np.arange(begin[-1]) - np.repeat(begin[:-1], counts)  # within its sequence
        first = np.repeat(bounds[:-1], counts) + number * size
        end = np.minimum(first + size, np.repeat(bounds[1:], counts))
        return cls(
            size=size,
            count=int(begin[-1]),
            sequence_count=sequences.count,
            tokens=sequences.tokens,
            first=sequences.moved(first),
            end=sequences.moved(end),
            begin=sequences.moved(begin),
        )
