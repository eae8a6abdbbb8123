# SPDX-License-Identifier: Apache-2.0
"""How the kernels of recurrences may be started; `triton.py` picks from these."""

from __future__ import annotations

from megatron.core.ops.launches import Launches

# With three stages the next chunk is on its way while this one is worked on; with two it is waited
# for. Narrow tiles give one long sequence the most programs, wide ones do less of a chunk twice.
SWEEP = Launches(
    "recurrence_sweep",
    {"BLOCK_V": 32, "num_warps": 4, "num_stages": 3},
    others=(
        {"BLOCK_V": 32, "num_warps": 4, "num_stages": 2},
        {"BLOCK_V": 64, "num_warps": 4, "num_stages": 3},
        {"BLOCK_V": 64, "num_warps": 8, "num_stages": 3},
        {"BLOCK_V": 16, "num_warps": 4, "num_stages": 3},
    ),
)
# Of SSD, whose sweep also makes what queries see.
SWEEP_DUAL = Launches(
    "recurrence_sweep_dual",
    {"BLOCK_V": 64, "num_warps": 8, "num_stages": 3},
    others=(
        {"BLOCK_V": 32, "num_warps": 4, "num_stages": 3},
        {"BLOCK_V": 32, "num_warps": 4, "num_stages": 2},
        {"BLOCK_V": 64, "num_warps": 4, "num_stages": 3},
    ),
)
# Of more than 128 features of keys, and of fp32, which no tensor core multiplies in full.
SWEEP_TALL = Launches("recurrence_sweep_tall", {"BLOCK_V": 32, "num_warps": 8, "num_stages": 2})
SWEEP_WIDE = Launches("recurrence_sweep_fp32", {"BLOCK_V": 16, "num_warps": 8, "num_stages": 1})

REVERSE = Launches(
    "recurrence_reverse",
    {"BLOCK_V": 32, "num_warps": 4, "num_stages": 3},
    others=(
        {"BLOCK_V": 32, "num_warps": 4, "num_stages": 2},
        {"BLOCK_V": 64, "num_warps": 8, "num_stages": 3},
        {"BLOCK_V": 64, "num_warps": 8, "num_stages": 2},
    ),
)
REVERSE_TALL = Launches("recurrence_reverse_tall", {"BLOCK_V": 16, "num_warps": 8, "num_stages": 2})
REVERSE_WIDE = Launches("recurrence_reverse_fp32", {"BLOCK_V": 16, "num_warps": 8, "num_stages": 1})
# HEADS of a program at most: one needs fewer registers, but then heads are summed up in memory.
# Of the delta rule two spill registers.
GRADIENTS = Launches(
    "recurrence_gradients",
    {"HEADS": 1, "BLOCK_V": 128, "num_warps": 8, "num_stages": 1},
    others=({"HEADS": 2, "BLOCK_V": 128, "num_warps": 8, "num_stages": 1},),
)
GRADIENTS_DUAL = Launches(
    "recurrence_gradients_dual",
    {"HEADS": 16, "BLOCK_V": 32, "num_warps": 8, "num_stages": 1},
    others=(
        {"HEADS": 16, "BLOCK_V": 64, "num_warps": 8, "num_stages": 1},
        {"HEADS": 1, "BLOCK_V": 32, "num_warps": 8, "num_stages": 1},
        {"HEADS": 1, "BLOCK_V": 64, "num_warps": 8, "num_stages": 1},
    ),
)
# Of more than 128 features of keys, and of fp32: what fits in shared memory.
GRADIENTS_TALL = Launches(
    "recurrence_gradients_tall", {"BLOCK_V": 64, "num_warps": 8, "num_stages": 1}
)
GRADIENTS_WIDE = Launches(
    "recurrence_gradients_fp32", {"BLOCK_V": 16, "num_warps": 8, "num_stages": 1}
)
