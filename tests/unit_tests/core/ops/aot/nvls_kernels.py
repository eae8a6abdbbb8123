# SPDX-License-Identifier: Apache-2.0
"""The kernels of collectives over symmetric memory, for eight ranks."""

from __future__ import annotations

from megatron.core.ops.nvls import triton as nvls
from tests.unit_tests.core.ops.aot.description import Description, typed

PADS = typed("*i64 pads; *i32 status")
BUFFERS = PADS | typed("*i64 buffers")
ROWS = typed("*i32 rows")
NORM = typed("fp32 eps offset")
MULTICAST = PADS | typed("i64 multicast")
COPY = {"WORLD": 8, "LIMIT": 0, "TRAP": False, **nvls.COPY.default}
#: As --nvls-tries launches it.
LIMITED = COPY | {"LIMIT": 1000, "TRAP": True}

KERNELS = (
    Description(nvls.peer_all_gather_kernel, LIMITED | {"TRAP": False}, BUFFERS, label="bounded"),
    Description(nvls.peer_all_gather_kernel, LIMITED, BUFFERS, label="traps"),
    Description(nvls.multimem_reduce_scatter_kernel, LIMITED, MULTICAST, label="traps"),
    Description(nvls.peer_all_gather_kernel, COPY, BUFFERS),
    Description(nvls.peer_reduce_scatter_kernel, COPY, BUFFERS),
    Description(nvls.peer_all_gather_v_kernel, COPY, BUFFERS | ROWS),
    Description(nvls.peer_reduce_scatter_v_kernel, COPY, BUFFERS | ROWS),
    Description(
        nvls.peer_reduce_norm_gather_kernel,
        {"WORLD": 8, "LIMIT": 0, "TRAP": False, "BLOCK": 4096, "num_warps": 8},
        BUFFERS | NORM | typed("*i64 gathered"),
    ),
    Description(nvls.multimem_all_gather_kernel, COPY, MULTICAST),
    Description(nvls.multimem_reduce_scatter_kernel, COPY, MULTICAST),
    Description(nvls.multimem_all_gather_v_kernel, COPY, MULTICAST | ROWS),
    Description(nvls.multimem_reduce_scatter_v_kernel, COPY, MULTICAST | ROWS),
    Description(
        nvls.multimem_reduce_norm_gather_kernel,
        {"WORLD": 8, "LIMIT": 0, "TRAP": False, "BLOCK": 4096, "num_warps": 8},
        MULTICAST | NORM | typed("i64 gathered"),
        quick=(90, 100),
    ),
)
