# SPDX-License-Identifier: Apache-2.0
"""The kernels of recurrences backward, at the sizes of published models."""

from __future__ import annotations

from megatron.core.ops.chunked_recurrence import triton as recurrence
from megatron.core.ops.chunked_recurrence.gradient_kernels import (
    recurrence_gradients_kernel,
    sum_units_kernel,
)
from megatron.core.ops.chunked_recurrence.reverse_kernels import reverse_sweep_kernel
from tests.unit_tests.core.ops.aot.description import Description
from tests.unit_tests.core.ops.aot.recurrence_kernels import DELTA, DUAL, SUMMED, strides

TYPES = SUMMED | {"begin_ptr": "*i64", "scale": "fp32"}
REVERSED = TYPES | {"grad_last_ptr": "*fp32", "grad_initial_ptr": "*fp32"}
DIFFERENTIATED = TYPES | {"decay_ptr": "*fp32", "grad_decay_ptr": "*fp32", "lowest_decay": "fp32"}


def launched(sizes: dict[str, int]) -> dict[str, object]:
    """Return what both kernels are told of a model."""
    width = sizes["values"]
    return {
        **sizes,
        **strides(sizes),
        "grad_stride_t": sizes["heads"] * width,
        "grad_stride_h": width,
        "CORRECTS": sizes is DELTA,
        "CHUNK": 64,
        "KEYS": sizes["keys"],
        "PRECISION": "ieee",
    }


def reversed_sweep(label: str, sizes: dict[str, int], quick: tuple[int, ...]) -> Description:
    """Describe the sweep that stores what gradients need."""
    flags = {"HAS_GRAD_LAST": True, "STORES": True}
    launch = launched(sizes) | flags | recurrence.REVERSE.default
    return Description(
        kernel=reverse_sweep_kernel, launch=launch, types=REVERSED, label=label, quick=quick
    )


def gradients(
    label: str, sizes: dict[str, int], together: int, quick: tuple[int, ...]
) -> Description:
    """Describe the gradients by programs of so many heads, of which Blackwell takes one."""
    launch = launched(sizes) | {
        **recurrence.GRADIENTS.default,
        "decay_stride_t": sizes["heads"],
        "decay_stride_h": 1,
        "VALUES": sizes["values"],
        "ROWS": 128 if sizes is DELTA else 64,
        "HEADS": together,
        "BLOCK_V": min(sizes["values"], recurrence.GRADIENTS.default["BLOCK_V"]),
    }
    return Description(
        kernel=recurrence_gradients_kernel,
        launch=launch,
        types=DIFFERENTIATED,
        label=label,
        quick=quick,
    )


KERNELS = (
    reversed_sweep("delta", DELTA, (90,)),
    reversed_sweep("ssd", DUAL, ()),
    gradients("delta", DELTA, 1, (90,)),
    gradients("ssd", DUAL, 1, ()),
    Description(
        kernel=sum_units_kernel,
        launch={"UNITS": 2, "BLOCK": 128, "num_warps": 1},
        divisible=("width",),
        quick=(),
    ),
)
