# SPDX-License-Identifier: Apache-2.0
"""Recurrences over sequences cut into segments, which one device works on side by side.

A sweep over states goes from chunk to chunk. Long sequences, few of them, leave most of a device
idle; cut in n, there are n times as many sweeps of an nth of the length, for the price of working
out M of each segment. First states follow from the [S_ext | M] of all segments, and with these the
segments run as sequences of their own. Backward goes the same way with the gradients of states.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from megatron.core.ops.recurrence import (
    Recurrence,
    RecurrenceInputs,
    recur,
    restore_tensors,
    split_tensors,
)
from megatron.core.ops.sequences import Sequences
from megatron.core.ssm.state_passing import NO_RECEIVER, PassingStep, StatePassing

#: Tokens that splits of a sequence keep together: whole chunks of the recurrences.
SPLIT_CHUNK = 128


class Split:
    """Segments of each sequence; those of one sequence follow each other.

    Args:
        sequences: what is cut.
        splits: segments of a sequence, fewer where it is short.
        chunk: tokens that are not cut.

    Attributes:
        segments: of the same packed tokens.
    """

    def __init__(self, sequences: Sequences, splits: int, *, chunk: int) -> None:
        bounds, firsts, lasts = [0], [], []
        for start, length in zip(sequences.bounds, sequences.lengths, strict=False):
            size = max(1, -(-length // (splits * chunk))) * chunk
            firsts.append(len(bounds) - 1)
            bounds += [*range(start + size, start + length, size), start + length]
            lasts.append(len(bounds) - 2)
        self.segments = Sequences(bounds, device=sequences.device)
        self._ends = list(zip(firsts, lasts, strict=True))
        self._firsts, self._lasts = (sequences.to_device(np.array(x)) for x in (firsts, lasts))

    @property
    def cuts(self) -> bool:
        """Return whether any sequence is cut."""
        return any(first != last for first, last in self._ends)

    def firsts(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [segments, ...] of the first segment of each sequence, [N, ...]."""
        return x.index_select(0, self._firsts)

    def lasts(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [segments, ...] of the last segment of each sequence, [N, ...]."""
        return x.index_select(0, self._lasts)

    def first_states(
        self, states: torch.Tensor, transitions: torch.Tensor, given: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the first state of each segment.

        Args:
            states, transitions: S_ext and M of each.
            given: the first states of sequences [N, ...]; None is zeros.
        """
        return self._folded(states, transitions, given, back=False)

    def last_gradients(
        self, gradients: torch.Tensor, transitions: torch.Tensor, given: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the gradient of the last state of each segment.

        Args:
            gradients: of their first states, as if nothing read the last ones.
            transitions: M of each.
            given: the gradients of the last states of sequences [N, ...]; None is zeros.
        """
        return self._folded(gradients, transitions, given, back=True)

    def _folded(
        self,
        addends: torch.Tensor,
        transitions: torch.Tensor,
        given: torch.Tensor | None,
        *,
        back: bool,
    ) -> torch.Tensor:
        state_passing = self.segments.cached(
            ("fold", back, given is None), lambda: self._state_passing(back, given is not None)
        )
        if given is not None:
            addends = torch.cat([addends, given])
        chain_transitions = transitions.index_select(0, state_passing.transitions)
        return state_passing.states(addends, chain_transitions, transposed=back)

    def _state_passing(self, back: bool, given: bool) -> StatePassing:
        """Return the state passing; slots are the segments, then the given states of sequences."""
        chains = []
        for number, (first, last) in enumerate(self._ends):
            order = list(range(first, last + 1))
            if back:
                order.reverse()
            steps = [PassingStep(one, one, taker) for one, taker in pairwise(order)]
            if given:
                steps.insert(0, PassingStep(self.segments.count + number, NO_RECEIVER, order[0]))
            chains.append(steps)
        return StatePassing(chains, self.segments)


def recur_split(
    recurrence: Recurrence,
    inputs: RecurrenceInputs,
    sequences: Sequences,
    *,
    splits: int,
    initial: torch.Tensor | None = None,
    keep_states: bool = False,
    chunk: int = SPLIT_CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a recurrence over every sequence by itself, each in segments side by side.

    Args:
        recurrence: which.
        inputs: of all tokens.
        sequences: where they begin and end.
        splits: segments of a sequence; of a short one fewer, each of at least a chunk.
        initial: [N, H, K, V], the first states; None is zeros.
        keep_states: as for `recur`.
        chunk: tokens that are not cut; a multiple of the recurrence's chunks wastes none.

    Returns:
        (out [t, H, V] in value's dtype, last states [N, H, K, V]), as `recur` does.

    Raises:
        ValueError: tokens of another number, less than one split.
    """
    sequences.check("recur_split", **inputs._asdict())
    if splits < 1:
        raise ValueError(f"recur_split: splits {splits}: use 1 or more")
    split = sequences.cached(
        ("split", splits, chunk), lambda: Split(sequences, splits, chunk=chunk)
    )
    if not split.cuts:
        return recur(recurrence, inputs, sequences, initial=initial, keep_states=keep_states)
    keep_states = keep_states and torch.is_grad_enabled()
    return _Splits.apply(recurrence, split, keep_states, initial, *inputs)


class _Splits(torch.autograd.Function):
    """forward: summaries of segments, their first states, the sweep. dgrad and wgrad: gradients of
    first states, those of last states, the recurrence's own. Saves what the recurrence keeps and M
    of segments."""

    @staticmethod
    def forward(ctx, recurrence: Recurrence, split: Split, keep_states: bool, first, *inputs):
        ctx.recurrence, ctx.split, ctx.has_first = recurrence, split, first is not None
        ctx.set_materialize_grads(False)
        prepared = recurrence.prepare(RecurrenceInputs(*inputs), split.segments)
        states, steps = recurrence.summary(prepared)
        first = split.first_states(states, steps, first)
        out, last = recurrence.sweep(prepared, first, keep_states=keep_states)
        ctx.shell, tensors = split_tensors(prepared)
        ctx.save_for_backward(steps, *tensors)
        return out, split.lasts(last)

    @staticmethod
    def backward(ctx, grad, last):
        recurrence, split = ctx.recurrence, ctx.split
        steps, *tensors = ctx.saved_tensors
        prepared = restore_tensors(ctx.shell, tuple(tensors))
        grad = torch.zeros_like(prepared.inputs.value) if grad is None else grad
        first = recurrence.state_gradient(prepared, grad)
        last = split.last_gradients(first, steps, last)
        grads, first = recurrence.backward(prepared, grad, last)
        return None, None, None, split.firsts(first) if ctx.has_first else None, *grads
