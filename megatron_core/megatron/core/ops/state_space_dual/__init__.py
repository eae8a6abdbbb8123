# SPDX-License-Identifier: Apache-2.0
"""State-space duality: a state per head that fades, to which tokens add, and that is read."""

from __future__ import annotations

import torch

from megatron.core.ops.dispatch import apply_function, choose
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
from megatron.core.ops.state_space_dual.reference import (
    AddSkip,
    PreparedStateSpace,
    StateSpaceDual,
    step,
)

__all__ = ["add_skip", "state_space_dual", "state_space_recurrence", "state_space_step"]

# Of 32, 64, 128 and 256 tokens, the quickest on a CPU with 64 channels a head, whether a state has
# 64 or 128 rows.
CHUNK_SIZE = 64


def state_space_recurrence(
    chunk_size: int = CHUNK_SIZE, *, implementation: str | None = None
) -> Recurrence:
    """Return state-space duality as the local operations of a recurrence.

    Args:
        chunk_size: tokens that are worked out at once.
        implementation: "reference", "triton" or None (by device and sizes).

    Raises:
        ValueError: an empty chunk.
    """
    if chunk_size < 1:
        raise ValueError(f"state_space_dual: chunk_size {chunk_size}: use 1 or more")
    return ByDevice(
        op="state_space_dual",
        reference=StateSpaceDual(chunk_size),
        kept=PreparedStateSpace,
        corrects=False,
        scale=1.0,
        chunk_size=chunk_size,
        implementation=implementation,
    )


def state_space_dual(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    dt: torch.Tensor,
    *,
    sequences: Sequences,
    initial: torch.Tensor | None = None,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence of Mamba-2 over sequences (Dao & Gu 2024, arXiv 2405.21060, section 6).

    Per head, with state S [K, V], token after token:
    S <- exp(decay) S + dt key value^T;  out = S^T query.
    In its words query is C, key is B, value is x, decay is dt A. Group g serves heads
    g r ... g r + r - 1, r = H / G.

    Args:
        query, key: [t, G, K].
        value: [t, H, V].
        decay: [t, H], logarithms, at most 0; fp32 or wider.
        dt: [t, H], how much of a token the state takes.
        sequences: where they begin and end.
        initial: [N, H, K, V], the first states; None is zeros.
        implementation: "reference", "triton" or None (by device and sizes).

    Returns:
        (out [t, H, V] in value's dtype, last states [N, H, K, V] in fp32, or fp64 of fp64).

    Raises:
        ValueError: shapes or dtypes that do not fit, an implementation that cannot take them.
    """
    op = "state_space_dual"
    inputs = RecurrenceInputs(query, key, value, decay, dt)
    require_sequences(op, sequences)
    sequences.check(op, query=query, key=key, value=value, decay=decay, dt=dt)
    check_inputs(op, inputs, strength="dt")
    check_initial(op, inputs, initial, count=sequences.count)
    recurrence = state_space_recurrence(implementation=implementation)
    return recur(recurrence, inputs, sequences, initial=initial)


@torch.no_grad()
def state_space_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    dt: torch.Tensor,
    *,
    state: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Run the recurrence of Mamba-2 for one more token of each row, in place; not differentiable.

    Args:
        query, key: [b, G, K].
        value: [b, H, V].
        decay, dt: [b, H].
        state: [slots, H, K, V], changed in the rows that `slots` names.
        slots: int64 [b], each row's state, none twice; -1 is a padding row: whatever it holds, its
            output is zero and no state is touched.

    Returns:
        out [b, H, V] in value's dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    op = "state_space_step"
    inputs = RecurrenceInputs(query, key, value, decay, dt)
    check_inputs(op, inputs, strength="dt")
    check_slots(op, inputs, state=state, slots=slots)
    return step(inputs, state=state, slots=slots)


def add_skip(
    out: torch.Tensor, x: torch.Tensor, skip: torch.Tensor, *, implementation: str | None = None
) -> torch.Tensor:
    """Return out + D x, which Mamba-2 adds to what is read from the state.

    Args:
        out, x: [t, H, V].
        skip: D [H].
        implementation: "reference", "triton" or None (by device).

    Returns:
        [t, H, V] in out's dtype.

    Raises:
        ValueError: shapes that do not fit, an implementation that cannot take them.
    """
    if x.ndim != 3 or out.shape != x.shape or skip.shape != x.shape[1:2]:
        raise ValueError(
            f"add_skip: out {tuple(out.shape)} and x {tuple(x.shape)} must be (tokens, heads, "
            f"features), skip {tuple(skip.shape)} a number for each head"
        )
    if choose(implementation, x, "add_skip") == "triton":
        from megatron.core.ops.state_space_dual.triton import AddSkip as Kernels

        return apply_function(Kernels, out, x, skip)
    return apply_function(AddSkip, out, x, skip)
