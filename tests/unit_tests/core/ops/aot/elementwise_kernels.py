# SPDX-License-Identifier: Apache-2.0
"""The memory-bound kernels: norms, rotary embedding, gated activations, dropout."""

from __future__ import annotations

from megatron.core.ops.dropout import triton as dropout
from megatron.core.ops.layernorm import triton as layernorm
from megatron.core.ops.rmsnorm import triton as rmsnorm
from megatron.core.ops.rope import triton as rope
from megatron.core.ops.swiglu import triton as swiglu
from tests.unit_tests.core.ops.aot.description import Description

RMS_TYPES = {"rstd_ptr": "*fp32", "offset": "fp32"}
DENSE = {"group_size": 1}  # the launcher specializes on 1, for rows of a dense tensor
LAYER_TYPES = {"statistics_ptr": "*fp32", "offset": "fp32"}

KERNELS = (
    *(
        Description(
            kernel=rmsnorm.rms_norm_forward_kernel,
            launch={
                "HAS_RESIDUAL": True,
                **rmsnorm.row_tile(rmsnorm.FORWARD.default, features),
                **inner,
            },
            types=RMS_TYPES | {"eps": "fp32"},
            divisible=("features",),
            label=str(features),
            quick=quick,
        )
        for features, inner, quick in ((4096, DENSE, (90,)), (128, {}, ()))
    ),
    *(
        Description(
            kernel=rmsnorm.rms_norm_backward_kernel,
            launch={
                "HAS_GRAD_TOTAL": True,
                **rmsnorm.row_tile(rmsnorm.BACKWARD.default, features),
                **inner,
            },
            types=RMS_TYPES | {"partial_ptr": "*fp32"},
            divisible=("features",),
            label=str(features),
            quick=quick,
        )
        for features, inner, quick in ((4096, DENSE, (90,)), (128, {}, ()))
    ),
    Description(
        kernel=layernorm.layer_norm_forward_kernel,
        launch={
            "HAS_RESIDUAL": True,
            "HAS_BIAS": True,
            **rmsnorm.row_tile(layernorm.FORWARD.default, 4096),
        },
        types=LAYER_TYPES | {"eps": "fp32"},
        divisible=("features",),
        quick=(),
    ),
    Description(
        kernel=layernorm.layer_norm_backward_kernel,
        launch={"HAS_GRAD_TOTAL": True, **rmsnorm.row_tile(layernorm.BACKWARD.default, 4096)},
        types=LAYER_TYPES | {"partial_ptr": "*fp32"},
        divisible=("features",),
    ),
    *(
        Description(
            kernel=rope.rope_kernel,
            launch={
                "PER_SAMPLE": False,
                "INTERLEAVED": interleaved,
                **rope.head_tile(
                    rope.ROTATE.default["TILE"], heads, features, 64 if heads > 2 else 32
                ),
                "num_warps": rope.ROTATE.default["num_warps"],
            },
            types={"cos_ptr": "*fp32", "sin_ptr": "*fp32", "sign": "fp32"},
            divisible=("features", "pairs"),
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
            kernel=rope.join_heads_kernel,
            launch={
                "ROTATES": rotates,
                "PER_SAMPLE": False,
                "INTERLEAVED": False,
                "FEATURES": 128,
                **rope.head_tile(rope.ROTATE.default["TILE"], heads, 128, 64 if rotates else 0),
                "num_warps": rope.ROTATE.default["num_warps"],
            },
            types={"cos_ptr": "*fp32", "sin_ptr": "*fp32"},
            divisible=("row", "features", "pairs"),
            label=label,
            quick=(),
        )
        for label, heads, rotates in (("16 heads", 16, True), ("64 heads, copied", 64, False))
    ),
    Description(
        kernel=swiglu.gated_forward_kernel,
        launch={"GELU": False, **swiglu.FORWARD.default},
        divisible=("width",),
        quick=(),
    ),
    Description(
        kernel=swiglu.gated_backward_kernel,
        launch={"GELU": False, **swiglu.BACKWARD.default},
        divisible=("width",),
    ),
    Description(
        kernel=dropout.dropout_kernel,
        launch={"GROUP": dropout.COLUMNS_PER_HASH, **dropout.DROP.default},
        types={"rows_ptr": "*i64", "columns_ptr": "*i64", "mix": "i64", "scale": "fp32"},
        divisible=("features", "offset_in_group"),
        quick=(),
    ),
)
