# SPDX-License-Identifier: Apache-2.0
"""Linear recurrences over packed tokens: the gated delta rule and state-space duality (SSD).

Both carry a state per head from token to token, and differ in the equation of a token alone. A
layer projects its tokens, `recurrence_prologue` convolves and activates them and computes gates,
`recur` runs the recurrence, `gated_rms_norm` normalises and gates its output. In generation
`recurrence_decode` does all of it for one token of each row.
"""

from megatron.core.ops.recurrence.convolution import causal_conv1d, causal_conv1d_step
from megatron.core.ops.recurrence.decode import (
    DecodeMemory,
    OutputNorm,
    needs_arrival_counts,
    recurrence_decode,
)
from megatron.core.ops.recurrence.delta_rule.cpu import (
    delta_recurrence,
    gated_delta_rule,
    gated_delta_step,
)
from megatron.core.ops.recurrence.gated_norm import GATE_FIRST, NORM_FIRST, gated_rms_norm
from megatron.core.ops.recurrence.interface import (
    CHUNK_SIZE,
    Recurrence,
    RecurrenceInputs,
    apply_transition,
    recur,
    restore_tensors,
    split_tensors,
)
from megatron.core.ops.recurrence.prologue import PrologueWeights, UnitLayout, recurrence_prologue
from megatron.core.ops.recurrence.ssd.cpu import (
    add_skip,
    state_space_dual,
    state_space_recurrence,
    state_space_step,
)

__all__ = [
    "CHUNK_SIZE",
    "GATE_FIRST",
    "NORM_FIRST",
    "DecodeMemory",
    "OutputNorm",
    "PrologueWeights",
    "Recurrence",
    "RecurrenceInputs",
    "UnitLayout",
    "add_skip",
    "apply_transition",
    "causal_conv1d",
    "causal_conv1d_step",
    "delta_recurrence",
    "gated_delta_rule",
    "gated_delta_step",
    "gated_rms_norm",
    "needs_arrival_counts",
    "recur",
    "recurrence_decode",
    "recurrence_prologue",
    "restore_tensors",
    "split_tensors",
    "state_space_dual",
    "state_space_recurrence",
    "state_space_step",
]
