# SPDX-License-Identifier: Apache-2.0
"""State sweeps: carrying the states of sequences from chunk to chunk, forwards and backwards.

Within a chunk the last state is `M · first + X`, so with M and X at hand one product a step is left
to do in order. A step works on all sequences and heads at once (see `Chunks`). What else is to be
done may go along, block by block of chunks, so that it stays in a cache.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

import torch

from megatron.core.ops.sequences import Chunks


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
