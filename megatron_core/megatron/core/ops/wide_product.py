# SPDX-License-Identifier: Apache-2.0
"""A product of two narrow matrices that ends up in a wider one, in one rounding where possible."""

from __future__ import annotations

import torch


def add_product_(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, overwrite: bool = False
) -> None:
    """Put left @ right into `total`: written if `overwrite`, else added.

    A GPU sums bf16 products in fp32 and can hand the sums over unrounded; without saying so they
    come rounded to bf16. On a CPU narrow operands are widened by the caller where that pays
    (`dispatch.matmul_dtype`).

    Args:
        total: [m, n], fp32 or the operands' dtype.
        left: [m, k].
        right: [k, n], the dtype of `left`.
    """
    if left.dtype == total.dtype:
        if overwrite:
            torch.mm(left, right, out=total)
        else:
            total.addmm_(left, right)
    elif left.device.type == "cuda":
        if overwrite:
            torch.mm(left, right, out_dtype=total.dtype, out=total)
        else:
            # Added where it is made: a product put aside would be written and read once more.
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif overwrite:
        total.copy_(left @ right)
    else:
        total.add_(left @ right)
