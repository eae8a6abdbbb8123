# SPDX-License-Identifier: Apache-2.0
"""Chains of segments: states handed from one to the next, all chains side by side.

A segment is affine in its first state, S_last = M · S_first + S_ext. So the states between segments
follow from their (S_ext, M) alone, as small products, and the segments themselves need not wait for
each other. Gradients of states go the same way back, with Mᵀ.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from megatron.core.ops.recurrence import RecurrenceInputs, passed
from megatron.core.ops.sequences import Sequences

NOBODY = -1
"""The taker of a state that nobody here needs."""


class Step(NamedTuple):
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

    Steps behind the last that has a taker are left out.

    Args:
        chains: of steps.
        sequences: the segments that take states; it keeps the maps.
    """

    def __init__(self, chains: Sequence[Sequence[Step]], sequences: Sequences) -> None:
        kept = sorted((_needed(chain) for chain in chains), key=len, reverse=True)
        kept = [chain for chain in kept if chain]
        most = len(kept[0]) if kept else 0
        steps = [[chain[i] for chain in kept if len(chain) > i] for i in range(most)]
        self._counts = [len(step) for step in steps]
        flat = [one for step in steps for one in step]
        moved = sequences.moved
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
            found[first : first + count] += passed(step, state, transposed=transposed)
            used += count
        return found.index_select(0, self._take)


def _needed(chain: Sequence[Step]) -> Sequence[Step]:
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
        self._numbers = sequences.moved(np.array(numbers, dtype=np.int64))
        self.sequences = Sequences(
            [0, *accumulate(own)] if own else (0, 0), device=sequences.device
        )
        if self.is_apart:
            parts = [np.arange(starts[n], starts[n] + lengths[n]) for n in numbers]
            self._tokens = sequences.moved(np.concatenate([np.zeros(0, np.int64), *parts]))

    def inputs(self, inputs: RecurrenceInputs) -> RecurrenceInputs:
        """Return the selected segments' tokens of inputs, where they are worked on apart."""
        return RecurrenceInputs(*(self.tokens(x) for x in inputs))

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return the selected segments' tokens of x [t, ...]."""
        return x.index_select(0, self._tokens)

    def results(self, x: torch.Tensor) -> torch.Tensor:
        """Return the selected ones of all segments' results [N, ...]."""
        return x if self.is_all else x.index_select(0, self._numbers)
