# SPDX-License-Identifier: Apache-2.0
"""Low-bit copies of weights, for generation on a CPU.

Decoding one token reads every weight once, so memory bandwidth bounds it. A bf16 copy has half the
bytes of fp32, an int8 copy a quarter. Activations keep their dtype (weight-only quantization); the
stored weights stay unchanged, and updates write to them.

| copy | product |
|---|---|
| bf16, packed | oneDNN's, with the packed copy |
| bf16 | `F.linear`; more than two rows in fp32 if the CPU multiplies bf16 slowly |
| int8 | `torch._weight_int8pack_mm` |

Operands and results are rounded to bf16 for any number of rows, so that other texts in the batch
change a text at most by the order of sums. The int8 product sums every row in the same order.

A row of an int8 copy is q · s with q = round(w / s) in -127..127. The scale s = max|w| / 127 is
rounded up to bf16, the dtype in which the product reads it.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from megatron.core.ops.backend_choice import matmul_dtype
from megatron.core.ops.matmul.onednn import agrees, onednn_linear, pack_weight

CopyDtype = Literal["bf16", "int8"]

#: Largest batch, in rows, that multiplies a bf16 copy directly if the CPU is faster in fp32.
MAX_BF16_ROWS = 2
#: Both sizes of an int8 copy are padded to a multiple: the int8 product reads whole tiles.
INT8_TILE = 32
#: Elements that are dequantized at a time: 4 MB in fp32, which stay in the cache.
DEQUANTIZED_ELEMENTS = 1 << 20


class LowBitCopy:
    """A weight [o, h] in bf16 or int8.

    Args:
        weight: [o, h], fp32 or bf16, on a CPU.
        dtype: of the copy.
        cpu_dtype: in which the CPU multiplies bf16, see `ops.backend_choice.matmul_dtype`.

    Attributes:
        dtype: of the copy.
        packed: whether `values` is in oneDNN's packed layout.
    """

    def __init__(
        self, weight: torch.Tensor, dtype: CopyDtype, *, cpu_dtype: torch.dtype | None = None
    ) -> None:
        self.rows, self.features = weight.shape
        self.dtype: CopyDtype = dtype
        self.packed, self._is_fast = False, True
        if dtype == "bf16":
            self.values, self.scales = weight.to(torch.bfloat16), None
            self._is_fast = matmul_dtype(self.values, cpu_dtype) is torch.bfloat16
            if self._is_fast and agrees(self.rows, self.features, torch.bfloat16, packed=True):
                self.values, self.packed = pack_weight(self.values), True
        else:
            self.values, self.scales = _quantize_int8(weight)

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def dequantize(self, start: int, stop: int) -> torch.Tensor:
        """Return rows start to stop - 1 in fp32, [stop - start, h]; unpacks a packed copy."""
        return self._dequantize(self.values.to_dense() if self.packed else self.values, start, stop)

    def _dequantize(self, values: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        rows = values[start:stop, : self.features].float()
        return rows if self.scales is None else rows.mul_(self.scales[start:stop, None])

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return x [..., h] Wᵀ + bias [o], [..., o] in x's dtype, written to `out` if present.

        The copy takes the place of `weight`, which is not read.
        """
        flat = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        y = self.matmul(flat)
        if x.ndim != 2:
            y = y.reshape(*x.shape[:-1], self.rows)
        if out is not None:
            y = out.copy_(y)
        elif y.dtype is not x.dtype:
            y = y.to(x.dtype)
        if bias is not None:
            y += bias
        return y

    def add_product_(
        self, total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None = None
    ) -> None:
        """Add x [t, h] Wᵀ to total [t, o], in place; `weight` is not read."""
        total.add_(self.matmul(x))

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [t, h] Wᵀ, bf16 [t, o]."""
        x = x.to(torch.bfloat16)
        if self.scales is not None:
            return self._int8_matmul(x, self.scales)
        if self.packed:
            return onednn_linear(x, self.values)
        if self._is_fast or len(x) <= MAX_BF16_ROWS:
            return F.linear(x, self.values)
        return self._matmul_in_fp32(x)

    def _int8_matmul(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return x [t, h] Wᵀ, [t, o]; operand and output are bf16."""
        rows, features = self.values.shape
        if features != self.features:
            x = F.pad(x, (0, features - self.features))
        out = torch._weight_int8pack_mm(x.contiguous(), self.values, scales)
        return out if rows == self.rows else out[:, : self.rows]

    def _matmul_in_fp32(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [t, h] Wᵀ, bf16 [t, o], with one block of W in fp32 at a time."""
        out, block_rows = x.new_empty(len(x), self.rows), self._block_rows
        operand = x.float()
        for start in range(0, self.rows, block_rows):
            stop = min(start + block_rows, self.rows)
            out[:, start:stop] = operand @ self.dequantize(start, stop).t()
        return out

    @property
    def _block_rows(self) -> int:
        """Rows that are dequantized at a time."""
        return max(1, DEQUANTIZED_ELEMENTS // self.features)

    def error(self, weight: torch.Tensor) -> float:
        """Return |copy - weight| / |weight|, Frobenius norms; 0 for a weight of zeros."""
        if self.scales is None and weight.dtype is torch.bfloat16:
            return 0.0
        squares = torch.zeros(2, dtype=torch.float64)
        values = self.values.to_dense() if self.packed else self.values
        for start in range(0, self.rows, self._block_rows):
            stop = min(start + self._block_rows, self.rows)
            exact = weight[start:stop].double()
            squares[0] += (self._dequantize(values, start, stop).double() - exact).square().sum()
            squares[1] += exact.square().sum()
        return float((squares[0] / squares[1]).sqrt()) if squares[1] > 0 else 0.0


def _quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 values and positive bf16 scales, [o, h] and [o] padded to tiles."""
    rows, features = weight.shape
    padded = F.pad(weight.float(), (0, -features % INT8_TILE, 0, -rows % INT8_TILE))
    exact = padded.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    scales = exact.to(torch.bfloat16)
    # Rounded up, so that no value exceeds 127: bf16 has 8 significant bits.
    scales = torch.where(scales.float() < exact, (exact * (1 + 2**-7)).to(torch.bfloat16), scales)
    values = (padded / scales.float().unsqueeze(1)).round_().clamp_(-127, 127)
    return values.to(torch.int8), scales
