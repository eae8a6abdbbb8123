# SPDX-License-Identifier: Apache-2.0
"""The recurrence prologue: from the projected features of tokens to the inputs of a recurrence.

Per unit, a group of r heads, with pre the causal convolution of its first c columns:

    [query | key | value] = SiLU(pre),  queries and keys of the delta rule scaled to length one;
    delta rule: beta = sigmoid(b),  decay = −e^A_log · softplus(alpha + dt_bias);
    SSD:        beta = dt = softplus(raw + dt_bias), clamped to its limits,  decay = −e^A_log · dt

(Yang et al. 2024, arXiv 2412.06464, section 3.4; Dao & Gu 2024, arXiv 2405.21060, section 7).

On a GPU this is one kernel, which reads each row in place and writes each output once. Backward is
another kernel. It recomputes pre and processes segments of tokens from their ends, so that a
token's contributions to the gradients of the W-1 tokens before it stay in registers. It sums the
gradients of the weights in a fixed order.
"""

from __future__ import annotations

import torch

from megatron.core.ops.backend_choice import choose
from megatron.core.ops.recurrence.interface import ProjectionSlice, RecurrenceInputs, slice_of
from megatron.core.ops.recurrence.prologue import cpu as reference
from megatron.core.ops.recurrence.prologue.cpu import PrologueWeights, UnitLayout, recurrence_inputs
from megatron.core.ops.sequences import PackingIndices, Sequences, require_sequences

__all__ = ["PrologueWeights", "UnitLayout", "recurrence_inputs", "recurrence_prologue"]

#: Limits of the kernel: taps W of the convolution, and features K of a key.
MAX_TAPS, MAX_KEYS = 4, 1024


def recurrence_prologue(
    source: torch.Tensor | ProjectionSlice,
    weights: PrologueWeights,
    *,
    unit: UnitLayout,
    sequences: Sequences,
    packing: PackingIndices | None = None,
    initial: torch.Tensor | None = None,
    return_conv_state: bool = False,
    implementation: str | None = None,
) -> tuple[RecurrenceInputs, torch.Tensor | None]:
    """Convolve, activate and normalise the features of tokens, and compute their gates.

    It computes in fp32, or in fp64 for fp64. Backward saves only the arguments.

    Args:
        source: [n, u, w], rows of tokens; may be a slice of the last dimension. The gradient of a
            `ProjectionSlice` is written into the gradient of its projection.
        weights: weights of the convolution and of the gates.
        unit: the meaning of the w columns.
        sequences: the boundaries of the t packed tokens.
        packing: the row of each packed token; padding rows get a zero gradient. None: the rows are
            packed, n = t.
        initial: [N, W-1, u, c], the rows before each sequence, in order; has a gradient. None is
            zeros.
        return_conv_state: whether to return the convolution's state, for generation.
        implementation: "reference", "triton" or None (by device; the reference too if W is
            above 4 or K above 1,024).

    Returns:
        (inputs of t tokens, decay and beta in fp32; the convolution's state [N, W-1, u, c] in
        source's dtype, which is `initial` of the next call, without a gradient, or None).

    Raises:
        ValueError: incompatible shapes, or a forced implementation that does not support them.
    """
    op = "recurrence_prologue"
    source_slice = slice_of(source)
    source = source_slice.value
    require_sequences(op, sequences)
    check_features(op, source, weights, unit)
    if packing is None:
        sequences.check(op, source=source)
    elif (len(packing.rows), len(packing.tokens)) != (sequences.tokens, source.shape[0]):
        raise ValueError(
            f"{op}: packing has {len(packing.rows)} tokens in {len(packing.tokens)} rows, but "
            f"there are {sequences.tokens} tokens and {source.shape[0]} rows: use one layout "
            "for all"
        )
    conv_width = weights.weight.shape[-1]
    expected = (sequences.count, conv_width - 1, source.shape[1], unit.conv_channels)
    if initial is not None and tuple(initial.shape) != expected:
        raise ValueError(
            f"{op}: initial {tuple(initial.shape)} must be {expected}: the W-1 rows before each "
            "sequence"
        )
    call = {"unit": unit, "sequences": sequences, "packing": packing, "initial": initial}
    if _implementation(implementation, source, conv_width, unit) == "triton":
        from megatron.core.ops.recurrence.prologue import triton

        return triton.prologue(source_slice, weights, return_conv_state=return_conv_state, **call)
    inputs, conv_state = reference.prologue(source, weights, **call)
    return inputs, conv_state.detach() if return_conv_state else None


def _implementation(
    implementation: str | None, source: torch.Tensor, conv_width: int, unit: UnitLayout
) -> str:
    """Return the implementation to use.

    Raises:
        ValueError: the requested implementation does not support these sizes.
    """
    name = choose(implementation, source, "recurrence_prologue")
    if name == "triton" and (conv_width > MAX_TAPS or unit.key_channels > MAX_KEYS):
        if implementation is not None:
            raise ValueError(
                f"recurrence_prologue: W {conv_width} and K {unit.key_channels}: the Triton kernel "
                f"takes up to {MAX_TAPS} and {MAX_KEYS}; use implementation='reference'"
            )
        return "reference"
    return name


def check_features(
    op: str,
    source: torch.Tensor,
    weights: PrologueWeights,
    unit: UnitLayout,
    *,
    skip: torch.Tensor | None = None,
) -> None:
    """Raise ValueError unless features, weights and the unit's columns are compatible."""
    if source.ndim != 3 or source.shape[2] != unit.width or not source.is_floating_point():
        raise ValueError(
            f"{op}: source {tuple(source.shape)} {source.dtype} must be floats (rows, units, "
            f"{unit.width})"
        )
    units = source.shape[1]
    heads, channels = (units * unit.heads,), (units, unit.conv_channels)
    weight, bias, a_log, dt_bias = weights
    if weight.ndim != 3 or weight.shape[:2] != channels or weight.shape[2] == 0:
        raise ValueError(
            f"{op}: weight {tuple(weight.shape)} must be ({units}, {unit.conv_channels}, taps)"
        )
    if bias is not None and bias.shape != channels:
        raise ValueError(f"{op}: bias {tuple(bias.shape)} must be {channels}")
    for name, value in (("a_log", a_log), ("dt_bias", dt_bias), ("skip", skip)):
        if value is not None and value.shape != heads:
            raise ValueError(f"{op}: {name} {tuple(value.shape)} must be {heads}")
