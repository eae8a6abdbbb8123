# SPDX-License-Identifier: Apache-2.0
"""Linear recurrences over packed tokens: the common interface of the gated delta rule and SSD.

Both carry a state S [K, V] per head from token to token. A token decays the state, adds to it, and
reads it with its query. Over any segment of tokens the final state is an affine function of the
initial state: S_final = M · S_initial + S_ext. So a sequence can be split anywhere: into chunks,
into segments that run in parallel, over ranks. Every split needs only the five operations of
`Recurrence`.

A sweep carries states from chunk to chunk, forward or backward. Given M and S_ext only one product
per chunk is sequential, and a step processes all sequences and heads at once (see `Chunks`). Other
work on the chunks may run in the same sweep, block by block, while its data is in the cache.

The decay between two tokens is exp(a_i - a_j), with a the cumulative sum of log decays in a chunk.
Its relative error is the absolute error of a_i - a_j, and a sum of large decays has a large
rounding error. So sums stay in fp64 until the subtraction, or are split into a high and a low part.
Subtracting the high parts first is exact where the difference is small; where it is large, the
exponential is 0.
"""

from __future__ import annotations

import copy
import functools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch

from megatron.core.ops.backend_choice import accumulation_dtype, apply_function
from megatron.core.ops.sequences import Chunks, Sequences

#: Default tokens of a chunk. Among 32, 64, 128 and 256, SSD on a CPU is fastest with 64, for heads
#: of 64 channels and states of 64 or 128 rows.
CHUNK_SIZE = 64


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


def check_inputs(op: str, inputs: RecurrenceInputs, *, beta_name: str) -> None:
    """Raise ValueError unless the inputs of a recurrence have compatible shapes and dtypes.

    Args:
        op: the op's name, for the message.
        inputs: of packed tokens, or of one token per row.
        beta_name: the op's name for `beta`.

    Raises:
        ValueError: incompatible shapes or dtypes.
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
    for name, gate in (("decay", inputs.decay), (beta_name, inputs.beta)):
        if gate.shape != value.shape[:2]:
            raise ValueError(
                f"{op}: {name} {tuple(gate.shape)} must be {tuple(value.shape[:2])}, one "
                "number per head of value"
            )
    _check_dtypes(op, inputs, beta_name)


def _check_dtypes(op: str, inputs: RecurrenceInputs, beta_name: str) -> None:
    """Raise ValueError unless the dtypes are compatible."""
    query, key, value, decay, _ = inputs
    if not value.is_floating_point() or not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"{op}: query is {query.dtype}, key {key.dtype}, value {value.dtype}; give all three "
            "in one floating-point dtype"
        )
    dtype = accumulation_dtype(value.dtype)
    if not decay.is_floating_point() or decay.dtype != torch.promote_types(decay.dtype, dtype):
        raise ValueError(
            f"{op}: decay is {decay.dtype}; make it {dtype}, because its sums over many "
            "tokens are exponents"
        )
    if not inputs.beta.is_floating_point():
        raise ValueError(f"{op}: {beta_name} is {inputs.beta.dtype}; give a floating-point dtype")


def check_slots(
    op: str, inputs: RecurrenceInputs, *, state: torch.Tensor, slots: torch.Tensor
) -> None:
    """Raise ValueError unless states and slots match the inputs of one token per row.

    Args:
        op: the op's name, for the message.
        inputs: checked by `check_inputs`.
        state: must be [slots, H, K, V].
        slots: must be int64 [b].

    Raises:
        ValueError: incompatible shapes or dtypes.
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
    """Raise ValueError unless the initial states are None or [N, H, K, V]; N is `count`."""
    states = (count, inputs.value.shape[1], inputs.key.shape[2], inputs.value.shape[2])
    if initial is not None and initial.shape != states:
        raise ValueError(f"{op}: initial {tuple(initial.shape)} must be {states}")


#: Decays are clamped to this: sums and differences of -inf are NaN. The exponential is 0 anyway, so
#: later tokens read nothing from before the decay, and its gradient is 0.
LOWEST_DECAY = -1e4


def decay_cumsum(decay: torch.Tensor) -> torch.Tensor:
    """Return a, the cumulative sum in fp64 of the decays [..., C] of a chunk."""
    decay_fp64 = decay.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    return decay_fp64.clamp_(min=LOWEST_DECAY).cumsum(-1)


def difference_factors(sums: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [..., C, 4] and columns [..., 4, C] whose product is a_i - a_j, in `dtype`.

    Args:
        sums: cumulative decays a [..., C], fp64.
        dtype: the dtype of the high part of each sum, and of the low part that it rounds off.
    """
    high = sums.to(dtype)
    low = (sums - high).to(dtype)
    ones = torch.ones_like(high)
    rows = torch.stack([high, ones, low, ones], -1)
    return rows, torch.stack([ones, -high, ones, -low], -2)


def decay_differences(
    rows: torch.Tensor, columns: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a_i - a_j [n, C, C] for i >= j, else -inf.

    Args:
        rows: [n, C, 4], from `difference_factors`.
        columns: [n, 4, C], from `difference_factors`.
        out: the output buffer; None allocates one.
    """
    count, size, _ = rows.shape
    upper_mask = rows.new_full((size, size), -torch.inf).triu_(1)
    return torch.baddbmm(upper_mask.expand(count, -1, -1), rows, columns, out=out)


def zero_clamped_grad(d_decay: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """Zero the gradient of decays in place where they were clamped to `LOWEST_DECAY`."""
    return d_decay.masked_fill_(decay <= LOWEST_DECAY, 0.0)


class _Steps:
    """The chunks of each step: step i has `sizes[i]` chunks, from chunk `begins[i]` on."""

    def __init__(self, chunks: Chunks) -> None:
        self.sizes = (*chunks.steps, 0)
        self.begins = (0, *accumulate(chunks.steps))

    def spans(self, block: slice) -> Iterator[tuple[int, slice]]:
        """Yield (step, slice of the step's chunks) for each step that a block overlaps."""
        step = bisect_right(self.begins, block.start) - 1
        while step < len(self.sizes) - 1 and self.begins[step] < block.stop:
            begin = self.begins[step]
            end = min(begin + self.sizes[step], block.stop)
            yield step, slice(max(begin, block.start) - begin, end - begin)
            step += 1


class Sweep:
    """Forward sweep of states through chunks: S_next = M · S + X.

    Attributes:
        states_before: [n, H, K, V], the state before each chunk; filled by `advance`.

    Args:
        chunks: the n chunks of N sequences.
        initial: [N, H, K, V], the initial states; may be expanded zeros.
    """

    def __init__(self, chunks: Chunks, initial: torch.Tensor) -> None:
        self._chunks, self._steps = chunks, _Steps(chunks)
        count, shape = initial.shape[0], initial.shape[1:]
        # A step writes its results where the next step reads its states. The final states of
        # sequences that end are moved out before the next step overwrites them.
        self._states = initial.new_empty((chunks.count + count, *shape))
        self._final = initial.new_empty((count, *shape))
        self._states[:count] = chunks.sorted(initial)
        num_active = self._steps.sizes[0]
        self._final[num_active:] = self._states[num_active:count]  # empty sequences
        self.states_before = self._states[: chunks.count]

    def advance(self, block: slice, transition: torch.Tensor, added: torch.Tensor | None) -> None:
        """Carry the states through the next chunks.

        Args:
            block: the slice of m chunks; blocks are consecutive.
            transition: M [m, H, K, K], or [m, ..., 1] if it is a scalar per head.
            added: X [m, H, K, V]; None adds nothing.
        """
        states, steps = self._states, self._steps
        for step, span in steps.spans(block):
            begin = steps.begins[step]
            end, next_size = begin + steps.sizes[step], steps.sizes[step + 1]
            rows = slice(begin + span.start - block.start, begin + span.stop - block.start)
            out = states[end + span.start : end + span.stop]
            _affine(
                transition[rows],
                states[begin + span.start : begin + span.stop],
                None if added is None else added[rows],
                out,
            )
            if span.stop > next_size:
                ended_begin = max(next_size, span.start)
                self._final[ended_begin : span.stop] = states[end + ended_begin : end + span.stop]

    def final(self) -> torch.Tensor:
        """Return the final states [N, H, K, V] in the order of the sequences."""
        return self._chunks.unsorted(self._final)


class SweepBack:
    """Reverse sweep of gradients of states through chunks: dS_before = Mᵀ · dS + Y.

    Attributes:
        d_states_after: [n, H, K, V], gradient of the state after each chunk; filled by `advance`.

    Args:
        chunks: the n chunks of N sequences.
        d_final: [N, H, K, V], gradient of the final states; may be expanded zeros.
    """

    def __init__(self, chunks: Chunks, d_final: torch.Tensor) -> None:
        self._chunks, self._steps = chunks, _Steps(chunks)
        self._d_final = chunks.sorted(d_final)
        self.d_states_after = d_final.new_empty((chunks.count, *d_final.shape[1:]))
        self._d_initial = d_final.new_empty(d_final.shape)
        num_active = self._steps.sizes[0]
        self._d_initial[num_active:] = self._d_final[num_active:]

    def advance(self, block: slice, transition: torch.Tensor, added: torch.Tensor) -> None:
        """Carry the gradients back through the preceding chunks.

        Args:
            block: the slice of m chunks; each block ends where the previous call's block began.
            transition: M, as in the forward sweep.
            added: Y [m, H, K, V], gradient of each chunk's initial state from the chunk's outputs.
        """
        grads, steps = self.d_states_after, self._steps
        for step, span in reversed(list(steps.spans(block))):
            begin, next_size = steps.begins[step], steps.sizes[step + 1]
            if span.stop > next_size:
                ended_begin = max(next_size, span.start)
                grads[begin + ended_begin : begin + span.stop] = self._d_final[
                    ended_begin : span.stop
                ]
            chunks = slice(begin + span.start, begin + span.stop)
            rows = slice(chunks.start - block.start, chunks.stop - block.start)
            if step:
                previous_begin = steps.begins[step - 1]
                out = grads[previous_begin + span.start : previous_begin + span.stop]
            else:
                out = self._d_initial[span]
            transposed = transition[rows]
            if transposed.shape[-1] > 1:
                transposed = transposed.mT
            _affine(transposed, grads[chunks], added[rows], out)

    def d_initial(self) -> torch.Tensor:
        """Return the gradient of the initial states [N, H, K, V] in the order of the sequences."""
        return self._chunks.unsorted(self._d_initial)


def _affine(
    transition: torch.Tensor,
    state: torch.Tensor,
    added: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write M · S + X [m, H, K, V] to `out`, with M [m, H, K, K] or [m, H, 1, 1]."""
    if transition.shape[-1] == 1:
        if added is None:
            torch.mul(transition, state, out=out)
        else:
            torch.addcmul(added, transition, state, out=out)
        return
    matrix, vectors, flat_out = transition.flatten(0, 1), state.flatten(0, 1), out.flatten(0, 1)
    if added is None:
        torch.bmm(matrix, vectors, out=flat_out)
    else:
        torch.baddbmm(added.flatten(0, 1), matrix, vectors, out=flat_out)
