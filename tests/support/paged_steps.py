# SPDX-License-Identifier: Apache-2.0
"""Rows that are fed to a model or a layer in steps of any sizes, through a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from megatron.core.context_parallel import SequenceLayout
from megatron.core.context_parallel.layout import PagedRows
from megatron.core.inference.cache import CacheShapes, PagedCache
from megatron.core.ops.paged_attention import PagedBatch
from megatron.core.ops.sequences import Sequences


class PagedSteps:
    """A cache whose rows have shuffled blocks of their own, and the layouts of steps.

    Args:
        shapes: what is kept.
        rows: how many there are.
        length: most tokens of a row.
        block_size: tokens of a block.

    Attributes:
        cache: the memory.
        done: tokens of each row that have been fed.
        order: the rows of the last step, in the order of its packed tokens.
    """

    def __init__(
        self, shapes: CacheShapes, *, rows: int, length: int, block_size: int = 16
    ) -> None:
        width = -(-length // block_size)
        self.cache = PagedCache(
            shapes, num_blocks=rows * width + 1, block_size=block_size, num_slots=rows + 1
        )
        shuffled = torch.randperm(rows * width + 1, generator=torch.Generator().manual_seed(5))
        self.table = shuffled[: rows * width].view(rows, width).int()
        self.slots = list(reversed(self.cache.states.take(rows)))
        self.done, self.order = [0] * rows, list(range(rows))

    def layout(self, counts: Sequence[int]) -> SequenceLayout:
        """Return the layout of a step that feeds so many tokens of each row; they count as fed."""
        size = self.cache.block_size
        fed = [row for row, count in enumerate(counts) if count]
        self.order = sorted(fed, key=lambda row: counts[row] > 1)
        decode = sum(counts[row] == 1 for row in fed)
        self.counts = [counts[row] for row in self.order]
        places = [(row, self.done[row] + n) for row in self.order for n in range(counts[row])]
        for row in fed:
            self.done[row] += counts[row]
        bounds = [0, *accumulate(self.counts)]
        slots = [int(self.table[row, at // size]) * size + at % size for row, at in places]
        prefill = None
        if decode < len(fed):
            prefill = Sequences([bound - decode for bound in bounds[decode:]])
        self.places = places
        paged = PagedRows(
            batch=PagedBatch(
                block_table=self.table[self.order],
                query_bounds=torch.tensor(bounds).int(),
                context_lengths=torch.tensor([self.done[row] for row in self.order]).int(),
                max_query=max(self.counts),
                max_context=max(self.done),
            ),
            slot_mapping=torch.tensor(slots),
            state_slots=torch.tensor([self.slots[row] for row in self.order]),
            decode_rows=decode,
            prefill=prefill,
        )
        return SequenceLayout(torch.tensor([at for _, at in places]), paged=paged)

    def packed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tokens of the last step, [t, ...] of x [s, b, ...]."""
        return torch.stack([x[at, row] for row, at in self.places])

    def unpacked(self, packed: torch.Tensor, into: torch.Tensor) -> None:
        """Put [t, ...] of the last step where its tokens are in x [s, b, ...]."""
        for n, (row, at) in enumerate(self.places):
            into[at, row] = packed[n]
