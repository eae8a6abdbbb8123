# SPDX-License-Identifier: Apache-2.0
"""Gated RMS normalisation: Gated DeltaNet gates after the norm, Mamba-2 before it."""

from __future__ import annotations

import torch

from megatron.core.ops.backend_choice import StoredWeight, apply_function, choose
from megatron.core.ops.recurrence.gated_norm import cpu
from megatron.core.ops.recurrence.interface import ProjectionSlice, slice_of

#: Whether the norm or the gate comes first.
NORM_FIRST, GATE_FIRST = "norm_first", "gate_first"


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor | ProjectionSlice,
    weight: torch.Tensor | StoredWeight,
    *,
    eps: float,
    order: str = NORM_FIRST,
    group_size: int | None = None,
    row_index: torch.Tensor | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Normalise groups of the last dimension by their root mean square, and gate them.

    norm_first: y = rms(x) * w * silu(gate) (Yang et al. 2024, arXiv 2412.06464, section 3.4);
    gate_first: y = rms(x * silu(gate)) * w (Dao & Gu 2024, arXiv 2405.21060, section 7.2);
    rms(t) = t / sqrt(mean of t^2 over a group + eps), in fp32.
    Backward saves the inputs and one fp32 number per group.

    `row_index` permutes the rows of x, for example from packed tokens to padded rows. The kernels
    gather in their loads, without another pass over x.

    Args:
        x: [..., n], or [t, ..., n] with `row_index`; slices are read in place.
        gate: [..., n], or [rows, ..., n] with `row_index`; the gradient of a `ProjectionSlice` is
            written into the gradient of its projection.
        weight: [n], or [u, n] for x and gate [..., u, n]; the gradient of a stored
            weight is accumulated flat.
        eps: added to the mean square.
        order: "norm_first" or "gate_first".
        group_size: features of a norm group; None is n.
        row_index: int64 [rows], the row of x for each row of y; contains each row of x once. -1 is
            a padding row, in which y and the gradient of the gate are 0, even if the gate is NaN.
        implementation: "reference", "triton" or None (by device).

    Returns:
        y in x's dtype, with the gate's shape.

    Raises:
        ValueError: incompatible shapes, dtypes or options.
    """
    op = "gated_rms_norm"
    gate, gradient = slice_of(gate)
    stored = weight if isinstance(weight, StoredWeight) else None
    if isinstance(weight, StoredWeight):
        value, leaf = weight.value, weight.anchor
    else:
        value = leaf = weight
    _check_shapes(op, x, gate, value, row_index=row_index)
    if not x.is_floating_point() or not gate.is_floating_point():
        raise ValueError(f"{op}: x is {x.dtype}, gate {gate.dtype}; give floating-point tensors")
    if eps < 0:
        raise ValueError(f"{op}: eps={eps} must not be negative")
    if order not in (NORM_FIRST, GATE_FIRST):
        raise ValueError(f"{op}: order={order!r}: use {NORM_FIRST} or {GATE_FIRST}")
    features = x.shape[-1]
    size = features if group_size is None else group_size
    if size < 1 or features % size:
        raise ValueError(f"{op}: group_size {size} must divide the {features} features")
    if choose(implementation, x, op) == "triton":
        from megatron.core.ops.recurrence.gated_norm import triton as kernels

        call = kernels.NormCall(eps, order == GATE_FIRST, size, gradient, stored)
        return apply_function(kernels.GatedRmsNorm, x, gate, leaf, row_index, call)
    options = {"eps": eps, "gate_first": order == GATE_FIRST, "size": size}
    return cpu.gated_rms_norm(x, gate, weight, row_index=row_index, **options)


def _check_shapes(
    op: str,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    *,
    row_index: torch.Tensor | None,
) -> None:
    """Raise ValueError unless the shapes are compatible."""
    row_dims = 0 if row_index is None else 1
    if x.ndim < 2 or gate.ndim != x.ndim or gate.shape[row_dims:] != x.shape[row_dims:]:
        raise ValueError(
            f"{op}: x {tuple(x.shape)} and gate {tuple(gate.shape)} must have one shape, of rows "
            "and features" + (", but for the number of rows" if row_dims else "")
        )
    expected = x.shape[-1:] if weight.ndim != 2 else x.shape[-2:]
    if weight.shape != expected or weight.ndim >= x.ndim:
        raise ValueError(f"{op}: weight {tuple(weight.shape)} must be {tuple(x.shape[-1:])}")
    if row_index is None:
        return
    if row_index.dtype != torch.int64 or row_index.shape != gate.shape[:1]:
        raise ValueError(
            f"{op}: row_index {tuple(row_index.shape)} {row_index.dtype} must be int64, one for "
            f"each of {gate.shape[0]} rows"
        )
    if len(x) > len(row_index):
        raise ValueError(
            f"{op}: {len(x)} rows of x are more than {len(row_index)} entries of row_index: each "
            "row needs one"
        )
