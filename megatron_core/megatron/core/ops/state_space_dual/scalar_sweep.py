# SPDX-License-Identifier: Apache-2.0
"""Sweeps over states that are only scaled: from chunk to chunk of each sequence, and back.

One operation a step works on all sequences and heads at once (see `Chunks`). A step's results lie
where the next step begins, so nothing is copied but what ends on the way.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from megatron.core.ops.sequences import Chunks


def sweep(
    chunks: Chunks, gain: torch.Tensor, *, added: torch.Tensor, initial: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Carry states forwards: the next is `gain · state + added`.

    Args:
        chunks: n of them, of N sequences.
        gain: [n, ...], of a shape that expands to that of states.
        added: [n, ...], what each chunk adds.
        initial: [N, ...], the first states; None is zeros.

    Returns:
        (the state before each chunk [n, ...], the last states [N, ...]).
    """
    count, shape = chunks.sequence_count, added.shape[1:]
    states = added.new_empty((chunks.count + count, *shape))
    last = added.new_empty((count, *shape))
    first = states[:count]
    if initial is None:
        first.zero_()
    else:
        first.copy_(chunks.sorted(initial))
    sizes = (*chunks.steps, 0)
    last[sizes[0] :] = first[sizes[0] :]  # empty sequences
    begin = 0
    for size, following in pairwise(sizes):
        end = begin + size
        out = states[end : end + size]
        torch.addcmul(added[begin:end], gain[begin:end], states[begin:end], out=out)
        if following < size:
            # Out of the way before the next step writes.
            last[following:size] = out[following:]
        begin = end
    return states[: chunks.count], chunks.unsorted(last)


def sweep_back(
    chunks: Chunks, gain: torch.Tensor, *, added: torch.Tensor, grad_last: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Carry gradients of states backwards: the one before is `gain · gradient + added`.

    Args:
        chunks: n of them, of N sequences.
        gain: [n, ...], as forwards.
        added: [n, ...], the gradient of each chunk's first state from its outputs.
        grad_last: [N, ...], of the last states; None is zeros.

    Returns:
        (the gradient of the state behind each chunk [n, ...], that of the first states [N, ...]).
    """
    count, shape = chunks.sequence_count, added.shape[1:]
    grads = added.new_empty((chunks.count, *shape))
    first = added.new_empty((count, *shape))
    last = added.new_zeros((count, *shape)) if grad_last is None else chunks.sorted(grad_last)
    sizes = (*chunks.steps, 0)
    first[sizes[0] :] = last[sizes[0] :]
    begin = chunks.count
    for step in reversed(range(len(chunks.steps))):
        size, following = sizes[step], sizes[step + 1]
        begin -= size
        behind = grads[begin : begin + size]
        behind[following:] = last[following:size]
        out = first[:size] if step == 0 else grads[begin - sizes[step - 1] :][:size]
        torch.addcmul(added[begin : begin + size], gain[begin : begin + size], behind, out=out)
    return grads, chunks.unsorted(first)
