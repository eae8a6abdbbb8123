# SPDX-License-Identifier: Apache-2.0
"""Feed rows to a model or a layer in steps of any size, through a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from megatron.core.context_parallel import SequenceLayout
from megatron.core.context_parallel.layout import PagedRows
from megatron.core.inference.cache import PagedCache
from megatron.core.ops.paged_attention import PagedBatch
from megatron.core.ops.sequences import Sequences
from megatron.core.transformer import CacheShapes


class PagedSteps:
    """A paged cache with shuffled blocks for each row, and the layouts of steps.

    Args:
        shapes: shapes of the cached tensors.
        rows: number of rows.
        length: maximum number of tokens of a row.
        block_size: tokens per block.

    Attributes:
        cache: the paged cache.
        num_fed: tokens of each row that have been fed.
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
        self.num_fed, self.order = [0] * rows, list(range(rows))

    def layout(self, counts: Sequence[int]) -> SequenceLayout:
        """Return the layout of a step that feeds `counts` tokens of each row."""
        size = self.cache.block_size
        fed = [row for row, count in enumerate(counts) if count]
        self.order = sorted(fed, key=lambda row: counts[row] > 1)
        decode = sum(counts[row] == 1 for row in fed)
        self.counts = [counts[row] for row in self.order]
        positions = [(row, self.num_fed[row] + n) for row in self.order for n in range(counts[row])]
        for row in fed:
            self.num_fed[row] += counts[row]
        bounds = [0, *accumulate(self.counts)]
        slots = [int(self.table[row, at // size]) * size + at % size for row, at in positions]
        prefill = None
        if decode < len(fed):
            prefill = Sequences([bound - decode for bound in bounds[decode:]])
        self.token_positions = positions
        paged = PagedRows(
            batch=PagedBatch(
                block_table=self.table[self.order],
                query_bounds=torch.tensor(bounds).int(),
                context_lengths=torch.tensor([self.num_fed[row] for row in self.order]).int(),
                max_query=max(self.counts),
                max_context=max(self.num_fed),
            ),
            slot_mapping=torch.tensor(slots),
            state_slots=torch.tensor([self.slots[row] for row in self.order]),
            decode_rows=decode,
            prefill=prefill,
        )
        return SequenceLayout(torch.tensor([at for _, at in positions]), paged=paged)

    def packed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tokens of the last step, [t, ...] of x [s, b, ...]."""
        return torch.stack([x[at, row] for row, at in self.token_positions])

    def unpacked(self, packed: torch.Tensor, into: torch.Tensor) -> None:
        """Scatter the packed tokens [t, ...] of the last step into x [s, b, ...]."""
        for n, (row, at) in enumerate(self.token_positions):
            into[at, row] = packed[n]
