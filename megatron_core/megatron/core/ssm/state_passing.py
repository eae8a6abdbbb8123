# SPDX-License-Identifier: Apache-2.0
"""State passing: recurrences over sequences whose segments are on several ranks.

The final state of a segment is affine in its initial state: S_final = M · S_initial + S_ext. First
each rank computes the summary [S_ext | M] of its segments, from a zero state and without outputs,
and all-gathers the summaries. `StatePassing` then computes all initial states: chains of small
products, all chains in parallel. With its initial state each segment runs as an independent
sequence. `StateExchange` lists the summaries that a rank sends, and the states that it needs.

Backward first computes the gradients of the initial states for a zero gradient of the final states,
then runs the same chains in reverse with Mᵀ, and then differentiates each segment with the gradient
of its final state. M itself needs no gradient: its inputs are differentiated in the run with the
true initial state.

Source: the affine form of a chunk (Yang et al. 2024, arXiv 2412.06464, section 3.3), and of SSD
(Dao & Gu 2024, arXiv 2405.21060, section 6), used for segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from megatron.core.comm.collectives import all_gather, all_to_all
from megatron.core.context_parallel.packed_tokens import LocalSequences, SequenceHalo
from megatron.core.ops.backend_choice import accumulation_dtype, apply_function
from megatron.core.ops.recurrence import (
    Recurrence,
    RecurrenceInputs,
    apply_transition,
    restore_tensors,
    split_tensors,
)
from megatron.core.ops.sequences import PackingIndices, Sequences
from megatron.core.process_groups import Group

NO_RECEIVER = -1
"""The receiver of a state that no segment of this rank needs."""


class PassingStep(NamedTuple):
    """One step of a chain: state ← M · state + addend, from a zero state.

    Args:
        addend: slot of the addend.
        transition: slot of M; unused in the first step.
        receiver: the segment whose initial state this is, or `NO_RECEIVER`.
    """

    addend: int
    transition: int
    receiver: int


class StatePassing:
    """Runs all chains in parallel, step by step, and gathers the states of the receivers.

    Steps after the last receiver of a chain are dropped.

    Args:
        chains: the steps of each chain.
        sequences: the segments that receive states.
    """

    def __init__(self, chains: Sequence[Sequence[PassingStep]], sequences: Sequences) -> None:
        trimmed = sorted((_trim(chain) for chain in chains), key=len, reverse=True)
        trimmed = [chain for chain in trimmed if chain]
        num_steps = len(trimmed[0]) if trimmed else 0
        levels = [[chain[i] for chain in trimmed if len(chain) > i] for i in range(num_steps)]
        self._counts = [len(level) for level in levels]
        flat_steps = [step for level in levels for step in level]
        to_device = sequences.to_device
        self._addends = to_device(np.array([step.addend for step in flat_steps], dtype=np.int64))
        transition_steps = flat_steps[len(trimmed) :]
        #: int64 [n], the slots of M in the order of the steps.
        slots = [step.transition for step in transition_steps]
        self.transitions = to_device(np.array(slots, dtype=np.int64))
        state_index = np.full(sequences.count, len(flat_steps), dtype=np.int64)
        for index, step in enumerate(flat_steps):
            if step.receiver != NO_RECEIVER:
                state_index[step.receiver] = index
        self._state_index, self._total = to_device(state_index), len(flat_steps)

    @property
    def has_receivers(self) -> bool:
        """Return whether any segment receives a state."""
        return self._total > 0

    def states(
        self, addends: torch.Tensor, transitions: torch.Tensor, *, transposed: bool = False
    ) -> torch.Tensor:
        """Return the state of each segment [N, H, K, V]; zero for segments that receive none.

        Args:
            addends: [slots, H, K, V].
            transitions: [n, H, K, K] or [n, H, 1, 1], gathered with `self.transitions`.
            transposed: use Mᵀ.
        """
        states = addends.new_empty((self._total + 1, *addends.shape[1:]))
        torch.index_select(addends, 0, self._addends, out=states[:-1])
        states[-1].zero_()
        starts, offset = list(accumulate(self._counts)), 0
        for count, start, previous in zip(self._counts[1:], starts, [0, *starts], strict=False):
            transition = transitions[offset : offset + count]
            state = states[previous : previous + count]
            states[start : start + count] += apply_transition(
                transition, state, transposed=transposed
            )
            offset += count
        return states.index_select(0, self._state_index)


def _trim(chain: Sequence[PassingStep]) -> Sequence[PassingStep]:
    """Return a chain up to the last step with a receiver."""
    ends = [end for end, step in enumerate(chain, start=1) if step.receiver != NO_RECEIVER]
    return chain[: max(ends, default=0)]


class SegmentSubset:
    """A subset of the segments, for operations that need only these.

    A separate run has to prepare the subset again. Unless the subset is small, it is cheaper to
    run all segments from their prepared state, and to select the results.

    Args:
        indices: the segments of the subset.
        sequences: all segments.
    """

    def __init__(self, indices: Sequence[int], sequences: Sequences) -> None:
        self.count = len(indices)
        lengths, starts = sequences.lengths, sequences.bounds
        selected = [lengths[index] for index in indices]
        self.is_separate = 4 * sum(selected) <= sequences.tokens
        self.is_all = tuple(indices) == tuple(range(sequences.count))
        self._indices = sequences.to_device(np.array(indices, dtype=np.int64))
        self.sequences = Sequences(
            [0, *accumulate(selected)] if selected else (0, 0), device=sequences.device
        )
        if self.is_separate:
            token_ranges = [np.arange(starts[n], starts[n] + lengths[n]) for n in indices]
            self._tokens = sequences.to_device(
                np.concatenate([np.zeros(0, np.int64), *token_ranges])
            )

    def inputs(self, inputs: RecurrenceInputs) -> RecurrenceInputs:
        """Return the inputs of the subset's tokens, for a separate run."""
        return RecurrenceInputs(*(self.tokens(x) for x in inputs))

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return the subset's tokens of x [t, ...]."""
        return x.index_select(0, self._tokens)

    def results(self, x: torch.Tensor) -> torch.Tensor:
        """Return the subset's rows of the results of all segments [N, ...]."""
        return x if self.is_all else x.index_select(0, self._indices)


@dataclass(frozen=True, eq=False, kw_only=True)
class StateExchange:
    """The exchange of states between the local segments and the segments of other ranks.

    Args:
        group: cp.
        exports: segments whose summaries other ranks need, padded to `export_slots`.
        entries: segments whose initial states come from other ranks, padded to `entry_slots`.
        initial: computes initial states from summaries.
        final: computes gradients of final states from gradients of initial states.
        chained: whether any M is needed.
    """

    group: Group
    exports: SegmentSubset
    entries: SegmentSubset
    export_slots: int
    entry_slots: int
    initial: StatePassing
    final: StatePassing
    chained: bool

    @staticmethod
    def of(local: LocalSequences, group: Group) -> StateExchange:
        """Return the exchange for the local segments of a layout."""
        sequences, rank = local.sequences, local.rank
        num_exports, num_entries = local.export_slots, local.entry_slots
        initial, final = [], []
        for chain in local.chains:
            chain_steps = []
            for transfer in chain:
                slot = transfer.source * num_exports + transfer.export
                receiver = local.entries[transfer.entry] if transfer.target == rank else NO_RECEIVER
                chain_steps.append(PassingStep(slot, slot, receiver))
            initial.append(chain_steps)
            chain_steps, next_export = [], NO_RECEIVER
            for transfer in reversed(chain):
                slot = transfer.target * num_entries + transfer.entry
                receiver = (
                    local.exports[transfer.export] if transfer.source == rank else NO_RECEIVER
                )
                # The segment after this transfer precedes the next one, and exported its M.
                chain_steps.append(PassingStep(slot, next_export, receiver))
                next_export = transfer.source * num_exports + transfer.export
            final.append(chain_steps)
        return StateExchange(
            group=group,
            exports=SegmentSubset(local.exports, sequences),
            entries=SegmentSubset(local.entries, sequences),
            export_slots=num_exports,
            entry_slots=num_entries,
            initial=StatePassing(initial, sequences),
            final=StatePassing(final, sequences),
            chained=local.chained,
        )


def pad_rows(x: torch.Tensor, slots: int) -> torch.Tensor:
    """Zero-pad x [n, ...] to [slots, ...]."""
    if x.shape[0] == slots:
        return x
    return functional.pad(x, (0, 0) * (x.ndim - 1) + (0, slots - x.shape[0]))


@dataclass(frozen=True, eq=False, kw_only=True)
class _SegmentCall:
    """The non-tensor arguments of the autograd function.

    Args:
        recurrence: its operations.
        sequences: the boundaries of the packed tokens.
        exchange: with other ranks; None if no document is split over ranks.
    """

    recurrence: Recurrence
    sequences: Sequences
    exchange: StateExchange | None = None
    keep_states: bool = False


def recur_in_segments(
    recurrence: Recurrence,
    inputs: RecurrenceInputs,
    local: LocalSequences,
    group: Group,
    *,
    keep_states: bool = False,
) -> torch.Tensor:
    """Run a recurrence over documents whose tokens are split over ranks.

    Forward takes one all-gather, of [S_ext | M] of each segment that another rank continues, and
    backward one all-gather of a state per segment. If no document crosses ranks there is none.

    Args:
        recurrence: its operations.
        inputs: of the local tokens, packed in the order of `local`.
        local: the local segments of the layout.
        group: cp.
        keep_states: save the states before chunks for backward, see `Recurrence.sweep`.

    Returns:
        out [t, H, V] in value's dtype.

    Raises:
        ValueError: segments of another rank or split, or another number of tokens.
    """
    _check(local, group)
    sequences = local.sequences
    sequences.check("recur_in_segments", **inputs._asdict())
    exchange = None
    if local.crossed:
        exchange = sequences.cached("state_exchange", lambda: StateExchange.of(local, group))
    call = _SegmentCall(
        recurrence=recurrence,
        sequences=sequences,
        exchange=exchange,
        keep_states=keep_states and torch.is_grad_enabled(),
    )
    return apply_function(_Segments, call, *inputs)


@dataclass(eq=False)
class _RankState:
    """The tensors of one rank's run that backward needs.

    Args:
        inputs: of the local tokens.
        prepared: the recurrence's prepared state; None if there are no local tokens.
        transitions: the gathered M of the segments after the local ones, in the order of
            `StateExchange.final`.
    """

    inputs: RecurrenceInputs
    prepared: Any = None
    transitions: torch.Tensor | None = None


class _Segments(torch.autograd.Function):
    """Forward: gather summaries, compute initial states, sweep.

    dgrad and wgrad: gather gradients of initial states, compute gradients of final states, run the
    recurrence's backward. Saves the tensors of the recurrence and the gathered M.
    """

    @staticmethod
    def forward(ctx, call: _SegmentCall, *inputs):
        rank_state, initial = _RankState(RecurrenceInputs(*inputs)), None
        ctx.call = call
        if call.sequences.tokens:
            rank_state.prepared = call.recurrence.prepare(rank_state.inputs, call.sequences)
        if call.exchange is not None:
            initial = _initial_states(call, rank_state)
        out, ctx.shell, tensors = torch.zeros_like(rank_state.inputs.value), rank_state.inputs, ()
        if rank_state.prepared is not None:
            out, _ = call.recurrence.sweep(
                rank_state.prepared, initial, keep_states=call.keep_states
            )
            ctx.shell, tensors = split_tensors(rank_state.prepared)
        ctx.save_for_backward(rank_state.transitions, *tensors)
        return out

    @staticmethod
    def backward(ctx, d_out):
        call, d_final = ctx.call, None
        transitions, *tensors = ctx.saved_tensors
        prepared = restore_tensors(ctx.shell, tuple(tensors)) if tensors else None
        inputs = ctx.shell if prepared is None else prepared.inputs
        if call.exchange is not None:
            d_final = _final_gradients(call, _RankState(inputs, prepared, transitions), d_out)
        if prepared is None:
            return None, *(torch.zeros_like(x) for x in inputs)
        d_inputs, _ = call.recurrence.backward(prepared, d_out, d_final)
        return None, *d_inputs


def _initial_states(call: _SegmentCall, rank_state: _RankState) -> torch.Tensor | None:
    """Return the initial states of segments [N, H, K, V], None if all are zero.

    It stores the gathered M for backward in `rank_state.transitions`.

    Args:
        call: the recurrence and the exchange.
        rank_state: this rank's tensors.
    """
    exchange, recurrence = call.exchange, call.recurrence
    assert exchange is not None
    exports = exchange.exports
    if not exports.count:
        states, transitions = _empty_summaries(call, rank_state.inputs)
    elif exports.is_separate:
        exported = recurrence.prepare(exports.inputs(rank_state.inputs), exports.sequences)
        states, transitions = recurrence.summary(exported)
    else:
        states, transitions = (exports.results(x) for x in recurrence.summary(rank_state.prepared))
    state_shape = states.shape[1:]  # [H, K, V]
    fields = [states, transitions] if exchange.chained else [states]
    message = torch.cat([field.flatten(2) for field in fields], dim=2)  # [n, H, K · V + M]
    gathered = all_gather(pad_rows(message, exchange.export_slots), exchange.group)
    states, packed = gathered.tensor_split([state_shape[1:].numel()], dim=2)
    states = states.unflatten(2, state_shape[1:])  # [cp · E, H, K, V]
    transitions = packed.unflatten(2, transitions.shape[2:]) if exchange.chained else transitions
    rank_state.transitions = transitions.index_select(0, exchange.final.transitions)
    if not exchange.initial.has_receivers:
        return None
    return exchange.initial.states(
        states, transitions.index_select(0, exchange.initial.transitions)
    )


def _empty_summaries(
    call: _SegmentCall, inputs: RecurrenceInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (S_ext, M) with zero rows; the summary of one zero token gives the shapes."""
    token = RecurrenceInputs(*(x.new_zeros((1, *x.shape[1:])) for x in inputs))
    sequences = Sequences((0, 1), device=token.key.device)
    states, transitions = call.recurrence.summary(call.recurrence.prepare(token, sequences))
    return states[:0], transitions[:0]


def _final_gradients(
    call: _SegmentCall, rank_state: _RankState, d_out: torch.Tensor
) -> torch.Tensor | None:
    """Return the gradients of the final states of segments [N, H, K, V], None if all are zero.

    Args:
        call: the recurrence and the exchange.
        rank_state: this rank's tensors.
        d_out: gradient of out.
    """
    exchange, recurrence = call.exchange, call.recurrence
    assert exchange is not None
    entries = exchange.entries
    if not entries.count:
        value, key = rank_state.inputs.value, rank_state.inputs.key
        shape = (0, value.shape[1], key.shape[2], value.shape[2])
        d_entries = value.new_zeros(shape, dtype=accumulation_dtype(value.dtype))
    elif entries.is_separate:
        prepared = recurrence.prepare(entries.inputs(rank_state.inputs), entries.sequences)
        d_entries = recurrence.state_gradient(prepared, entries.tokens(d_out))
    else:
        d_entries = entries.results(recurrence.state_gradient(rank_state.prepared, d_out))
    gathered = all_gather(pad_rows(d_entries, exchange.entry_slots), exchange.group)
    if not exchange.final.has_receivers:
        return None
    assert rank_state.transitions is not None
    return exchange.final.states(gathered, rank_state.transitions, transposed=True)


def _check(local: LocalSequences, group: Group) -> None:
    """Raise ValueError unless the segments belong to this rank of the group."""
    if local.sharding.size != group.size or local.rank != group.rank:
        raise ValueError(
            f"the local sequences are for rank {local.rank} of {local.sharding.size}, but "
            f"group {group.name} is rank {group.rank} of {group.size}: make the layout for "
            "this group"
        )


def halo_rows(
    x: torch.Tensor,
    local: LocalSequences,
    group: Group,
    *,
    width: int,
    channels: int | None = None,
    packing: PackingIndices | None = None,
) -> torch.Tensor | None:
    """Return the `width` tokens before each segment, zero before the start of a document.

    One all-to-all sends the tokens forward, one their gradients backward.

    Args:
        x: [t, ...], local tokens, packed in the order of `local`; with `packing` [n, ...], rows.
        local: the local segments of the layout.
        group: cp.
        width: W - 1 of a convolution.
        channels: number of leading channels of the last dimension to send; None is all.
        packing: the row of x of each token.

    Returns:
        [N, width, ...]; None means zeros, if no document crosses ranks.

    Raises:
        ValueError: segments of another rank or split, or another number of tokens.
    """
    _check(local, group)
    if packing is None:
        local.sequences.check("halo_rows", x=x)
    if width == 0 or not local.crossed:
        return None
    halo = local.halo(width)
    if packing is not None:
        halo = replace(halo, send_index=packing.rows.index_select(0, halo.send_index))
    return apply_function(
        _Halo, x, halo, group, width, x.shape[-1] if channels is None else channels
    )


class _Halo(torch.autograd.Function):
    """Forward: send rows to other ranks; dgrad: send gradients back and sum. Saves nothing."""

    @staticmethod
    def forward(ctx, x, halo: SequenceHalo, group: Group, width: int, channels: int):
        ctx.halo, ctx.group, ctx.shape, ctx.channels = halo, group, x.shape, channels
        received = all_to_all(
            x[..., :channels].index_select(0, halo.send_index),
            group,
            send_counts=halo.send_counts,
            receive_counts=halo.receive_counts,
        )
        padded_rows = pad_rows(received, received.shape[0] + 1)
        return padded_rows.index_select(0, halo.take).unflatten(0, (-1, width))  # [N, width, ...]

    @staticmethod
    def backward(ctx, d_out):
        halo: SequenceHalo = ctx.halo
        d_rows = all_to_all(
            d_out.flatten(0, 1).index_select(0, halo.halo_rows),
            ctx.group,
            send_counts=halo.receive_counts,
            receive_counts=halo.send_counts,
        )
        d_x = d_rows.new_zeros(ctx.shape)
        # Several segments may read a token, if segments are shorter than the halo.
        d_x[..., : ctx.channels].index_add_(0, halo.send_index, d_rows)
        return d_x, None, None, None, None
