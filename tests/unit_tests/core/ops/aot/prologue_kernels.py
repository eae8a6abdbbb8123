# SPDX-License-Identifier: Apache-2.0
"""The kernels of the recurrence prologue, at the sizes of Qwen3-Next and of Mamba-2.

Units of Qwen3-Next are 772 columns apart; Mamba-2 has every flag on.
"""

from megatron.core.ops.recurrence import UnitLayout
from megatron.core.ops.recurrence.prologue import triton
from megatron.core.ops.recurrence.prologue.kernels import (
    prologue_backward_kernel,
    prologue_forward_kernel,
)
from tests.unit_tests.core.ops.aot.description import Description, typed

INDEX_TYPES = typed("*i64 rows; *i32 positions sequence_ids")
GATE_PARAMETERS = typed("*fp32 a_log dt_bias") | dict.fromkeys(("eps", "low", "high"), "fp32")
GATES = typed("*fp32 decay beta")
GRADIENTS = typed("*fp32 d_decay d_beta tap_partial gate_partial")
DELTA = triton.constants_of(UnitLayout.delta(2, 128, 128), conv_width=4, align=4, has_index=True)
STATE_SPACE = triton.constants_of(
    UnitLayout.state_space(16, 128, 64, (0.0, 1.0)),
    conv_width=4,
    align=16,
    has_index=True,
    has_bias=True,
    has_initial=True,
)
FORWARD, BACKWARD = dict(triton.FORWARD.default), dict(triton.BACKWARD.default)


def describe(constants: dict, label: str, quick: tuple[int, ...]) -> tuple[Description, ...]:
    """Describe the forward and the backward kernel with the same constants."""
    gate_tile = {"GATE_T": min(constants["GATE_T"], FORWARD["BLOCK_T"])}
    return (
        Description(
            prologue_forward_kernel,
            constants | FORWARD | gate_tile,
            INDEX_TYPES | GATE_PARAMETERS | GATES,
            divisible="row_stride",
            label=label,
            quick=quick,
        ),
        Description(
            prologue_backward_kernel,
            constants | {"JOINT": True} | BACKWARD,
            INDEX_TYPES | GATE_PARAMETERS | GRADIENTS,
            divisible="row_stride",
            label=label,
            quick=quick,
        ),
    )


KERNELS = (*describe(DELTA, "delta", (90,)), *describe(STATE_SPACE, "state space", ()))
