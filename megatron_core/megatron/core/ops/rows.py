# SPDX-License-Identifier: Apache-2.0
"""Rows of a tensor as kernels walk over them: slices of a fused projection without a copy.

Query and key heads are slices [s, b, n, d] of one projection [s, b, f]: rows of d lie n to a token,
tokens lie f apart. Two strides say where every row begins.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Rows(NamedTuple):
    """Rows of a tensor [..., h]: row i begins at i // inner · outer_stride + i % inner · stride.

    Args:
        tensor: what a kernel reads; a copy only where two strides do not say it all.
        count: how many rows.
        inner: rows that lie `stride` apart.
        outer_stride: elements from one group of `inner` rows to the next.
        stride: elements from one row of a group to the next.
    """

    tensor: torch.Tensor
    count: int
    inner: int
    outer_stride: int
    stride: int

    @staticmethod
    def of(x: torch.Tensor) -> Rows:
        """Describe the rows of x [..., h], which are not empty."""
        features = x.shape[-1]
        count = x.numel() // features
        groups = _groups(x)
        if x.stride(-1) != 1 or len(groups) > 2:
            x = x.contiguous()
            groups = [(count, features)]
        if not groups:  # one row
            return Rows(x, count, 1, 0, 0)
        (_, outer), (inner, stride) = groups if len(groups) == 2 else (groups[0], (1, 0))
        return Rows(x, count, inner, outer, stride)


def _groups(x: torch.Tensor) -> list[tuple[int, int]]:
    """Merge the dimensions before the last: (size, stride) of those that remain, outer first."""
    found: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return found
