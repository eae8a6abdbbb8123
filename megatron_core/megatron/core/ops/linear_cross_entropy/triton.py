# SPDX-License-Identifier: Apache-2.0
"""Softmax statistics and gradient of one slice of the vocabulary, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

STATISTICS_BLOCK = 2048
GRADIENT_BLOCK = 1024


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
    BLOCK: tl.constexpr,
):
    """Pass once over a row: running maximum, sum of exponentials, the target's logit."""
    row = tl.program_id(0).to(tl.int64)
    source = logits_ptr + row * row_stride
    maximum = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, valid_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(source + columns, mask=columns < valid_columns, other=float("-inf"))
        x = x.to(tl.float32)
        larger = tl.maximum(maximum, x)
        # Lanes that saw only padding hold -inf: shift by 0 there, so that no inf - inf arises.
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(maximum - shift) + tl.exp(x - shift)
        maximum = larger
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
    BLOCK: tl.constexpr,
):
    """Overwrite one block of one row by (softmax - onehot) * weight, padding by 0."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = logits_ptr + row * row_stride + columns
    valid = columns < valid_columns
    x = tl.load(place, mask=valid, other=float("-inf")).to(tl.float32)
    probability = tl.exp(x - tl.load(lse_ptr + row))
    column = tl.load(targets_ptr + row) - vocab_start
    hit = tl.where(valid & (columns == column), 1.0, 0.0)
    value = (probability - hit) * tl.load(weights_ptr + row)
    value = tl.where(valid, value, 0.0)  # also where the weight is not finite
    tl.store(place, value.to(logits_ptr.dtype.element_ty), mask=columns < columns_total)


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
            BLOCK=STATISTICS_BLOCK,
            num_warps=8,
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
    """Overwrite logits, its last dimension dense, by its gradient; see the package."""
    if logits.stride(-1) != 1:
        raise ValueError(
            f"chunk_gradient_: logits with strides {logits.stride()} must be dense in the last"
            " dimension; call contiguous() first"
        )
    rows, columns = logits.shape
    if logits.numel():
        chunk_gradient_kernel[(rows, triton.cdiv(columns, GRADIENT_BLOCK))](
            logits,
            targets.contiguous(),
            lse.contiguous(),
            weights.contiguous(),
            logits.stride(0),
            vocab_start,
            valid_columns,
            columns,
            BLOCK=GRADIENT_BLOCK,
        )
    return logits


def fused_gradient_(
    logits: torch.Tensor, targets: torch.Tensor, valid_columns: int, *, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the loss of whole rows and overwrite logits by its gradient; see `reference`.

    The row factor is one here: the kernel normalises in registers.
    """
    maximum, sum_exp, target = chunk_statistics(logits, targets, 0, valid_columns)
    lse = sum_exp.log_().add_(maximum)
    if not gradient:
        return lse - target, None
    ones = torch.ones_like(lse)
    chunk_gradient_(logits, targets, lse, ones, 0, valid_columns)
    return lse - target, ones
