# SPDX-License-Identifier: Apache-2.0
"""FP8 tensors of TransformerEngine, quantized in torch: a part of the stand-in `te_extension`.

| quantizer | scale of x |
|---|---|
| Float8CurrentScalingQuantizer | 448 (or 57344) / amax(x) of the ranks of its group |
| Float8Quantizer | its stored scale; it records amax(x) |
| MXFP8Quantizer | 2^-e of each 32 (or 32 x 32) elements, e the least with amax <= 448 · 2^e |

A tensor has its rows, its columns or both, as the quantizer is told and as the products of the GPU
need them: Hopper multiplies FP8 tensors by rows alone, so it keeps the transpose as well.
Blockwise and FP4 tensors raise NotImplementedError.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

#: Elements of MXFP8 that share a scale (OCP Microscaling Formats v1.0, section 5.2).
_BLOCK = 32


class Fp8Functions:
    """The extension's functions on FP8 tensors.

    Args:
        torch_dtypes: torch's dtypes by TE's dtype numbers.
        transposes: whether columns of tensors with one scale are kept as a transpose (Hopper).
        calls: counts each kind of quantizer.
    """

    def __init__(
        self, torch_dtypes: dict[int, torch.dtype], *, transposes: bool, calls: Counter[str]
    ) -> None:
        self.torch_dtypes, self.transposes, self.calls = torch_dtypes, transposes, calls

    def quantize(
        self, x: torch.Tensor, quantizer: Any, output: Any = None, noop: Any = None
    ) -> Any:
        """Return x [..., h] as an FP8 tensor."""
        if output is not None or noop is not None:
            raise NotImplementedError("transformer_engine_torch.quantize into a given tensor")
        self.calls[type(quantizer).__name__] += 1
        return self._quantized(x, quantizer)

    def _quantized(self, x: torch.Tensor, quantizer: Any) -> Any:
        name = type(quantizer).__name__
        kinds: dict[str, Callable[..., Any]] = {
            "Float8Quantizer": self._delayed,
            "Float8CurrentScalingQuantizer": self._tensorwise,
            "MXFP8Quantizer": self._blocks,
        }
        if name not in kinds:
            raise NotImplementedError(f"transformer_engine_torch.quantize of {name}")
        return kinds[name](x, quantizer)

    def split_quantize(
        self, x: torch.Tensor, splits: list[int], quantizers: list[Any], **_: Any
    ) -> list[Any]:
        """Return runs of rows of x [r, h] as FP8 tensors."""
        runs = x.split([int(rows) for rows in splits])
        return [self.quantize(run, q) for run, q in zip(runs, quantizers, strict=True)]

    def dequantize(self, x: Any, dtype: int) -> torch.Tensor:
        """Return an FP8 tensor in another dtype."""
        rowwise = (x._rowwise_data if _has_blocks(x) else x._data) is not None
        return self.operand(x, rowwise=rowwise).to(self.torch_dtypes[dtype])

    def operand(self, x: Any, *, rowwise: bool) -> torch.Tensor:
        """Return the operand of a product: the rows or the columns of x [..., h], in fp32."""
        if not is_fp8(x):
            return x
        dtype = self.torch_dtypes[x._fp8_dtype]
        if _has_blocks(x):
            data, scales = (
                (x._rowwise_data, x._rowwise_scale_inv)
                if rowwise
                else (x._columnwise_data, x._columnwise_scale_inv)
            )
            return _from_blocks(data.view(dtype), scales, rowwise=rowwise)
        if rowwise or not self.transposes:
            return x._data.view(dtype).float() * x._scale_inv
        # [h, ...] -> [..., h]
        return x._transpose.view(dtype).float().movedim(0, -1) * x._scale_inv

    def fp8_transpose(self, data: torch.Tensor, dtype: int, out: Any = None) -> torch.Tensor:
        """Return data [..., h] as [h, ...]."""
        return data.movedim(-1, 0).contiguous()

    def create_empty_quantized_tensor(
        self, quantizer: Any, shape: list[int], dtype: torch.dtype, device: Any, pinned: bool
    ) -> Any:
        """Return a tensor of a quantizer, to be filled."""
        return self._quantized(torch.zeros(shape, dtype=dtype), _silent(quantizer))

    def _tensorwise(self, x: torch.Tensor, quantizer: Any) -> Any:
        amax = _amax(x)
        if quantizer.with_amax_reduction:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=quantizer.amax_reduction_group)
        limit = torch.finfo(self.torch_dtypes[quantizer.dtype]).max
        scale = torch.where(amax > 0.0, limit / amax, torch.ones_like(amax))
        return self._one_scale(x, quantizer, scale)

    def _delayed(self, x: torch.Tensor, quantizer: Any) -> Any:
        quantizer.amax.copy_(torch.maximum(quantizer.amax, _amax(x)))
        return self._one_scale(x, quantizer, quantizer.scale)

    def _one_scale(self, x: torch.Tensor, quantizer: Any, scale: torch.Tensor) -> Any:
        from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
        from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import (
            Float8TensorStorage,
        )

        data = _cast(x.float() * scale, self.torch_dtypes[quantizer.dtype])
        columns = self.transposes and quantizer.columnwise_usage
        fields = {
            "data": data if quantizer.rowwise_usage or not self.transposes else None,
            "data_transpose": self.fp8_transpose(data, 0) if columns else None,
            "fp8_scale_inv": (1.0 / scale).reshape(1),
            "fp8_dtype": quantizer.dtype,
            "quantizer": quantizer,
        }
        return _fp8_tensor(Float8Tensor, Float8TensorStorage, x, quantizer, fields)

    def _blocks(self, x: torch.Tensor, quantizer: Any) -> Any:
        from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor
        from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import (
            MXFP8TensorStorage,
        )

        fields: dict[str, Any] = {
            "fp8_dtype": quantizer.dtype,
            "quantizer": quantizer,
            "with_gemm_swizzled_scales": False,
        }
        for name, is_needed in (
            ("rowwise", quantizer.rowwise_usage),
            ("columnwise", quantizer.columnwise_usage),
        ):
            data = scales = None
            if is_needed:
                rows = name == "rowwise"
                shape = quantizer.get_scale_shape(x.shape, columnwise=not rows)
                data, scales = _to_blocks(
                    x,
                    self.torch_dtypes[quantizer.dtype],
                    shape,
                    rowwise=rows,
                    square=quantizer.with_2d_quantization,
                )
            fields[f"{name}_data"], fields[f"{name}_scale_inv"] = data, scales
        return _fp8_tensor(MXFP8Tensor, MXFP8TensorStorage, x, quantizer, fields)


def is_fp8(x: Any) -> bool:
    """Whether x is quantized."""
    return hasattr(x, "_fp8_dtype")


def _silent(quantizer: Any) -> Any:
    """Return a copy of a quantizer that records and reduces nothing."""
    copied = quantizer.copy()
    if hasattr(copied, "amax"):
        copied.amax = copied.amax.clone()
    if hasattr(copied, "with_amax_reduction"):
        copied.with_amax_reduction = False
    return copied


def _fp8_tensor(tensor: Any, storage: Any, x: torch.Tensor, quantizer: Any, fields: Any) -> Any:
    if quantizer.internal:
        return storage(fake_dtype=x.dtype, **fields)
    return tensor(shape=x.shape, dtype=x.dtype, device=x.device, **fields)


def _has_blocks(x: Any) -> bool:
    return hasattr(x, "_rowwise_data")


def _amax(x: torch.Tensor) -> torch.Tensor:
    return x.abs().max().float() if x.numel() else torch.zeros(())


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype).view(torch.uint8)


def _to_blocks(
    x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int], *, rowwise: bool, square: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return data uint8 of x's shape, and exponents uint8 [*shape], padded at the end.

    Args:
        square: the elements of 32 lines share a scale as well.
    """
    lines = x.float().reshape(-1, x.shape[-1])  # [t, h]
    lines = lines if rowwise else lines.t()
    blocks = lines.reshape(len(lines), lines.shape[1] // _BLOCK, _BLOCK)
    largest = blocks.abs().amax(-1)
    if square:
        largest = largest.unflatten(0, (-1, _BLOCK)).amax(1).repeat_interleave(_BLOCK, 0)
    mantissa, exponent = torch.frexp(largest / torch.finfo(dtype).max)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
    exponent = torch.where(mantissa == 0.0, torch.full_like(exponent, -127), exponent)
    data = _cast(torch.ldexp(blocks, -exponent[..., None]), dtype).reshape(lines.shape)
    exponents = (exponent + 127).to(torch.uint8)
    data, exponents = (data, exponents) if rowwise else (data.t(), exponents.t())
    scales = torch.zeros(tuple(shape), dtype=torch.uint8)
    scales[: exponents.shape[0], : exponents.shape[1]] = exponents
    return data.contiguous().view(x.shape), scales


def _from_blocks(data: torch.Tensor, scales: torch.Tensor, *, rowwise: bool) -> torch.Tensor:
    lines = data.float().reshape(math.prod(data.shape[:-1]), data.shape[-1])
    lines, scales = (lines, scales) if rowwise else (lines.t(), scales.t())
    blocks = lines.reshape(len(lines), lines.shape[1] // _BLOCK, _BLOCK)
    exponent = scales[: blocks.shape[0], : blocks.shape[1]].int() - 127
    values = torch.ldexp(blocks, exponent[..., None]).reshape(lines.shape)
    return (values if rowwise else values.t()).reshape(data.shape)
