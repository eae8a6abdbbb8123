# SPDX-License-Identifier: Apache-2.0
"""All-to-all context parallelism: the tokens of whole rows for 1/cp of the heads, and back.

Attention (DeepSpeed Ulysses, Jacobs et al. 2023, arXiv 2309.14509) and recurrences exchange tokens
for heads alike: `all_to_all_cp2hp` scatters heads and gathers tokens, `all_to_all_hp2cp` reverses
it. A head is consecutive columns, so the split over ranks is a plain one, and there is one
all-to-all each way, however many sequences are packed.

Attention sorts the received tokens by place. A recurrence keeps them in the received order: on the
way there `PackingIndices` give the indices of the packed tokens; on the way back a gather puts
tokens in the order that ranks receive. So the kernels that read the result, the prologue or the
norm and gate of a mixer, apply the order in their loads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megatron.core.comm.collectives import all_to_all
from megatron.core.context_parallel.layout import PackedTokens, SequenceLayout
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
class Placed:
    """What came out of a recurrence for s · b tokens and n heads, or units of them, as stored.

    Args:
        rows: [m, n/parts, ...].
        places: of the s · b · parts parts of tokens, which of `rows` each is; None: in their order.
        parts: in how many each token's heads are; part by part, so many heads after another.
    """

    rows: torch.Tensor
    places: PackingIndices | None = None
    parts: int = 1

    @property
    def order(self) -> torch.Tensor | None:
        """int64 [s · b · parts], the row of each part of a token, -1 of padding."""
        return None if self.places is None else self.places.tokens

    def split_parts(self, x: torch.Tensor) -> torch.Tensor:
        """Return parts of tokens [s · b · parts, n/parts, ...], a view of x [s, b, n, ...]."""
        return x.unflatten(2, (self.parts, -1)).flatten(0, 2)

    def joined(self) -> torch.Tensor:
        """Return tokens in their order, [s · b, n, ...], zero where padding is."""
        rows = self.rows if self.places is None else self.places.unpack(self.rows)
        return rows.unflatten(0, (-1, self.parts)).flatten(1, 2)


def scatter_heads(
    x: torch.Tensor, layout: SequenceLayout, group: Group
) -> tuple[torch.Tensor, PackingIndices | None]:
    """Give this rank the tokens of whole rows, for its share of the heads.

    Args:
        x: [s/cp, b, n, w], this rank's tokens, w columns for each of n heads; may be a slice of the
            last dimension.
        layout: of these tokens.
        group: cp; rank r gets heads r · n/cp to (r + 1) · n/cp.

    Returns:
        (rows [cp · s/cp · b, n/cp, w], a view of `x` on one rank; places, which of them the tokens
        of all rows are, one document after another, as `layout.whole_rows` packs them; None: they
        lie so).

    Raises:
        ValueError: heads that do not divide over the ranks, or tokens that the layout does not fit.
    """
    rows = _rows(x.shape[0], x.shape[1], layout, group)
    if x.shape[2] % group.size:
        raise ValueError(
            f"{x.shape[2]} heads do not divide over {group.size} context parallel ranks: use "
            "linear-cp-mode segments"
        )
    gathered = x.flatten(0, 1) if group.size == 1 else apply_function(_ScatterHeads, x, group)
    return gathered, rows.places


def gather_heads(y: torch.Tensor, layout: SequenceLayout, group: Group) -> Placed:
    """Give this rank its own tokens back, for all heads: undo `scatter_heads`.

    Args:
        y: [t, n/cp, ...], packed.
        layout: as for `scatter_heads`.
        group: cp.

    Returns:
        s/cp · b tokens of n heads, each in cp parts, zero or -1 where padding is.

    Raises:
        ValueError: tokens that the layout does not fit.
    """
    length = layout.positions.shape[0]
    rows = _rows(length, _batch(y, layout), layout, group)
    if group.size == 1:
        return Placed(y, rows.places)
    return Placed(
        apply_function(_GatherHeads, y, rows, group), _received(rows, group.size), group.size
    )


def _received(rows: PackedTokens, ranks: int) -> PackingIndices | None:
    """Return where the parts of tokens are in what comes from all ranks, made once."""
    count = rows.length * rows.batch
    moved = rows.sequences.to_device

    def make() -> PackingIndices | None:
        # Rank after rank, of each all tokens; row i is part i // tokens of token i % tokens.
        lies = np.arange(count).reshape(-1, ranks).T.reshape(-1)
        return PackingIndices.of(lies, count, moved)

    return rows.sequences.cached(("received", ranks), make)


def _batch(y: torch.Tensor, layout: SequenceLayout) -> int:
    """Return b: the layout's, or how many of its rows the tokens make."""
    if layout.rows is not None:
        return layout.rows
    length = layout.positions.shape[0] if layout.cut is None else layout.cut.length
    if y.shape[0] % length:
        raise ValueError(f"{y.shape[0]} tokens are no rows of {length}")
    return y.shape[0] // length


def _rows(length: int, batch: int, layout: SequenceLayout, group: Group) -> PackedTokens:
    """Return how the tokens of whole rows are packed; they must be those of the group's ranks."""
    rows = layout.whole_rows(batch)
    if rows.length != length * group.size:
        raise ValueError(
            f"{length} tokens a row on each of {group.size} context parallel ranks, the layout has "
            f"{rows.length}: give this rank's, layout.local(tokens)"
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
        back = all_to_all(grad, ctx.group)
        return ctx.rows.take(back.unflatten(0, (-1, ctx.rows.batch))), None, None
