# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule: a state per head that fades, is corrected by each token, and is read."""

from __future__ import annotations

import torch

from megatron.core.ops.dispatch import accumulation_dtype, choose
from megatron.core.ops.gated_delta_rule.reference import DeltaRecurrence
from megatron.core.ops.gated_delta_rule.step import step
from megatron.core.ops.recurrence import Recurrence, RecurrenceInputs, recur
from megatron.core.ops.sequences import Sequences

__all__ = ["delta_recurrence", "gated_delta_rule", "gated_delta_step"]


def delta_recurrence(scale: float | None = None, chunk_size: int = 64) -> Recurrence:
    """Return the gated delta rule as the local operations of a recurrence.

    Args:
        scale: of queries; None is K^-0.5.
        chunk_size: tokens that are worked out at once.

    Raises:
        ValueError: an empty chunk.
    """
    if chunk_size < 1:
        raise ValueError(f"gated_delta_rule: chunk_size {chunk_size}: use 1 or more")
    return DeltaRecurrence(scale, chunk_size)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    sequences: Sequences,
    initial: torch.Tensor | None = None,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the gated delta rule over sequences (Yang et al. 2024, arXiv 2412.06464, equation 10).

    Per value head, with state S [K, V], token after token:
    S <- exp(decay) S;  S <- S + key (beta (value - S^T key))^T;  out = S^T query / sqrt(K).
    Key head h serves value heads h r ... h r + r - 1, r = Hv / Hk. For another scale
    `recur` over a `delta_recurrence`.

    Args:
        query, key: [t, Hk, K], of length 1 (`l2norm`).
        value: [t, Hv, V].
        decay: [t, Hv], logarithms, at most 0; fp32 or wider.
        beta: [t, Hv], from 0 to 1.
        sequences: where they begin and end.
        initial: [N, Hv, K, V], the first states; None is zeros.
        implementation: "reference" or None.

    Returns:
        (out [t, Hv, V] in value's dtype, last states [N, Hv, K, V] in fp32, or fp64 of fp64).

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    op = "gated_delta_rule"
    inputs = RecurrenceInputs(query, key, value, decay, beta)
    sequences.check(op, **inputs._asdict())
    _check(op, inputs)
    states = (sequences.count, *value.shape[1:2], key.shape[-1], value.shape[-1])
    if initial is not None and initial.shape != states:
        raise ValueError(f"{op}: initial {tuple(initial.shape)} must be {states}")
    choose(implementation, value, op, has_triton=False)
    return recur(delta_recurrence(), inputs, sequences, initial=initial)


@torch.no_grad()
def gated_delta_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    state: torch.Tensor,
    slots: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Run the gated delta rule for one more token of each row, in place; not differentiable.

    Args:
        query, key: [b, Hk, K], of length 1.
        value: [b, Hv, V].
        decay, beta: [b, Hv].
        state: [slots, Hv, K, V], changed in the rows that `slots` names.
        slots: int64 [b], each row's state, none twice; -1 is a padding row: whatever it holds, its
            output is zero and no state is touched.
        scale: of queries; None is K^-0.5.

    Returns:
        out [b, Hv, V] in value's dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    op = "gated_delta_step"
    inputs = RecurrenceInputs(query, key, value, decay, beta)
    _check(op, inputs, scale)
    rows = (*value.shape[1:2], key.shape[-1], value.shape[-1])
    if state.ndim != 4 or state.shape[1:] != rows:
        raise ValueError(f"{op}: state {tuple(state.shape)} must be (slots, {str(rows)[1:]}")
    if slots.shape != value.shape[:1] or slots.dtype != torch.int64:
        raise ValueError(
            f"{op}: slots {tuple(slots.shape)} {slots.dtype} must be int64, one for each of "
            f"{value.shape[0]} rows"
        )
    return step(inputs, state=state, slots=slots, scale=scale)


def _check(op: str, inputs: RecurrenceInputs, scale: float | None = None) -> None:
    """Raise ValueError unless shapes and dtypes fit together."""
    query, key, value, decay, beta = inputs
    if key.ndim != 3 or query.shape != key.shape:
        raise ValueError(
            f"{op}: query {tuple(query.shape)} and key {tuple(key.shape)} must both be "
            "(tokens, key heads, features)"
        )
    if value.ndim != 3 or value.shape[0] != key.shape[0] or value.shape[1] % key.shape[1]:
        raise ValueError(
            f"{op}: value {tuple(value.shape)} must be (tokens, a multiple of "
            f"{key.shape[1]} heads, features)"
        )
    for name, gate in (("decay", decay), ("beta", beta)):
        if gate.shape != value.shape[:2]:
            raise ValueError(
                f"{op}: {name} {tuple(gate.shape)} must be {tuple(value.shape[:2])}, a number for "
                "each value head"
            )
    if decay.dtype != torch.promote_types(decay.dtype, accumulation_dtype(value.dtype)):
        raise ValueError(
            f"{op}: decay is {decay.dtype}; make it {accumulation_dtype(value.dtype)}, its sums "
            "over many tokens are powers"
        )
    if scale is not None and not scale > 0:
        raise ValueError(f"{op}: scale {scale}: use more than 0, or None")
