# SPDX-License-Identifier: Apache-2.0
"""State-space duality in Triton: cumulative decays of each chunk, and the skip out + D x.

The skip reads and writes memory once in each direction; a program takes a tile of tokens of one
head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.ops.launches import Launches, cdiv
from megatron.core.ops.recurrence.interface import LOWEST_DECAY, RecurrenceInputs
from megatron.core.ops.recurrence.sweep.triton import (
    PreparedOnDevice,
    SweepKernels,
    compute_scores,
    dense,
)
from megatron.core.ops.sequences import Sequences
from megatron.core.ops.strided_rows import row_tile


@triton.jit
def tile_of_tokens(
    heads,
    tokens,
    features,
    stride_t,
    stride_h,
    x_stride_t,
    x_stride_h,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Return this program's head, the offsets of its tile [ROWS, FEATURES], and the tile's mask.

    The offsets are for the tensor with strides (stride_t, stride_h), for x, and for a contiguous
    [t, H, V]. The head varies faster than the tokens, so that neighbouring programs access
    neighbouring memory.
    """
    head = (tl.program_id(0) % heads).to(tl.int64)
    token = (tl.program_id(0) // heads).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    feature = tl.arange(0, FEATURES)
    mask = (token < tokens)[:, None] & (feature < features)[None, :]
    offsets = token[:, None] * stride_t + (head * stride_h + feature)[None, :]
    x_offsets = token[:, None] * x_stride_t + (head * x_stride_h + feature)[None, :]
    dense_offsets = token[:, None] * heads * features + (head * features + feature)[None, :]
    return head, offsets, x_offsets, dense_offsets, mask


@triton.jit(do_not_specialize=["tokens"])
def add_skip_kernel(
    out_ptr,
    x_ptr,
    skip_ptr,
    y_ptr,
    tokens,
    heads,
    features,
    out_stride_t,
    out_stride_h,
    x_stride_t,
    x_stride_h,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Store y [t, H, V] = out + D x."""
    head, offsets, x_offsets, dense_offsets, mask = tile_of_tokens(
        *(heads, tokens, features, out_stride_t, out_stride_h, x_stride_t, x_stride_h),
        *(ROWS, FEATURES),
    )
    out = tl.load(out_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + x_offsets, mask=mask, other=0.0).to(tl.float32)
    y = out + tl.load(skip_ptr + head).to(tl.float32) * x
    tl.store(y_ptr + dense_offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def add_skip_backward_kernel(
    d_out_ptr,
    x_ptr,
    skip_ptr,
    d_x_ptr,
    partials_ptr,
    tokens,
    heads,
    features,
    d_out_stride_t,
    d_out_stride_h,
    x_stride_t,
    x_stride_h,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Store d_x = D d_out [t, H, V], and the sum of d_out x over this program's tile."""
    head, offsets, x_offsets, dense_offsets, mask = tile_of_tokens(
        *(heads, tokens, features, d_out_stride_t, d_out_stride_h, x_stride_t, x_stride_h),
        *(ROWS, FEATURES),
    )
    d_out = tl.load(d_out_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + x_offsets, mask=mask, other=0.0).to(tl.float32)
    d_x = tl.load(skip_ptr + head).to(tl.float32) * d_out
    tl.store(d_x_ptr + dense_offsets, d_x.to(d_x_ptr.dtype.element_ty), mask=mask)
    tl.store(partials_ptr + tl.program_id(0), tl.sum(d_out * x))


SUMS = Launches("recurrence_sums", {"BLOCK_H": 16, "num_warps": 4, "num_stages": 1})
#: A tile has ELEMENTS of one head: tokens times features, padded to a power of two.
SKIP = Launches(
    "add_skip_forward",
    {"ELEMENTS": 4096, "num_warps": 4, "num_stages": 1},
    alternatives=(
        {"ELEMENTS": 2048, "num_warps": 4, "num_stages": 1},
        {"ELEMENTS": 8192, "num_warps": 8, "num_stages": 1},
    ),
)
SKIP_BACKWARD = Launches(
    "add_skip_backward",
    {"ELEMENTS": 4096, "num_warps": 4, "num_stages": 1},
    alternatives=(
        {"ELEMENTS": 2048, "num_warps": 4, "num_stages": 1},
        {"ELEMENTS": 8192, "num_warps": 8, "num_stages": 1},
    ),
)


@triton.jit(do_not_specialize=["chunks"])
def decay_sums_kernel(
    decay_ptr,
    cumsum_ptr,
    chunk_starts_ptr,
    chunk_ends_ptr,
    chunks,
    heads,
    decay_stride_t,
    decay_stride_h,
    lowest,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sum the decays of BLOCK_H heads over one chunk in fp64; store high and low parts in fp32."""
    blocks = tl.cdiv(heads, BLOCK_H)
    chunk = (tl.program_id(0) // blocks).to(tl.int64)
    head = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    rows = tl.arange(0, CHUNK)
    token = tl.load(chunk_starts_ptr + chunk) + rows
    mask = (token < tl.load(chunk_ends_ptr + chunk))[:, None] & (head < heads)[None, :]
    decay = tl.load(
        decay_ptr + token[:, None] * decay_stride_t + head[None, :].to(tl.int64) * decay_stride_h,
        mask=mask,
        other=0.0,
    )
    # A comparison, since tl.maximum would turn a NaN decay into `lowest`.
    decay = tl.where(decay < lowest, lowest, decay.to(tl.float64))
    cumsum = tl.cumsum(decay, 0)
    high = cumsum.to(tl.float32)
    out_ptr = cumsum_ptr + (chunk * heads + head[None, :]) * CHUNK + rows[:, None]
    tl.store(out_ptr, high, mask=(head < heads)[None, :])
    tl.store(
        out_ptr + chunks.to(tl.int64) * heads * CHUNK,
        (cumsum - high.to(tl.float64)).to(tl.float32),
        mask=(head < heads)[None, :],
    )


class StateSpaceKernels(SweepKernels):
    """SSD as a `Recurrence` of Triton kernels."""

    def prepare(self, inputs: RecurrenceInputs, sequences: Sequences) -> PreparedOnDevice:
        """See `Recurrence`; computes the cumulative decays, and scores that the sweep does not."""
        prepared = self._begin(inputs, sequences, delta_rule=False)
        decay, chunks, heads = prepared.inputs.decay, prepared.chunks, prepared.heads
        launch = SUMS.pick(decay, f"C{chunks.size}")
        if prepared.decay_cumsum.numel():
            decay_sums_kernel[(chunks.count * cdiv(heads, launch["BLOCK_H"]),)](
                *(decay, prepared.decay_cumsum, chunks.starts, chunks.ends),
                *(chunks.count, heads, *decay.stride(), LOWEST_DECAY),
                CHUNK=chunks.size,
                **launch,
            )
        compute_scores(prepared)
        return prepared


class AddSkip(torch.autograd.Function):
    """Forward, dgrad and wgrad as in the reference, one kernel each way. Saves x and D.

    Each program stores a partial gradient of D; their sum has a fixed order, so it is
    deterministic.
    """

    @staticmethod
    def forward(ctx, out, x, skip):
        x, skip = dense(x), skip.contiguous()
        ctx.save_for_backward(x, skip)
        y = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        launch = row_tile(SKIP, x, x.shape[2])
        blocks = cdiv(x.shape[0], launch["ROWS"])
        if y.numel():
            add_skip_kernel[(blocks * x.shape[1],)](
                *skip_arguments(dense(out), x, skip, y), **launch
            )
        return y

    @staticmethod
    def backward(ctx, d_out):
        x, skip = ctx.saved_tensors
        d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        launch = row_tile(SKIP_BACKWARD, x, x.shape[2])
        blocks = cdiv(x.shape[0], launch["ROWS"]) if x.numel() else 0
        partials = torch.empty((blocks, x.shape[1]), dtype=torch.float32, device=x.device)
        if blocks:
            add_skip_backward_kernel[(partials.numel(),)](
                *skip_arguments(dense(d_out), x, skip, d_x, partials), **launch
            )
        return d_out, d_x, partials.sum(0).to(skip.dtype)


def skip_arguments(
    out: torch.Tensor, x: torch.Tensor, skip: torch.Tensor, *outputs: torch.Tensor
) -> tuple:
    """Return the arguments of both skip kernels: tensors, sizes and strides."""
    return out, x, skip, *outputs, *x.shape, *out.stride()[:2], *x.stride()[:2]
