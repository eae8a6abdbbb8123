# SPDX-License-Identifier: Apache-2.0
"""Dropout in Triton: the same mask as in `cpu.py`, bit for bit, computed in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.ops.dropout.cpu import (
    COLUMNS_PER_HASH,
    MIX,
    column_key,
    drop_levels,
    hash_index,
    keep_scale,
    row_hashes,
    signed,
)
from megatron.core.ops.launches import Launches, cdiv

# BLOCK: columns of a program, 16 per thread, of which four share a hash.
DROP = Launches(
    "dropout",
    {"BLOCK": 2048, "num_warps": 4},
    alternatives=(
        {"BLOCK": 1024, "num_warps": 4},
        {"BLOCK": 2048, "num_warps": 8},
        {"BLOCK": 4096, "num_warps": 8},
    ),
)


@triton.jit
def dropout_kernel(
    x_ptr,
    rows_ptr,
    columns_ptr,
    out_ptr,
    features,
    blocks,
    offset_in_group,
    threshold,
    scale,
    mix,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Drop one block of one row: level = 16 bits of the mixed row and column-group hashes.

    The block is a tile [BLOCK // GROUP, GROUP]: the columns of a group share one hash.
    """
    row = (tl.program_id(0) // blocks).to(tl.int64)
    group = tl.program_id(0) % blocks * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    member = tl.arange(0, GROUP)
    column = (group * GROUP - offset_in_group)[:, None] + member[None, :]
    inside = (column >= 0) & (column < features)
    in_row = group * GROUP - offset_in_group < features
    state = tl.load(rows_ptr + row) + tl.load(columns_ptr + group, mask=in_row, other=0)
    # Shifts of int64 are arithmetic: the masks clear the sign bits that they shift in.
    state = state ^ ((state >> 32) & 0xFFFFFFFF)
    state = state * mix
    state = state ^ ((state >> 29) & 0x7FFFFFFFF)
    level = (state[:, None] >> (member * 16).to(tl.int64)[None, :]) & 0xFFFF
    # The reference compares signed 16-bit numbers: flipping the top bit gives the same order.
    keep = (level ^ 0x8000) >= threshold
    offsets = row * features + column
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    y = tl.where(keep, x * scale, 0.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, y, mask=inside)


def dropout_values(
    x: torch.Tensor,
    rate: float,
    key: int,
    sample_ids: torch.Tensor,
    position_ids: torch.Tensor,
    feature_offset: int,
) -> torch.Tensor:
    """Drop and rescale x [s, b, h/tp]; see `ops.dropout.dropout`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if not x.numel():
        return out
    features = x.shape[-1]
    first_group = feature_offset // COLUMNS_PER_HASH
    group_stop = -(-(feature_offset + features) // COLUMNS_PER_HASH)
    groups = torch.arange(first_group, group_stop, dtype=torch.int64, device=x.device)
    rows = row_hashes(key, sample_ids, position_ids[:, None]).contiguous()  # [s, b]
    launch = DROP.pick(x, str(x.dtype).removeprefix("torch."))
    blocks = cdiv(len(groups) * COLUMNS_PER_HASH, launch["BLOCK"])
    dropout_kernel[(rows.numel() * blocks,)](
        x,
        rows,
        hash_index(column_key(key), groups),
        out,
        features,
        blocks,
        feature_offset - first_group * COLUMNS_PER_HASH,
        drop_levels(rate),
        keep_scale(rate),
        signed(MIX),
        GROUP=COLUMNS_PER_HASH,
        **launch,
    )
    return out
