# SPDX-License-Identifier: Apache-2.0
"""Attention kernels: causal and with all masks, in bf16 and fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron.core.ops.attention import Mask, triton
from tests.unit_tests.core.ops.aot.description import Description, typed

TYPES = typed("*fp32 lse delta; *i32 documents query_documents bounds; fp32 scale")
FORWARD, QUERY, KEY = (
    (triton.attention_forward_kernel, triton.FORWARD),
    (triton.query_gradient_kernel, triton.QUERY_GRADIENT),
    (triton.key_gradient_kernel, triton.KEY_GRADIENT),
)


def describe(
    kind: tuple[Any, Mapping],
    features: int,
    *,
    label: str = "",
    masked: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    quick: tuple[int, ...] = (),
    **launch: bool,
) -> Description:
    """Describe one kernel for heads of size `features`, causal or with all masks."""
    kernel, shapes = kind
    documents = torch.zeros(1, 1) if masked else None
    mask = Mask(window=1 if masked else None, document_ids=documents)
    types = {name: kind for name, kind in TYPES.items() if name in kernel.arg_names}
    if dtype == torch.float32:
        types |= {n: "*fp32" for n in kernel.arg_names if n.endswith("_ptr") and n not in types}
    return Description(
        kernel,
        {
            "CAUSAL": True,
            "HAS_WINDOW": masked,
            "HAS_DOCUMENTS": masked,
            "I64": False,
            "SOFTCAP": 0.0,
            **triton.tile_shape(shapes, features, dtype, mask),
            **launch,
        },
        types,
        divisible="queries keys",
        label=" ".join(filter(None, (label, str(features)))),
        quick=quick,
    )


SINKS = {"HAS_SINKS": True}
KEYS_AND_VALUES, KEYS_ONLY, VALUES_ONLY = (
    {"OF_KEYS": keys, "OF_VALUES": values}
    for keys, values in ((True, True), (True, False), (False, True))
)
FP32 = {"label": "fp32", "masked": True, "dtype": torch.float32}
MASKED = {"label": "masked", "masked": True}

KERNELS = (
    describe(FORWARD, 64, **SINKS),
    describe(FORWARD, 128, **SINKS, quick=(90,)),
    describe(FORWARD, 192, **SINKS),
    describe(FORWARD, 256, **SINKS),
    describe(FORWARD, 128, **SINKS, **MASKED),
    describe(FORWARD, 256, **SINKS, **MASKED),
    describe(FORWARD, 128, **SINKS, **FP32, quick=(90,)),
    describe(FORWARD, 256, **SINKS, **FP32),
    describe(QUERY, 64),
    describe(QUERY, 128, quick=(100,)),
    describe(QUERY, 192),
    describe(QUERY, 256),
    describe(QUERY, 128, **MASKED),
    describe(QUERY, 128, **FP32),
    describe(KEY, 64, **KEYS_AND_VALUES),
    describe(KEY, 128, **KEYS_AND_VALUES, quick=(90,)),
    describe(KEY, 128, **KEYS_AND_VALUES, **MASKED),
    describe(KEY, 192, **KEYS_ONLY, label="keys"),
    describe(KEY, 192, **VALUES_ONLY, label="values"),
    describe(KEY, 256, **KEYS_ONLY, label="keys"),
    describe(KEY, 256, **VALUES_ONLY, label="values"),
    describe(KEY, 128, **KEYS_AND_VALUES, **FP32),
    describe(KEY, 256, **KEYS_AND_VALUES, **FP32),
    Description(
        triton.document_bounds_kernel,
        {
            "OF_KEYS": True,
            "CAUSAL": True,
            "HAS_WINDOW": True,
            "BLOCK_Q": 64,
            "BLOCK_K": 128,
            "TILES": triton.TILES_PER_STEP,
        },
        {name: "*i32" for name in ("documents_ptr", "other_documents_ptr", "bounds_ptr")},
        divisible="queries keys",
    ),
    Description(
        triton.row_dots_kernel,
        {"FEATURES": 128, **triton.ROW_DOTS.default},
        typed("*fp32 lse dots log2"),
        divisible="queries features",
    ),
)
