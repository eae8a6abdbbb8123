# SPDX-License-Identifier: Apache-2.0
"""The exchange of headwise context parallelism: whole rows for a part of the heads, and back.

One all-to-all each way, however many sequences are packed and whatever the columns of a head are:
they lie head after head, so the cut over ranks is a plain one. Around it one copy packs what each
rank is sent, and one gather puts what it gets in the order of its rows.
"""

from __future__ import annotations

import torch

from megatron.core.comm.collectives import all_to_all
from megatron.core.context_parallel import SequenceLayout
from megatron.core.context_parallel.token_rows import TokenRows
from megatron.core.process_groups import Group


def to_heads(x: torch.Tensor, layout: SequenceLayout, group: Group) -> torch.Tensor:
    """Give this rank the tokens of whole rows, for its part of the heads.

    Args:
        x: [s/cp, b, n, w], this rank's tokens, w columns for each of n heads; may be a slice of the
            last dimension.
        layout: of these tokens.
        group: cp; rank r gets heads r · n/cp to (r + 1) · n/cp.

    Returns:
        [t, n/cp, w], the tokens of all rows one document after another, as `layout.whole_rows`
        packs them; a view of `x` where one rank has them in that order.

    Raises:
        ValueError: heads that do not divide over the ranks, or tokens that the layout does not fit.
    """
    rows = _rows(x.shape[0], x.shape[1], layout, group)
    if x.shape[2] % group.size:
        raise ValueError(
            f"{x.shape[2]} heads do not divide over {group.size} context parallel ranks: use "
            "linear-cp-mode segments"
        )
    return rows.pack(x) if group.size == 1 else _ToHeads.apply(x, rows, group)


def to_tokens(y: torch.Tensor, layout: SequenceLayout, group: Group) -> torch.Tensor:
    """Give this rank its own tokens back, for all heads: undo `to_heads`.

    Args:
        y: [t, n/cp, w].
        layout: as for `to_heads`.
        group: cp.

    Returns:
        [s/cp, b, n, w], zero where padding is.

    Raises:
        ValueError: tokens that the layout does not fit.
    """
    length = layout.positions.shape[0]
    rows = _rows(length, _batch(y, layout), layout, group)
    return rows.unpack(y) if group.size == 1 else _ToTokens.apply(y, rows, group)


def _batch(y: torch.Tensor, layout: SequenceLayout) -> int:
    """Return b: the layout's, or how many of its rows the tokens make."""
    if layout.rows is not None:
        return layout.rows
    length = layout.positions.shape[0] if layout.cut is None else layout.cut.length
    if y.shape[0] % length:
        raise ValueError(f"{y.shape[0]} tokens are no rows of {length}")
    return y.shape[0] // length


def _rows(length: int, batch: int, layout: SequenceLayout, group: Group) -> TokenRows:
    """Return how the tokens of whole rows are packed; they must be those of the group's ranks."""
    rows = layout.whole_rows(batch)
    if rows.length != length * group.size:
        raise ValueError(
            f"{length} tokens a row on each of {group.size} context parallel ranks, the layout has "
            f"{rows.length}: give this rank's, layout.local(tokens)"
        )
    return rows


def _heads(x: torch.Tensor, rows: TokenRows, group: Group) -> torch.Tensor:
    """Return [t, n/cp, w] from [s/cp, b, n, w]: a copy, an all-to-all, a gather."""
    parts = x.unflatten(2, (group.size, -1)).permute(2, 0, 1, 3, 4)  # [cp, s/cp, b, n/cp, w]
    return rows.take(all_to_all(parts.contiguous().flatten(0, 1), group))


def _tokens(y: torch.Tensor, rows: TokenRows, group: Group) -> torch.Tensor:
    """Return [s/cp, b, n, w] from [t, n/cp, w]: a gather, an all-to-all, a copy."""
    parts = all_to_all(rows.put_back(y), group).unflatten(0, (group.size, -1))
    return parts.permute(1, 2, 0, 3, 4).flatten(2, 3)  # from [cp, s/cp, b, n/cp, w]


class _ToHeads(torch.autograd.Function):
    """forward `_heads`; dgrad `_tokens` of the gradient. Saves nothing."""

    @staticmethod
    def forward(ctx, x, rows: TokenRows, group: Group):
        ctx.rows, ctx.group = rows, group
        return _heads(x, rows, group)

    @staticmethod
    def backward(ctx, grad):
        return _tokens(grad, ctx.rows, ctx.group), None, None


class _ToTokens(torch.autograd.Function):
    """forward `_tokens`; dgrad `_heads` of the gradient. Saves nothing."""

    @staticmethod
    def forward(ctx, y, rows: TokenRows, group: Group):
        ctx.rows, ctx.group = rows, group
        return _tokens(y, rows, group)

    @staticmethod
    def backward(ctx, grad):
        return _heads(grad, ctx.rows, ctx.group), None, None
