# SPDX-License-Identifier: Apache-2.0
"""Row addressing for kernels that read slices of a fused projection in place.

Query and key heads are slices [s, b, n, d] of one projection [s, b, f]: a token has n rows of d
elements, `d` apart, and tokens are `f` apart. Two strides therefore address every row
(`StridedRows`).

Triton loads vectors only if it knows that 16 divides the pointer and the strides; a slice with a
stride of, say, 772 elements and an offset of 516 is otherwise loaded element by element.
`AlignedRows` therefore starts from an aligned pointer and counts offsets and strides in units of
the largest power of two that divides every offset and stride.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron.core.ops.launches import WARPS, Launches


class StridedRows(NamedTuple):
    """Rows of a tensor [..., h]; row i begins at element
    i // group_size · group_stride + i % group_size · row_stride.

    Args:
        tensor: the kernel's operand: the tensor itself, or a copy if two strides do not suffice.
        num_rows: product of all dimensions but the last.
        group_size: consecutive rows that are `row_stride` apart.
        group_stride: elements from one group to the next.
        row_stride: elements from one row of a group to the next.
    """

    tensor: torch.Tensor
    num_rows: int
    group_size: int
    group_stride: int
    row_stride: int

    @staticmethod
    def from_tensor(x: torch.Tensor) -> StridedRows:
        """Describe the rows of a non-empty x [..., h]."""
        strides = _row_strides(x.shape, x.stride())
        if strides is None:
            x = x.contiguous()
            strides = x.numel() // x.shape[-1], 1, x.shape[-1], 0
        return StridedRows(x, *strides)


# Takes 4 microseconds of host time a tensor, and a layer asks for the same shapes in each step.
@functools.lru_cache(maxsize=1024)
def _row_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int, int] | None:
    """Return all fields of `StridedRows` but the tensor; None if two strides do not suffice."""
    dims = _merged_dims(shape, strides)
    if strides[-1] != 1 or len(dims) > 2:
        return None
    num_rows = math.prod(shape[:-1])
    if not dims:  # one row
        return num_rows, 1, 0, 0
    (_, group_stride), (group_size, row_stride) = dims if len(dims) == 2 else (dims[0], (1, 0))
    return num_rows, group_size, group_stride, row_stride


def _merged_dims(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Merge adjacent dimensions before the last into (size, stride) pairs, outermost first."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return dims


#: Bytes of the widest load, and the largest unit in elements.
_LOAD_BYTES, _MAX_UNIT = 16, 16
#: Warps of a program: with more of them, threads have so few registers that they spill.
_MAX_WARPS = 16
#: Kernels count rows in 32 bits.
_MAX_ROWS = 1 << 31


@dataclass(frozen=True)
class AlignedRows:
    """Rows of [..., n]; row i begins at element
    (offset + i // count · outer + i % count · inner) · step of `base`.

    Attributes:
        base: shares the tensor's storage and dtype and begins at most 16 bytes before it.
        count: consecutive rows that are `inner` apart.
        offset, outer, inner: offset of row 0 and strides, in units of `step` elements.
        step: elements of a unit, a power of two.
    """

    base: torch.Tensor
    count: int
    offset: int
    outer: int
    inner: int
    step: int

    @staticmethod
    def from_tensor(x: torch.Tensor) -> AlignedRows:
        """Describe the rows of a non-empty x [..., n], or of a copy if two strides do not suffice.

        Raises:
            ValueError: more rows than a kernel's 32-bit index counts.
        """
        rows = StridedRows.from_tensor(x)
        if rows.num_rows >= _MAX_ROWS:
            raise ValueError(
                f"{tuple(x.shape)} has {rows.num_rows} rows: give fewer than {_MAX_ROWS} at once"
            )
        return AlignedRows._aligned(
            rows.tensor, rows.group_size, (rows.group_stride, rows.row_stride)
        )

    @staticmethod
    def _aligned(x: torch.Tensor, count: int, strides: tuple[int, ...]) -> AlignedRows:
        """Return the rows from an aligned base on, in the largest unit."""
        misaligned = x.data_ptr() % _LOAD_BYTES // x.element_size()
        # The storage may itself begin misaligned: the base must not lie before it.
        if misaligned > x.storage_offset():
            misaligned = 0
        step = math.gcd(_MAX_UNIT, misaligned, *strides)
        if misaligned:
            x = x.as_strided(x.shape, x.stride(), x.storage_offset() - misaligned)
        outer, inner = (stride // step for stride in strides)
        return AlignedRows(x, count, misaligned // step, outer, inner, step)

    @property
    def kernel_args(self) -> tuple[int, ...]:
        """Count, offset, outer and inner, in the order of the kernels' parameters."""
        return self.count, self.offset, self.outer, self.inner


def row_tile(launches: Launches, x: torch.Tensor, features: int) -> dict[str, int]:
    """Return a launch whose programs process whole rows, about ELEMENTS elements each.

    Args:
        launches: of the kernel; its ELEMENTS counts the elements of a program.
        x: an input of the kernel.
        features: elements of a row.

    Returns:
        ROWS and FEATURES, powers of two, in place of ELEMENTS; more warps for longer rows.
    """
    padded = 1 << (features - 1).bit_length()
    launch = launches.pick(x, f"{padded} {x.dtype}".replace("torch.", ""))
    elements = launch.pop("ELEMENTS")
    if padded > elements:
        launch[WARPS] = min(launch[WARPS] * padded // elements, _MAX_WARPS)
    return {"ROWS": max(1, elements // padded), "FEATURES": padded, **launch}
