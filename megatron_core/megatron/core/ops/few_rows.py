# SPDX-License-Identifier: Apache-2.0
"""Products of one to four rows by a matrix on a CPU: a step that decodes few texts, or drafts.

Such a product reads the matrix once, so its speed should be that of memory. MKL reads it slower on
CPUs of AMD: it takes the rows one after the other, by one thread. With the matrix on the left,
W [o, h] by x^T [h, t], it takes another path. Time of `torch.mm(x, W.t())` by that of
`multiply`, fp32, AMD EPYC, matrices that are not in the cache, 1 and 2 threads:

| W | 1 row | 2 rows | 3 rows | 4 rows |
|---|---|---|---|---|
| 2,752 x 512 | 1.7 | 2.9 | 2.2 | 1.6 |
| 4,864 x 896 | 1.5, 1.8 | 3.1, 5.5 | 3.0, 5.3 | 1.6, 2.9 |
| 4,096 x 1,024 | 1.2, 1.0 | 2.2, 4.2 | 2.0, 3.8 | 0.9, 1.7 |
| 8,192 x 2,048 | 0.8, 1.4 | 1.6, 3.2 | 1.4, 2.8 | 0.9, 1.8 |
| 14,336 x 4,096 | 0.5, 0.9 | 1.1, 2.0 | 1.3, 2.4 | 1.2, 2.2 |

One row is multiplied twice, as two. What takes this path depends on the vendor of the CPU, shapes
and threads alone: a machine multiplies alike in every run.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from megatron.core.device import cpu_vendor

#: Rows of a product that may take the other path.
MOST_ROWS = 4
#: Features below which a single row takes it, and four rows on one thread.
MOST_FEATURES = 1024
#: Elements of a matrix from which on it pays: smaller ones stay in the cache.
LEAST_ELEMENTS = 1 << 17


def multiply(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return x Wᵀ [t, o], outside of autograd.

    Args:
        x: [t, h].
        weight: [o, h], in x's dtype.
        out: [t, o] where it is written, and returned, instead of to a new tensor.
    """
    if not applies(x, weight):
        return torch.mm(x, weight.t(), out=out)
    product = _transposed(x, weight)
    return product.contiguous() if out is None else out.copy_(product)


def add_product_(total: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add x [t, h] Wᵀ to total [t, o], in place, outside of autograd."""
    if applies(x, weight):
        total.add_(_transposed(x, weight))
    else:
        total.addmm_(x, weight.t())


def applies(x: Tensor, weight: Tensor) -> bool:
    """Whether the product of x [t, h] by a matrix [o, h] has the matrix on the left."""
    rows, features = x.shape
    if not 0 < rows <= MOST_ROWS or x.dtype is not torch.float32 or not x.is_cpu:
        return False
    if weight.numel() < LEAST_ELEMENTS:
        return False
    narrow_only = rows == 1 or (rows == MOST_ROWS and torch.get_num_threads() == 1)
    return (features < MOST_FEATURES or not narrow_only) and is_mkl_on_amd()


def _transposed(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ [t, o], a view of [o, t]."""
    rows = len(x)
    pair = x.expand(2, -1).contiguous() if rows == 1 else x
    return torch.mm(weight, pair.t())[:, :rows].t()


@functools.cache
def is_mkl_on_amd() -> bool:
    """Whether torch multiplies by MKL on a CPU of AMD."""
    return torch.backends.mkl.is_available() and cpu_vendor() == "AuthenticAMD"
