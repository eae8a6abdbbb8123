# SPDX-License-Identifier: Apache-2.0
"""The exchange of headwise context parallelism: whole rows for a part of the heads, and back.

One all-to-all each way, however many sequences are packed and whatever the columns of a head are:
they lie head after head, so the cut over ranks is a plain one. On the way there a copy packs what
each rank is sent, and what comes is left as it lies: `Places` say where the packed tokens are. On
the way back a gather puts tokens in the order that ranks get, and what comes is again left as it
lies. So what reads it, the prologue or the norm and gate of a mixer, folds the order in its loads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megatron.core.comm.collectives import all_to_all
from megatron.core.context_parallel import SequenceLayout
from megatron.core.context_parallel.token_rows import TokenRows
from megatron.core.ops.places import Places
from megatron.core.process_groups import Group


@dataclass(frozen=True, eq=False)
class Placed:
    """What came out of a recurrence for s · b tokens and n heads, or units of them, as it lies.

    Args:
        rows: [m, n/parts, ...].
        places: of the s · b · parts parts of tokens, which of `rows` each is; None: in their order.
        parts: in how many each token's heads are; part by part, so many heads after another.
    """

    rows: torch.Tensor
    places: Places | None = None
    parts: int = 1

    @property
    def order(self) -> torch.Tensor | None:
        """int64 [s · b · parts], the row of each part of a token, -1 of padding."""
        return None if self.places is None else self.places.tokens

    def beside(self, x: torch.Tensor) -> torch.Tensor:
        """Return parts of tokens [s · b · parts, n/parts, ...], a view of x [s, b, n, ...]."""
        return x.unflatten(2, (self.parts, -1)).flatten(0, 2)

    def joined(self) -> torch.Tensor:
        """Return tokens in their order, [s · b, n, ...], zero where padding is."""
        rows = self.rows if self.places is None else self.places.unpack(self.rows)
        return rows.unflatten(0, (-1, self.parts)).flatten(1, 2)


def to_heads(
    x: torch.Tensor, layout: SequenceLayout, group: Group
) -> tuple[torch.Tensor, Places | None]:
    """Give this rank the tokens of whole rows, for its part of the heads.

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
    return x.flatten(0, 1) if group.size == 1 else _ToHeads.apply(x, group), rows.places


def to_tokens(y: torch.Tensor, layout: SequenceLayout, group: Group) -> Placed:
    """Give this rank its own tokens back, for all heads: undo `to_heads`.

    Args:
        y: [t, n/cp, ...], packed.
        layout: as for `to_heads`.
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
    return Placed(_ToTokens.apply(y, rows, group), _received(rows, group.size), group.size)


def _received(rows: TokenRows, ranks: int) -> Places | None:
    """Return where the parts of tokens are in what comes from all ranks, made once."""
    count = rows.length * rows.batch
    moved = rows.sequences.moved

    def make() -> Places | None:
        # Rank after rank, of each all tokens; row i is part i // tokens of token i % tokens.
        lies = np.arange(count).reshape(-1, ranks).T.reshape(-1)
        return Places.of(lies, count, moved)

    return rows.sequences.made(("received", ranks), make)


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


def _sent(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return what came, [cp · s/cp · b, n/cp, w], of [s/cp, b, n, w]: a copy, an all-to-all."""
    parts = x.unflatten(2, (group.size, -1)).permute(2, 0, 1, 3, 4)  # [cp, s/cp, b, n/cp, w]
    return all_to_all(parts.contiguous().flatten(0, 2), group)


def _returned(rows: torch.Tensor, group: Group, batch: int) -> torch.Tensor:
    """Return [s/cp, b, n, w] from [cp · s/cp · b, n/cp, w]: an all-to-all, a copy."""
    parts = all_to_all(rows, group).unflatten(0, (group.size, -1, batch))
    return parts.permute(1, 2, 0, 3, 4).flatten(2, 3)  # from [cp, s/cp, b, n/cp, w]


class _ToHeads(torch.autograd.Function):
    """forward `_sent`; dgrad `_returned` of the gradient. Saves nothing."""

    @staticmethod
    def forward(ctx, x, group: Group):
        ctx.group, ctx.batch = group, x.shape[1]
        return _sent(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _returned(grad, ctx.group, ctx.batch), None


class _ToTokens(torch.autograd.Function):
    """forward: a gather, an all-to-all; dgrad: an all-to-all, a gather. Saves nothing."""

    @staticmethod
    def forward(ctx, y, rows: TokenRows, group: Group):
        ctx.rows, ctx.group = rows, group
        return all_to_all(rows.put_back(y).flatten(0, 1), group)

    @staticmethod
    def backward(ctx, grad):
        back = all_to_all(grad, ctx.group)
        return ctx.rows.take(back.unflatten(0, (-1, ctx.rows.batch))), None, None
