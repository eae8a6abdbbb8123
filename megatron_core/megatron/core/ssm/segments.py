# SPDX-License-Identifier: Apache-2.0
"""Recurrences over sequences in segments: those of several ranks, or side by side on one.

Each segment is first worked out as if it began from zero, as far as its last state needs, and so is
M, what its first state is multiplied by. From [S_ext | M] of all segments follow all first states
(`chains`), and with these the segments run as sequences of their own. Backward: the gradients of
first states as if nothing read the last ones, then the same chains back with Mᵀ, then each segment
with the gradient of its last state. M itself needs no gradient: what it depends on gets its own
from the run with the true first state.

Source: the affine form of a chunk (Yang et al. 2024, arXiv 2412.06464, section 3.3), and of SSD
(Dao & Gu 2024, arXiv 2405.21060, section 6), used for segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from megatron.core.comm.collectives import all_gather, all_to_all
from megatron.core.context_parallel.pieces import OwnPieces, PieceHalo
from megatron.core.ops.dispatch import accumulation_dtype
from megatron.core.ops.recurrence import Recurrence, RecurrenceInputs, recur
from megatron.core.ops.sequences import Sequences
from megatron.core.process_groups import Group
from megatron.core.ssm.chains import NOBODY, Fold, Selected, Step
from megatron.core.ssm.splits import Split

#: Tokens that splits keep together: whole chunks of the recurrences here.
CHUNK = 128


@dataclass(frozen=True, eq=False, kw_only=True)
class _Links:
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


@dataclass(frozen=True, eq=False, kw_only=True)
class _Call:
    """What the autograd function is told beside tensors.

    Args:
        recurrence: which.
        sequences: of the packed tokens.
        links: to other ranks; None where all say that there are none.
        split: into segments; None where nothing is cut.
    """

    recurrence: Recurrence
    sequences: Sequences
    links: _Links | None = None
    split: Split | None = None


def recur_in_segments(
    recurrence: Recurrence,
    inputs: RecurrenceInputs,
    pieces: OwnPieces,
    group: Group,
    *,
    splits: int = 1,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Run a recurrence over documents of which each rank has pieces.

    One all-gather forward, of a state and what it is multiplied by for each piece that is continued
    elsewhere; one backward, of a state. None where no document goes on from one rank to another.

    Args:
        recurrence: which.
        inputs: of own tokens, packed as `pieces` do.
        pieces: own ones, of the layout of all ranks.
        group: cp.
        splits, chunk: of own pieces, see `recur_split`.

    Returns:
        out [t, H, V] in value's dtype.

    Raises:
        ValueError: pieces of another rank or cut, tokens of another number, less than one split.
    """
    _check(pieces, group)
    sequences = pieces.sequences
    sequences.check("recur_in_segments", **inputs._asdict())
    links = None
    if pieces.crossed:
        links = sequences.made("links", lambda: _links_of(pieces, group))
    call = _Call(
        recurrence=recurrence,
        sequences=sequences,
        links=links,
        split=_split(sequences, splits, chunk),
    )
    return _Segments.apply(call, None, *inputs)[0]


def recur_split(
    recurrence: Recurrence,
    inputs: RecurrenceInputs,
    sequences: Sequences,
    *,
    splits: int,
    initial: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a recurrence over every sequence by itself, each in segments side by side.

    Args:
        recurrence: which.
        inputs: of all tokens.
        sequences: where they begin and end.
        splits: segments of a sequence; of a short one fewer, each of at least a chunk.
        initial: [N, H, K, V], the first states; None is zeros.
        chunk: tokens that are not cut; a multiple of the recurrence's chunks wastes none.

    Returns:
        (out [t, H, V] in value's dtype, last states [N, H, K, V]), as `recur` does.

    Raises:
        ValueError: tokens of another number, less than one split.
    """
    sequences.check("recur_split", **inputs._asdict())
    split = _split(sequences, splits, chunk)
    if split is None:
        return recur(recurrence, inputs, sequences, initial=initial)
    call = _Call(recurrence=recurrence, sequences=sequences, split=split)
    return _Segments.apply(call, initial, *inputs)


class _Segments(torch.autograd.Function):
    """forward: summaries, gathered; first states; the sweep. dgrad and wgrad: gradients of first
    states, gathered; those of last states; the recurrence's own. Saves what the recurrence keeps,
    M of segments, and the gathered M between own pieces and the ends of their documents."""

    @staticmethod
    def forward(ctx, call: _Call, first, *tensors):
        inputs, split = RecurrenceInputs(*tensors), call.split
        ctx.call, ctx.prepared, ctx.inputs = call, None, inputs
        ctx.has_first = first is not None
        ctx.set_materialize_grads(False)
        if call.sequences.tokens:
            segments = call.sequences if split is None else split.segments
            ctx.prepared = call.recurrence.prepare(inputs, segments)
            ctx.inputs = None  # kept there
        states = None
        if split is not None:
            states, ctx.steps = call.recurrence.summary(ctx.prepared)
        if call.links is not None:
            first = _first_states(ctx, inputs, states)
        if ctx.prepared is None:
            return torch.zeros_like(inputs.value), None
        if split is None:
            return call.recurrence.sweep(ctx.prepared, first)
        first = split.first_states(states, ctx.steps, first)
        out, last = call.recurrence.sweep(ctx.prepared, first)
        return out, split.lasts(last)

    @staticmethod
    def backward(ctx, grad, last):
        call, prepared, split = ctx.call, ctx.prepared, ctx.call.split
        inputs = ctx.inputs if prepared is None else prepared.inputs
        grad = torch.zeros_like(inputs.value) if grad is None else grad
        first = None
        if split is not None:
            first = call.recurrence.state_gradient(prepared, grad)
        if call.links is not None:
            last = _last_gradients(ctx, inputs, grad, first)
        if prepared is None:
            return None, None, *(torch.zeros_like(x) for x in inputs)
        if split is None:
            grads, first = call.recurrence.backward(prepared, grad, last)
        else:
            last = split.last_gradients(first, ctx.steps, last)
            grads, first = call.recurrence.backward(prepared, grad, last)
            first = split.firsts(first)
        return None, first if ctx.has_first else None, *grads


def _first_states(
    ctx, inputs: RecurrenceInputs, states: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the first states of pieces [N, H, K, V], None if all are zero; keep M for backward.

    Args:
        ctx: of the call.
        inputs: of own tokens.
        states: S_ext of segments, None where nothing is split.
    """
    call: _Call = ctx.call
    links = call.links
    assert links is not None
    if not links.exports.count:
        states, steps = _no_summaries(call, inputs)
    elif states is not None:
        assert call.split is not None
        found = call.split.summaries(states, ctx.steps)
        states, steps = (links.exports.results(x) for x in found)
    elif links.exports.is_apart:
        own = call.recurrence.prepare(links.exports.inputs(inputs), links.exports.sequences)
        states, steps = call.recurrence.summary(own)
    else:
        states, steps = (links.exports.results(x) for x in call.recurrence.summary(ctx.prepared))
    size = states.shape[1:]  # [H, K, V]
    parts = [states, steps] if links.chained else [states]
    message = torch.cat([part.flatten(2) for part in parts], dim=2)  # [n, H, K · V + M]
    gathered = all_gather(_filled(message, links.export_slots), links.group)
    states, rest = gathered.tensor_split([size[1:].numel()], dim=2)
    states = states.unflatten(2, size[1:])  # [cp · E, H, K, V]
    steps = rest.unflatten(2, steps.shape[2:]) if links.chained else steps
    ctx.between = steps.index_select(0, links.last.transitions)
    if not links.first.hands_out:
        return None
    return links.first.states(states, steps.index_select(0, links.first.transitions))


def _no_summaries(call: _Call, inputs: RecurrenceInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return no (S_ext, M), of the shapes that other ranks send; a token of zeros tells them."""
    one = RecurrenceInputs(*(x.new_zeros((1, *x.shape[1:])) for x in inputs))
    sequences = Sequences((0, 1), device=one.key.device)
    states, steps = call.recurrence.summary(call.recurrence.prepare(one, sequences))
    return states[:0], steps[:0]


def _last_gradients(
    ctx, inputs: RecurrenceInputs, grad: torch.Tensor, first: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the gradients of the last states of pieces [N, H, K, V], None if all are zero.

    Args:
        ctx: of the call.
        inputs: of own tokens.
        grad: of out.
        first: of the first states of segments by themselves, None where nothing is split.
    """
    call: _Call = ctx.call
    links = call.links
    assert links is not None
    if not links.entries.count:
        value = inputs.value
        shape = (0, value.shape[1], inputs.key.shape[2], value.shape[2])
        own = value.new_zeros(shape, dtype=accumulation_dtype(value.dtype))
    elif first is not None:
        assert call.split is not None
        own = links.entries.results(call.split.first_gradients(first, ctx.steps))
    elif links.entries.is_apart:
        prepared = call.recurrence.prepare(links.entries.inputs(inputs), links.entries.sequences)
        own = call.recurrence.state_gradient(prepared, links.entries.tokens(grad))
    else:
        own = links.entries.results(call.recurrence.state_gradient(ctx.prepared, grad))
    gathered = all_gather(_filled(own, links.entry_slots), links.group)
    if not links.last.hands_out:
        return None
    return links.last.states(gathered, ctx.between, transposed=True)


def _filled(x: torch.Tensor, slots: int) -> torch.Tensor:
    """Return x [n, ...] with rows of zeros behind, [slots, ...]."""
    if x.shape[0] == slots:
        return x
    return functional.pad(x, (0, 0) * (x.ndim - 1) + (0, slots - x.shape[0]))


def _split(sequences: Sequences, splits: int, chunk: int) -> Split | None:
    """Return how sequences are cut, made once; None where none is."""
    if splits < 1:
        raise ValueError(f"linear-recurrence-splits {splits}: use 1 or more")
    if splits == 1:
        return None
    split = sequences.made(("split", splits, chunk), lambda: Split(sequences, splits, chunk=chunk))
    return split if split.cuts else None


def _links_of(pieces: OwnPieces, group: Group) -> _Links:
    """Return how own pieces hang together with those of other ranks."""
    sequences, rank = pieces.sequences, pieces.rank
    exports, entries = pieces.export_slots, pieces.entry_slots
    first, last = [], []
    for chain in pieces.chains:
        steps = []
        for link in chain:
            slot = link.source * exports + link.export
            taker = pieces.entries[link.entry] if link.target == rank else NOBODY
            steps.append(Step(slot, slot, taker))
        first.append(steps)
        steps, behind = [], NOBODY
        for link in reversed(chain):
            slot = link.target * entries + link.entry
            taker = pieces.exports[link.export] if link.source == rank else NOBODY
            # The piece behind this link is the one before the next: M is what that one exported.
            steps.append(Step(slot, behind, taker))
            behind = link.source * exports + link.export
        last.append(steps)
    return _Links(
        group=group,
        exports=Selected(pieces.exports, sequences),
        entries=Selected(pieces.entries, sequences),
        export_slots=exports,
        entry_slots=entries,
        first=Fold(first, sequences),
        last=Fold(last, sequences),
        chained=pieces.chained,
    )


def _check(pieces: OwnPieces, group: Group) -> None:
    """Raise ValueError where pieces are not those of this rank of the group."""
    if pieces.cut.size != group.size or pieces.rank != group.rank:
        raise ValueError(
            f"the pieces are those of rank {pieces.rank} of {pieces.cut.size}, group {group.name} "
            f"is rank {group.rank} of {group.size}: make the layout for this group"
        )


def halo_rows(
    x: torch.Tensor, pieces: OwnPieces, group: Group, *, width: int
) -> torch.Tensor | None:
    """Return the `width` tokens before each piece, zero before the first of a document.

    One exchange forward of the tokens that are needed, one backward of their gradients.

    Args:
        x: [t, ...], own tokens, packed as `pieces` do.
        pieces: own ones, of the layout of all ranks.
        group: cp.
        width: of a convolution, less 1.

    Returns:
        [N, width, ...]; None, which is zeros, where no document goes on from one rank to another.

    Raises:
        ValueError: pieces of another rank or cut, or tokens of another number.
    """
    _check(pieces, group)
    pieces.sequences.check("halo_rows", x=x)
    if width == 0 or not pieces.crossed:
        return None
    return _Halo.apply(x, pieces.halo(width), group, width)


class _Halo(torch.autograd.Function):
    """forward: the rows that others need, exchanged; dgrad: theirs back, added up. Saves none."""

    @staticmethod
    def forward(ctx, x, halo: PieceHalo, group: Group, width: int):
        ctx.halo, ctx.group, ctx.tokens = halo, group, x.shape[0]
        received = all_to_all(
            x.index_select(0, halo.send_index),
            group,
            send_counts=halo.send_counts,
            receive_counts=halo.receive_counts,
        )
        known = _filled(received, received.shape[0] + 1)
        return known.index_select(0, halo.take).unflatten(0, (-1, width))  # [N, width, ...]

    @staticmethod
    def backward(ctx, grad):
        halo: PieceHalo = ctx.halo
        back = all_to_all(
            grad.flatten(0, 1).index_select(0, halo.place),
            ctx.group,
            send_counts=halo.receive_counts,
            receive_counts=halo.send_counts,
        )
        found = back.new_zeros((ctx.tokens, *back.shape[1:]))
        # A token may be lent to several pieces, where runs are shorter than the halo.
        return found.index_add_(0, halo.send_index, back), None, None, None
