# SPDX-License-Identifier: Apache-2.0
"""The kernels of linear cross entropy and of token permutation."""

from __future__ import annotations

from megatron.core.ops.linear_cross_entropy import triton as loss
from megatron.core.ops.permutation import triton as permutation
from tests.unit_tests.core.ops.aot.description import Description

SLOTS = {"slots_ptr": "*i64", "weights_ptr": "*fp32"}

KERNELS = (
    Description(
        kernel=loss.chunk_statistics_kernel,
        launch=loss.STATISTICS.default,
        types={
            "maximum_ptr": "*fp32",
            "sum_ptr": "*fp32",
            "target_ptr": "*fp32",
            "targets_ptr": "*i64",
        },
        divisible=("row_stride", "columns_total"),
    ),
    Description(
        kernel=loss.chunk_gradient_kernel,
        launch=loss.GRADIENT.default,
        types={"targets_ptr": "*i64", "lse_ptr": "*fp32", "weights_ptr": "*fp32"},
        divisible=("row_stride", "columns_total"),
        quick=(),
    ),
    Description(
        kernel=permutation.take_rows_kernel,
        launch=permutation.TAKE.default,
        types={"sources_ptr": "*i64"},
        divisible=("features",),
        quick=(),
    ),
    *(
        Description(
            kernel=permutation.sum_rows_kernel,
            launch={
                "HAS_WEIGHTS": True,
                **permutation.tile_shape(permutation.SUM.default, 2048, copies),
            },
            types=SLOTS,
            divisible=("features",),
            label=str(copies),
            quick=quick,
        )
        for copies, quick in ((8, ()), (10, ()))
    ),
    *(
        Description(
            kernel=permutation.sum_rows_backward_kernel,
            launch=permutation.tile_shape(permutation.SUM_BACKWARD.default, 2048, copies),
            types=SLOTS | {"d_weights_ptr": "*fp32"},
            divisible=("features",),
            label=str(copies),
            quick=(),
        )
        for copies in (8, 10)
    ),
)
