# SPDX-License-Identifier: Apache-2.0
"""Causal convolution at the sizes of Qwen3-Next, whose units are 772 columns apart, and with every
flag; norms of heads of 128 and of groups of 1,024."""

import torch

from megatron.core.ops.causal_conv1d import gradient_kernels, kernels
from megatron.core.ops.causal_conv1d import triton as convolution
from megatron.core.ops.gated_rms_norm import triton as gated
from megatron.core.ops.l2norm import triton as length
from megatron.core.ops.launches import Launches
from megatron.core.ops.row_steps import row_tile
from tests.unit_tests.core.ops.aot.description import Description

MARKS = {"after_ptr": "*i32", "number_ptr": "*i32"}
PLAIN = {"STEP": 4, "WIDTH": 4, "SILU": True, "HAS_BIAS": False, "HAS_INITIAL": False}
FULL = PLAIN | {"STEP": 16, "HAS_BIAS": True, "HAS_INITIAL": True}
STEP = {name: FULL[name] for name in ("STEP", "WIDTH", "SILU", "HAS_BIAS")}
CHANNELS = ("channels", "units")


def rows_of(launches: Launches, features: int) -> dict[str, int]:
    """Return how a kernel starts on rows of so many bf16 numbers, on no device."""
    return row_tile(launches, torch.empty(0, dtype=torch.bfloat16), features)


def gated_norms(features: int, *, gate_first: bool, quick: tuple[int, ...]):
    """Describe both kernels of a gated norm."""
    constants = {"X_STEP": 16, "GATE_STEP": 4, "GATE_FIRST": gate_first, "HAS_PLACES": True}
    types = {"places_ptr": "*i64", "rstd_ptr": "*fp32", "weight_ptr": "*fp32"}
    return (
        Description(
            kernel=gated.gated_norm_forward_kernel,
            launch=constants | rows_of(gated.FORWARD, features),
            types=types | {"eps": "fp32"},
            divisible=("features",),
            label=str(features),
            quick=quick,
        ),
        Description(
            kernel=gated.gated_norm_backward_kernel,
            launch=constants | rows_of(gated.BACKWARD, features),
            types=types | {"partial_ptr": "*fp32"},
            divisible=("features",),
            label=str(features),
            quick=quick,
        ),
    )


KERNELS = (
    *(
        Description(
            kernel=kernels.convolution_forward_kernel,
            launch=constants | convolution.FORWARD.default,
            types=MARKS,
            divisible=CHANNELS,
            label=label,
            quick=quick,
        )
        for constants, label, quick in ((PLAIN, "", (90,)), (FULL, "full", ()))
    ),
    *(
        Description(
            kernel=gradient_kernels.convolution_backward_kernel,
            launch=constants
            | {"HAS_LAST": full, "NEEDS_INITIAL": full}
            | convolution.BACKWARD.default,
            types=MARKS | {"partial_ptr": "*fp32"},
            divisible=CHANNELS,
            label=label,
            quick=() if full else (90,),
        )
        for constants, label, full in ((PLAIN, "", False), (FULL, "full", True))
    ),
    Description(
        kernel=kernels.convolution_last_kernel,
        launch={"STEP": 4, "NEAR": 3, "HAS_INITIAL": True} | convolution.LAST.default,
        types={"bounds_ptr": "*i64"},
        divisible=CHANNELS,
        quick=(),
    ),
    Description(
        kernel=kernels.convolution_step_kernel,
        launch=STEP | convolution.STEP.default,
        types={"slots_ptr": "*i64"},
        divisible=CHANNELS,
        quick=(),
    ),
    *gated_norms(128, gate_first=False, quick=(90,)),
    *gated_norms(1024, gate_first=True, quick=()),
    Description(
        kernel=length.l2norm_forward_kernel,
        launch={"STEP": 16} | rows_of(length.FORWARD, 128),
        types={"scale_ptr": "*fp32", "eps": "fp32"},
        divisible=("features",),
        quick=(),
    ),
    Description(
        kernel=length.l2norm_backward_kernel,
        launch={"STEP": 16} | rows_of(length.BACKWARD, 128),
        types={"scale_ptr": "*fp32"},
        divisible=("features",),
        quick=(),
    ),
)
