# SPDX-License-Identifier: Apache-2.0
"""The three matrix products of a linear layer, in the dtype that the device multiplies fastest.

| product | equation | result |
|---|---|---|
| forward | y = x Wᵀ (+ bias) | dtype of x |
| dgrad | dx = dy W | dtype of dy |
| wgrad | dW (+)= dyᵀ x | accumulated in the gradient slot, fp32 |

`dtype` is what the operands are multiplied in: `WeightHandle.product_dtype`. Where a CPU multiplies
bf16 slower than fp32 they are widened, which also keeps the whole sum in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.core.ops.wide_product import add_product_


def linear_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return x [..., h] Wᵀ [h, o] + bias [o], [..., o] in x's dtype."""
    if dtype is x.dtype:
        return F.linear(x, weight, bias)
    wide = None if bias is None else bias.to(dtype)
    return F.linear(x.to(dtype), weight.to(dtype), wide).to(x.dtype)


def linear_dgrad(grad: torch.Tensor, weight: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Return dy [..., o] W [o, h], [..., h] in dy's dtype."""
    if dtype is grad.dtype:
        return grad.matmul(weight)
    return grad.to(dtype).matmul(weight.to(dtype)).to(grad.dtype)


def linear_wgrad_(
    slot: torch.Tensor,
    grad: torch.Tensor,
    x: torch.Tensor,
    *,
    overwrite: bool,
    dtype: torch.dtype,
) -> None:
    """Put dyᵀ x into `slot` [o, h] fp32: written if `overwrite`, else added.

    Args:
        grad: dy [..., o].
        x: [..., h], the same leading shape.
    """
    if x.ndim != 2:
        grad, x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])  # [t, o], [t, h]
    if grad.dtype is not dtype or x.dtype is not dtype:
        grad, x = grad.to(dtype), x.to(dtype)
    add_product_(slot, grad.t(), x, overwrite=overwrite)
