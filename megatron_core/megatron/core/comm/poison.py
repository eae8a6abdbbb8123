# SPDX-License-Identifier: Apache-2.0
"""Values that show when memory is read before it is written."""

from __future__ import annotations

import torch


@torch.no_grad()
def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with NaN, or with the largest value of a dtype that has none; return it."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.fill_(float("nan"))
    if tensor.dtype is torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(torch.iinfo(tensor.dtype).max)
