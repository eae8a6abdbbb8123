# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule: a state per head that fades, is corrected by each token, and is read."""

from __future__ import annotations

import torch

from megatron.core.ops.gated_delta_rule.reference import DeltaRecurrence, PreparedDeltaRule, step
from megatron.core.ops.recurrence import (
    Recurrence,
    RecurrenceInputs,
    check_initial,
    check_inputs,
    check_slots,
    recur,
)
from megatron.core.ops.recurrence_by_device import ByDevice
from megatron.core.ops.sequences import Sequences, require_sequences

__all__ = ["delta_recurrence", "gated_delta_rule", "gated_delta_step"]


def delta_recurrence(
    scale: float | None = None, chunk_size: int = 64, *, implementation: str | None = None
) -> Recurrence:
    """Return the gated delta rule as the local operations of a recurrence.

    Args:
        scale: of queries; None is K^-0.5.
        chunk_size: tokens that are worked out at once.
        implementation: "reference", "triton" or None (by device and sizes).

    Raises:
        ValueError: an empty chunk.
    """
    if chunk_size < 1:
        raise ValueError(f"gated_delta_rule: chunk_size {chunk_size}: use 1 or more")
    return ByDevice(
        op="gated_delta_rule",
        reference=DeltaRecurrence(scale, chunk_size),
        kept=PreparedDeltaRule,
        corrects=True,
        scale=scale,
        chunk_size=chunk_size,
        implementation=implementation,
    )


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
        implementation: "reference", "triton" or None (by device and sizes).

    Returns:
        (out [t, Hv, V] in value's dtype, last states [N, Hv, K, V] in fp32, or fp64 of fp64).

    Raises:
        ValueError: shapes or dtypes that do not fit, an implementation that cannot take them.
    """
    op = "gated_delta_rule"
    inputs = RecurrenceInputs(query, key, value, decay, beta)
    require_sequences(op, sequences)
    sequences.check(op, query=query, key=key, value=value, decay=decay, beta=beta)
    check_inputs(op, inputs, strength="beta")
    check_initial(op, inputs, initial, count=sequences.count)
    recurrence = delta_recurrence(implementation=implementation)
    return recur(recurrence, inputs, sequences, initial=initial)


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
    check_inputs(op, inputs, strength="beta")
    check_slots(op, inputs, state=state, slots=slots)
    if scale is not None and not scale > 0:
        raise ValueError(f"{op}: scale {scale}: use more than 0, or None")
    return step(inputs, state=state, slots=slots, scale=scale)
