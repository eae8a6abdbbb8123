# SPDX-License-Identifier: Apache-2.0
"""The sampling kernels."""

from __future__ import annotations

from megatron.core.ops.sampling import triton as sampling
from tests.unit_tests.core.ops.aot.description import Description, typed

KERNELS = (
    Description(
        sampling.change_scores_kernel,
        sampling.CHANGE.default,
        typed("*fp32 scores penalties values; *i32 rows bounds tokens"),
    ),
    Description(
        sampling.choose_tokens_kernel,
        sampling.SAMPLE.default,
        typed(
            "*fp32 logits scores logprobs normalizers; *fp64 parameters; *i64 tokens; *i1 finite"
        ),
        divisible="size",
    ),
    Description(
        sampling.most_probable_kernel,
        sampling.TOP.default,
        typed("*fp32 logits normalizers logprobs; *i32 counts; *i64 ids"),
        divisible="size",
    ),
)
