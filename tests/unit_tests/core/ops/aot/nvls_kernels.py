# SPDX-License-Identifier: Apache-2.0
"""The kernels of collectives over symmetric memory, for eight ranks."""

from __future__ import annotations

from megatron.core.ops.nvls import triton as nvls
from tests.unit_tests.core.ops.aot.description import Description

PADS = {"pads_ptr": "*i64", "status_ptr": "*i32"}
BUFFERS = PADS | {"buffers_ptr": "*i64"}
ROWS = {"rows_ptr": "*i32"}
NORM = {"eps": "fp32", "offset": "fp32"}
MULTICAST = PADS | {"multicast": "i64"}
COPY = {"WORLD": 8, "LIMIT": 0, "TRAP": False, **nvls.COPY.default}
#: As --nvls-tries launches it.
LIMITED = COPY | {"LIMIT": 1000, "TRAP": True}

KERNELS = (
    Description(  # as a probe launches it
        kernel=nvls.peer_all_gather_kernel,
        launch=LIMITED | {"TRAP": False},
        types=BUFFERS,
        label="bounded",
        quick=(),
    ),
    Description(
        kernel=nvls.peer_all_gather_kernel,
        launch=LIMITED,
        types=BUFFERS,
        label="traps",
        quick=(),
    ),
    Description(
        kernel=nvls.multimem_reduce_scatter_kernel,
        launch=LIMITED,
        types=MULTICAST,
        label="traps",
        quick=(),
    ),
    Description(kernel=nvls.peer_all_gather_kernel, launch=COPY, types=BUFFERS, quick=()),
    Description(kernel=nvls.peer_reduce_scatter_kernel, launch=COPY, types=BUFFERS, quick=()),
    Description(kernel=nvls.peer_all_gather_v_kernel, launch=COPY, types=BUFFERS | ROWS, quick=()),
    Description(
        kernel=nvls.peer_reduce_scatter_v_kernel, launch=COPY, types=BUFFERS | ROWS, quick=()
    ),
    Description(
        kernel=nvls.peer_reduce_norm_gather_kernel,
        launch={"WORLD": 8, "LIMIT": 0, "TRAP": False, "BLOCK": 4096, "num_warps": 8},
        types=BUFFERS | NORM | {"gathered_ptr": "*i64"},
        quick=(),
    ),
    Description(kernel=nvls.multimem_all_gather_kernel, launch=COPY, types=MULTICAST, quick=()),
    Description(kernel=nvls.multimem_reduce_scatter_kernel, launch=COPY, types=MULTICAST, quick=()),
    Description(
        kernel=nvls.multimem_all_gather_v_kernel, launch=COPY, types=MULTICAST | ROWS, quick=()
    ),
    Description(
        kernel=nvls.multimem_reduce_scatter_v_kernel, launch=COPY, types=MULTICAST | ROWS, quick=()
    ),
    Description(
        kernel=nvls.multimem_reduce_norm_gather_kernel,
        launch={"WORLD": 8, "LIMIT": 0, "TRAP": False, "BLOCK": 4096, "num_warps": 8},
        types=MULTICAST | NORM | {"gathered": "i64"},
        quick=(90, 100),
    ),
)
