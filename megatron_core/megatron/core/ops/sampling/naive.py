# SPDX-License-Identifier: Apache-2.0
"""The equations of sampling, one row at a time in fp64; see `ops.sampling`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron.core.ops.sampling import TokenFilter


def choose_token(scores: torch.Tensor, row_filter: TokenFilter, draw: float) -> int:
    """Return the token of a row of scores [V], the first whose cumulative weight exceeds the draw.

    Args:
        scores: finite or -inf, some finite.
        row_filter: temperature, top-k, top-p and min-p.
        draw: in [0, 1).
    """
    if row_filter.temperature == 0:
        return int(scores.argmax())
    x = (scores - scores.max()).double() / row_filter.temperature
    order = x.sort(descending=True, stable=True).indices
    if 0 < row_filter.top_k < len(x):
        x = x.where(x >= x[order[row_filter.top_k - 1]], -torch.inf)
    weights = (2.0**52 * x.softmax(-1)).floor()
    before = weights[order].cumsum(0) - weights[order]
    weights[order[before >= row_filter.top_p * weights.sum()]] = 0
    if row_filter.min_p > 0:
        weights[x < math.log(row_filter.min_p)] = 0
    cumulative = weights.cumsum(0)
    return int((cumulative > draw * cumulative[-1]).nonzero()[0])
