# SPDX-License-Identifier: Apache-2.0
"""Linear recurrences over packed tokens: what the gated delta rule and SSD have in common.

Both carry a state S [K, V] per head from token to token, which is decayed, then changed by what the
token brings, and read by its query. Within a stretch of tokens the last state is an affine function
of the first: S_last = M · S_first + S_ext. So a sequence can be cut anywhere: into chunks, into
segments that run side by side, over ranks. Five local operations are enough for all of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from megatron.core.ops.sequences import Sequences


class RecurrenceInputs(NamedTuple):
    """What a recurrence reads. H heads of values share G heads of queries and keys, H / G each.

    Args:
        query, key: [t, G, K].
        value: [t, H, V].
        decay: [t, H], the logarithm of what the state is multiplied by, at most 0; fp32 or wider.
        strength: [t, H], how much of a token the state takes: beta of the delta rule, dt of SSD.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    strength: torch.Tensor


class Recurrence(Protocol):
    """The local operations of one recurrence, none of them differentiable by autograd.

    States are [N, H, K, V], one a sequence, in the accumulation dtype: fp32, or fp64 of fp64.
    """

    def prepare(self, inputs: RecurrenceInputs, sequences: Sequences) -> Any:
        """Work out what does not depend on states, for the other operations; it keeps `inputs`."""
        ...

    def sweep(
        self, prepared: Any, initial: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out [t, H, V] in value's dtype, last states) from the first states, None is 0.

        `prepared` keeps from it what `backward` needs.
        """
        ...

    def summary(self, prepared: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (S_ext, M) of each sequence: its last state is `passed(M, first) + S_ext`.

        M is [N, H, K, K], or [N, H, 1, 1] where it only scales.
        """
        ...

    def state_gradient(self, prepared: Any, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the first states from that of out [t, H, V] alone, as if nothing
        read the last states."""
        ...

    def backward(
        self, prepared: Any, grad: torch.Tensor, grad_last: torch.Tensor | None
    ) -> tuple[RecurrenceInputs, torch.Tensor]:
        """Return (the gradients of the inputs, that of the first states), after `sweep`."""
        ...


def passed(
    transition: torch.Tensor, state: torch.Tensor, *, transposed: bool = False
) -> torch.Tensor:
    """Return M · S, or Mᵀ · S: [..., K, V] from M [..., K, K] or [..., 1, 1] and S [..., K, V]."""
    if transition.shape[-1] == 1:
        return transition * state
    return (transition.mT if transposed else transition) @ state


@dataclass(frozen=True)
class _Call:
    """What `recur` is told beside tensors."""

    recurrence: Recurrence
    sequences: Sequences


def recur(
    recurrence: Recurrence,
    inputs: RecurrenceInputs,
    sequences: Sequences,
    *,
    initial: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a recurrence over every sequence by itself.

    Args:
        recurrence: which.
        inputs: of all tokens.
        sequences: where they begin and end.
        initial: [N, H, K, V], the first states; None is zeros.

    Returns:
        (out [t, H, V] in value's dtype, last states [N, H, K, V]).
    """
    return _Recur.apply(_Call(recurrence, sequences), initial, *inputs)


class _Recur(torch.autograd.Function):
    """forward: prepare, sweep; backward: the recurrence's own. Saves what these keep."""

    @staticmethod
    def forward(ctx, call: _Call, initial, *inputs):
        prepared = call.recurrence.prepare(RecurrenceInputs(*inputs), call.sequences)
        out, last = call.recurrence.sweep(prepared, initial)
        ctx.call, ctx.prepared, ctx.has_initial = call, prepared, initial is not None
        ctx.set_materialize_grads(False)
        return out, last

    @staticmethod
    def backward(ctx, grad, grad_last):
        call, prepared = ctx.call, ctx.prepared
        if grad is None:
            values = prepared.inputs.value
            grad = torch.zeros_like(values)
        grads, grad_initial = call.recurrence.backward(prepared, grad, grad_last)
        return None, grad_initial if ctx.has_initial else None, *grads
