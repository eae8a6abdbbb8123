# SPDX-License-Identifier: Apache-2.0
"""The kernels of linear cross entropy and of token permutation."""

from __future__ import annotations

from megatron.core.ops.linear_cross_entropy import triton as loss
from megatron.core.ops.permutation import triton as permutation
from tests.unit_tests.core.ops.aot.description import Description, typed

SLOTS = typed("*i64 slots; *fp32 weights")

KERNELS = (
    Description(
        loss.chunk_statistics_kernel,
        loss.STATISTICS.default,
        typed("*fp32 maximum sum target; *i64 targets"),
        divisible="row_stride columns_total",
        quick=(90,),
    ),
    Description(
        loss.chunk_gradient_kernel,
        loss.GRADIENT.default,
        typed("*i64 targets; *fp32 lse weights"),
        divisible="row_stride columns_total",
    ),
    Description(
        permutation.take_rows_kernel,
        permutation.TAKE.default,
        typed("*i64 sources"),
        divisible="features",
    ),
    *(
        Description(
            permutation.sum_rows_kernel,
            {"HAS_WEIGHTS": True, **permutation.tile_shape(permutation.SUM.default, 2048, copies)},
            SLOTS,
            divisible="features",
            label=str(copies),
            quick=quick,
        )
        for copies, quick in ((8, ()), (10, ()))
    ),
    *(
        Description(
            permutation.sum_rows_backward_kernel,
            permutation.tile_shape(permutation.SUM_BACKWARD.default, 2048, copies),
            SLOTS | typed("*fp32 d_weights"),
            divisible="features",
            label=str(copies),
        )
        for copies in (8, 10)
    ),
)
