# SPDX-License-Identifier: Apache-2.0
"""Split: sequences cut into segments of whole chunks, that one device works on side by side.

A sweep over states goes from chunk to chunk. Long sequences, few of them, leave most of a device
idle; cut in n, there are n times as many sweeps of an nth of the length, for the price of working
out M of each segment.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from megatron.core.ops.recurrence import passed
from megatron.core.ops.sequences import Sequences
from megatron.core.ssm.chains import NOBODY, Fold, Step


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
        self._firsts, self._lasts = (sequences.moved(np.array(x)) for x in (firsts, lasts))

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

    def summaries(
        self, states: torch.Tensor, transitions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (S_ext, M) of each sequence from those of its segments."""
        last, step = self.first_states(states, transitions, None), self.lasts(transitions)
        whole = passed(step, self.lasts(last)) + self.lasts(states)
        one = torch.eye(step.shape[-1], dtype=step.dtype, device=step.device)
        nothing = torch.zeros_like(transitions)
        products = self.first_states(nothing, transitions, one.expand(step.shape))
        return whole, passed(step, self.lasts(products))

    def first_gradients(self, gradients: torch.Tensor, transitions: torch.Tensor) -> torch.Tensor:
        """Return the gradient of each sequence's first state, as if nothing read its last one."""
        last = self.firsts(self.last_gradients(gradients, transitions, None))
        return self.firsts(gradients) + passed(self.firsts(transitions), last, transposed=True)

    def _folded(
        self,
        addends: torch.Tensor,
        transitions: torch.Tensor,
        given: torch.Tensor | None,
        *,
        back: bool,
    ) -> torch.Tensor:
        fold = self.segments.made(
            ("fold", back, given is None), lambda: self._fold(back, given is not None)
        )
        if given is not None:
            addends = torch.cat([addends, given])
        taken = transitions.index_select(0, fold.transitions)
        return fold.states(addends, taken, transposed=back)

    def _fold(self, back: bool, given: bool) -> Fold:
        """Return the fold; slots are the segments, then what is given for each sequence."""
        chains = []
        for number, (first, last) in enumerate(self._ends):
            order = list(range(first, last + 1))
            if back:
                order.reverse()
            steps = [Step(one, one, taker) for one, taker in pairwise(order)]
            if given:
                steps.insert(0, Step(self.segments.count + number, NOBODY, order[0]))
            chains.append(steps)
        return Fold(chains, self.segments)
