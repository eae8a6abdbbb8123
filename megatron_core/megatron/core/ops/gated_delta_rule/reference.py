# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in plain torch, chunk by chunk: the definition, and the CPU's path.

Chunk form (Yang et al. 2024, arXiv 2412.06464, section 3), per chunk of C tokens and value head,
with G_i the decay summed up to token i, D_ij = exp(G_i - G_j) for i >= j else 0, B = diag(beta),
Γ = diag(exp(G)), e = diag(exp(G_C - G)), and queries that hold their scale:

    T = (I + tril(B K Kᵀ, -1))⁻¹    W = T B K           U = (T ∘ D) B V     P = Q Kᵀ ∘ D
    M = exp(G_C) (I - Kᵀ W)         X = (e K)ᵀ U
    S_next = M S + X                O = Γ (Q - tril(Q Kᵀ) W) S + P U

So all but `M S + X` is done for all chunks and heads at once. The inverse, by a triangular solve,
has no decay in it: those of a path from token to token multiply to D, and on the way from the state
before the chunk to Γ. Backward, given dO and the gradients dS of the states behind the chunks, with
V' = U - Γ W S what the tokens change states by:

    dV' = Pᵀ dO + e K dS            x = (T ∘ D)ᵀ dV'
    Z = (dO V'ᵀ) ∘ D                N = tril((x V'ᵀ) ∘ D, -1)
    dQ = Γ dO Sᵀ + Z K              f = Γ x Sᵀ + N K
    dK = w - β f                    w = Zᵀ Q - (B N)ᵀ K + e V' dSᵀ
    dV = β x                        dβ = x · v - f · k

-β f is the gradient of a key where it reads the state, w where it writes to it. A decay acts on
whatever is read behind it and was written before it, and its gradient is the sum of these terms.
It could be had from Q · dQ and K · dK alone, but by differences of sums that no decay acts on:
their rounding is more than the gradient of a strong decay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.ops.dispatch import accumulation_dtype
from megatron.core.ops.gated_delta_rule.block import Block, product
from megatron.core.ops.recurrence import RecurrenceInputs
from megatron.core.ops.sequences import Chunks, Sequences
from megatron.core.ops.state_sweep import Sweep, SweepBack

# Elements of one part of a block, e.g. its values: so many that products keep all threads busy, so
# few that the twenty or so parts of the next block find their memory in place.
ELEMENTS_IN_CACHE = 1 << 20


@dataclass
class Prepared:
    """What `DeltaRecurrence` keeps from one operation to the next.

    Args:
        inputs: as they were given.
        sequences: of their tokens.
        inverse: T [n, H, C, C], from a sweep on.
        starts: [n, H, K, V], the state before each chunk, from a sweep on.
    """

    inputs: RecurrenceInputs
    sequences: Sequences
    inverse: torch.Tensor | None = None
    starts: torch.Tensor | None = None


@dataclass(frozen=True)
class DeltaRecurrence:
    """The gated delta rule as a `Recurrence`.

    Beside the inputs it keeps T and the state before each chunk; what one product of a batch gives
    is made again.

    Args:
        scale: of queries; None is K^-0.5.
        chunk_size: tokens C of a chunk.
    """

    scale: float | None = None
    chunk_size: int = 64

    def prepare(self, inputs: RecurrenceInputs, sequences: Sequences) -> Prepared:
        """See `Recurrence`; everything waits for the sweep, to go through a cache once."""
        return Prepared(inputs, sequences)

    def sweep(
        self, prepared: Prepared, initial: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Recurrence`."""
        work = _Work(self, prepared)
        value = work.grids.value
        states = Sweep(work.chunks, work.states_or_zeros(initial))
        out = value.new_empty(value.shape)
        # Its columns lie next to each other: so triangular solves give them.
        size = work.chunks.size
        inverse = value.new_empty((len(value), work.heads, size, size), dtype=work.dtype).mT
        for where in work.blocks():
            block = work.block(where, inverse[where])
            states.through(where, block.transition, block.added)
            out[where] = block.out(states.starts[where]).transpose(1, 2)
        prepared.inverse, prepared.starts = inverse, states.starts
        return work.chunks.put_back(out), states.last()

    def summary(self, prepared: Prepared) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Recurrence`."""
        work = _Work(self, prepared)
        added = Sweep(work.chunks, work.states_or_zeros(None))
        keys = work.grids.key.shape[-1]
        identity = torch.eye(keys, dtype=work.dtype, device=work.grids.key.device)
        shape = (work.chunks.sequence_count, work.heads, keys, keys)
        chained = Sweep(work.chunks, identity.expand(shape))
        for where in work.blocks():
            block = work.block(where)
            added.through(where, block.transition, block.added)
            chained.through(where, block.transition, None)
        return added.last(), chained.last()

    def state_gradient(self, prepared: Prepared, grad: torch.Tensor) -> torch.Tensor:
        """See `Recurrence`."""
        work = _Work(self, prepared)
        grids = work.chunks.take(grad).transpose(1, 2)  # [n, H, C, V]
        grads = SweepBack(work.chunks, work.states_or_zeros(None))
        for where in reversed(work.blocks()):
            block = work.block(where)
            pulled = product(block.readers.mT, grids[where].to(work.dtype))
            grads.through(where, block.transition, pulled)
        return grads.first()

    def backward(
        self, prepared: Prepared, grad: torch.Tensor, grad_last: torch.Tensor | None
    ) -> tuple[RecurrenceInputs, torch.Tensor]:
        """See `Recurrence`."""
        work = _Work(self, prepared)
        grids = work.chunks.take(grad).transpose(1, 2)  # [n, H, C, V]
        grads = SweepBack(work.chunks, work.states_or_zeros(grad_last))
        found = RecurrenceInputs(*(x.new_empty(x.shape) for x in work.grids))
        for where in reversed(work.blocks()):
            block = work.block(where)
            shape = (*block.value.shape[:2], 2 * block.size, block.values)
            pulls = block.value.new_empty(shape)  # [dO ; x]
            pulls[:, :, : block.size] = grids[where]
            pulled = product(block.readers.mT, pulls[:, :, : block.size])
            grads.through(where, block.transition, pulled)
            parts = block.gradients(pulls, prepared.starts[where], grads.ends[where])
            for total, part in zip(found, parts, strict=True):
                total[where] = part.transpose(1, 2)
        return RecurrenceInputs(*map(work.chunks.put_back, found)), grads.first()


class _Work:
    """The chunks of one operation, and how they are cut in blocks."""

    def __init__(self, recurrence: DeltaRecurrence, prepared: Prepared) -> None:
        inputs = prepared.inputs
        self.chunks: Chunks = prepared.sequences.chunks(recurrence.chunk_size)
        self.grids = RecurrenceInputs(*map(self.chunks.take, inputs))
        self.dtype = accumulation_dtype(inputs.value.dtype)
        self.heads = inputs.value.shape[1]
        scale = recurrence.scale
        self.scale = inputs.key.shape[-1] ** -0.5 if scale is None else scale
        self._inverse = prepared.inverse

    def blocks(self) -> list[slice]:
        """Return the chunks of each block."""
        count, width = self.chunks.count, max(self.chunks.size, *self.grids.value.shape[-1:])
        step = max(1, ELEMENTS_IN_CACHE // (self.heads * self.chunks.size * width))
        if self.grids.value.device.type != "cpu":
            step = max(1, count)
        return [slice(i, min(i + step, count)) for i in range(0, count, step)]

    def block(self, where: slice, inverse: torch.Tensor | None = None) -> Block:
        """Return the block of some chunks; its T goes to `inverse`."""
        return Block(
            RecurrenceInputs(*(grid[where] for grid in self.grids)),
            scale=self.scale,
            dtype=self.dtype,
            inverse=inverse if self._inverse is None else self._inverse[where],
            is_solved=self._inverse is not None,
        )

    def states_or_zeros(self, states: torch.Tensor | None) -> torch.Tensor:
        """Return states [N, H, K, V] in the dtype of the work, zeros for None."""
        if states is not None:
            return states.to(self.dtype)
        key, value = self.grids.key, self.grids.value
        shape = (self.chunks.sequence_count, self.heads, key.shape[-1], value.shape[-1])
        return value.new_zeros((), dtype=self.dtype).expand(shape)
