# SPDX-License-Identifier: Apache-2.0
"""The prologue of recurrences: from the features of tokens to what a recurrence reads.

Per unit, a group of r heads, with pre the causal convolution of its first c columns:

    [query | key | value] = SiLU(pre),  queries and keys of the delta rule scaled to length one;
    delta rule: strength = sigmoid(beta),  decay = −e^A_log · softplus(alpha + dt_bias);
    SSD:        strength = dt = softplus(raw + dt_bias) within limits,  decay = −e^A_log · dt

(Yang et al. 2024, arXiv 2412.06464, section 3.4; Dao & Gu 2024, arXiv 2405.21060, section 7).

On a GPU this is one kernel: it reads each row where it lies and writes each result once. Backward
is one more, which works out pre again, walks each stretch of tokens from its end, so that what a
token gives to the W-1 before it stays in registers, and sums the gradients of weights in a fixed
order.
"""

from __future__ import annotations

import torch

from megatron.core.ops.backend_choice import choose
from megatron.core.ops.joint_gradient import ProjectionSlice, slice_of
from megatron.core.ops.recurrence import RecurrenceInputs
from megatron.core.ops.recurrence_prologue import reference
from megatron.core.ops.recurrence_prologue.reference import (
    PrologueWeights,
    UnitParts,
    recurrence_inputs,
)
from megatron.core.ops.sequences import PackingIndices, Sequences, require_sequences

__all__ = ["PrologueWeights", "UnitParts", "recurrence_inputs", "recurrence_prologue"]

#: What the kernel takes: tokens a convolution sees, and features of a key.
MOST_TAPS, MOST_KEYS = 4, 1024


def recurrence_prologue(
    source: torch.Tensor | ProjectionSlice,
    weights: PrologueWeights,
    *,
    parts: UnitParts,
    sequences: Sequences,
    places: PackingIndices | None = None,
    initial: torch.Tensor | None = None,
    keeps_last: bool = False,
    implementation: str | None = None,
) -> tuple[RecurrenceInputs, torch.Tensor | None]:
    """Convolve, activate and normalise the features of tokens, and work out their gates.

    Inside all is in fp32; fp64 stays fp64. Backward saves the arguments alone.

    Args:
        source: [n, u, w], rows of tokens; may be a slice of the last dimension, whose gradient is
            then written to that of the projection, if it says where that is.
        weights: of the convolution and of the gates.
        parts: what the w columns are.
        sequences: where those of the t packed tokens begin and end.
        places: the row of each packed token; rows of none get a gradient of zero. None: t rows, as
            they are packed.
        initial: [N, W-1, u, c], the rows before each sequence, the last nearest to it; has a
            gradient. None is zeros.
        keeps_last: whether the last rows are wanted, as they are while generating.
        implementation: "reference", "triton" or None (by device; the reference too where W is
            above 4 or K above 1,024).

    Returns:
        (inputs of t tokens, decay and strength in fp32; last [N, W-1, u, c] in source's dtype, what
        a next call needs as `initial`, without a gradient; None where it is not wanted).

    Raises:
        ValueError: shapes that do not fit, or a forced implementation that cannot take them.
    """
    op = "recurrence_prologue"
    columns = slice_of(source)
    source = columns.value
    require_sequences(op, sequences)
    check_features(op, source, weights, parts)
    if places is None:
        sequences.check(op, source=source)
    elif (len(places.rows), len(places.tokens)) != (sequences.tokens, source.shape[0]):
        raise ValueError(
            f"{op}: places are of {len(places.rows)} tokens in {len(places.tokens)} rows, there "
            f"are {sequences.tokens} tokens and {source.shape[0]} rows: use one layout for all"
        )
    width = weights.weight.shape[-1]
    wanted = (sequences.count, width - 1, source.shape[1], parts.convolved)
    if initial is not None and tuple(initial.shape) != wanted:
        raise ValueError(
            f"{op}: initial {tuple(initial.shape)} must be {wanted}: the W-1 rows before each "
            "sequence"
        )
    call = {"parts": parts, "sequences": sequences, "places": places, "initial": initial}
    if _chosen(implementation, source, width, parts) == "triton":
        from megatron.core.ops.recurrence_prologue import triton

        return triton.prologue(columns, weights, keeps_last=keeps_last, **call)
    inputs, last = reference.prologue(source, weights, **call)
    return inputs, last.detach() if keeps_last else None


def _chosen(implementation: str | None, source: torch.Tensor, width: int, parts: UnitParts) -> str:
    """Return which implementation is used.

    Raises:
        ValueError: one that cannot be.
    """
    name = choose(implementation, source, "recurrence_prologue")
    if name == "triton" and (width > MOST_TAPS or parts.key_channels > MOST_KEYS):
        if implementation is not None:
            raise ValueError(
                f"recurrence_prologue: W {width} and K {parts.key_channels}: the Triton kernel "
                f"takes up to {MOST_TAPS} and {MOST_KEYS}; use implementation='reference'"
            )
        return "reference"
    return name


def check_features(
    op: str,
    source: torch.Tensor,
    weights: PrologueWeights,
    parts: UnitParts,
    *,
    skip: torch.Tensor | None = None,
) -> None:
    """Raise ValueError unless features, weights and parts fit together."""
    if source.ndim != 3 or source.shape[2] != parts.width or not source.is_floating_point():
        raise ValueError(
            f"{op}: source {tuple(source.shape)} {source.dtype} must be floats (rows, units, "
            f"{parts.width})"
        )
    units = source.shape[1]
    heads, channels = (units * parts.heads,), (units, parts.convolved)
    weight, bias, rates, step_bias = weights
    if weight.ndim != 3 or weight.shape[:2] != channels or weight.shape[2] == 0:
        raise ValueError(
            f"{op}: weight {tuple(weight.shape)} must be ({units}, {parts.convolved}, taps)"
        )
    if bias is not None and bias.shape != channels:
        raise ValueError(f"{op}: bias {tuple(bias.shape)} must be {channels}")
    for name, value in (("rates", rates), ("step_bias", step_bias), ("skip", skip)):
        if value is not None and value.shape != heads:
            raise ValueError(f"{op}: {name} {tuple(value.shape)} must be {heads}")
