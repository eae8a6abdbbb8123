# SPDX-License-Identifier: Apache-2.0
"""The forward kernels of recurrences, at the sizes of published models."""

from __future__ import annotations

import torch

from megatron.core.ops.recurrence.delta_rule.triton import SOLVE, solve_kernel
from megatron.core.ops.recurrence.ssd.triton import (
    SKIP,
    SKIP_BACKWARD,
    SUMS,
    add_skip_backward_kernel,
    add_skip_kernel,
    decay_sums_kernel,
)
from megatron.core.ops.recurrence.sweep import triton as recurrence
from megatron.core.ops.recurrence.sweep.kernels import sweep_kernel
from megatron.core.ops.strided_rows import row_tile
from tests.unit_tests.core.ops.aot.description import ARCHITECTURES, Description, typed

#: The delta rule of Qwen3-Next, SSD of Nemotron-H, and SSD with the largest key size.
DELTA = {"heads": 32, "group_heads": 2, "keys": 128, "values": 128}
DUAL = {"heads": 128, "group_heads": 16, "keys": 128, "values": 64}
TALL = {"heads": 24, "group_heads": 24, "keys": 256, "values": 64}
CHUNK_TYPES = typed("*fp32 beta cumsum; *i64 chunk_starts chunk_ends")
SWEEP_TYPES = CHUNK_TYPES | typed(
    "*i64 chunk_offsets; *fp32 initial_state final_state total_decay; fp32 scale"
)


POINTERS = tuple(name for name in sweep_kernel.arg_names if name.endswith("_ptr"))


def strides(sizes: dict[str, int]) -> dict[str, int]:
    """Return the strides of contiguous inputs."""
    heads, groups = sizes["heads"], sizes["heads"] // sizes["group_heads"]
    strides_by_name = {"beta_stride_t": heads, "beta_stride_h": 1}
    for name, num_heads, width in (
        ("query", groups, sizes["keys"]),
        ("key", groups, sizes["keys"]),
        ("value", heads, sizes["values"]),
    ):
        strides_by_name |= {f"{name}_stride_t": num_heads * width, f"{name}_stride_h": width}
    return strides_by_name


def fp32_chunk(sizes: dict[str, int]) -> int:
    """Return the number of tokens in a chunk in fp32."""
    return recurrence.fp32_chunk(delta_rule=sizes is DELTA, keys=sizes["keys"])


def describe_sweep(
    label: str, quick: tuple[int, ...], sizes: dict[str, int], **flags: bool
) -> Description:
    """Describe one use of the sweep kernel, in fp32 if `fp32` is set, else in bf16."""
    names = ("SCORES", "VALUE", "INITIAL", "OUT", "STATES", "FINAL", "TOTAL")
    launches = recurrence.SWEEP if sizes is DELTA else recurrence.SWEEP_DUAL
    launches = launches if sizes["keys"] <= 128 else recurrence.SWEEP_TALL
    fp32 = flags.get("fp32", False)
    launches = recurrence.SWEEP_FP32 if fp32 else launches
    launch = {
        **sizes,
        **strides(sizes),
        **{f"HAS_{name}": flags.get(name.lower(), False) for name in names},
        "DELTA_RULE": sizes is DELTA,
        "CHUNK": fp32_chunk(sizes) if fp32 else 64,
        "KEYS": sizes["keys"],
        "PRECISION": "tf32x3" if fp32 else "ieee",
        **launches.default,
    }
    architectures = ARCHITECTURES if sizes["keys"] <= 128 else (90,)
    return Description(
        sweep_kernel,
        launch,
        (dict.fromkeys(POINTERS, "*fp32") if fp32 else {}) | SWEEP_TYPES,
        label=label,
        quick=quick,
        architectures=architectures,
    )


SOLVE_CONSTANTS = {
    name: size for name, size in (DELTA | strides(DELTA)).items() if not name.startswith("value")
}

KERNELS = (
    describe_sweep(
        "delta", (90, 100), DELTA, scores=True, value=True, initial=True, out=True, final=True
    ),
    describe_sweep(
        "delta fp32", (), DELTA, fp32=True, scores=True, value=True, out=True, final=True
    ),
    describe_sweep("ssd fp32", (), DUAL, fp32=True, scores=True, value=True, out=True, final=True),
    describe_sweep("delta starts", (), DELTA, value=True, initial=True, states=True),
    describe_sweep(
        "delta out starts", (), DELTA, scores=True, value=True, out=True, states=True, final=True
    ),
    describe_sweep("ssd out starts", (), DUAL, value=True, out=True, states=True, final=True),
    describe_sweep("delta M", (), DELTA, final=True),
    describe_sweep("ssd", (90,), DUAL, value=True, initial=True, out=True, final=True),
    describe_sweep(
        "ssd 256", (), TALL, scores=True, value=True, initial=True, out=True, final=True
    ),
    describe_sweep("ssd summary", (), DUAL, value=True, final=True, total=True),
    Description(
        solve_kernel,
        {
            **SOLVE_CONSTANTS,
            "decay_stride_t": DELTA["heads"],
            "decay_stride_h": 1,
            "CHUNK": 64,
            "KEYS": 128,
            "PRECISION": "tf32",
            **SOLVE.default,
        },
        CHUNK_TYPES | typed("*fp32 decay; fp32 lowest scale"),
        quick=(90, 100),
    ),
    Description(
        decay_sums_kernel,
        {"CHUNK": 64, **SUMS.default},
        {x: kind for x, kind in CHUNK_TYPES.items() if x != "beta_ptr"}
        | typed("*fp32 decay; fp32 lowest"),
        divisible="heads",
    ),
    *(
        Description(
            kernel,
            row_tile(launches, torch.empty(0, dtype=torch.bfloat16), DUAL["values"]),
            typed("*fp32 skip") | types,
            divisible="heads features",
        )
        for kernel, launches, types in (
            (add_skip_kernel, SKIP, {}),
            (add_skip_backward_kernel, SKIP_BACKWARD, typed("*fp32 partials")),
        )
    ),
)
