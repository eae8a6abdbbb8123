# SPDX-License-Identifier: Apache-2.0
"""Stateless dropout: the mask is a function of key, sample, position and feature."""

from __future__ import annotations

import torch

from megatron.core.ops.backend_choice import choose
from megatron.core.ops.dropout import cpu
from megatron.core.ops.dropout.cpu import AttentionDropout, dropout_key

__all__ = ["AttentionDropout", "dropout", "dropout_key"]


def dropout(
    x: torch.Tensor,
    *,
    rate: float,
    key: int,
    sample_ids: torch.Tensor,
    position_ids: torch.Tensor,
    feature_offset: int = 0,
    implementation: str | None = None,
) -> torch.Tensor:
    """Zero elements with probability `rate` and divide the other elements by 1 - rate.

    The mask depends only on (key, sample id, position id, global feature): the mask of any slice of
    the batch, sequence or features is that slice of the full mask. Backward recomputes the mask;
    nothing is saved.

    Args:
        x: [s, b, h/tp].
        rate: probability of dropping, in [0, 1), rounded to 2^-16.
        key: int64 from `dropout_key`, unique for each site and step.
        sample_ids: int64 [b], global index of each sample, or [s, b], global index of each token's
            sample if a row packs several samples.
        position_ids: int64 [s], position of each token in its sample.
        feature_offset: global index of the first local feature.
        implementation: "reference", "triton" or None (by device).

    Returns:
        [s, b, h/tp] in x's dtype.

    Raises:
        ValueError: a rate outside [0, 1) or ids that do not fit x.
    """
    _check_rate("dropout", rate)
    valid_shapes = (x.shape[1:2], x.shape[:2])
    if x.ndim != 3 or position_ids.shape != x.shape[:1] or sample_ids.shape not in valid_shapes:
        raise ValueError(
            f"dropout: x {tuple(x.shape)} must be [s, b, h] with position_ids [s], not"
            f" {tuple(position_ids.shape)}, and sample_ids [b] or [s, b], not"
            f" {tuple(sample_ids.shape)}"
        )
    if feature_offset < 0:
        raise ValueError(f"dropout: feature_offset={feature_offset} must not be negative")
    if rate == 0:
        return x
    if choose(implementation, x, "dropout") == "triton":
        from megatron.core.ops.dropout import triton as kernels

        values_fn = kernels.dropout_values
    else:
        values_fn = cpu.dropout_values
    arguments = rate, key, sample_ids, position_ids, feature_offset
    if torch.is_grad_enabled():
        return Dropout.apply(x, *arguments, values_fn)
    return values_fn(x, *arguments)


class Dropout(torch.autograd.Function):
    """y = x * keep / (1 - rate). dgrad: the same function of the gradient. Saves no mask.

    `values_fn` is `dropout_values` of `cpu` or of `triton`.
    """

    @staticmethod
    def forward(ctx, x, rate, key, sample_ids, position_ids, feature_offset, values_fn):
        ctx.save_for_backward(sample_ids, position_ids)
        ctx.site = (rate, key, feature_offset)
        ctx.values_fn = values_fn
        return values_fn(x, rate, key, sample_ids, position_ids, feature_offset)

    @staticmethod
    def backward(ctx, grad):
        sample_ids, position_ids = ctx.saved_tensors
        rate, key, feature_offset = ctx.site
        d_x = ctx.values_fn(grad, rate, key, sample_ids, position_ids, feature_offset)
        return d_x, None, None, None, None, None, None


def _check_rate(op: str, rate: float) -> None:
    """Raise ValueError unless rate is a probability below one."""
    if not 0 <= rate < 1:
        raise ValueError(f"{op}: rate={rate} must be in [0, 1)")
