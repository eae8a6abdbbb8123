# SPDX-License-Identifier: Apache-2.0
"""The kernels of recurrences backward, at the sizes of published models."""

from __future__ import annotations

from triton.runtime.jit import JITFunction

from megatron.core.ops.chunked_recurrence import triton as recurrence
from megatron.core.ops.chunked_recurrence.kernels import (
    recurrence_gradients_kernel,
    reverse_sweep_kernel,
    seen_kernel,
    sum_units_kernel,
)
from tests.unit_tests.core.ops.aot.description import Description
from tests.unit_tests.core.ops.aot.recurrence_kernels import (
    DELTA,
    DUAL,
    SUMMED,
    TALL,
    fp32_chunk,
    strides,
)

TYPES = SUMMED | {"chunk_offsets_ptr": "*i64", "scale": "fp32"}
REVERSED = TYPES | {"d_final_ptr": "*fp32", "d_initial_ptr": "*fp32"}
DIFFERENTIATED = TYPES | {"d_decay_ptr": "*fp32"}
DIFFERENTIATED |= {"d_beta_ptr": "*fp32"}


def launched(sizes: dict[str, int]) -> dict[str, object]:
    """Return what both kernels are told of a model."""
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


def reversed_sweep(label: str, sizes: dict[str, int], **options: tuple[int, ...]) -> Description:
    """Describe the sweep that stores what gradients need."""
    flags = {"HAS_SCORES": sizes is not DUAL, "HAS_D_FINAL": True, "STORE_GRADS": True}
    narrow = recurrence.REVERSE if sizes["keys"] <= 128 else recurrence.REVERSE_TALL
    launch = launched(sizes) | flags | narrow.default
    return Description(
        kernel=reverse_sweep_kernel, launch=launch, types=REVERSED, label=label, **options
    )


def gradients(
    label: str, sizes: dict[str, int], together: int, **options: tuple[int, ...]
) -> Description:
    """Describe the gradients by programs of so many heads, of which Blackwell takes one."""
    narrow = recurrence.GRADIENTS if sizes is DELTA else recurrence.GRADIENTS_DUAL
    narrow = narrow if sizes["keys"] <= 128 else recurrence.GRADIENTS_DUAL_TALL
    launch = launched(sizes) | {
        **narrow.default,
        "VALUES": sizes["values"],
        "ROWS": 128 if sizes is DELTA else 64,
        "HEADS": together,
        "BLOCK_V": min(sizes["values"], narrow.default["BLOCK_V"]),
    }
    return Description(
        kernel=recurrence_gradients_kernel,
        launch=launch,
        types=DIFFERENTIATED,
        label=label,
        **options,
    )


def in_fp32(kernel: JITFunction, sizes: dict[str, int], types: dict[str, str]) -> Description:
    """Describe the reverse sweep, or the gradients of one head, in fp32."""
    chunk = fp32_chunk(sizes)
    is_sweep = kernel is reverse_sweep_kernel
    pointers = (name for name in kernel.arg_names if name.endswith("_ptr"))
    return Description(
        kernel=kernel,
        launch=launched(sizes)
        | {"CHUNK": chunk, "PRECISION": "tf32x3"}
        | (
            {"HAS_SCORES": True, "HAS_D_FINAL": True, "STORE_GRADS": True}
            | recurrence.REVERSE_FP32.default
            if is_sweep
            else {"VALUES": sizes["values"], "ROWS": chunk * (2 if sizes is DELTA else 1)}
            | {"HEADS": 1, **recurrence.GRADIENTS_FP32.default}
        ),
        types=dict.fromkeys(pointers, "*fp32") | types,
        label=f"{'delta' if sizes is DELTA else 'ssd'} fp32",
        quick=(),
    )


HOPPER = {"architectures": (90,)}

KERNELS = (
    reversed_sweep("delta", DELTA, quick=(90,)),
    reversed_sweep("ssd", DUAL, quick=()),
    reversed_sweep("ssd 256", TALL, quick=(), **HOPPER),
    *(in_fp32(reverse_sweep_kernel, sizes, REVERSED) for sizes in (DELTA, DUAL)),
    *(in_fp32(recurrence_gradients_kernel, sizes, DIFFERENTIATED) for sizes in (DELTA, DUAL)),
    gradients("delta", DELTA, 1, quick=()),
    gradients("delta two heads", DELTA, 2, quick=(90,), **HOPPER),
    gradients("ssd", DUAL, 1, quick=()),
    gradients("ssd 16 heads", DUAL, 16, quick=(), **HOPPER),
    gradients("ssd 256", TALL, 24, quick=(), **HOPPER),
    Description(
        kernel=seen_kernel,
        launch={
            **{x: size for x, size in launched(DELTA).items() if x in seen_kernel.arg_names},
            **recurrence.SCORES.default,
        },
        types={name: kind for name, kind in TYPES.items() if name in seen_kernel.arg_names},
        quick=(),
    ),
    Description(
        kernel=sum_units_kernel,
        launch={"UNITS": 2, "BLOCK": 128, "num_warps": 1},
        divisible=("width",),
        quick=(),
    ),
)
