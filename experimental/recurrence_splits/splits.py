# SPDX-License-Identifier: Apache-2.0
"""Recurrences over sequences that are split into segments, computed in parallel on one device.

A sweep over states goes from chunk to chunk, so a few long sequences leave most of a device idle.
Split into n segments, there are n times as many sweeps of 1/n of the length, at the cost of
computing M of each segment. The [S_ext | M] of all segments give the initial states, with which the
segments run as separate sequences. Backward does the same with the gradients of states.
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

#: Segment sizes are multiples of this number of tokens, a multiple of the recurrences' chunks.
SPLIT_CHUNK = 128


class Split:
    """Segments of each sequence, in the order of the sequences.

    Args:
        sequences: the sequences to split.
        splits: segments of a sequence; a short sequence has fewer.
        chunk: segment sizes are multiples of this number of tokens.

    Attributes:
        segments: the segments as sequences of the packed tokens.
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
        """Return whether any sequence is split."""
        return any(start != stop for start, stop in self._ends)

    def firsts(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [segments, ...] of the first segment of each sequence, [N, ...]."""
        return x.index_select(0, self._firsts)

    def lasts(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [segments, ...] of the last segment of each sequence, [N, ...]."""
        return x.index_select(0, self._lasts)

    def initial_states(
        self, states: torch.Tensor, transitions: torch.Tensor, initial: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the initial state of each segment.

        Args:
            states, transitions: S_ext and M of each segment.
            initial: initial states of the sequences [N, ...]; None is zeros.
        """
        return self._folded(states, transitions, initial, back=False)

    def final_gradients(
        self, gradients: torch.Tensor, transitions: torch.Tensor, final_grads: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the gradient of the final state of each segment.

        Args:
            gradients: gradients of the segments' initial states without final-state gradients.
            transitions: M of each segment.
            final_grads: gradients of the sequences' final states [N, ...]; None is zeros.
        """
        return self._folded(gradients, transitions, final_grads, back=True)

    def _folded(
        self,
        addends: torch.Tensor,
        transitions: torch.Tensor,
        boundary: torch.Tensor | None,
        *,
        back: bool,
    ) -> torch.Tensor:
        state_passing = self.segments.cached(
            ("fold", back, boundary is None),
            lambda: self._state_passing(back, boundary is not None),
        )
        if boundary is not None:
            addends = torch.cat([addends, boundary])
        chain_transitions = transitions.index_select(0, state_passing.transitions)
        return state_passing.states(addends, chain_transitions, transposed=back)

    def _state_passing(self, back: bool, has_boundary: bool) -> StatePassing:
        """Return the state passing; slots are segments, then boundary states of sequences."""
        chains = []
        for number, (start, stop) in enumerate(self._ends):
            order = list(range(start, stop + 1))
            if back:
                order.reverse()
            steps = [PassingStep(sender, sender, receiver) for sender, receiver in pairwise(order)]
            if has_boundary:
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
    """Run a recurrence over every sequence, in parallel segments.

    Args:
        recurrence: the recurrence to run.
        inputs: inputs of all tokens.
        sequences: bounds of the sequences.
        splits: segments of a sequence; a short sequence has fewer, each of at least a chunk.
        initial: initial states [N, H, K, V]; None is zeros.
        keep_states: as for `recur`.
        chunk: segment sizes are multiples of this; best a multiple of the recurrence's chunk.

    Returns:
        (out [t, H, V] in value's dtype, final states [N, H, K, V]), like `recur`.

    Raises:
        ValueError: if the number of tokens differs from the sequences', or splits is below 1.
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
    """forward: summaries of segments, their initial states, the sweep. dgrad and wgrad: grads of
    initial states, of final states, and of the recurrence. Saves the recurrence's tensors and M of
    segments."""

    @staticmethod
    def forward(ctx, recurrence: Recurrence, split: Split, keep_states: bool, initial, *inputs):
        ctx.recurrence, ctx.split, ctx.has_initial = recurrence, split, initial is not None
        ctx.set_materialize_grads(False)
        prepared = recurrence.prepare(RecurrenceInputs(*inputs), split.segments)
        states, steps = recurrence.summary(prepared)
        initial = split.initial_states(states, steps, initial)
        out, final_states = recurrence.sweep(prepared, initial, keep_states=keep_states)
        ctx.shell, tensors = split_tensors(prepared)
        ctx.save_for_backward(steps, *tensors)
        return out, split.lasts(final_states)

    @staticmethod
    def backward(ctx, grad, grad_final):
        recurrence, split = ctx.recurrence, ctx.split
        steps, *tensors = ctx.saved_tensors
        prepared = restore_tensors(ctx.shell, tuple(tensors))
        grad = torch.zeros_like(prepared.inputs.value) if grad is None else grad
        grad_initial = recurrence.state_gradient(prepared, grad)
        grad_final = split.final_gradients(grad_initial, steps, grad_final)
        grads, grad_initial = recurrence.backward(prepared, grad, grad_final)
        return None, None, None, split.firsts(grad_initial) if ctx.has_initial else None, *grads
