# SPDX-License-Identifier: Apache-2.0
"""Linear recurrences over packed tokens: what the gated delta rule and SSD have in common.

Both carry a state S [K, V] per head from token to token, which is decayed, then changed by what the
token brings, and read by its query. Within a stretch of tokens the last state is an affine function
of the first: S_last = M · S_first + S_ext. So a sequence can be cut anywhere: into chunks, into
segments that run side by side, over ranks. Five local operations are enough for all of these.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
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
        """Work out what does not depend on states, for the other operations.

        Returns:
            A dataclass that keeps `inputs` under this name, and its own tensors in fields.
        """
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
class _Taken:
    """Where the tensors of a field are: number `first` and on, `count` of them."""

    first: int
    count: int


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
    """forward: prepare, sweep; backward: the recurrence's own. Saves the tensors that these keep,
    by autograd, so that they go when the graph goes and recomputation can do without them."""

    @staticmethod
    def forward(ctx, call: _Call, initial, *inputs):
        prepared = call.recurrence.prepare(RecurrenceInputs(*inputs), call.sequences)
        out, last = call.recurrence.sweep(prepared, initial)
        ctx.call, ctx.has_initial = call, initial is not None
        ctx.shell, tensors = emptied(prepared)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return out, last

    @staticmethod
    def backward(ctx, grad, grad_last):
        prepared = filled(ctx.shell, ctx.saved_tensors)
        if grad is None:
            grad = torch.zeros_like(prepared.inputs.value)
        grads, grad_initial = ctx.call.recurrence.backward(prepared, grad, grad_last)
        return None, grad_initial if ctx.has_initial else None, *grads


def emptied(prepared: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Take the tensors out of what `Recurrence.prepare` made, for `save_for_backward`.

    Args:
        prepared: a dataclass; its fields that are tensors or `RecurrenceInputs` are taken.

    Returns:
        (a copy without tensors, the tensors).
    """
    shell, tensors = copy.copy(prepared), []
    for name in (part.name for part in fields(prepared)):
        value = getattr(prepared, name)
        if isinstance(value, torch.Tensor):
            setattr(shell, name, _Taken(len(tensors), 1))
            tensors.append(value)
        elif isinstance(value, RecurrenceInputs):
            setattr(shell, name, _Taken(len(tensors), len(value)))
            tensors += value
    return shell, tuple(tensors)


def filled(shell: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Put tensors back to where `emptied` took them from; the shell may be filled again."""
    prepared = copy.copy(shell)
    for name in (part.name for part in fields(prepared)):
        value = getattr(shell, name)
        if isinstance(value, _Taken):
            taken = tensors[value.first : value.first + value.count]
            put = RecurrenceInputs(*taken) if value.count > 1 else taken[0]
            setattr(prepared, name, put)
    return prepared
