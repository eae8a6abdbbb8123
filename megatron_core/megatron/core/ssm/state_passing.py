# SPDX-License-Identifier: Apache-2.0
"""State passing: recurrences over sequences whose segments are on several ranks.

A segment is affine in its first state, S_last = M · S_first + S_ext. Each segment is first computed
from a zero state, as far as its last state needs, which gives S_ext and the transition M. `Fold`
derives all first states from the [S_ext | M] of all segments: chains of small products, all chains
side by side, for which segments need not wait for each other. With these states the segments run as
sequences of their own. `Links` gives which states a rank sends and receives, and in which order.

Backward: the gradients of first states as if nothing read the last ones, then the same chains in
reverse with Mᵀ, then each segment with the gradient of its last state. M itself needs no gradient:
its inputs get theirs from the run with the true first state.

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
from megatron.core.context_parallel.layout import LocalSequences, SequenceHalo
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

NOBODY = -1
"""The taker of a state that nobody here needs."""


class ChainStep(NamedTuple):
    """One step of a chain: state ← M · state + addend, 0 before the first.

    Args:
        addend: slot of what is added.
        transition: slot of M; of a first step none is read.
        taker: the segment that takes the state, or `NOBODY`.
    """

    addend: int
    transition: int
    taker: int


class Fold:
    """What follows chains step by step and hands out the states.

    Steps after the last that has a taker are left out.

    Args:
        chains: of steps.
        sequences: the segments that take states; it keeps the maps.
    """

    def __init__(self, chains: Sequence[Sequence[ChainStep]], sequences: Sequences) -> None:
        kept = sorted((_needed(chain) for chain in chains), key=len, reverse=True)
        kept = [chain for chain in kept if chain]
        most = len(kept[0]) if kept else 0
        steps = [[chain[i] for chain in kept if len(chain) > i] for i in range(most)]
        self._counts = [len(step) for step in steps]
        flat = [one for step in steps for one in step]
        moved = sequences.to_device
        self._addends = moved(np.array([one.addend for one in flat], dtype=np.int64))
        later = flat[len(kept) :]
        #: int64 [n], the slots of M in the order in which they are read.
        self.transitions = moved(np.array([one.transition for one in later], dtype=np.int64))
        take = np.full(sequences.count, len(flat), dtype=np.int64)
        for number, one in enumerate(flat):
            if one.taker != NOBODY:
                take[one.taker] = number
        self._take, self._total = moved(take), len(flat)

    @property
    def hands_out(self) -> bool:
        """Return whether any segment takes a state."""
        return self._total > 0

    def states(
        self, addends: torch.Tensor, transitions: torch.Tensor, *, transposed: bool = False
    ) -> torch.Tensor:
        """Return the state of each segment, [N, H, K, V], zero of those that take none.

        Args:
            addends: [slots, H, K, V].
            transitions: [n, H, K, K] or [n, H, 1, 1], taken by `self.transitions`.
            transposed: use Mᵀ.
        """
        found = addends.new_empty((self._total + 1, *addends.shape[1:]))
        torch.index_select(addends, 0, self._addends, out=found[:-1])
        found[-1].zero_()
        ends = list(accumulate(self._counts))
        used = 0
        for count, first, before in zip(self._counts[1:], ends, [0, *ends], strict=False):
            step = transitions[used : used + count]
            state = found[before : before + count]
            found[first : first + count] += apply_transition(step, state, transposed=transposed)
            used += count
        return found.index_select(0, self._take)


def _needed(chain: Sequence[ChainStep]) -> Sequence[ChainStep]:
    """Return a chain up to the last step that has a taker."""
    ends = [number for number, step in enumerate(chain, start=1) if step.taker != NOBODY]
    return chain[: max(ends, default=0)]


class Selected:
    """Some of the segments, to be worked on without the others.

    That means to prepare them once more. Unless they are few it is cheaper to use what is prepared
    for all segments, and to leave the others' results alone.

    Args:
        numbers: which.
        sequences: all segments.
    """

    def __init__(self, numbers: Sequence[int], sequences: Sequences) -> None:
        self.count = len(numbers)
        lengths, starts = sequences.lengths, sequences.bounds
        own = [lengths[number] for number in numbers]
        self.is_apart = 4 * sum(own) <= sequences.tokens
        self.is_all = tuple(numbers) == tuple(range(sequences.count))
        self._numbers = sequences.to_device(np.array(numbers, dtype=np.int64))
        self.sequences = Sequences(
            [0, *accumulate(own)] if own else (0, 0), device=sequences.device
        )
        if self.is_apart:
            parts = [np.arange(starts[n], starts[n] + lengths[n]) for n in numbers]
            self._tokens = sequences.to_device(np.concatenate([np.zeros(0, np.int64), *parts]))

    def inputs(self, inputs: RecurrenceInputs) -> RecurrenceInputs:
        """Return the selected segments' tokens of inputs, where they are worked on apart."""
        return RecurrenceInputs(*(self.tokens(x) for x in inputs))

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return the selected segments' tokens of x [t, ...]."""
        return x.index_select(0, self._tokens)

    def results(self, x: torch.Tensor) -> torch.Tensor:
        """Return the selected ones of all segments' results [N, ...]."""
        return x if self.is_all else x.index_select(0, self._numbers)


@dataclass(frozen=True, eq=False, kw_only=True)
class Links:
    """How own pieces hang together with those of other ranks.

    Args:
        group: cp.
        exports: pieces whose summaries others need, filled up to `export_slots`.
        entries: pieces whose first states come from others, filled up to `entry_slots`.
        first: gives first states from summaries.
        last: gives gradients of last states from those of first ones.
        chained: whether any M is needed.
    """

    group: Group
    exports: Selected
    entries: Selected
    export_slots: int
    entry_slots: int
    first: Fold
    last: Fold
    chained: bool

    @staticmethod
    def of(pieces: LocalSequences, group: Group) -> Links:
        """Return how own pieces hang together with those of other ranks."""
        sequences, rank = pieces.sequences, pieces.rank
        exports, entries = pieces.export_slots, pieces.entry_slots
        first, last = [], []
        for chain in pieces.chains:
            steps = []
            for link in chain:
                slot = link.source * exports + link.export
                taker = pieces.entries[link.entry] if link.target == rank else NOBODY
                steps.append(ChainStep(slot, slot, taker))
            first.append(steps)
            steps, behind = [], NOBODY
            for link in reversed(chain):
                slot = link.target * entries + link.entry
                taker = pieces.exports[link.export] if link.source == rank else NOBODY
                # The piece after this link is the one before the next, which exported its M.
                steps.append(ChainStep(slot, behind, taker))
                behind = link.source * exports + link.export
            last.append(steps)
        return Links(
            group=group,
            exports=Selected(pieces.exports, sequences),
            entries=Selected(pieces.entries, sequences),
            export_slots=exports,
            entry_slots=entries,
            first=Fold(first, sequences),
            last=Fold(last, sequences),
            chained=pieces.chained,
        )


def filled_up(x: torch.Tensor, slots: int) -> torch.Tensor:
    """Return x [n, ...] with rows of zeros after, [slots, ...]."""
    if x.shape[0] == slots:
        return x
    return functional.pad(x, (0, 0) * (x.ndim - 1) + (0, slots - x.shape[0]))


@dataclass(frozen=True, eq=False, kw_only=True)
class _SegmentCall:
    """The arguments of the autograd function other than tensors.

    Args:
        recurrence: which.
        sequences: of the packed tokens.
        links: to other ranks; None where no rank has any.
    """

    recurrence: Recurrence
    sequences: Sequences
    links: Links | None = None
    keep_states: bool = False


def recur_in_segments(
    recurrence: Recurrence,
    inputs: RecurrenceInputs,
    pieces: LocalSequences,
    group: Group,
    *,
    keep_states: bool = False,
) -> torch.Tensor:
    """Run a recurrence over documents of which each rank has pieces.

    One all-gather forward, of a state and what it is multiplied by for each piece that is continued
    elsewhere; one backward, of a state. None where no document goes on from one rank to another.

    Args:
        recurrence: which.
        inputs: of own tokens, packed as `pieces` do.
        pieces: own ones, of the layout of all ranks.
        group: cp.
        keep_states: keep the states before chunks for backward, see `Recurrence.sweep`.

    Returns:
        out [t, H, V] in value's dtype.

    Raises:
        ValueError: pieces of another rank or split, tokens of another number.
    """
    _check(pieces, group)
    sequences = pieces.sequences
    sequences.check("recur_in_segments", **inputs._asdict())
    links = None
    if pieces.crossed:
        links = sequences.cached("links", lambda: Links.of(pieces, group))
    call = _SegmentCall(
        recurrence=recurrence,
        sequences=sequences,
        links=links,
        keep_states=keep_states and torch.is_grad_enabled(),
    )
    return apply_function(_Segments, call, *inputs)


@dataclass(eq=False)
class _Kept:
    """What backward needs of one rank's run.

    Args:
        inputs: of own tokens.
        prepared: what the recurrence keeps; None of no tokens.
        between: the gathered M between own pieces and the ends of their documents.
    """

    inputs: RecurrenceInputs
    prepared: Any = None
    between: torch.Tensor | None = None


class _Segments(torch.autograd.Function):
    """forward: summaries, gathered; first states; the sweep. dgrad and wgrad: gradients of first
    states, gathered; those of last states; the recurrence's own. Saves what the recurrence keeps,
    and the gathered M between own pieces and the ends of their documents."""

    @staticmethod
    def forward(ctx, call: _SegmentCall, *inputs):
        kept, first = _Kept(RecurrenceInputs(*inputs)), None
        ctx.call = call
        if call.sequences.tokens:
            kept.prepared = call.recurrence.prepare(kept.inputs, call.sequences)
        if call.links is not None:
            first = _first_states(call, kept)
        out, ctx.shell, tensors = torch.zeros_like(kept.inputs.value), kept.inputs, ()
        if kept.prepared is not None:
            out, _ = call.recurrence.sweep(kept.prepared, first, keep_states=call.keep_states)
            ctx.shell, tensors = split_tensors(kept.prepared)
        ctx.save_for_backward(kept.between, *tensors)
        return out

    @staticmethod
    def backward(ctx, grad):
        call, last = ctx.call, None
        between, *tensors = ctx.saved_tensors
        prepared = restore_tensors(ctx.shell, tuple(tensors)) if tensors else None
        inputs = ctx.shell if prepared is None else prepared.inputs
        if call.links is not None:
            last = _last_gradients(call, _Kept(inputs, prepared, between), grad)
        if prepared is None:
            return None, *(torch.zeros_like(x) for x in inputs)
        grads, _ = call.recurrence.backward(prepared, grad, last)
        return None, *grads


def _first_states(call: _SegmentCall, kept: _Kept) -> torch.Tensor | None:
    """Return the first states of pieces [N, H, K, V], None if all are zero; keep M for backward.

    Args:
        call: what runs.
        kept: of own tokens.
    """
    links, recurrence = call.links, call.recurrence
    assert links is not None
    exports = links.exports
    if not exports.count:
        states, steps = _no_summaries(call, kept.inputs)
    elif exports.is_apart:
        own = recurrence.prepare(exports.inputs(kept.inputs), exports.sequences)
        states, steps = recurrence.summary(own)
    else:
        states, steps = (exports.results(x) for x in recurrence.summary(kept.prepared))
    size = states.shape[1:]  # [H, K, V]
    parts = [states, steps] if links.chained else [states]
    message = torch.cat([part.flatten(2) for part in parts], dim=2)  # [n, H, K · V + M]
    gathered = all_gather(filled_up(message, links.export_slots), links.group)
    states, rest = gathered.tensor_split([size[1:].numel()], dim=2)
    states = states.unflatten(2, size[1:])  # [cp · E, H, K, V]
    steps = rest.unflatten(2, steps.shape[2:]) if links.chained else steps
    kept.between = steps.index_select(0, links.last.transitions)
    if not links.first.hands_out:
        return None
    return links.first.states(states, steps.index_select(0, links.first.transitions))


def _no_summaries(
    call: _SegmentCall, inputs: RecurrenceInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return no (S_ext, M), of the shapes that other ranks send; a token of zeros tells them."""
    one = RecurrenceInputs(*(x.new_zeros((1, *x.shape[1:])) for x in inputs))
    sequences = Sequences((0, 1), device=one.key.device)
    states, steps = call.recurrence.summary(call.recurrence.prepare(one, sequences))
    return states[:0], steps[:0]


def _last_gradients(call: _SegmentCall, kept: _Kept, grad: torch.Tensor) -> torch.Tensor | None:
    """Return the gradients of the last states of pieces [N, H, K, V], None if all are zero.

    Args:
        call: what runs.
        kept: of own tokens.
        grad: of out.
    """
    links, recurrence = call.links, call.recurrence
    assert links is not None
    entries = links.entries
    if not entries.count:
        value, key = kept.inputs.value, kept.inputs.key
        shape = (0, value.shape[1], key.shape[2], value.shape[2])
        own = value.new_zeros(shape, dtype=accumulation_dtype(value.dtype))
    elif entries.is_apart:
        prepared = recurrence.prepare(entries.inputs(kept.inputs), entries.sequences)
        own = recurrence.state_gradient(prepared, entries.tokens(grad))
    else:
        own = entries.results(recurrence.state_gradient(kept.prepared, grad))
    gathered = all_gather(filled_up(own, links.entry_slots), links.group)
    if not links.last.hands_out:
        return None
    return links.last.states(gathered, kept.between, transposed=True)


def _check(pieces: LocalSequences, group: Group) -> None:
    """Raise ValueError where pieces are not those of this rank of the group."""
    if pieces.sharding.size != group.size or pieces.rank != group.rank:
        raise ValueError(
            f"the pieces are those of rank {pieces.rank} of {pieces.sharding.size}, group "
            f"{group.name} is rank {group.rank} of {group.size}: make the layout for this group"
        )


def halo_rows(
    x: torch.Tensor,
    pieces: LocalSequences,
    group: Group,
    *,
    width: int,
    channels: int | None = None,
    packing: PackingIndices | None = None,
) -> torch.Tensor | None:
    """Return the `width` tokens before each piece, zero before the first of a document.

    One exchange forward of the tokens that are needed, one backward of their gradients.

    Args:
        x: [t, ...], own tokens, packed as `pieces` do; with `packing` [n, ...], as stored.
        pieces: own ones, of the layout of all ranks.
        group: cp.
        width: of a convolution, less 1.
        channels: so many of the last dimension, the first; None is all.
        packing: the row of x that each token is.

    Returns:
        [N, width, ...]; None, which is zeros, where no document goes on from one rank to another.

    Raises:
        ValueError: pieces of another rank or split, or tokens of another number.
    """
    _check(pieces, group)
    if packing is None:
        pieces.sequences.check("halo_rows", x=x)
    if width == 0 or not pieces.crossed:
        return None
    halo = pieces.halo(width)
    if packing is not None:
        halo = replace(halo, send_index=packing.rows.index_select(0, halo.send_index))
    return apply_function(
        _Halo, x, halo, group, width, x.shape[-1] if channels is None else channels
    )


class _Halo(torch.autograd.Function):
    """forward: exchange rows that others need; dgrad: their gradients back, summed. Saves none."""

    @staticmethod
    def forward(ctx, x, halo: SequenceHalo, group: Group, width: int, channels: int):
        ctx.halo, ctx.group, ctx.shape, ctx.channels = halo, group, x.shape, channels
        received = all_to_all(
            x[..., :channels].index_select(0, halo.send_index),
            group,
            send_counts=halo.send_counts,
            receive_counts=halo.receive_counts,
        )
        known = filled_up(received, received.shape[0] + 1)
        return known.index_select(0, halo.take).unflatten(0, (-1, width))  # [N, width, ...]

    @staticmethod
    def backward(ctx, grad):
        halo: SequenceHalo = ctx.halo
        back = all_to_all(
            grad.flatten(0, 1).index_select(0, halo.halo_rows),
            ctx.group,
            send_counts=halo.receive_counts,
            receive_counts=halo.send_counts,
        )
        found = back.new_zeros(ctx.shape)
        # A token may be lent to several pieces, where runs are shorter than the halo.
        found[..., : ctx.channels].index_add_(0, halo.send_index, back)
        return found, None, None, None, None
