# SPDX-License-Identifier: Apache-2.0
"""What callers of recurrences may give: shapes and dtypes that fit together, or a ValueError."""

from __future__ import annotations

import torch

from megatron.core.ops.dispatch import accumulation_dtype
from megatron.core.ops.recurrence import RecurrenceInputs


def check_inputs(op: str, inputs: RecurrenceInputs, *, strength: str) -> None:
    """Raise ValueError unless the inputs of a recurrence fit together.

    Args:
        op: its name, for the message.
        inputs: of packed tokens, or of one token a row.
        strength: how the op calls it.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    query, key, value = inputs[:3]
    if key.ndim != 3 or query.shape != key.shape or 0 in key.shape[1:]:
        raise ValueError(
            f"{op}: query {tuple(query.shape)} and key {tuple(key.shape)} must both be "
            "(tokens, heads, features), with at least one head and one feature"
        )
    fits = value.ndim == 3 and value.shape[0] == key.shape[0]
    if not fits or 0 in value.shape[1:] or value.shape[1] % key.shape[1]:
        raise ValueError(
            f"{op}: value {tuple(value.shape)} must be (tokens, a multiple of {key.shape[1]} "
            "heads, features), with at least one feature"
        )
    for name, gate in (("decay", inputs.decay), (strength, inputs.strength)):
        if gate.shape != value.shape[:2]:
            raise ValueError(
                f"{op}: {name} {tuple(gate.shape)} must be {tuple(value.shape[:2])}, a number for "
                "each head of value"
            )
    _check_dtypes(op, inputs, strength)


def _check_dtypes(op: str, inputs: RecurrenceInputs, strength: str) -> None:
    """Raise ValueError unless dtypes fit together."""
    query, key, value, decay, _ = inputs
    if not value.is_floating_point() or not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"{op}: query is {query.dtype}, key {key.dtype}, value {value.dtype}; give all three "
            "in one floating-point dtype"
        )
    wide = accumulation_dtype(value.dtype)
    if not decay.is_floating_point() or decay.dtype != torch.promote_types(decay.dtype, wide):
        raise ValueError(
            f"{op}: decay is {decay.dtype}; make it {wide}, its sums over many tokens are powers"
        )
    if not inputs.strength.is_floating_point():
        raise ValueError(
            f"{op}: {strength} is {inputs.strength.dtype}; give a floating-point dtype"
        )


def check_slots(
    op: str, inputs: RecurrenceInputs, *, state: torch.Tensor, slots: torch.Tensor
) -> None:
    """Raise ValueError unless states, and which row each has, fit the inputs of one token a row.

    Args:
        op: its name, for the message.
        inputs: that `check_inputs` let pass.
        state: must be [slots, H, K, V].
        slots: must be int64 [b].

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    key, value = inputs.key, inputs.value
    shape = (value.shape[1], key.shape[2], value.shape[2])
    if state.ndim != 4 or state.shape[1:] != shape:
        raise ValueError(f"{op}: state {tuple(state.shape)} must be (slots, {str(shape)[1:]}")
    if slots.shape != value.shape[:1] or slots.dtype != torch.int64:
        raise ValueError(
            f"{op}: slots {tuple(slots.shape)} {slots.dtype} must be int64, one for each of "
            f"{value.shape[0]} rows"
        )


def check_initial(
    op: str, inputs: RecurrenceInputs, initial: torch.Tensor | None, *, count: int
) -> None:
    """Raise ValueError unless first states are None or [N, H, K, V]; N is `count`."""
    states = (count, inputs.value.shape[1], inputs.key.shape[2], inputs.value.shape[2])
    if initial is not None and initial.shape != states:
        raise ValueError(f"{op}: initial {tuple(initial.shape)} must be {states}")
