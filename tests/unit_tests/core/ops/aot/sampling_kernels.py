# SPDX-License-Identifier: Apache-2.0
"""The sampling kernels."""

from __future__ import annotations

from megatron.core.ops.sampling import triton as sampling
from tests.unit_tests.core.ops.aot.description import Description

KERNELS = (
    Description(
        kernel=sampling.change_scores_kernel,
        launch=sampling.CHANGE.default,
        types={
            "scores_ptr": "*fp32",
            "rows_ptr": "*i32",
            "penalties_ptr": "*fp32",
            "bounds_ptr": "*i32",
            "tokens_ptr": "*i32",
            "values_ptr": "*fp32",
        },
        quick=(),
    ),
    Description(
        kernel=sampling.choose_tokens_kernel,
        launch=sampling.SAMPLE.default,
        types={
            "logits_ptr": "*fp32",
            "scores_ptr": "*fp32",
            "parameters_ptr": "*fp64",
            "tokens_ptr": "*i64",
            "logprobs_ptr": "*fp32",
            "finite_ptr": "*i1",
            "normalizers_ptr": "*fp32",
        },
        divisible=("size",),
        quick=(),
    ),
    Description(
        kernel=sampling.most_probable_kernel,
        launch=sampling.TOP.default,
        types={
            "logits_ptr": "*fp32",
            "normalizers_ptr": "*fp32",
            "counts_ptr": "*i32",
            "ids_ptr": "*i64",
            "logprobs_ptr": "*fp32",
        },
        divisible=("size",),
        quick=(),
    ),
)
