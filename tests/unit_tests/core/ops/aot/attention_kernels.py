# SPDX-License-Identifier: Apache-2.0
"""The kernels of attention, with all masks on, for heads of 128 and 256 features."""

from __future__ import annotations

from megatron.core.ops.attention import triton
from megatron.core.ops.attention.triton import BACKWARD_WARPS, FORWARD_WARPS, tile_shape
from tests.unit_tests.core.ops.aot.description import Description

MASKS = {"CAUSAL": True, "HAS_WINDOW": True, "HAS_DOCUMENTS": True, "num_stages": 2}
TYPES = {
    "lse_ptr": "*fp32",
    "delta_ptr": "*fp32",
    "documents_ptr": "*i32",
    "query_documents_ptr": "*i32",
    "scale": "fp32",
}


def described(kernel: object, features: int, quick: tuple[int, ...], **launch: int) -> Description:
    """Describe one kernel for heads of so many features."""
    types = {name: kind for name, kind in TYPES.items() if name in kernel.arg_names}
    return Description(
        kernel=kernel,
        launch=MASKS | tile_shape(features) | launch,
        types=types,
        divisible=("queries", "keys", "features"),
        label=str(features),
        quick=quick,
    )


KERNELS = tuple(
    described(kernel, features, quick, **launch)
    for kernel, launch, quicks in (
        (
            triton.attention_forward_kernel,
            {"HAS_SINKS": True, "num_warps": FORWARD_WARPS},
            ((100,), ()),
        ),
        (triton.query_gradient_kernel, {"num_warps": BACKWARD_WARPS}, ((90,), ())),
        (triton.key_gradient_kernel, {"num_warps": BACKWARD_WARPS}, ((90, 100), ())),
    )
    for features, quick in zip((128, 256), quicks, strict=True)
) + (
    Description(
        kernel=triton.row_dots_kernel,
        launch={"FEATURES": 128, **triton.ROW_DOTS.default},
        types={"dots_ptr": "*fp32"},
        divisible=("queries", "features"),
        quick=(),
    ),
)
