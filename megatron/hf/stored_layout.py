# SPDX-License-Identifier: Apache-2.0
"""How files store a tensor whose layout differs from the table of its architecture.

Tables describe a tensor as [..., rows, columns], with the rows of fused weights one weight after
the other. Files may store it transposed, [..., columns, rows], as GPT-2 and gpt-oss do, and may
interleave the rows of the fused weights, as gpt-oss does with gate and up:

    stored row n · i + k = row i of weight k of n
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron.core.boxes import Box


class StoredLayout(NamedTuple):
    """The layout of a tensor in files.

    Args:
        transposed: the last two dimensions are swapped.
        num_interleaved: number of fused weights whose rows are interleaved; 1 for none.
        rows_dim: dimension of the rows, counted from the end, in the order of the table.
    """

    transposed: bool = False
    num_interleaved: int = 1
    rows_dim: int = -2

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the stored shape of a tensor of the shape in the table."""
        return _swapped(shape) if self.transposed else shape

    def stored_box(self, box: Box, shape: tuple[int, ...]) -> Box:
        """Return the smallest box of the stored tensor that contains a box of one weight.

        Args:
            box: rows of one of the fused weights, in the order of the table.
            shape: shape of the tensor in the table.
        """
        n, dim = self.num_interleaved, len(shape) + self.rows_dim
        offsets, sizes = list(box.offsets), list(box.sizes)
        weight, row = divmod(offsets[dim], shape[dim] // n)
        offsets[dim], sizes[dim] = n * row + weight, n * (sizes[dim] - 1) + 1
        if self.transposed:
            return Box(_swapped(tuple(offsets)), _swapped(tuple(sizes)))
        return Box(tuple(offsets), tuple(sizes))

    def select(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the view of the elements of one weight in the box of `stored_box`, in the order of
        the table."""
        table_order = stored.mT if self.transposed else stored
        steps = [slice(None)] * table_order.ndim
        steps[self.rows_dim] = slice(None, None, self.num_interleaved)
        return table_order[tuple(steps)]


def _swapped(values: tuple[int, ...]) -> tuple[int, ...]:
    return (*values[:-2], values[-1], values[-2])
