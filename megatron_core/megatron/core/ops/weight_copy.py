# SPDX-License-Identifier: Apache-2.0
"""Copies of matrices in fewer bytes, for the products of generation on a CPU.

One token a step reads every weight once, so memory bandwidth bounds it. A copy in bf16 has half
the bytes of fp32, in int8 a quarter. Activations keep their dtype (weight-only quantisation); the
stored weights stay as they are and remain what updates write to.

| copy | few rows of x | more |
|---|---|---|
| bf16 | x rounded to bf16, multiplied as it is | where a CPU multiplies bf16 slowly: widened |
| bf16, packed | the same, by oneDNN's layout of the matrix | the same |
| int8 | x rounded to bf16, `torch._weight_int8pack_mm` | widened |

A row of an int8 copy is q * s: q = round(w / s) in -127..127 and s = max|w| / 127, rounded up to
bf16, which the product takes.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from megatron.core.ops.dispatch import matmul_dtype
from megatron.core.ops.packed_product import multiply, pack, packs_bf16

CopyDtype = Literal["bf16", "int8"]

#: Rows of x that are multiplied by a bf16 copy as it is, on a CPU that multiplies fp32 faster.
BF16_ROWS = 2
#: Rows of x that are multiplied by an int8 copy as it is. At 16 widening costs the same.
INT8_ROWS = 16
#: What both sizes of an int8 copy are a multiple of: that product reads whole tiles.
INT8_TILE = 32
#: Elements of a copy that are widened at a time: 4 MB in fp32, which stay in the cache.
WIDENED = 1 << 20


class WeightCopy:
    """A matrix [o, h] in fewer bytes.

    Args:
        weight: [o, h], fp32 or bf16, on a CPU.
        dtype: of the copy.
        cpu_dtype: what the CPU multiplies bf16 in, see `ops.dispatch.matmul_dtype`.

    Attributes:
        packed: the values are in oneDNN's layout.
    """

    def __init__(
        self, weight: torch.Tensor, dtype: CopyDtype, *, cpu_dtype: torch.dtype | None = None
    ) -> None:
        self.rows, self.features = weight.shape
        self.packed = False
        if dtype == "bf16":
            self.values, self.scales = weight.to(torch.bfloat16), None
            fast = matmul_dtype(self.values, cpu_dtype) is torch.bfloat16
            self._rows = None if fast else BF16_ROWS
            if fast and packs_bf16(self.rows, self.features):
                self.values, self.packed = pack(self.values), True
        else:
            self.values, self.scales = _quantised(weight)
            self._rows = INT8_ROWS

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def widened(self, start: int, stop: int) -> torch.Tensor:
        """Return rows start to stop - 1 in fp32, [stop - start, h]."""
        values = self.values.to_dense() if self.packed else self.values
        rows = values[start:stop, : self.features].float()
        return rows if self.scales is None else rows.mul_(self.scales[start:stop, None])

    def product(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return x [..., h] Wᵀ + bias [o], [..., o] in x's dtype; in `out` if that is given."""
        flat = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        y = self.multiplied(flat)
        if x.ndim != 2:
            y = y.reshape(*x.shape[:-1], self.rows)
        if out is not None:
            y = out.copy_(y)
        elif y.dtype is not x.dtype:
            y = y.to(x.dtype)
        if bias is not None:
            y += bias
        return y

    def add_product_(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Add x [t, h] Wᵀ to total [t, o], in place."""
        total.add_(self.multiplied(x))

    def multiplied(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [t, h] Wᵀ [t, o], in bf16 or fp32."""
        if self._rows is not None and len(x) > self._rows:
            return self._widened_product(x.float())
        if self.packed:
            return multiply(x.to(torch.bfloat16), self.values)
        if self.scales is None:
            return F.linear(x.to(torch.bfloat16), self.values)
        return self._int8_product(x.to(torch.bfloat16))

    def _int8_product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [t, h] Wᵀ, [t, o], bf16 both."""
        rows, features = self.values.shape
        if features != self.features:
            x = F.pad(x, (0, features - self.features))
        out = torch._weight_int8pack_mm(x, self.values, self.scales)
        return out if rows == self.rows else out[:, : self.rows]

    def _widened_product(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [t, h] Wᵀ, fp32 [t, o]."""
        out, each = x.new_empty(len(x), self.rows), max(1, WIDENED // self.features)
        for start in range(0, self.rows, each):
            stop = min(start + each, self.rows)
            torch.mm(x, self.widened(start, stop).t(), out=out[:, start:stop])
        return out

    def error(self, weight: torch.Tensor) -> float:
        """Return |copy - weight| / |weight|, Frobenius norms; 0 for a weight of zeros."""
        each, squares = max(1, WIDENED // self.features), torch.zeros(2, dtype=torch.float64)
        for start in range(0, self.rows, each):
            stop = min(start + each, self.rows)
            wide = weight[start:stop].double()
            squares[0] += (self.widened(start, stop).double() - wide).square().sum()
            squares[1] += wide.square().sum()
        return float((squares[0] / squares[1]).sqrt()) if squares[1] > 0 else 0.0


def _quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 and scales bf16, all positive, [o, h] and [o] padded to tiles."""
    rows, features = weight.shape
    wide = F.pad(weight.float(), (0, -features % INT8_TILE, 0, -rows % INT8_TILE))
    exact = wide.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    scales = exact.to(torch.bfloat16)
    # Rounded up, so that no value is beyond 127: bf16 keeps 8 bits.
    scales = torch.where(scales.float() < exact, (exact * (1 + 2**-7)).to(torch.bfloat16), scales)
    values = (wide / scales.float().unsqueeze(1)).round_().clamp_(-127, 127)
    return values.to(torch.int8), scales
