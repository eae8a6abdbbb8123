# SPDX-License-Identifier: Apache-2.0
"""Decays of a recurrence: sums of logarithms over a chunk, and their differences, in full accuracy.

exp(a_i - a_j) is off by as much as a_i - a_j is, and the rounding of two large sums is large. So
sums are fp64 until they have been subtracted, or are given in two parts, of which the larger are
subtracted first: that is exact where the difference is small, and where it is not, nothing is left.
"""

from __future__ import annotations

import torch

#: A decay below this is as good as -inf, whose sums and differences would not be numbers. Its
#: exponential is 0, so nothing behind it sees anything before it, and its gradient is 0.
LOWEST_DECAY = -1e4


def decay_sums(decay: torch.Tensor) -> torch.Tensor:
    """Return a, the decays [..., C] of a chunk summed up to each token, in fp64."""
    wide = decay.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    return wide.clamp_(min=LOWEST_DECAY).cumsum(-1)


def in_two_parts(sums: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows [..., C, 4] and columns [..., 4, C] whose product is a_i - a_j, in `dtype`.

    Args:
        sums: a [..., C], fp64.
        dtype: of the parts, each sum's own and what that rounds off.
    """
    large = sums.to(dtype)
    small = (sums - large).to(dtype)
    ones = torch.ones_like(large)
    rows = torch.stack([large, ones, small, ones], -1)
    return rows, torch.stack([ones, -large, ones, -small], -2)


def decay_differences(
    rows: torch.Tensor, columns: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a_i - a_j [n, C, C] for i >= j, else -inf, from what `in_two_parts` made.

    Args:
        rows: [n, C, 4].
        columns: [n, 4, C].
        out: where to write it; None is new memory.
    """
    count, size, _ = rows.shape
    above = rows.new_full((size, size), -torch.inf).triu_(1)
    return torch.baddbmm(above.expand(count, -1, -1), rows, columns, out=out)


def without_clamped(grad: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """Set the gradient of decays to 0 in place where these were taken as `LOWEST_DECAY`."""
    return grad.masked_fill_(decay <= LOWEST_DECAY, 0.0)
