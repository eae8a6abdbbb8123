# SPDX-License-Identifier: Apache-2.0
"""The kernels whose time is memory's: norms, rotary embedding, gates, dropout."""

from __future__ import annotations

from megatron.core.ops.dropout import triton as dropout
from megatron.core.ops.layernorm import triton as layernorm
from megatron.core.ops.rmsnorm import triton as rmsnorm
from megatron.core.ops.rope import triton as rope
from megatron.core.ops.swiglu import triton as swiglu
from tests.unit_tests.core.ops.aot.description import Description

RMS_TYPES = {"rstd_ptr": "*fp32", "offset": "fp32"}
LAYER_TYPES = {"statistics_ptr": "*fp32", "offset": "fp32"}

KERNELS = (
    Description(
        kernel=rmsnorm.rms_norm_forward_kernel,
        launch={"HAS_RESIDUAL": True, "BLOCK": 4096, "num_warps": 8},
        types=RMS_TYPES | {"eps": "fp32"},
        divisible=("features",),
    ),
    Description(
        kernel=rmsnorm.rms_norm_backward_kernel,
        launch={"HAS_GRAD_TOTAL": True, "BLOCK": 4096, "num_warps": 8},
        types=RMS_TYPES | {"partial_ptr": "*fp32"},
        divisible=("features",),
    ),
    Description(
        kernel=layernorm.layer_norm_forward_kernel,
        launch={"HAS_RESIDUAL": True, "HAS_BIAS": True, "BLOCK": 4096, "num_warps": 8},
        types=LAYER_TYPES | {"eps": "fp32"},
        divisible=("features",),
    ),
    Description(
        kernel=layernorm.layer_norm_backward_kernel,
        launch={"HAS_GRAD_TOTAL": True, "BLOCK": 4096, "num_warps": 8},
        types=LAYER_TYPES | {"partial_ptr": "*fp32"},
        divisible=("features",),
    ),
    Description(
        kernel=rope.rope_kernel,
        launch={"PER_SAMPLE": False, "INTERLEAVED": False, "HEADS": 32, "PAIRS": 64, "REST": 0},
        types={"cos_ptr": "*fp32", "sin_ptr": "*fp32", "sign": "fp32"},
        divisible=("features", "pairs"),
    ),
    Description(
        kernel=swiglu.gated_forward_kernel,
        launch={"GELU": False, "BLOCK": swiglu.BLOCK},
        divisible=("width",),
    ),
    Description(
        kernel=swiglu.gated_backward_kernel,
        launch={"GELU": False, "BLOCK": swiglu.BLOCK},
        divisible=("width",),
    ),
    Description(
        kernel=dropout.dropout_kernel,
        launch={"GROUP": dropout.COLUMNS_PER_HASH, "BLOCK": dropout.BLOCK},
        types={"rows_ptr": "*i64", "columns_ptr": "*i64", "mix": "i64", "scale": "fp32"},
        divisible=("features",),
    ),
)
