# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation with a gate: of Gated DeltaNet behind it, of Mamba-2 before it."""

from __future__ import annotations

import torch

from megatron.core.ops.dispatch import apply_function, choose
from megatron.core.ops.gated_rms_norm import reference

#: Whether the norm or the gate comes first.
NORM_FIRST, GATE_FIRST = "norm_first", "gate_first"


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    order: str = NORM_FIRST,
    group_size: int | None = None,
    places: torch.Tensor | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Normalise groups of the last dimension by their root mean square, and gate them.

    norm_first: y = rms(x) * w * silu(gate) (Yang et al. 2024, arXiv 2412.06464, section 3.4);
    gate_first: y = rms(x * silu(gate)) * w (Dao & Gu 2024, arXiv 2405.21060, section 7.2);
    rms(t) = t / sqrt(mean of t^2 over a group + eps), in fp32.
    Backward saves the inputs and one fp32 number a group.

    With `places` x has its rows in another order, such as that of packed tokens: y and the gate
    have those of the places, and nothing else goes over x to put it in order.

    Args:
        x: [..., n], or [t, ..., n] with places; slices are read in place.
        gate: [..., n], or [rows, ..., n] with places.
        weight: [n], or [u, n] for x and gate [..., u, n].
        eps: added to the mean square.
        order: "norm_first" or "gate_first".
        group_size: features that are normalised together; None is n.
        places: int64 [rows], the row of x that each row of y is made of. Each of x is named once.
            -1 is a padding row: y and the gradient of its gate are 0, whatever it holds.
        implementation: "reference", "triton" or None (by device).

    Returns:
        y in x's dtype, of the gate's shape.

    Raises:
        ValueError: shapes, dtypes or options that do not fit.
    """
    op = "gated_rms_norm"
    _check_shapes(op, x, gate, weight, places=places)
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
        from megatron.core.ops.gated_rms_norm import triton as kernels

        return apply_function(
            kernels.GatedRmsNorm, x, gate, weight, eps, order == GATE_FIRST, size, places
        )
    options = {"eps": eps, "gate_first": order == GATE_FIRST, "size": size}
    return reference.gated_rms_norm(x, gate, weight, places=places, **options)


def _check_shapes(
    op: str,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    *,
    places: torch.Tensor | None,
) -> None:
    """Raise ValueError unless shapes fit together."""
    first = 0 if places is None else 1
    if x.ndim < 2 or gate.ndim != x.ndim or gate.shape[first:] != x.shape[first:]:
        raise ValueError(
            f"{op}: x {tuple(x.shape)} and gate {tuple(gate.shape)} must have one shape, of rows "
            "and features" + (", but for the number of rows" if first else "")
        )
    wanted = x.shape[-1:] if weight.ndim != 2 else x.shape[-2:]
    if weight.shape != wanted or weight.ndim >= x.ndim:
        raise ValueError(f"{op}: weight {tuple(weight.shape)} must be {tuple(x.shape[-1:])}")
    if places is None:
        return
    if places.dtype != torch.int64 or places.shape != gate.shape[:1]:
        raise ValueError(
            f"{op}: places {tuple(places.shape)} {places.dtype} must be int64, one for each of "
            f"{gate.shape[0]} rows"
        )
    if len(x) > len(places):
        raise ValueError(
            f"{op}: {len(x)} rows of x are more than {len(places)} places: each row needs one"
        )
