# SPDX-License-Identifier: Apache-2.0
"""The grouped matmuls of experts: in bf16, and in fp32 without tensor cores."""

from __future__ import annotations

from megatron.core.ops.grouped_mm import triton as grouped
from tests.unit_tests.core.ops.aot.description import Description, typed

SHAPE = {"TRANSPOSED": True, "RUNS": 64}


def in_fp32(kernel: object) -> dict[str, str]:
    """Return the types of a kernel's pointers in fp32."""
    return {name: "*fp32" for name in kernel.arg_names if name.endswith("_ptr")}


PRODUCT, WGRAD = grouped.grouped_mm_kernel, grouped.grouped_wgrad_kernel
ENDS = typed("*i32 ends")

KERNELS = (
    Description(PRODUCT, SHAPE | grouped.PRODUCT.default, ENDS, divisible="inner columns"),
    Description(
        PRODUCT,
        SHAPE | grouped.PRODUCT_FP32.default,
        in_fp32(PRODUCT) | ENDS,
        divisible="inner columns",
        label="fp32",
    ),
    Description(
        WGRAD,
        grouped.WGRAD.default,
        ENDS | typed("*fp32 total"),
        divisible="outputs features",
        quick=(90,),
    ),
    Description(
        WGRAD,
        grouped.WGRAD_FP32.default,
        in_fp32(WGRAD) | ENDS,
        divisible="outputs features",
        label="fp32",
    ),
)
