# SPDX-License-Identifier: Apache-2.0
"""Arguments of the ops of recurrences: inputs of a recurrence, and slices of a projection.

The gated delta rule and SSD carry a state S [K, V] per head from token to token. A token decays
the state, adds to it, and reads it with its query. Over any segment of tokens the final state is an
affine function of the initial state: S_final = M · S_initial + S_ext. So a sequence can be split
anywhere: into chunks, into segments that run in parallel, over ranks. Every split needs only the
five operations of `Recurrence`.

A mixer splits the columns of a fused projection among several ops. Autograd would concatenate the
gradients of the slices. Instead each op writes its slice of one tensor, the gradient of the
projection (`JointGradient`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import torch

from megatron.core.ops.backend_choice import apply_function
from megatron.core.ops.sequences import Sequences

#: Default tokens of a chunk. Among 32, 64, 128 and 256, SSD on a CPU is fastest with 64, for heads
#: of 64 channels and states of 64 or 128 rows.
CHUNK_SIZE = 64

#: Decays are clamped to this: sums and differences of -inf are NaN. The exponential is 0 anyway, so
#: later tokens read nothing from before the decay, and its gradient is 0.
LOWEST_DECAY = -1e4


class RecurrenceInputs(NamedTuple):
    """Inputs of a recurrence. H heads of values share G heads of queries and keys, H / G each.

    Args:
        query, key: [t, G, K].
        value: [t, H, V].
        decay: [t, H], logarithm of the state's decay, at most 0; fp32 or wider.
        beta: [t, H], factor of the token's write: beta of the delta rule, dt of SSD.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor


class Recurrence(Protocol):
    """The local operations of one recurrence; autograd does not differentiate them.

    States are [N, H, K, V], one per sequence, in the accumulation dtype: fp32, or fp64 for fp64.
    """

    def prepare(self, inputs: RecurrenceInputs, sequences: Sequences) -> Any:
        """Compute the terms that do not depend on states, for the other operations.

        Returns:
            A dataclass with a field `inputs`, and further tensors in fields.
        """
        ...

    def sweep(
        self, prepared: Any, initial: torch.Tensor | None, *, keep_states: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out [t, H, V] in value's dtype, final states) from the initial states, None is 0.

        It stores the tensors that `backward` needs in `prepared`. With `keep_states` these include
        the state before every chunk, which `backward` may otherwise recompute.
        """
        ...

    def summary(self, prepared: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (S_ext, M) of each sequence: S_final = `apply_transition(M, S_initial) + S_ext`.

        M is [N, H, K, K], or [N, H, 1, 1] if it is a scalar per head.
        """
        ...

    def state_gradient(self, prepared: Any, d_out: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the initial states from `d_out` [t, H, V] alone, for a zero
        gradient of the final states."""
        ...

    def backward(
        self, prepared: Any, d_out: torch.Tensor, d_final: torch.Tensor | None
    ) -> tuple[RecurrenceInputs, torch.Tensor]:
        """Return the gradients of (the inputs, the initial states); `sweep` has run before.

        Args:
            prepared: the result of `prepare`, after `sweep`.
            d_out: gradient of out [t, H, V].
            d_final: gradient of the final states; None is zeros.
        """
        ...


def apply_transition(
    transition: torch.Tensor, state: torch.Tensor, *, transposed: bool = False
) -> torch.Tensor:
    """Return M · S, or Mᵀ · S: [..., K, V] from M [..., K, K] or [..., 1, 1] and S [..., K, V]."""
    if transition.shape[-1] == 1:
        return transition * state
    return (transition.mT if transposed else transition) @ state


@dataclass(frozen=True)
class _TensorRange:
    """The range of saved tensors that replaces a field: `count` tensors from `start` on."""

    start: int
    count: int


@dataclass(frozen=True)
class _RecurrenceCall:
    """The non-tensor arguments of `recur`."""

    recurrence: Recurrence
    sequences: Sequences
    keep_states: bool


def recur(
    recurrence: Recurrence,
    inputs: RecurrenceInputs,
    sequences: Sequences,
    *,
    initial: torch.Tensor | None = None,
    keep_states: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a recurrence over every sequence independently.

    Args:
        recurrence: its operations.
        inputs: of all packed tokens.
        sequences: the boundaries of the t tokens.
        initial: [N, H, K, V], the initial states; None is zeros.
        keep_states: save the states before chunks for backward, see `Recurrence.sweep`.

    Returns:
        (out [t, H, V] in value's dtype, final states [N, H, K, V]).
    """
    call = _RecurrenceCall(recurrence, sequences, keep_states and torch.is_grad_enabled())
    return apply_function(_Recur, call, initial, *inputs)


class _Recur(torch.autograd.Function):
    """Forward: prepare, sweep; dgrad and wgrad: `Recurrence.backward`.

    Saves the tensors of `prepared` with `save_for_backward`, so that autograd frees them with the
    graph and activation checkpointing can drop them.
    """

    @staticmethod
    def forward(ctx, call: _RecurrenceCall, initial, *inputs):
        prepared = call.recurrence.prepare(RecurrenceInputs(*inputs), call.sequences)
        out, final_state = call.recurrence.sweep(prepared, initial, keep_states=call.keep_states)
        ctx.call, ctx.has_initial = call, initial is not None
        ctx.shell, tensors = split_tensors(prepared)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return out, final_state

    @staticmethod
    def backward(ctx, d_out, d_final):
        prepared = restore_tensors(ctx.shell, ctx.saved_tensors)
        if d_out is None:
            d_out = torch.zeros_like(prepared.inputs.value)
        d_inputs, d_initial = ctx.call.recurrence.backward(prepared, d_out, d_final)
        return None, d_initial if ctx.has_initial else None, *d_inputs


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    """Return the names of a dataclass's fields."""
    return tuple(field.name for field in fields(kind))


def split_tensors(prepared: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Split the result of `Recurrence.prepare` into tensors and the rest, for `save_for_backward`.

    Args:
        prepared: a dataclass; its fields that are tensors or `RecurrenceInputs` are split off.

    Returns:
        (a copy without tensors, the tensors).
    """
    shell, tensors = copy.copy(prepared), []
    for name in _field_names(type(prepared)):
        value = getattr(prepared, name)
        if isinstance(value, torch.Tensor):
            setattr(shell, name, _TensorRange(len(tensors), 1))
            tensors.append(value)
        elif isinstance(value, RecurrenceInputs):
            setattr(shell, name, _TensorRange(len(tensors), len(value)))
            tensors += value
    return shell, tuple(tensors)


def restore_tensors(shell: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return `shell` with the tensors of `split_tensors` restored; `shell` itself is unchanged."""
    prepared = copy.copy(shell)
    for name in _field_names(type(prepared)):
        tensor_range = getattr(shell, name)
        if isinstance(tensor_range, _TensorRange):
            saved = tensors[tensor_range.start : tensor_range.start + tensor_range.count]
            restored = RecurrenceInputs(*saved) if tensor_range.count > 1 else saved[0]
            setattr(prepared, name, restored)
    return prepared


# --- slices of a fused projection


class JointGradient:
    """The gradient of one projection, allocated when the first op requests its slice.

    Args:
        like: the projection [..., w].
        sizes: columns of each slice, w in all.
    """

    def __init__(self, like: torch.Tensor, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self._shape, self._dtype, self._device = like.shape, like.dtype, like.device
        self._tensor: torch.Tensor | None = None

    def slice(self, index: int) -> torch.Tensor:
        """Return slice `index` [..., size] of the gradient, for an op to write."""
        if self._tensor is None:
            self._tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return self._tensor.split(self.sizes, dim=-1)[index]

    def collect(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the gradient of the projection, after copying the slices not written in place.

        Args:
            grads: the gradient of each slice.
        """
        joint, self._tensor = self._tensor, None
        if joint is None:
            return torch.cat(list(grads), dim=-1)
        for grad, d_slice in zip(grads, joint.split(self.sizes, dim=-1), strict=True):
            if not _is_same_memory(grad, d_slice):
                d_slice.copy_(grad)
        return joint


def _is_same_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype have the same elements at the same addresses."""
    if x.shape != y.shape or x.data_ptr() != y.data_ptr():
        return False
    strides = zip(x.shape, x.stride(), y.stride(), strict=True)
    return all(size == 1 or x_stride == y_stride for size, x_stride, y_stride in strides)


class GradientSlice(NamedTuple):
    """The destination of the gradient of one slice of a projection.

    Args:
        joint: the gradient of the projection.
        index: the index of the slice.
    """

    joint: JointGradient
    index: int

    def memory_like(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the memory for the gradient of x, a view of the slice; None if its strides differ
        from the strides of x."""
        d_x = self.joint.slice(self.index).view(x.shape)
        return d_x if d_x.stride() == x.stride() else None


class ProjectionSlice(NamedTuple):
    """A slice of a projection, or a view of one, for an op that writes its gradient in place.

    Args:
        value: the slice's tensor.
        gradient: the destination of its gradient; None leaves it to autograd.
    """

    value: torch.Tensor
    gradient: GradientSlice | None


def slice_of(x: torch.Tensor | ProjectionSlice) -> ProjectionSlice:
    """Wrap a tensor as a `ProjectionSlice` whose gradient autograd handles; return slices as is."""
    return x if isinstance(x, ProjectionSlice) else ProjectionSlice(x, None)


def split_projection(x: torch.Tensor, sizes: Sequence[int]) -> list[ProjectionSlice]:
    """Split the columns of a projection [..., w] into slices [..., size]."""
    joint = JointGradient(x, sizes)
    values = apply_function(_Split, x, joint)
    return [ProjectionSlice(value, GradientSlice(joint, i)) for i, value in enumerate(values)]


class _Split(torch.autograd.Function):
    """Forward: views of x. dgrad: the joint gradient. Saves nothing."""

    @staticmethod
    def forward(ctx, x, joint):
        ctx.joint = joint
        return x.split(joint.sizes, dim=-1)

    @staticmethod
    def backward(ctx, *grads):
        return ctx.joint.collect(grads), None
