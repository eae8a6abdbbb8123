# SPDX-License-Identifier: Apache-2.0
"""The kernels of paged attention, for heads of 128 and 256 features, eight in a group, and for
latents of DeepSeek-V3's 512 and 64 features."""

from __future__ import annotations

import torch

from megatron.core.ops.paged_attention import triton
from megatron.core.ops.paged_attention.triton import LATENT, MERGE, WRITE, tile_shape
from tests.unit_tests.core.ops.aot.description import Description

RATIO = 8
NUMBERS = {"table_ptr": "*i32", "bounds_ptr": "*i32", "contexts_ptr": "*i32", "scale": "fp32"}
PIECES = {"out_ptr": "*fp32", "lse_ptr": "*fp32"}


def attention(
    label: str, features: int, max_query: int, page: int, quick: tuple[int, ...], window: bool
) -> Description:
    """Describe attention of tiles of so many queries; decoding ones cut contexts into pieces."""
    query = torch.empty((1, RATIO, features), dtype=torch.bfloat16, device="meta")
    split = max_query == 1
    return Description(
        kernel=triton.paged_attention_kernel,
        launch={
            "HAS_SINKS": window,
            "HAS_WINDOW": window,
            "SPLIT": split,
            "RATIO": RATIO,
            "PAGE": page,
            **tile_shape(query, ratio=RATIO, max_query=max_query),
        },
        types=NUMBERS | (PIECES if split else {"lse_ptr": "*fp32"}),
        divisible=("features",),
        label=f"{label} {features}",
        quick=quick,
    )


def latent(label: str, page: int, quick: tuple[int, ...]) -> Description:
    """Describe attention of one token to latents, its context cut into pieces."""
    return Description(
        kernel=triton.paged_latent_attention_kernel,
        launch={
            "SPLIT": True,
            "RANK": 512,
            "ROTATED": 64,
            "PAGE": page,
            **LATENT.default,
        },
        types=NUMBERS | PIECES,
        divisible=("rank", "rotated"),
        label=label,
        quick=quick,
    )


KERNELS = (
    attention("decode", 128, 1, 256, (90,), False),
    attention("decode of small pages", 128, 1, 16, (), True),
    attention("decode", 256, 1, 256, (), False),
    attention("prefill", 128, 4096, 256, (90, 100), False),
    attention("prefill of small pages", 128, 4096, 16, (), True),
    attention("prefill", 256, 4096, 256, (), False),
    latent("latents", 64, (90,)),
    latent("latents in small pages", 16, ()),
    Description(
        kernel=triton.merge_pieces_kernel,
        launch={"FEATURES": 128, **MERGE.default},
        types={"piece_ptr": "*fp32", "piece_lse_ptr": "*fp32", "lse_ptr": "*fp32"},
        divisible=("features",),
    ),
    Description(
        kernel=triton.write_to_pages_kernel,
        launch={"HAS_VALUE": True, "PAGE": 256, **WRITE.default},
        types={"slots_ptr": "*i64"},
        divisible=("width", "features"),
        quick=(),
    ),
)
