# SPDX-License-Identifier: Apache-2.0
"""Linear recurrences over packed tokens: what the gated delta rule and SSD have in common.

Both carry a state S [K, V] per head from token to token, which is decayed, then changed by what the
token brings, and read by its query. Within a stretch of tokens the last state is an affine function
of the first: S_last = M · S_first + S_ext. So a sequence can be cut anywhere: into chunks, into
segments that run side by side, over ranks. Five local operations are enough for all of these.

States are carried from chunk to chunk, forwards and backwards, by sweeps: with M and S_ext at hand
one product a step is left to do in order. A step works on all sequences and heads at once (see
`Chunks`). What else is to be done may go along, block by block of chunks, so that it stays in a
cache.

Decays are sums of logarithms over a chunk, and their differences, in full accuracy. exp(a_i - a_j)
is off by as much as a_i - a_j is, and the rounding of two large sums is large. So sums are fp64
until they have been subtracted, or are given in two parts, of which the larger are subtracted
first: that is exact where the difference is small, and where it is not, nothing is left.
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

#: Default tokens of a chunk. Of 32, 64, 128 and 256, SSD on a CPU is fastest with 64, for heads of
#: 64 channels and states of 64 or 128 rows.
CHUNK_SIZE = 64


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
        self, prepared: Any, initial: torch.Tensor | None, *, keep_states: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out [t, H, V] in value's dtype, last states) from the first states, None is 0.

        `prepared` keeps from it what `backward` needs. With `keep_states` these include the state
        before every chunk, which `backward` otherwise may compute again.
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
class _RecurrenceCall:
    """The arguments of `recur` that are not tensors."""

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
    """Run a recurrence over every sequence by itself.

    Args:
        recurrence: which.
        inputs: of all tokens.
        sequences: where they begin and end.
        initial: [N, H, K, V], the first states; None is zeros.
        keep_states: keep the states before chunks for backward, see `Recurrence.sweep`.

    Returns:
        (out [t, H, V] in value's dtype, last states [N, H, K, V]).
    """
    call = _RecurrenceCall(recurrence, sequences, keep_states and torch.is_grad_enabled())
    return apply_function(_Recur, call, initial, *inputs)


class _Recur(torch.autograd.Function):
    """forward: prepare, sweep; backward: the recurrence's own. Saves the tensors that these keep,
    by autograd, so that they go when the graph goes and recomputation can do without them."""

    @staticmethod
    def forward(ctx, call: _RecurrenceCall, initial, *inputs):
        prepared = call.recurrence.prepare(RecurrenceInputs(*inputs), call.sequences)
        out, last = call.recurrence.sweep(prepared, initial, keep_states=call.keep_states)
        ctx.call, ctx.has_initial = call, initial is not None
        ctx.shell, tensors = split_tensors(prepared)
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


@functools.cache
def _names_of_fields(kind: type) -> tuple[str, ...]:
    """Return the names of a dataclass's fields."""
    return tuple(part.name for part in fields(kind))


def split_tensors(prepared: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Take the tensors out of what `Recurrence.prepare` made, for `save_for_backward`.

    Args:
        prepared: a dataclass; its fields that are tensors or `RecurrenceInputs` are taken.

    Returns:
        (a copy without tensors, the tensors).
    """
    shell, tensors = copy.copy(prepared), []
    for name in _names_of_fields(type(prepared)):
        value = getattr(prepared, name)
        if isinstance(value, torch.Tensor):
            setattr(shell, name, _Taken(len(tensors), 1))
            tensors.append(value)
        elif isinstance(value, RecurrenceInputs):
            setattr(shell, name, _Taken(len(tensors), len(value)))
            tensors += value
    return shell, tuple(tensors)


def filled(shell: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Put tensors back to where `split_tensors` took them from; the shell may be filled again."""
    prepared = copy.copy(shell)
    for name in _names_of_fields(type(prepared)):
        value = getattr(shell, name)
        if isinstance(value, _Taken):
            taken = tensors[value.first : value.first + value.count]
            put = RecurrenceInputs(*taken) if value.count > 1 else taken[0]
            setattr(prepared, name, put)
    return prepared


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


#: A decay below this is as good as -inf, whose sums and differences would not be numbers. Its
#: exponential is 0, so nothing behind it sees anything before it, and its gradient is 0.
LOWEST_DECAY = -1e4


def decay_sums(decay: torch.Tensor) -> torch.Tensor:
    """Return a, the decays [..., C] of a chunk summed up to each token, in fp64."""
    wide = decay.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    return wide.clamp_(min=LOWEST_DECAY).cumsum(-1)


def in_two_parts(sums: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows [..., C, 4] and columns [..., 4, C] whose product is a_i - a_j, in `dtype`.

    Args:
        sums: a [..., C], fp64.
        dtype: of the parts, each sum's own and what that rounds off.
    """
    large = sums.to(dtype)
    small = (sums - large).to(dtype)
    ones = torch.ones_like(large)
    rows = torch.stack([large, ones, small, ones], -1)
    return rows, torch.stack([ones, -large, ones, -small], -2)


def decay_differences(
    rows: torch.Tensor, columns: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a_i - a_j [n, C, C] for i >= j, else -inf, from what `in_two_parts` made.

    Args:
        rows: [n, C, 4].
        columns: [n, 4, C].
        out: where to write it; None is new memory.
    """
    count, size, _ = rows.shape
    above = rows.new_full((size, size), -torch.inf).triu_(1)
    return torch.baddbmm(above.expand(count, -1, -1), rows, columns, out=out)


def without_clamped(grad: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """Set the gradient of decays to 0 in place where these were taken as `LOWEST_DECAY`."""
    return grad.masked_fill_(decay <= LOWEST_DECAY, 0.0)


class _Steps:
    """Where the chunks of each step are: step i has `sizes[i]`, from `begins[i]` on."""

    def __init__(self, chunks: Chunks) -> None:
        self.sizes = (*chunks.steps, 0)
        self.begins = (0, *accumulate(chunks.steps))

    def parts(self, block: slice) -> Iterator[tuple[int, slice]]:
        """Yield (step, which of its chunks) for the steps that a block of chunks meets."""
        step = bisect_right(self.begins, block.start) - 1
        while step < len(self.sizes) - 1 and self.begins[step] < block.stop:
            begin = self.begins[step]
            end = min(begin + self.sizes[step], block.stop)
            yield step, slice(max(begin, block.start) - begin, end - begin)
            step += 1


class Sweep:
    """States on their way through the chunks: the next is `M · state + X`.

    Attributes:
        starts: [n, H, K, V], the state before each chunk; filled by `through`.

    Args:
        chunks: n of them, of N sequences.
        initial: [N, H, K, V], the first states, or a tensor of their shape and dtype that
            expands to zeros.
    """

    def __init__(self, chunks: Chunks, initial: torch.Tensor) -> None:
        self._chunks, self._steps = chunks, _Steps(chunks)
        count, shape = initial.shape[0], initial.shape[1:]
        # A step's results lie where the next step begins; those of sequences that end there move
        # out of the way before that step writes.
        self._states = initial.new_empty((chunks.count + count, *shape))
        self._last = initial.new_empty((count, *shape))
        self._states[:count] = chunks.sorted(initial)
        alive = self._steps.sizes[0]
        self._last[alive:] = self._states[alive:count]  # empty sequences
        self.starts = self._states[: chunks.count]

    def through(self, block: slice, transition: torch.Tensor, added: torch.Tensor | None) -> None:
        """Carry the states through the next chunks.

        Args:
            block: which m chunks; blocks follow each other.
            transition: M [m, H, K, K], or [m, ..., 1] where it only scales.
            added: X [m, H, K, V]; None adds nothing.
        """
        states, steps = self._states, self._steps
        for step, part in steps.parts(block):
            begin = steps.begins[step]
            end, following = begin + steps.sizes[step], steps.sizes[step + 1]
            here = slice(begin + part.start - block.start, begin + part.stop - block.start)
            out = states[end + part.start : end + part.stop]
            _affine(
                transition[here],
                states[begin + part.start : begin + part.stop],
                None if added is None else added[here],
                out,
            )
            if part.stop > following:
                ended = max(following, part.start)
                self._last[ended : part.stop] = states[end + ended : end + part.stop]

    def last(self) -> torch.Tensor:
        """Return the last states [N, H, K, V], by sequence."""
        return self._chunks.unsorted(self._last)


class SweepBack:
    """Gradients of states on their way back: the one before is `Mᵀ · gradient + Y`.

    Attributes:
        ends: [n, H, K, V], the gradient of the state behind each chunk; filled by `through`.

    Args:
        chunks: n of them, of N sequences.
        grad_last: [N, H, K, V], of the last states; may expand, like zeros.
    """

    def __init__(self, chunks: Chunks, grad_last: torch.Tensor) -> None:
        self._chunks, self._steps = chunks, _Steps(chunks)
        self._last = chunks.sorted(grad_last)
        self.ends = grad_last.new_empty((chunks.count, *grad_last.shape[1:]))
        self._first = grad_last.new_empty(grad_last.shape)
        alive = self._steps.sizes[0]
        self._first[alive:] = self._last[alive:]

    def through(self, block: slice, transition: torch.Tensor, added: torch.Tensor) -> None:
        """Carry the gradients back through the chunks before.

        Args:
            block: which m chunks; each block ends where the one before began.
            transition: M, as forwards.
            added: Y [m, H, K, V], the gradient of each chunk's first state from its outputs.
        """
        grads, steps = self.ends, self._steps
        for step, part in reversed(list(steps.parts(block))):
            begin, following = steps.begins[step], steps.sizes[step + 1]
            if part.stop > following:
                ended = max(following, part.start)
                grads[begin + ended : begin + part.stop] = self._last[ended : part.stop]
            here = slice(begin + part.start, begin + part.stop)
            inside = slice(here.start - block.start, here.stop - block.start)
            if step:
                before = steps.begins[step - 1]
                out = grads[before + part.start : before + part.stop]
            else:
                out = self._first[part]
            turned = transition[inside]
            if turned.shape[-1] > 1:
                turned = turned.mT
            _affine(turned, grads[here], added[inside], out)

    def first(self) -> torch.Tensor:
        """Return the gradient of the first states [N, H, K, V], by sequence."""
        return self._chunks.unsorted(self._first)


def _affine(
    transition: torch.Tensor,
    state: torch.Tensor,
    added: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write M · S + X to `out`: of [m, H, K, V], from M [m, H, K, K] or [m, H, 1, 1]."""
    if transition.shape[-1] == 1:
        if added is None:
            torch.mul(transition, state, out=out)
        else:
            torch.addcmul(added, transition, state, out=out)
        return
    left, right, found = transition.flatten(0, 1), state.flatten(0, 1), out.flatten(0, 1)
    if added is None:
        torch.bmm(left, right, out=found)
    else:
        torch.baddbmm(added.flatten(0, 1), left, right, out=found)
