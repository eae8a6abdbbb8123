# SPDX-License-Identifier: Apache-2.0
"""The memory-bound kernels: norms, rotary embedding, gated activations, dropout."""

from __future__ import annotations

from megatron.core.ops.dropout import triton as dropout
from megatron.core.ops.layernorm import triton as layernorm
from megatron.core.ops.rmsnorm import triton as rmsnorm
from megatron.core.ops.rope import triton as rope
from megatron.core.ops.swiglu import triton as swiglu
from tests.unit_tests.core.ops.aot.description import Description, typed

RMS_TYPES = typed("*fp32 rstd; fp32 offset")
DENSE = {"group_size": 1}  # the launcher specializes on 1, for rows of a dense tensor
#: Constants of a gate by silu without a clamp.
SILU = {"GELU": False, "FACTOR": 1.0, "CLAMP": None, "OFFSET": 0.0}
LAYER_TYPES = typed("*fp32 statistics; fp32 offset")

KERNELS = (
    *(
        Description(
            rmsnorm.rms_norm_forward_kernel,
            {"HAS_RESIDUAL": True, **rmsnorm.row_tile(rmsnorm.FORWARD.default, features), **inner},
            RMS_TYPES | typed("fp32 eps"),
            divisible="features",
            label=str(features),
            quick=quick,
        )
        for features, inner, quick in ((4096, DENSE, (90,)), (128, {}, ()))
    ),
    *(
        Description(
            rmsnorm.rms_norm_backward_kernel,
            {
                "HAS_GRAD_TOTAL": True,
                **rmsnorm.row_tile(rmsnorm.BACKWARD.default, features),
                **inner,
            },
            RMS_TYPES | typed("*fp32 partial"),
            divisible="features",
            label=str(features),
            quick=quick,
        )
        for features, inner, quick in ((4096, DENSE, (90,)), (128, {}, ()))
    ),
    Description(
        layernorm.layer_norm_forward_kernel,
        {
            "HAS_RESIDUAL": True,
            "HAS_BIAS": True,
            **rmsnorm.row_tile(layernorm.FORWARD.default, 4096),
        },
        LAYER_TYPES | typed("fp32 eps"),
        divisible="features",
    ),
    Description(
        layernorm.layer_norm_backward_kernel,
        {"HAS_GRAD_TOTAL": True, **rmsnorm.row_tile(layernorm.BACKWARD.default, 4096)},
        LAYER_TYPES | typed("*fp32 partial"),
        divisible="features",
        quick=(90,),
    ),
    *(
        Description(
            rope.rope_kernel,
            {
                "PER_SAMPLE": False,
                "INTERLEAVED": interleaved,
                **rope.head_tile(
                    rope.ROTATE.default["TILE"], heads, features, 64 if heads > 2 else 32
                ),
                "num_warps": rope.ROTATE.default["num_warps"],
            },
            typed("*fp32 cos sin; fp32 sign"),
            divisible="features pairs",
            label=label,
            quick=quick,
        )
        for label, heads, features, interleaved, quick in (
            ("32 heads", 32, 128, False, (90,)),
            ("2 heads", 2, 256, False, ()),
            ("interleaved", 32, 128, True, ()),
        )
    ),
    *(
        Description(
            rope.join_heads_kernel,
            {
                "ROTATES": rotates,
                "PER_SAMPLE": False,
                "INTERLEAVED": False,
                "FEATURES": 128,
                **rope.head_tile(rope.ROTATE.default["TILE"], heads, 128, 64 if rotates else 0),
                "num_warps": rope.ROTATE.default["num_warps"],
            },
            typed("*fp32 cos sin"),
            divisible="row features pairs",
            label=label,
        )
        for label, heads, rotates in (("16 heads", 16, True), ("64 heads, copied", 64, False))
    ),
    Description(swiglu.gated_forward_kernel, {**SILU, **swiglu.FORWARD.default}, divisible="width"),
    Description(
        swiglu.gated_backward_kernel,
        {**SILU, **swiglu.BACKWARD.default},
        divisible="width",
        quick=(90,),
    ),
    Description(
        dropout.dropout_kernel,
        {"GROUP": dropout.COLUMNS_PER_HASH, **dropout.DROP.default},
        typed("*i64 rows columns; i64 mix; fp32 scale"),
        divisible="features offset_in_group",
    ),
)
