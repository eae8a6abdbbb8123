# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter with a GPU's rounding: bf16 in casts, sums and products, and TF32.

The interpreter stores bf16 as 16-bit integers. It converts them only from and to fp32, where it
truncates instead of rounding; it would add and multiply bf16 tensors as integers. It multiplies
fp32 in full precision, whatever `input_precision` a product requests.

Compiled kernels pass fp32 bits to TF32 products, and tensor cores ignore the last 13 bits; "tf32x3"
splits each operand into a rounded high part and a low part (PTX of Triton 3.6.0 and 3.7.1).

Not modelled: the order in which tensor cores add up, and the approximations of exp, log and sqrt.
These are of the size of fp32's rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def to_bf16_bits(x: np.ndarray) -> np.ndarray:
    """Return fp32 x as bits of bf16, rounded to nearest even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    truncated = bits >> np.uint32(16)
    nearest = (bits + np.uint32(0x7FFF) + (truncated & np.uint32(1))) >> np.uint32(16)
    return (
        np.where(np.isnan(x), truncated | np.uint32(0x40), nearest)
        .astype(np.uint16)
        .reshape(x.shape)
    )


def tf32(x: np.ndarray, *, nearest: bool) -> np.ndarray:
    """Return fp32 x with a mantissa of 10 bits.

    Args:
        x: fp32.
        nearest: as `cvt.rna.tf32` rounds; else as products read fp32, which drop 13 bits.
    """
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    bits = bits + np.uint32(0x1000 if nearest else 0) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), bits.view(np.float32).reshape(x.shape), x)


def as_fp32(x: TensorHandle) -> np.ndarray:
    """Return the values of a tensor, bf16 converted to fp32."""
    if x.dtype.scalar != tl.bfloat16 or x.data.dtype != np.uint16:
        return x.data
    return (x.data.astype(np.uint32) << np.uint32(16)).view(np.float32)


def as_bf16(x: np.ndarray) -> TensorHandle:
    """Return fp32 values as a bf16 tensor."""
    return TensorHandle(to_bf16_bits(x.astype(np.float32)), tl.bfloat16)


class RoundingBuilder(InterpreterBuilder):
    """Kernel operations with a GPU's rounding of bf16 and TF32."""

    def cast_impl(self, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        """Convert between types."""
        if dst_type.scalar == tl.bfloat16:
            return as_bf16(as_fp32(src))
        if src.dtype.scalar == tl.bfloat16:
            src = TensorHandle(as_fp32(src), tl.float32)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(
        self, src: TensorHandle, dst_type: tl.dtype, rounding_mode: ir.ROUNDING_MODE
    ) -> TensorHandle:
        """Convert between types of floating point, to bf16 by the nearest."""
        if dst_type.scalar == tl.bfloat16 and rounding_mode != ir.ROUNDING_MODE.RTZ:
            return as_bf16(as_fp32(src))
        return super().create_fp_to_fp(src, dst_type, rounding_mode)

    def get_bf16(self, value: float) -> TensorHandle:
        """Return a constant."""
        return as_bf16(np.array([value], dtype=np.float32))

    def binary_op(
        self, lhs: TensorHandle, rhs: TensorHandle, op: Callable[..., np.ndarray]
    ) -> TensorHandle:
        """Apply an operation to each pair of elements; a result of bf16 is rounded once."""
        if lhs.dtype.scalar != tl.bfloat16:
            return super().binary_op(lhs, rhs, op)
        result = op(as_fp32(lhs), as_fp32(rhs))
        if result.dtype == np.bool_:
            return TensorHandle(result, lhs.dtype.scalar)
        return as_bf16(result)

    def create_dot(
        self,
        a: TensorHandle,
        b: TensorHandle,
        d: TensorHandle,
        input_precision: ir.INPUT_PRECISION,
        max_num_imprecise_acc: int,
    ) -> TensorHandle:
        """Multiply matrices and add them to `d`, in the type of `d`."""
        if a.dtype.scalar == tl.bfloat16:
            fp32_operands = [TensorHandle(as_fp32(x), tl.float32) for x in (a, b)]
            return super().create_dot(*fp32_operands, d, input_precision, max_num_imprecise_acc)
        names = ir.INPUT_PRECISION
        if a.dtype.scalar != tl.float32 or input_precision not in (names.TF32, names.TF32x3):
            return super().create_dot(a, b, d, input_precision, max_num_imprecise_acc)
        splits = input_precision == names.TF32x3
        left, right = (tf32(x.data, nearest=splits) for x in (a, b))
        total = d.data
        if splits:  # the compiler's three products, the smallest first
            total = total + tf32(a.data - left, nearest=False) @ right
            total = total + left @ tf32(b.data - right, nearest=False)
        return TensorHandle(left @ right + total, d.dtype.scalar)


def round_like_a_gpu() -> None:
    """Let all kernels that this process interprets from now on round as they would on a GPU."""
    interpreter.interpreter_builder.__class__ = RoundingBuilder
