# SPDX-License-Identifier: Apache-2.0
"""Matrix products of activations with a weight, y = x Wᵀ + b, outside of autograd.

A weight's handle chooses its `MatmulKernel` once for each dtype of x:

| kernel | weights | product |
|---|---|---|
| `PLAIN` | of x's dtype | `F.linear` |
| `amd_cpu` | fp32, in MKL on an AMD CPU | by oneDNN; few rows as the columns of W xᵀ |
| converted | of another dtype; 16 bits, if the CPU is faster in fp32 | `F.linear` in one dtype |
| batch-invariant | of a batch-invariant model | packed by oneDNN, or in tiles of rows |
| `low_bit` | copied in bf16 or int8 | with the copy |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.ops.matmul import amd_cpu
from megatron.core.ops.matmul.batch_invariant import PackedMatrix, tiled_matmul

__all__ = ["PLAIN", "MatmulKernel", "batch_invariant_kernel", "choose_kernel"]


class MatmulKernel(NamedTuple):
    """The functions that multiply by one weight [o, h].

    Args:
        linear: (x [..., h], weight, bias [o] or None, out=None) -> [..., o] in x's dtype, written
            to `out` if it is not None.
        add_product_: (total [t, o], x [t, h], weight) adds x Wᵀ to total in place.
    """

    linear: Callable[..., Tensor]
    add_product_: Callable[..., None]


def choose_kernel(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    operand_dtype: torch.dtype,
    product_dtype: torch.dtype,
) -> MatmulKernel:
    """Return the kernel for a weight.

    Args:
        shape, dtype, device: of the weight.
        operand_dtype: of x.
        product_dtype: in which the device multiplies, see `ops.backend_choice.matmul_dtype`.
    """
    if not operand_dtype is product_dtype is dtype:
        return _with_add(partial(_converted_linear, product_dtype))
    if amd_cpu.is_faster(shape, dtype, device):
        return MatmulKernel(amd_cpu.linear, amd_cpu.add_product_)
    return PLAIN


def batch_invariant_kernel(
    dtype: torch.dtype, min_rows: Callable[[], int | None], packed: Callable[[], PackedMatrix]
) -> MatmulKernel:
    """Return a kernel whose result for a row does not depend on the other rows.

    Args:
        dtype: of the product.
        min_rows: returns `packed.min_invariant_rows` of the weight; None multiplies in tiles.
        packed: returns the weight in oneDNN's layout.
    """
    return _with_add(partial(_batch_invariant_linear, dtype, min_rows, packed))


def _with_add(linear: Callable[..., Tensor]) -> MatmulKernel:
    """Return a kernel that adds its products in an operation of its own."""

    def add_product_(total: Tensor, x: Tensor, weight: Tensor) -> None:
        total.add_(linear(x, weight))

    return MatmulKernel(linear, add_product_)


def _add_plain_(total: Tensor, x: Tensor, weight: Tensor) -> None:
    if total.dtype is x.dtype:
        total.addmm_(x, weight.t())
    else:
        total.add_(F.linear(x, weight))


#: The kernel of a weight in x's dtype: a function of C++, without a Python call of its own.
PLAIN = MatmulKernel(F.linear, _add_plain_)


def _converted_linear(
    dtype: torch.dtype,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply operands that are converted to `dtype`."""
    y = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return y.to(x.dtype) if out is None else out.copy_(y)


def _batch_invariant_linear(
    dtype: torch.dtype,
    min_rows: Callable[[], int | None],
    packed: Callable[[], PackedMatrix],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """See `batch_invariant_kernel`. The result is rounded to x's dtype after the bias."""
    rows, least = x.to(dtype), min_rows()
    if least is None:
        y = tiled_matmul(rows, weight.to(dtype).t())
    else:
        y = packed().linear(rows, least)
    y = (y if bias is None else y + bias).to(x.dtype)
    return y if out is None else out.copy_(y)
