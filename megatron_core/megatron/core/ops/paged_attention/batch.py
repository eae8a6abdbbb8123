# SPDX-License-Identifier: Apache-2.0
"""Which pages hold the keys of each row of a batch, and which tokens of the batch are new."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedBatch:
    """The rows of one engine step: packed new tokens, and the pages that hold their contexts.

    A page is a block of the cache. Token number p of row i lies in page block_table[i, p // size],
    at place p % size. The new tokens of a row are the last ones of its context, and their keys and
    values are in the cache before attention is asked for. Numbers on the device are never read by
    the host, which knows two upper bounds instead: so a CUDA graph can be captured with the bounds
    of its bucket, and replayed with any batch that fits.

    Padding is inert. A row of context length 0 gets out 0 and lse -inf for its tokens, and so do
    tokens behind the last row; a row without new tokens does nothing. Entries of the table past a
    context, or wholly before what a window still sees, are never used and may hold anything.

    Args:
        block_table: int32 [b, blocks of a row].
        query_bounds: int32 [b + 1], where each row's new tokens begin; the first is 0.
        context_lengths: int32 [b], tokens of each row in the cache, the new ones too.
        max_query: no row has more new tokens.
        max_context: no row has a longer context.

    Raises:
        ValueError: shapes, dtypes or bounds that do not fit.
    """

    block_table: torch.Tensor
    query_bounds: torch.Tensor
    context_lengths: torch.Tensor
    max_query: int
    max_context: int

    def __post_init__(self) -> None:
        rows = self.context_lengths.numel()
        for name, x, shape, fits in (
            ("context_lengths", self.context_lengths, "[b]", self.context_lengths.ndim == 1),
            ("query_bounds", self.query_bounds, "[b + 1]", self.query_bounds.shape == (rows + 1,)),
            (
                "block_table",
                self.block_table,
                "[b, blocks]",
                self.block_table.shape[:-1] == (rows,),
            ),
        ):
            if not fits or x.dtype != torch.int32 or not _is_dense(x) or x.device != self.device:
                raise ValueError(
                    f"paged attention: {name} {tuple(x.shape)} {x.dtype} on {x.device} must be"
                    f" int32 {shape}, b = {rows}, on one device, its last dimension dense"
                )
        if self.max_query < 1 or self.max_context < 1:
            raise ValueError(
                f"paged attention: max_query={self.max_query} and max_context={self.max_context}"
                " must be at least 1: give the bounds of the largest batch"
            )

    @property
    def device(self) -> torch.device:
        """Where table, bounds and lengths are."""
        return self.context_lengths.device

    @property
    def rows(self) -> int:
        """How many rows the batch has, padding included."""
        return self.context_lengths.shape[0]


def _is_dense(x: torch.Tensor) -> bool:
    """Say whether the last dimension has no gaps."""
    return x.stride(-1) == 1 or x.shape[-1] <= 1
