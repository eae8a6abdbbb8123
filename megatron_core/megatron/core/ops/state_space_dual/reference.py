# SPDX-License-Identifier: Apache-2.0
"""State-space duality in plain torch, chunk by chunk: the definition, and the CPU's path.

Within a chunk of C tokens, with a_i the decay summed up to token i, L_ij = exp(a_i - a_j) for
i >= j else 0, and x' = dt · value (Dao & Gu 2024, arXiv 2405.21060, section 6):

    out = (Q Kᵀ ∘ L) x' + exp(a) Q S        S_next = exp(a_C) S + Kᵀ (exp(a_C - a) x')

No factor is above 1: a decay is only ever a difference of sums that is at most 0. The r = H / G
heads of a group share Q and K, so their states lie side by side, [n, G, K, r, V], and one product
serves them all. Backward, given dO and the gradients dS of the states behind the chunks:

    W = dO x'ᵀ      P = Q Kᵀ ∘ L      Z = Σ_heads W ∘ L      u = exp(a_C - a) (K dS)
    dQ = Z K + Σ_heads (exp(a) dO) Sᵀ           dK = Zᵀ Q + Σ_heads (exp(a_C - a) x') dSᵀ
    dx' = Pᵀ dO + u            dvalue = dt dx'            ddt = value · dx'
    ddecay_j = Σ_{i >= j} (rowsum - colsum of W ∘ P without its diagonal, + dO · exp(a) Q S)_i
               + Σ_{i < j} (x' · u)_i + exp(a_C) <S, dS>

The last sums leave out what cancels (the diagonal, a token's way into the state that no decay is
on), since under a strong decay it would be all that is left, as an error of rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.ops.decay import decay_sums, in_two_parts, without_clamped
from megatron.core.ops.dispatch import accumulation_dtype
from megatron.core.ops.recurrence import RecurrenceInputs
from megatron.core.ops.sequences import Chunks, Sequences
from megatron.core.ops.state_space_dual.blocks import (
    Block,
    Gradients,
    blocks,
    by_group,
    differentiate,
    power,
    read,
    written,
)
from megatron.core.ops.state_sweep import Sweep, SweepBack


@dataclass
class Prepared:
    """What `StateSpaceDual` keeps between its operations.

    Args:
        inputs: as they were given.
        chunks: n of them.
        sums: a [n, H, C], in fp64.
        strength: dt [n, H, C], in the accumulation dtype.
        local: [n, G, K, r, V], what the tokens of each chunk leave in the state; from `summary`
            until a sweep.
        states: [n, G, K, r, V], what each chunk begins with; from a sweep on.
        grad, pulled: an output gradient, and [n, G, K, r, V], that of each chunk's first state from
            it alone; between `state_gradient` and `backward`.
    """

    inputs: RecurrenceInputs
    chunks: Chunks
    sums: torch.Tensor
    strength: torch.Tensor
    local: torch.Tensor | None = None
    states: torch.Tensor | None = None
    grad: torch.Tensor | None = None
    pulled: torch.Tensor | None = None

    @property
    def groups(self) -> int:
        """G."""
        return self.inputs.key.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """That of what is accumulated."""
        return self.strength.dtype

    @property
    def gain(self) -> torch.Tensor:
        """exp(a_C) [n, G, 1, r, 1]."""
        gain = power(self.sums[..., -1].to(self.dtype))
        return gain.unflatten(1, (self.groups, 1, -1))[..., None]

    def by_group(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, G, C, K], in the accumulation dtype, from x [t, G, K]."""
        grid = self.chunks.take(x).to(self.dtype).transpose(1, 2)
        # The one group of a chunk is a view; several lie far apart.
        return grid if self.groups == 1 else grid.contiguous()

    def by_token(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, C, G, r, V] from x [t, H, V]."""
        return self.chunks.take(x).unflatten(2, (self.groups, -1))

    @property
    def left(self) -> torch.Tensor:
        """exp(a_C - a) [n, H, C], how much of a token is left behind the chunk."""
        return power((self.sums[..., -1:] - self.sums).to(self.dtype))

    @property
    def growth(self) -> torch.Tensor:
        """exp(a) [n, H, C]."""
        return power(self.sums.to(self.dtype))

    def read(self) -> tuple[torch.Tensor, ...]:
        """Return what all chunks read, as `Block` has it, without states."""
        query, key = self.by_group(self.inputs.query), self.by_group(self.inputs.key)
        gates = self.strength, self.growth, self.left, *in_two_parts(self.sums, self.dtype)
        return self.by_token(self.inputs.value), query, key, *gates

    def states_or_zeros(self, states: torch.Tensor | None) -> torch.Tensor:
        """Return [N, G, K, r, V] from states [N, H, K, V], or zeros."""
        if states is not None:
            return _by_group(states.to(self.dtype), self.groups)
        heads, width = self.inputs.value.shape[1:]
        shared, keys = heads // self.groups, self.inputs.key.shape[-1]
        shape = (self.chunks.sequence_count, self.groups, keys, shared, width)
        return self.strength.new_zeros(()).expand(shape)


@dataclass(frozen=True)
class StateSpaceDual:
    """SSD as a `Recurrence`; M is a number a head.

    Between forward and backward it keeps, beside the inputs, the state before each chunk.

    Args:
        chunk_size: tokens C of a chunk; of one that no sequence fills as many as the longest has.
    """

    chunk_size: int

    def prepare(self, inputs: RecurrenceInputs, sequences: Sequences) -> Prepared:
        """See `Recurrence`."""
        chunks = sequences.chunks(min(self.chunk_size, max(1, *sequences.lengths)))
        dtype = accumulation_dtype(inputs.value.dtype)
        sums = decay_sums(chunks.take(inputs.decay).transpose(1, 2))
        strength = chunks.take(inputs.strength).transpose(1, 2)
        strength = strength.to(dtype, memory_format=torch.contiguous_format)
        return Prepared(inputs, chunks, sums, strength)

    def sweep(
        self, prepared: Prepared, initial: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Recurrence`."""
        chunks, gain = prepared.chunks, prepared.gain
        states = Sweep(chunks, prepared.states_or_zeros(initial))
        given = prepared.read()
        reach = prepared.strength * prepared.left
        out = torch.empty(given[0].shape, dtype=given[0].dtype, device=given[0].device)
        for block, scratch, *parts, target in blocks(3, reach.dtype, *given, out):
            local = prepared.local
            if local is None:
                added = written(parts[2], by_group(parts[0], reach[block], scratch, 0))
            else:
                added = local[block]
            states.through(block, gain[block], added)
            read(Block(*parts, states.starts[block]), scratch, target)
        prepared.states, prepared.local = states.starts, None
        return chunks.put_back(out.flatten(2, 3)), _by_head(states.last())

    def summary(self, prepared: Prepared) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Recurrence`."""
        key, value = (
            prepared.by_group(prepared.inputs.key),
            prepared.by_token(prepared.inputs.value),
        )
        prepared.local = _added(key, value, prepared.strength * prepared.left)
        states = Sweep(prepared.chunks, prepared.states_or_zeros(None))
        states.through(slice(0, prepared.chunks.count), prepared.gain, prepared.local)
        whole = prepared.growth[..., -1:, None]  # [n, H, 1, 1]
        ones = whole.new_ones(()).expand(prepared.chunks.sequence_count, *whole.shape[1:])
        transition = Sweep(prepared.chunks, ones)
        transition.through(slice(0, prepared.chunks.count), whole, None)
        return _by_head(states.last()), transition.last()

    def state_gradient(self, prepared: Prepared, grad: torch.Tensor) -> torch.Tensor:
        """See `Recurrence`."""
        query, prepared.grad = prepared.by_group(prepared.inputs.query), grad
        prepared.pulled = _added(query, prepared.by_token(grad), prepared.growth)
        grads = SweepBack(prepared.chunks, prepared.states_or_zeros(None))
        grads.through(slice(0, prepared.chunks.count), prepared.gain, prepared.pulled)
        return _by_head(grads.first())

    def backward(
        self, prepared: Prepared, grad: torch.Tensor, grad_last: torch.Tensor | None
    ) -> tuple[RecurrenceInputs, torch.Tensor]:
        """See `Recurrence`."""
        inputs, chunks, gain = prepared.inputs, prepared.chunks, prepared.gain
        pulled = prepared.pulled if prepared.grad is grad else None
        prepared.grad = prepared.pulled = None
        grads = SweepBack(chunks, prepared.states_or_zeros(grad_last))
        given, states = prepared.read(), prepared.states
        assert states is not None, "a sweep comes before gradients"
        found = _empty_gradients(*given[:3], prepared.sums, prepared.strength)
        growth, pulls = given[4], prepared.by_token(grad)
        parts = blocks(5, growth.dtype, *given, states, pulls, *found)
        for block, scratch, *part in reversed(list(parts)):
            read_by, pull, target = Block(*part[:9]), part[9], Gradients(*part[10:])
            scaled = by_group(pull, growth[block], scratch, 4)
            added = written(read_by.query, scaled) if pulled is None else pulled[block]
            grads.through(block, gain[block], added)
            differentiate(read_by, scratch, grad=pull, ends=grads.ends[block], found=target)
        return RecurrenceInputs(
            _by_row(chunks, found.query, inputs.query.dtype),
            _by_row(chunks, found.key, inputs.key.dtype),
            chunks.put_back(found.value.flatten(2, 3)),
            without_clamped(_by_row(chunks, found.decay(), inputs.decay.dtype), inputs.decay),
            _by_row(chunks, found.strength, inputs.strength.dtype),
        ), _by_head(grads.first())


def _added(key: torch.Tensor, value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return Kᵀ (scale · x) of all chunks: [n, G, K, r, V] of [n, G, C, K], [n, C, G, r, V]."""
    n, _, groups, shared, width = value.shape
    states = key.new_empty((n, groups, key.shape[-1], shared, width))
    for _, scratch, x, keys, scales, out in blocks(1, key.dtype, value, key, scale, states):
        out.copy_(written(keys, by_group(x, scales, scratch, 0)))
    return states


def _empty_gradients(value, query, key, sums, strength) -> Gradients:
    """Return memory for the gradients of all chunks."""
    return Gradients(
        torch.empty(value.shape, dtype=value.dtype, device=value.device),
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        torch.empty_like(strength),
        torch.empty_like(sums),
        torch.empty_like(strength),
        strength.new_empty(strength.shape[:2]),
    )


def _by_row(chunks: Chunks, grid: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [t, H, ...] from grid [n, H, C, ...]."""
    return chunks.put_back(grid.transpose(1, 2).to(dtype))


def _by_group(states: torch.Tensor, groups: int) -> torch.Tensor:
    """Return [N, G, K, r, V] from states [N, H, K, V]."""
    return states.unflatten(1, (groups, -1)).transpose(2, 3)


def _by_head(states: torch.Tensor) -> torch.Tensor:
    """Return [N, H, K, V] from states [N, G, K, r, V]."""
    return states.transpose(2, 3).flatten(1, 2)
