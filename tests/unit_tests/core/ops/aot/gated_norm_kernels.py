# SPDX-License-Identifier: Apache-2.0
"""Gated norms of heads of 128 and of groups of 1,024."""

import torch

from megatron.core.ops.launches import Launches
from megatron.core.ops.recurrence.gated_norm import triton as gated
from megatron.core.ops.strided_rows import row_tile
from tests.unit_tests.core.ops.aot.description import Description, typed


def launch_of(launches: Launches, features: int) -> dict[str, int]:
    """Return the launch for rows of `features` bf16 elements, independent of a device."""
    return row_tile(launches, torch.empty(0, dtype=torch.bfloat16), features)


def gated_norms(features: int, *, gate_first: bool, quick: tuple[int, ...]):
    """Describe both kernels of a gated norm."""
    constants = {"X_STEP": 16, "GATE_STEP": 4, "GATE_FIRST": gate_first, "HAS_INDEX": True}
    types = typed("*i64 index; *fp32 rstd weight")
    return (
        Description(
            gated.gated_norm_forward_kernel,
            constants | launch_of(gated.FORWARD, features),
            types | typed("fp32 eps"),
            divisible="features",
            label=str(features),
            quick=quick,
        ),
        Description(
            gated.gated_norm_backward_kernel,
            constants | {"JOINT": True} | launch_of(gated.BACKWARD, features),
            types | typed("*fp32 partial"),
            divisible="features",
            label=str(features),
            quick=quick,
        ),
    )


KERNELS = (
    *gated_norms(128, gate_first=False, quick=(90,)),
    *gated_norms(1024, gate_first=True, quick=()),
)
