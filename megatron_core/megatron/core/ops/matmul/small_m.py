# SPDX-License-Identifier: Apache-2.0
"""Small-M matrix products on a CPU: one to four rows times a weight, in decoding and drafting.

Such a product reads the weight once, so it should run at memory bandwidth. On AMD CPUs MKL is
slower: it computes the rows one after another on a single thread. With the weight on the left,
W [o, h] by x^T [h, t], MKL takes a faster kernel. Time of `torch.mm(x, W.t())` divided by the time
of `linear`, fp32, AMD EPYC, weights that are not in the cache, on 1 and on 2 threads:

| W | 1 row | 2 rows | 3 rows | 4 rows |
|---|---|---|---|---|
| 2,752 x 512 | 1.7 | 2.9 | 2.2 | 1.6 |
| 4,864 x 896 | 1.5, 1.8 | 3.1, 5.5 | 3.0, 5.3 | 1.6, 2.9 |
| 4,096 x 1,024 | 1.2, 1.0 | 2.2, 4.2 | 2.0, 3.8 | 0.9, 1.7 |
| 8,192 x 2,048 | 0.8, 1.4 | 1.6, 3.2 | 1.4, 2.8 | 0.9, 1.8 |
| 14,336 x 4,096 | 0.5, 0.9 | 1.1, 2.0 | 1.3, 2.4 | 1.2, 2.2 |

A single row is duplicated and multiplied as two columns. The choice of the kernel depends only on
the CPU's vendor, the shapes and the number of threads, so a machine repeats its results.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.device import cpu_vendor

#: Largest number of rows that is multiplied with the weight on the left.
MAX_ROWS = 4
#: From this many features on, the table shows no gain for 1 row, nor for 4 rows on one thread.
MIN_SLOW_FEATURES = 1024
#: Smallest weight, in elements: a smaller one stays in the cache, where `torch.mm` is as fast.
MIN_ELEMENTS = 1 << 17


def is_faster(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether few rows are multiplied faster with a weight on the left.

    Args:
        shape, dtype, device: of the weight.
    """
    large = math.prod(shape) >= MIN_ELEMENTS
    return large and dtype is torch.float32 and device.type == "cpu" and is_mkl_on_amd()


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Return x Wᵀ + bias, outside of autograd; x is multiplied on the right if it has few rows.

    Args:
        x: [..., h].
        weight: [o, h], in x's dtype, for which `is_faster`.
        bias: [o] or None.
        out: [..., o], written and returned instead of a new tensor.
    """
    if bias is not None or x.ndim != 2 or not uses_transposed_product(x):
        return F.linear(x, weight, bias, out=out)  # pyright: ignore[reportCallIssue]  # undeclared
    product = _transposed_product(x, weight)
    return product.contiguous() if out is None else out.copy_(product)


def add_product_(total: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add x [t, h] Wᵀ to total [t, o], in place, outside of autograd."""
    if total.dtype is not x.dtype:
        total.add_(linear(x, weight))
    elif uses_transposed_product(x):
        total.add_(_transposed_product(x, weight))
    else:
        total.addmm_(x, weight.t())


def uses_transposed_product(x: Tensor) -> bool:
    """Return whether x [t, h] is multiplied on the right of a weight for which `is_faster`."""
    rows, features = x.shape
    if not 0 < rows <= MAX_ROWS:
        return False
    needs_few_features = rows == 1 or (rows == MAX_ROWS and torch.get_num_threads() == 1)
    return features < MIN_SLOW_FEATURES or not needs_few_features


def _transposed_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ [t, o], a transposed view of W xᵀ [o, t]."""
    rows = len(x)
    # A single column would be a matrix-vector product again, which MKL runs on one thread.
    columns = x.expand(2, -1).contiguous() if rows == 1 else x
    return torch.mm(weight, columns.t())[:, :rows].t()


@functools.cache
def is_mkl_on_amd() -> bool:
    """Return whether torch multiplies with MKL on an AMD CPU."""
    return torch.backends.mkl.is_available() and cpu_vendor() == "AuthenticAMD"
