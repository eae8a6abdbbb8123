# SPDX-License-Identifier: Apache-2.0
"""All-to-all context parallelism: exchange sequence sharding for head sharding, and back.

Attention (DeepSpeed Ulysses, Jacobs et al. 2023, arXiv 2309.14509) and recurrences both use it:
`all_to_all_cp2hp` scatters heads and gathers tokens, `all_to_all_hp2cp` reverses it. The columns of
a head are contiguous, so there is one all-to-all in each direction, however many sequences are
packed.

Attention sorts the received tokens by row index. A recurrence keeps them in the received order:
`PackingIndices` are the gather indices of the packed tokens, and before the reverse all-to-all a
gather puts tokens in the order that the ranks expect. The kernels that read the result, the
prologue or the norm and gate of a mixer, apply the gather indices in their loads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megatron.core.comm.collectives import all_to_all
from megatron.core.context_parallel.layout import SequenceLayout
from megatron.core.context_parallel.packed_tokens import PackedTokens
from megatron.core.ops.backend_choice import apply_function
from megatron.core.ops.sequences import PackingIndices
from megatron.core.process_groups import Group


def all_to_all_cp2hp(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Scatter heads and gather tokens: a copy, an all-to-all. Not differentiable.

    Args:
        x: [s/cp, b, n, w], this rank's tokens.
        group: cp; rank r gets heads r · n/cp to (r + 1) · n/cp.

    Returns:
        [cp · s/cp, b, n/cp, w], the tokens of rank 0, then of rank 1, ...
    """
    head_shards = x.unflatten(2, (group.size, -1)).permute(2, 0, 1, 3, 4)  # [cp, s/cp, b, n/cp, w]
    return all_to_all(head_shards.contiguous().flatten(0, 1), group)


def all_to_all_hp2cp(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Gather heads and scatter tokens: undo `all_to_all_cp2hp`. Not differentiable.

    Args:
        x: [cp · s/cp, b, n/cp, w].
        group: cp.

    Returns:
        [s/cp, b, cp, n/cp, w], a view; the heads of rank 0, then of rank 1, ...
    """
    received = all_to_all(x, group).unflatten(0, (group.size, -1))  # [cp, s/cp, b, n/cp, w]
    return received.permute(1, 2, 0, 3, 4)


@dataclass(frozen=True, eq=False)
class RecurrenceOutput:
    """The output of a recurrence for s · b tokens and n heads, in storage order.

    Args:
        rows: [m, n/shards, ...].
        indices: gather indices into `rows` of the s · b · shards head shards of all tokens; None if
            they are in order.
        head_shards: number of shards of each token's heads.
    """

    rows: torch.Tensor
    indices: PackingIndices | None = None
    head_shards: int = 1

    @property
    def order(self) -> torch.Tensor | None:
        """int64 [s · b · shards], the row of each head shard of a token, -1 for padding."""
        return None if self.indices is None else self.indices.tokens

    def split_head_shards(self, x: torch.Tensor) -> torch.Tensor:
        """Return head shards [s · b · shards, n/shards, ...], a view of x [s, b, n, ...]."""
        return x.unflatten(2, (self.head_shards, -1)).flatten(0, 2)

    def joined(self) -> torch.Tensor:
        """Return tokens in order, [s · b, n, ...], zero for padding."""
        rows = self.rows if self.indices is None else self.indices.unpack(self.rows)
        return rows.unflatten(0, (-1, self.head_shards)).flatten(1, 2)


def scatter_heads(
    x: torch.Tensor, layout: SequenceLayout, group: Group
) -> tuple[torch.Tensor, PackingIndices | None]:
    """Exchange this rank's tokens with all heads for the tokens of whole rows with 1/cp of the
    heads.

    Args:
        x: [s/cp, b, n, w], this rank's tokens, w columns for each of n heads; may be a slice of the
            last dimension.
        layout: layout of the tokens.
        group: cp; rank r gets heads r · n/cp to (r + 1) · n/cp.

    Returns:
        (rows [cp · s/cp · b, n/cp, w], a view of `x` on a single rank; gather indices of the packed
        tokens of all rows, document by document, see `layout.whole_rows`; None if the rows have
        this order).

    Raises:
        ValueError: heads that do not divide over the ranks, or a layout of other tokens.
    """
    rows = _rows(x.shape[0], x.shape[1], layout, group)
    if x.shape[2] % group.size:
        raise ValueError(
            f"{x.shape[2]} heads do not divide over {group.size} context parallel ranks: use "
            "linear-cp-mode segments"
        )
    gathered = x.flatten(0, 1) if group.size == 1 else apply_function(_ScatterHeads, x, group)
    return gathered, rows.indices


def gather_heads(y: torch.Tensor, layout: SequenceLayout, group: Group) -> RecurrenceOutput:
    """Exchange the tokens of whole rows with 1/cp of the heads for this rank's tokens with all
    heads: undo `scatter_heads`.

    Args:
        y: [t, n/cp, ...], packed.
        layout: see `scatter_heads`.
        group: cp.

    Returns:
        s/cp · b tokens of n heads in cp head shards. A padding token has a zero row or index -1.

    Raises:
        ValueError: a layout of other tokens.
    """
    length = layout.positions.shape[0]
    rows = _rows(length, _batch(y, layout), layout, group)
    if group.size == 1:
        return RecurrenceOutput(y, rows.indices)
    return RecurrenceOutput(
        apply_function(_GatherHeads, y, rows, group), _received(rows, group.size), group.size
    )


def _received(rows: PackedTokens, ranks: int) -> PackingIndices | None:
    """Return the gather indices of head shards in the all-to-all's output, computed once."""
    count = rows.length * rows.batch
    to_device = rows.sequences.to_device

    def make() -> PackingIndices | None:
        # The output has all tokens of rank 0's heads, then of rank 1's heads, ...: row i is head
        # shard i // tokens of token i % tokens.
        indices = np.arange(count).reshape(-1, ranks).T.reshape(-1)
        return PackingIndices.of(indices, count, to_device)

    return rows.sequences.cached(("received", ranks), make)


def _batch(y: torch.Tensor, layout: SequenceLayout) -> int:
    """Return b: the layout's, or the number of rows of its length in the tokens."""
    if layout.rows is not None:
        return layout.rows
    length = layout.positions.shape[0] if layout.sharding is None else layout.sharding.length
    if y.shape[0] % length:
        raise ValueError(f"{y.shape[0]} tokens are not a multiple of the row length {length}")
    return y.shape[0] // length


def _rows(length: int, batch: int, layout: SequenceLayout, group: Group) -> PackedTokens:
    """Return the packing of whole rows; raise ValueError if the layout is for another group."""
    rows = layout.whole_rows(batch)
    if rows.length != length * group.size:
        raise ValueError(
            f"{length} tokens per row on each of {group.size} context parallel ranks, but the "
            f"layout has {rows.length}: pass this rank's tokens, layout.local(tokens)"
        )
    return rows


class _ScatterHeads(torch.autograd.Function):
    """forward: an all-to-all, tokens to heads; dgrad: back. Saves nothing."""

    @staticmethod
    def forward(ctx, x, group: Group):
        ctx.group, ctx.batch = group, x.shape[1]
        return all_to_all_cp2hp(x, group).flatten(0, 1)  # [cp · s/cp · b, n/cp, w]

    @staticmethod
    def backward(ctx, grad):
        rows = grad.unflatten(0, (-1, ctx.batch))
        return all_to_all_hp2cp(rows, ctx.group).flatten(2, 3), None


class _GatherHeads(torch.autograd.Function):
    """forward: a gather, an all-to-all; dgrad: an all-to-all, a gather. Saves nothing."""

    @staticmethod
    def forward(ctx, y, rows: PackedTokens, group: Group):
        ctx.rows, ctx.group = rows, group
        return all_to_all(rows.put_back(y).flatten(0, 1), group)

    @staticmethod
    def backward(ctx, grad):
        grad_rows = all_to_all(grad, ctx.group)
        return ctx.rows.take(grad_rows.unflatten(0, (-1, ctx.rows.batch))), None, None
