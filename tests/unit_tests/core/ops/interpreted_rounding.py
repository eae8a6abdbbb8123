# SPDX-License-Identifier: Apache-2.0
"""bf16 and TF32 rounding of `tensor_core_rounding` against closed forms.

`test_triton.py` runs this file in a separate process.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def cast_kernel(x_ptr, bf16_ptr, sum_ptr, SIZE: tl.constexpr):
    """Store x in bf16, and in fp32 the bf16 sum of x and x / 2."""
    index = tl.arange(0, SIZE)
    x = tl.load(x_ptr + index).to(tl.bfloat16)
    tl.store(bf16_ptr + index, x)
    tl.store(sum_ptr + index, (x + x * 0.5).to(tl.float32))


@triton.jit
def product_kernel(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Store the product of x and y [SIZE, SIZE] in fp32."""
    row = tl.arange(0, SIZE)
    index = row[:, None] * SIZE + row[None, :]
    x, y = tl.load(x_ptr + index), tl.load(y_ptr + index)
    tl.store(out_ptr + index, tl.dot(x, y, input_precision=PRECISION))


def product(x: float, y: float, dtype: torch.dtype, precision: str = "ieee") -> float:
    """Return the sum of 16 products x y."""
    left, right = (torch.full((16, 16), z, dtype=torch.float64).to(dtype) for z in (x, y))
    out = torch.empty(16, 16)
    product_kernel[(1,)](left, right, out, 16, precision)
    (total,) = set(out.flatten().tolist())
    return total


#: fp32 numbers and the nearest bf16, which has 7 fraction bits.
NEAREST = {
    1 + 2**-8: 1.0,  # ties go to the even mantissa
    1 + 3 * 2**-8: 1 + 2**-6,
    1 + 2**-8 + 2**-20: 1 + 2**-7,
    -(1 + 2**-9 + 2**-10): -1.0,
    2 - 2**-9: 2.0,  # a carry into the exponent
    2.0**-133: 2.0**-133,  # the smallest bf16 number
    2.0**-134: 0.0,
    3.4e38: torch.inf,
    -torch.inf: -torch.inf,
}


def test_bf16_casts_round_to_nearest_even():
    numbers = [*NEAREST, torch.nan, *[0.0] * (15 - len(NEAREST))]
    x, out, total = torch.tensor(numbers), torch.empty(16, dtype=torch.bfloat16), torch.empty(16)
    cast_kernel[(1,)](x, out, total, 16)
    assert out[: len(NEAREST)].tolist() == list(NEAREST.values())
    assert out[len(NEAREST)].isnan().item()
    assert not out[len(NEAREST) + 1 :].any().item()


def test_bf16_sums_are_rounded_to_bf16():
    x, out, total = torch.full((16,), 1 + 2**-7), torch.empty(16).bfloat16(), torch.empty(16)
    cast_kernel[(1,)](x, out, total, 16)  # 1.5 + 2⁻⁷ + 2⁻⁸ lies between two numbers
    assert total.tolist() == [1.5 + 2**-6] * 16


def test_bf16_products_are_exact_and_summed_in_fp32():
    x = 1 + 2**-7
    assert product(x, x, torch.bfloat16) == 16 * (1 + 2**-6 + 2**-14)
    assert product(1 + 2**-8, 1.0, torch.bfloat16) == 16.0


def test_tf32_products_use_ten_fraction_bits():
    low = 1 + 2**-10 + 2**-11 + 2**-12
    assert product(low, 1.0, torch.float32, "tf32") == 16 * (1 + 2**-10)
    assert product(1.0, low, torch.float32, "tf32") == 16 * (1 + 2**-10)
    assert product(low, 1.0, torch.float32, "ieee") == 16 * low


def test_tf32x3_omits_the_product_of_low_parts():
    low = 2**-12 + 2**-13  # less than half of the last of ten fraction bits
    assert product(1 + low, 1.0, torch.float32, "tf32x3") == 16 * (1 + low)
    assert product(1 + low, 1 + low, torch.float32, "tf32x3") == 16 * (1 + 2 * low)
    assert product(1 + low, 1 + low, torch.float32, "ieee") > 16 * (1 + 2 * low)
    low_rounded_up = (
        2**-11 + 2**-12
    )  # over half a bit: the high part is 1 + 2⁻¹⁰, the low part -2⁻¹²
    squared = (1 + 2**-10) ** 2 - 2 * (1 + 2**-10) * 2**-12
    assert product(1 + low_rounded_up, 1 + low_rounded_up, torch.float32, "tf32x3") == 16 * squared
