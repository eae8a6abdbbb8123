# SPDX-License-Identifier: Apache-2.0
"""Rows of a tensor as kernels walk over them: slices of a fused projection without a copy.

Query and key heads are slices [s, b, n, d] of one projection [s, b, f]: rows of d lie n to a token,
tokens lie f apart. Two strides say where every row begins.

RowSteps: where the rows of a slice lie in memory, said so that kernels load them wide.

A layer's projection is cut in slices, whose rows are steps of, say, 772 elements apart and begin
516 into each. Triton asks of a pointer and of a stride only whether 16 divides them, and loads one
element at a time where it does not. So places are counted in steps here, of as many elements as
divide all of them, and the pointer is one that is aligned.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron.core.ops.launches import WARPS, Launches


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
        steps = _row_strides(x.shape, x.stride())
        if steps is None:
            x = x.contiguous()
            steps = x.numel() // x.shape[-1], 1, x.shape[-1], 0
        return Rows(x, *steps)


# The host takes 4 microseconds a tensor to work it out, and a layer has the same ones in each step.
@functools.lru_cache(maxsize=1024)
def _row_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int, int] | None:
    """Return what `Rows` says besides the tensor; None where two strides do not say it all."""
    groups = _groups(shape, strides)
    if strides[-1] != 1 or len(groups) > 2:
        return None
    count = math.prod(shape[:-1])
    if not groups:  # one row
        return count, 1, 0, 0
    (_, outer), (inner, stride) = groups if len(groups) == 2 else (groups[0], (1, 0))
    return count, inner, outer, stride


def _groups(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Merge the dimensions before the last: (size, stride) of those that remain, outer first."""
    found: list[tuple[int, int]] = []
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return found


#: Bytes that are loaded at once at most, and elements of the largest step.
_BYTES, _ELEMENTS = 16, 16
#: Of a program: with more of them threads have so few registers that they spill them.
_MOST_WARPS = 16
#: Kernels count rows in 32 bits.
_MOST_ROWS = 1 << 31


@dataclass(frozen=True)
class RowSteps:
    """Rows i of [..., n]: (offset + i // count · outer + i % count · inner) · step behind base.

    Attributes:
        base: of the slice's storage and dtype, at most 16 bytes before its first element.
        count: rows that are `inner` apart.
        offset, outer, inner: in steps.
        step: elements, a power of two.
    """

    base: torch.Tensor
    count: int
    offset: int
    outer: int
    inner: int
    step: int

    @staticmethod
    def of(x: torch.Tensor) -> RowSteps:
        """Return those of x [..., n], not empty; of a copy where two strides do not reach all rows.

        Raises:
            ValueError: more rows than kernels have numbers for.
        """
        rows = Rows.of(x)
        if rows.count >= _MOST_ROWS:
            raise ValueError(
                f"{tuple(x.shape)} has {rows.count} rows: give fewer than {_MOST_ROWS} at once"
            )
        return RowSteps._counted(rows.tensor, rows.inner, (rows.outer_stride, rows.stride))

    @staticmethod
    def _counted(x: torch.Tensor, count: int, strides: tuple[int, ...]) -> RowSteps:
        """Count what begins at x in the longest steps."""
        before = x.data_ptr() % _BYTES // x.element_size()
        if before > x.storage_offset():
            before = 0
        step = math.gcd(_ELEMENTS, before, *strides)
        if before:
            x = x.as_strided(x.shape, x.stride(), x.storage_offset() - before)
        outer, inner = (stride // step for stride in strides)
        return RowSteps(x, count, before // step, outer, inner, step)

    @property
    def places(self) -> tuple[int, ...]:
        """Count, offset, outer and inner, as kernels take them."""
        return self.count, self.offset, self.outer, self.inner


def row_tile(launches: Launches, x: torch.Tensor, features: int) -> dict[str, int]:
    """Return the launch of programs that hold rows whole, as many as make their ELEMENTS.

    Args:
        launches: of the kernel, with ELEMENTS, of all rows of a program.
        x: that it reads.
        features: of a row.

    Returns:
        ROWS and FEATURES, powers of two, in place of ELEMENTS; more warps for longer rows.
    """
    padded = 1 << (features - 1).bit_length()
    launch = launches.pick(x, f"{padded} {x.dtype}".replace("torch.", ""))
    elements = launch.pop("ELEMENTS")
    if padded > elements:
        launch[WARPS] = min(launch[WARPS] * padded // elements, _MOST_WARPS)
    return {"ROWS": max(1, elements // padded), "FEATURES": padded, **launch}
