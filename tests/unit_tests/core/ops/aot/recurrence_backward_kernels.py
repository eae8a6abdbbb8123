# SPDX-License-Identifier: Apache-2.0
"""The backward kernels of recurrences, at the sizes of published models."""

from __future__ import annotations

from triton.runtime.jit import JITFunction

from megatron.core.ops.recurrence.sweep import triton as recurrence
from megatron.core.ops.recurrence.sweep.kernels import (
    recurrence_gradients_kernel,
    reverse_sweep_kernel,
    seen_kernel,
    sum_units_kernel,
)
from tests.unit_tests.core.ops.aot.description import Description, typed
from tests.unit_tests.core.ops.aot.recurrence_kernels import (
    CHUNK_TYPES,
    DELTA,
    DUAL,
    TALL,
    fp32_chunk,
    strides,
)

TYPES = CHUNK_TYPES | typed("*i64 chunk_offsets; fp32 scale")
REVERSE_TYPES = TYPES | typed("*fp32 d_final d_initial")
GRADIENT_TYPES = TYPES | typed("*fp32 d_decay")
GRADIENT_TYPES |= typed("*fp32 d_beta")


def shared_constants(sizes: dict[str, int]) -> dict[str, object]:
    """Return the constants that both kernels share for the sizes of a model."""
    width = sizes["values"]
    return {
        **sizes,
        **strides(sizes),
        "d_out_stride_t": sizes["heads"] * width,
        "d_out_stride_h": width,
        "DELTA_RULE": sizes is DELTA,
        "CHUNK": 64,
        "KEYS": sizes["keys"],
        "PRECISION": "ieee",
    }


def describe_reverse_sweep(
    label: str, sizes: dict[str, int], **options: tuple[int, ...]
) -> Description:
    """Describe the reverse sweep that stores the inputs of the gradient kernel."""
    flags = {"HAS_SCORES": sizes is not DUAL, "HAS_D_FINAL": True, "STORE_GRADS": True}
    launches = recurrence.REVERSE if sizes["keys"] <= 128 else recurrence.REVERSE_TALL
    launch = shared_constants(sizes) | flags | launches.default
    return Description(
        kernel=reverse_sweep_kernel, launch=launch, types=REVERSE_TYPES, label=label, **options
    )


def describe_gradients(
    label: str, sizes: dict[str, int], heads_per_program: int, **options: tuple[int, ...]
) -> Description:
    """Describe the gradient kernel with a number of heads per program; Blackwell uses one."""
    launches = recurrence.GRADIENTS if sizes is DELTA else recurrence.GRADIENTS_DUAL
    launches = launches if sizes["keys"] <= 128 else recurrence.GRADIENTS_DUAL_TALL
    launch = shared_constants(sizes) | {
        **launches.default,
        "VALUES": sizes["values"],
        "ROWS": 128 if sizes is DELTA else 64,
        "HEADS": heads_per_program,
        "BLOCK_V": min(sizes["values"], launches.default["BLOCK_V"]),
    }
    return Description(
        kernel=recurrence_gradients_kernel,
        launch=launch,
        types=GRADIENT_TYPES,
        label=label,
        **options,
    )


def describe_fp32(kernel: JITFunction, sizes: dict[str, int], types: dict[str, str]) -> Description:
    """Describe the reverse sweep in fp32, or the gradients of one head in fp32."""
    chunk = fp32_chunk(sizes)
    is_sweep = kernel is reverse_sweep_kernel
    pointers = (name for name in kernel.arg_names if name.endswith("_ptr"))
    return Description(
        kernel,
        shared_constants(sizes)
        | {"CHUNK": chunk, "PRECISION": "tf32x3"}
        | (
            {"HAS_SCORES": True, "HAS_D_FINAL": True, "STORE_GRADS": True}
            | recurrence.REVERSE_FP32.default
            if is_sweep
            else {"VALUES": sizes["values"], "ROWS": chunk * (2 if sizes is DELTA else 1)}
            | {"HEADS": 1, **recurrence.GRADIENTS_FP32.default}
        ),
        dict.fromkeys(pointers, "*fp32") | types,
        label=f"{'delta' if sizes is DELTA else 'ssd'} fp32",
    )


HOPPER = {"architectures": (90,)}

KERNELS = (
    describe_reverse_sweep("delta", DELTA, quick=(90,)),
    describe_reverse_sweep("ssd", DUAL, quick=()),
    describe_reverse_sweep("ssd 256", TALL, quick=(), **HOPPER),
    *(describe_fp32(reverse_sweep_kernel, sizes, REVERSE_TYPES) for sizes in (DELTA, DUAL)),
    *(describe_fp32(recurrence_gradients_kernel, sizes, GRADIENT_TYPES) for sizes in (DELTA, DUAL)),
    describe_gradients("delta", DELTA, 1, quick=()),
    describe_gradients("delta two heads", DELTA, 2, quick=(90,), **HOPPER),
    describe_gradients("ssd", DUAL, 1, quick=()),
    describe_gradients("ssd 16 heads", DUAL, 16, quick=(), **HOPPER),
    describe_gradients("ssd 256", TALL, 24, quick=(), **HOPPER),
    Description(
        seen_kernel,
        {
            **{
                x: size for x, size in shared_constants(DELTA).items() if x in seen_kernel.arg_names
            },
            **recurrence.SCORES.default,
        },
        {name: kind for name, kind in TYPES.items() if name in seen_kernel.arg_names},
    ),
    Description(sum_units_kernel, {"UNITS": 2, "BLOCK": 128, "num_warps": 1}, divisible="width"),
)
