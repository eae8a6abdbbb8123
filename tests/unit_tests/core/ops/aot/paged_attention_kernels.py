# SPDX-License-Identifier: Apache-2.0
"""The kernels of paged attention, at the sizes of grouped-query models and of DeepSeek-V3.

Grouped-query heads have 128 or 256 features and groups of eight; latents have 512 + 64 features
and 128 heads.
"""

from __future__ import annotations

import torch

from megatron.core.ops.paged_attention import triton
from megatron.core.ops.paged_attention.triton import MERGE, WRITE, latent_tile, tile_shape
from tests.unit_tests.core.ops.aot.description import Description, typed

RATIO = 8
BATCH_TYPES = typed("*i32 table bounds contexts; fp32 scale")
SPLIT_OUTPUTS = typed("*fp32 out lse")


def operands(names: tuple[str, ...], dtype: torch.dtype) -> dict[str, str]:
    """Return the types of pointers to queries, keys and values that are not bf16."""
    return dict.fromkeys(names, "*fp32") if dtype == torch.float32 else {}


def attention(
    label: str,
    features: int,
    max_query: int,
    page: int,
    quick: tuple[int, ...],
    window: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> Description:
    """Describe attention for tiles of `max_query` queries; decode splits the context."""
    query = torch.empty((1, RATIO, features), dtype=dtype, device="meta")
    split = max_query == 1
    return Description(
        triton.paged_attention_kernel,
        {
            "HAS_SINKS": window,
            "HAS_WINDOW": window,
            "SPLIT": split,
            "RATIO": RATIO,
            "PAGE": page,
            "SOFTCAP": 0.0,
            **tile_shape(query, ratio=RATIO, max_query=max_query),
        },
        BATCH_TYPES
        | operands(("q_ptr", "k_ptr", "v_ptr", "sinks_ptr", "out_ptr"), dtype)
        | (SPLIT_OUTPUTS if split else typed("*fp32 lse")),
        divisible="features",
        label=f"{label} {features}",
        quick=quick,
    )


def latent(
    label: str,
    page: int,
    quick: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.bfloat16,
    architectures: tuple[int, ...] = (90,),
) -> Description:
    """Describe attention of one token to latents with a split context."""
    query = torch.empty((1, 128, 512 + 64), dtype=dtype, device="meta")
    launch = {} if architectures == (90,) else triton.LATENT_16_ROWS.default
    return Description(
        triton.paged_latent_attention_kernel,
        {"SPLIT": True, "IS_WHOLE": True, "PAGE": page, **latent_tile(query, 512), **launch},
        BATCH_TYPES | operands(("q_ptr", "c_ptr"), dtype) | SPLIT_OUTPUTS,
        divisible="rank rotated",
        label=label,
        quick=quick,
        architectures=architectures,
    )


KERNELS = (
    attention("decode", 128, 1, 256, (90,), False),
    attention("decode of small pages", 128, 1, 16, (), True),
    attention("decode", 256, 1, 256, (), False),
    attention("prefill", 128, 4096, 256, (90, 100), False),
    attention("prefill of small pages", 128, 4096, 16, (), True),
    attention("prefill", 64, 4096, 256, (), False),
    attention("prefill", 256, 4096, 256, (), False),
    attention("prefill of few", 256, 8, 256, (), False),
    *(attention("fp32 prefill", d, 4096, 256, (), False, torch.float32) for d in (64, 128, 256)),
    attention("fp32 decode", 128, 1, 256, (), False, torch.float32),
    latent("latents", 64, (90,)),
    latent("latents in small pages", 16, ()),
    latent("latents in small tiles", 64, (), architectures=(100,)),
    latent("fp32 latents", 64, (), dtype=torch.float32),
    Description(
        triton.merge_pieces_kernel,
        {"FEATURES": 128, **MERGE.default},
        typed("*fp32 split split_lse lse"),
        divisible="features",
        quick=(90,),
    ),
    Description(
        triton.write_to_pages_kernel,
        {"HAS_VALUE": True, "PAGE": 256, **WRITE.default},
        typed("*i64 slots"),
        divisible="width features",
    ),
)
