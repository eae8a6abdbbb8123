# SPDX-License-Identifier: Apache-2.0
"""State sweeps: carrying the states of sequences from chunk to chunk, forwards and backwards.

Within a chunk the last state is `M · first + X`, so with M and X of all chunks at hand one product
a step is left to do in order. Steps work on all sequences and heads at once (see `Chunks`).
"""

from __future__ import annotations

import torch

from megatron.core.ops.sequences import Chunks


def sweep(
    chunks: Chunks,
    transition: torch.Tensor,
    added: torch.Tensor,
    initial: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Carry states over the chunks: the next is `M · state + X`.

    Args:
        chunks: n of them, of N sequences.
        transition: M [n, H, K, K], or [n, H, 1, 1] where it only scales.
        added: X [n, H, K, V].
        initial: [N, H, K, V], the first states; None is zeros.

    Returns:
        (the state before each chunk [n, H, K, V], the last states [N, H, K, V]).
    """
    shape, count = added.shape[1:], chunks.sequence_count
    # A step's results lie where the next step begins; those of sequences that end move out of the
    # way before that step writes.
    states = added.new_empty((chunks.count + count, *shape))
    last = added.new_empty((count, *shape))
    first = states[:count]
    if initial is None:
        first.zero_()
    else:
        first.copy_(chunks.sorted(initial))
    alive = chunks.steps[0] if chunks.steps else 0
    last[alive:] = first[alive:]  # empty sequences
    begin = 0
    for step, size in enumerate(chunks.steps):
        end = begin + size
        _affine(
            transition[begin:end], states[begin:end], added[begin:end], states[end : end + size]
        )
        following = chunks.steps[step + 1] if step + 1 < len(chunks.steps) else 0
        last[following:size] = states[end + following : end + size]
        begin = end
    return states[: chunks.count], chunks.unsorted(last)


def sweep_back(
    chunks: Chunks,
    transition: torch.Tensor,
    added: torch.Tensor,
    grad_last: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Carry gradients of states back over the chunks: the one before is `Mᵀ · gradient + Y`.

    Args:
        chunks: n of them, of N sequences.
        transition: M, as in `sweep`.
        added: Y [n, H, K, V], the gradient of each chunk's first state from its outputs.
        grad_last: [N, H, K, V], of the last states; None is zeros.

    Returns:
        (the gradient of the state behind each chunk [n, H, K, V], that of the first states
        [N, H, K, V]).
    """
    count, shape = chunks.sequence_count, added.shape[1:]
    grads = added.new_empty((chunks.count, *shape))
    first = added.new_zeros((count, *shape))
    if grad_last is None:
        ends = first.new_zeros(()).expand(count, *shape)
    else:
        ends = chunks.sorted(grad_last).to(added.dtype)
    alive = chunks.steps[0] if chunks.steps else 0
    first[alive:] = ends[alive:]
    end, following = chunks.count, 0
    for step in reversed(range(len(chunks.steps))):
        size = chunks.steps[step]
        begin = end - size
        grads[begin + following : end] = ends[following:size]
        before = chunks.steps[step - 1] if step else 0
        out = grads[begin - before : begin - before + size] if step else first[:size]
        _affine(transition[begin:end].mT, grads[begin:end], added[begin:end], out)
        end, following = begin, size
    return grads, chunks.unsorted(first)


def chained(chunks: Chunks, transition: torch.Tensor) -> torch.Tensor:
    """Return M of each whole sequence [N, H, K, K] or [N, H, 1, 1] from those of its chunks."""
    heads, features = transition.shape[1:3]
    identity = torch.eye(features, dtype=transition.dtype, device=transition.device)
    first = identity.expand(chunks.sequence_count, heads, features, features)
    nothing = transition.new_zeros(()).expand(transition.shape)
    return sweep(chunks, transition, nothing, first)[1]


def _affine(
    transition: torch.Tensor, state: torch.Tensor, added: torch.Tensor, out: torch.Tensor
) -> None:
    """Write M · S + X to `out`: of [m, H, K, V], from M [m, H, K, K] or [m, H, 1, 1]."""
    if transition.shape[-1] == 1:
        torch.addcmul(added, transition, state, out=out)
        return
    flat = [tensor.flatten(0, 1) for tensor in (added, transition, state, out)]
    torch.baddbmm(*flat[:3], out=flat[3])
