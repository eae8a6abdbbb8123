# SPDX-License-Identifier: Apache-2.0
"""Matrix products in fp32 on AMD CPUs, where MKL is slow.

`torch.nn.functional.linear` calls MKL. Two other products read the same weight. oneDNN multiplies a
weight [o, h] without a reorder. MKL itself takes a faster kernel with the weight on the left, W
[o, h] by x^T [h, t], for a few rows of few features; a single row is duplicated and multiplied as
two columns. Time of `torch.nn.functional.linear` divided by the time of oneDNN, and by the time of
the transposed product; AMD EPYC with AVX-512, weights that are not in the cache, one thread:

| W | 1 row | 2 rows | 3 rows | 4 rows | 8 rows | 16 rows | 256 |
|---|---|---|---|---|---|---|---|
| 2,752 x 512 | 1.2, 1.2 | 1.6, 2.4 | 2.1, 2.9 | 1.1, 1.6 | 1.1, 1.1 | 1.1, 0.9 | 1.3, 0.9 |
| 4,864 x 896 | 1.2, 1.4 | 1.8, 3.0 | 2.6, 3.3 | 1.5, 2.0 | 1.3, 0.7 | 1.4, 0.9 | 1.2, 1.0 |
| 4,096 x 1,024 | 1.2, 1.3 | 1.8, 2.7 | 2.4, 2.6 | 1.4, 1.1 | 1.3, 0.7 | 1.4, 0.9 | 1.3, 1.0 |
| 8,192 x 2,048 | 1.2, 0.8 | 1.6, 1.5 | 2.3, 1.4 | 1.9, 1.1 | 1.9, 0.9 | 1.7, 1.0 | 1.3, 1.1 |
| 14,336 x 4,096 | 1.1, 0.5 | 1.4, 1.1 | 2.1, 1.2 | 2.1, 1.2 | 2.0, 0.9 | 1.8, 1.0 | 1.3, 1.0 |

The choice of the product depends only on the CPU's vendor and the shapes, so a machine repeats its
results.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from megatron.core.device import cpu_vendor
from megatron.core.ops.matmul.onednn import agrees, onednn_linear

#: Largest number of rows that is multiplied with the weight on the left.
MAX_TRANSPOSED_ROWS = 4
#: From this many features on, oneDNN is as fast for 4 rows, and above it for any number of rows.
MANY_FEATURES = 1024
#: Smallest weight, in elements: a smaller one stays in the cache, where MKL is as fast.
MIN_ELEMENTS = 1 << 17


def is_faster(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `linear` below is faster than `torch.nn.functional.linear`.

    Args:
        shape, dtype, device: of the weight.
    """
    large = math.prod(shape) >= MIN_ELEMENTS
    return large and dtype is torch.float32 and device.type == "cpu" and is_mkl_on_amd()


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Return x Wᵀ + bias, outside of autograd.

    Args:
        x: [..., h].
        weight: [o, h], in x's dtype, for which `is_faster`.
        bias: [o] or None.
        out: [..., o], written and returned instead of a new tensor.
    """
    if bias is None and x.ndim == 2 and uses_transposed_product(x):
        product = _transposed_product(x, weight)
        return product.contiguous() if out is None else out.copy_(product)
    product = onednn_linear(x, weight, bias)
    return product if out is None else out.copy_(product)


def add_product_(total: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add x [t, h] Wᵀ to total [t, o], in place, outside of autograd."""
    if uses_transposed_product(x):
        total.add_(_transposed_product(x, weight))
    else:
        total.add_(onednn_linear(x, weight))


def uses_transposed_product(x: Tensor) -> bool:
    """Return whether x [t, h] is multiplied on the right of a weight for which `is_faster`."""
    rows, features = x.shape
    if features >= MANY_FEATURES:
        return features == MANY_FEATURES and 0 < rows < MAX_TRANSPOSED_ROWS
    return 0 < rows <= MAX_TRANSPOSED_ROWS


def _transposed_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ [t, o], a transposed view of W xᵀ [o, t]."""
    rows = len(x)
    # A single column would be a matrix-vector product again, which MKL runs on one thread.
    columns = x.expand(2, -1).contiguous() if rows == 1 else x
    return torch.mm(weight, columns.t())[:, :rows].t()


@functools.cache
def is_mkl_on_amd() -> bool:
    """Return whether torch multiplies with MKL on an AMD CPU, and could with oneDNN."""
    is_amd = torch.backends.mkl.is_available() and cpu_vendor() == "AuthenticAMD"
    return is_amd and agrees(512, 512, torch.float32, packed=False)
