# SPDX-License-Identifier: Apache-2.0
"""The decode kernel of recurrent mixers, at the sizes of Qwen3-Next and Nemotron-H."""

from __future__ import annotations

from megatron.core.ops.recurrence import UnitLayout
from megatron.core.ops.recurrence.decode.triton import (
    DECODE,
    NORM_BLOCK,
    constants_of,
    recurrence_decode_kernel,
)
from tests.unit_tests.core.ops.aot.description import Description, typed

FP32_POINTERS = ("a_log_ptr", "dt_bias_ptr", "skip_ptr", "norm_ptr", "state_ptr")
FP32_SCALARS = ("scale", "dt_min", "dt_max", "eps")
TYPES = {name: "*fp32" for name in FP32_POINTERS} | {name: "fp32" for name in FP32_SCALARS}
TYPES |= typed("*i64 slots; *i32 arrival_counts")

DELTA_RULE = constants_of(UnitLayout.delta(2, 128, 128), 4) | {
    "HAS_BIAS": False,
    "HAS_SKIP": False,
    "HEAD_NORM": True,
    "UNIT_NORM": False,
    "GATE_FIRST": False,
    "BLOCK_NORM": NORM_BLOCK,
}
STATE_SPACE = constants_of(UnitLayout.state_space(16, 128, 64, (0.0, 1.0)), 4) | {
    "HAS_BIAS": True,
    "HAS_SKIP": True,
    "HEAD_NORM": False,
    "UNIT_NORM": True,
    "GATE_FIRST": True,
    "BLOCK_NORM": NORM_BLOCK,
}

KERNELS = (
    Description(
        recurrence_decode_kernel,
        DELTA_RULE | DECODE.default,
        TYPES,
        divisible="channels",
        label="delta",
        quick=(90,),
    ),
    Description(
        recurrence_decode_kernel,
        DELTA_RULE | DECODE.default,
        TYPES | typed("*bf16 state"),
        divisible="channels",
        label="delta bf16",
    ),
    Description(
        recurrence_decode_kernel,
        STATE_SPACE | DECODE.default,
        TYPES,
        divisible="channels",
        label="state space",
    ),
)
