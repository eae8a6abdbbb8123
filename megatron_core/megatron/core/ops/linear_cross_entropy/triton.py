# SPDX-License-Identifier: Apache-2.0
"""Softmax statistics and gradient of one slice of the vocabulary, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.ops.launches import Launches, cdiv

# BLOCK: columns per iteration, of which each thread has RUN adjacent ones.
STATISTICS = Launches(
    "chunk_statistics",
    {"BLOCK": 4096, "RUN": 8, "num_warps": 8},
    alternatives=(
        {"BLOCK": 2048, "RUN": 8, "num_warps": 8},
        {"BLOCK": 4096, "RUN": 8, "num_warps": 4},
        {"BLOCK": 8192, "RUN": 8, "num_warps": 16},
    ),
)
GRADIENT = Launches(
    "chunk_gradient",
    {"BLOCK": 2048, "num_warps": 4},
    alternatives=({"BLOCK": 1024, "num_warps": 4}, {"BLOCK": 4096, "num_warps": 8}),
)


@triton.jit
def chunk_statistics_kernel(
    logits_ptr,
    targets_ptr,
    maximum_ptr,
    sum_ptr,
    target_ptr,
    row_stride,
    vocab_start,
    valid_columns,
    columns_total,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute maximum, sum of exponentials and target logit in one pass over a row.

    Every thread has its own running maximum, and computes one exponential per RUN of elements more
    than it has elements.
    """
    row = tl.program_id(0).to(tl.int64)
    source = logits_ptr + row * row_stride
    maximum = tl.full([BLOCK // RUN], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK // RUN], dtype=tl.float32)
    block_columns = tl.arange(0, BLOCK // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    for start in range(0, valid_columns, BLOCK):
        columns = start + block_columns
        # Padding is loaded and excluded: a mask at a multiple of 16 allows vector loads.
        x = tl.load(source + columns, mask=columns < columns_total, other=float("-inf"))
        x = tl.where(columns < valid_columns, x.to(tl.float32), float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(x, 1))
        # A thread with only padding so far has -inf: subtract 0, since -inf - -inf = NaN.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        total = total * tl.exp(maximum - shift) + tl.sum(tl.exp(x - shift[:, None]), 1)
        maximum = new_maximum
    peak = tl.max(maximum, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(maximum_ptr + row, peak)
    tl.store(sum_ptr + row, tl.sum(total * tl.exp(maximum - shift), 0))
    column = tl.load(targets_ptr + row) - vocab_start
    inside = (column >= 0) & (column < valid_columns)
    tl.store(target_ptr + row, tl.load(source + column, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def chunk_gradient_kernel(
    logits_ptr,
    targets_ptr,
    lse_ptr,
    weights_ptr,
    row_stride,
    vocab_start,
    valid_columns,
    columns_total,
    blocks,
    BLOCK: tl.constexpr,
):
    """Overwrite one block of one row with (softmax - onehot) * weight, and padding with 0."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    pointers = logits_ptr + row * row_stride + columns
    valid = columns < valid_columns
    x = tl.load(pointers, mask=columns < columns_total, other=0.0).to(tl.float32)
    probability = tl.exp(tl.where(valid, x, float("-inf")) - tl.load(lse_ptr + row))
    column = tl.load(targets_ptr + row) - vocab_start
    onehot = tl.where(valid & (columns == column), 1.0, 0.0)
    value = (probability - onehot) * tl.load(weights_ptr + row)
    value = tl.where(valid, value, 0.0)  # 0 also if the weight is not finite
    tl.store(pointers, value.to(logits_ptr.dtype.element_ty), mask=columns < columns_total)


def chunk_statistics(
    logits: torch.Tensor, targets: torch.Tensor, vocab_start: int, valid_columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute maximum, sum of exponentials and target logit; see the package."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    shape, device = targets.shape, logits.device
    maximum, sum_exp, target = (
        torch.empty(shape, dtype=torch.float32, device=device) for _ in range(3)
    )
    if shape[0]:
        chunk_statistics_kernel[(shape[0],)](
            logits,
            targets.contiguous(),
            maximum,
            sum_exp,
            target,
            logits.stride(0),
            vocab_start,
            valid_columns,
            logits.shape[1],
            **STATISTICS.pick(logits, str(logits.dtype).removeprefix("torch.")),
        )
    return maximum, sum_exp, target


def chunk_gradient_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    weights: torch.Tensor,
    vocab_start: int,
    valid_columns: int,
) -> torch.Tensor:
    """Overwrite logits, dense in the last dimension, with their gradient; see the package."""
    if logits.stride(-1) != 1:
        raise ValueError(
            f"chunk_gradient_: logits with strides {logits.stride()} must be dense in the last"
            " dimension; call contiguous() first"
        )
    rows, columns = logits.shape
    if logits.numel():
        launch = GRADIENT.pick(logits, str(logits.dtype).removeprefix("torch."))
        blocks = cdiv(columns, launch["BLOCK"])
        chunk_gradient_kernel[(rows * blocks,)](
            logits,
            targets.contiguous(),
            lse.contiguous(),
            weights.contiguous(),
            logits.stride(0),
            vocab_start,
            valid_columns,
            columns,
            blocks,
            **launch,
        )
    return logits


def fused_gradient_(
    logits: torch.Tensor, targets: torch.Tensor, valid_columns: int, *, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the loss of whole rows and overwrite logits with its gradient; see the package.

    The row factor is 1: the kernel normalises in registers.
    """
    maximum, sum_exp, target = chunk_statistics(logits, targets, 0, valid_columns)
    lse = sum_exp.log_().add_(maximum)
    if not gradient:
        return lse - target, None
    ones = torch.ones_like(lse)
    chunk_gradient_(logits, targets, lse, ones, 0, valid_columns)
    return lse - target, ones
