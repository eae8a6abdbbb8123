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

from megatron.core.ops.dispatch import accumulation_dtype
from megatron.core.ops.recurrence import RecurrenceInputs
from megatron.core.ops.sequences import Chunks, Sequences
from megatron.core.ops.state_space_dual.blocks import (
    Block,
    Gradients,
    blocks,
    differentiate,
    read,
    written,
)
from megatron.core.ops.state_space_dual.scalar_sweep import sweep, sweep_back


@dataclass
class Prepared:
    """What `StateSpaceDual` keeps between its operations.

    Args:
        inputs: as they were given.
        chunks: n of them.
        sums: a [n, H, C].
        strength: dt [n, H, C].
        local: [n, G, K, r, V], what the tokens of each chunk leave in the state; until a sweep.
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
    def gain(self) -> torch.Tensor:
        """exp(a_C) [n, G, 1, r, 1]."""
        gain = self.sums[..., -1].exp()
        return gain.unflatten(1, (self.groups, 1, -1))[..., None]

    def by_group(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, G, C, K], in the accumulation dtype, from x [t, G, K]."""
        grid = self.chunks.take(x).to(self.sums.dtype).transpose(1, 2)
        # The one group of a chunk is a view; several lie far apart.
        return grid if self.groups == 1 else grid.contiguous()

    def by_token(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, C, G, r, V] from x [t, H, V]."""
        return self.chunks.take(x).unflatten(2, (self.groups, -1))

    def left(self) -> torch.Tensor:
        """Return exp(a_C - a) [n, H, C]."""
        return (self.sums[..., -1:] - self.sums).exp_()


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
        sums = _by_chunk(chunks, inputs.decay, dtype).cumsum(-1)
        return Prepared(inputs, chunks, sums, _by_chunk(chunks, inputs.strength, dtype))

    def sweep(
        self, prepared: Prepared, initial: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Recurrence`."""
        chunks = prepared.chunks
        if initial is not None:
            initial = _by_group(initial, prepared.groups)
        prepared.states, last = sweep(
            chunks, prepared.gain, added=self._local(prepared), initial=initial
        )
        prepared.local = None
        given = _read_by_blocks(prepared)
        out = torch.empty(given.value.shape, dtype=given.value.dtype, device=given.value.device)
        for scratch, *block, part in blocks(3, prepared.sums.dtype, *given, out):
            read(Block(*block), scratch, part)
        return chunks.put_back(out.flatten(2, 3)), _by_head(last)

    def _local(self, prepared: Prepared) -> torch.Tensor:
        """Return what the tokens of each chunk leave in the state; made once."""
        if prepared.local is None:
            inputs = prepared.inputs
            prepared.local = written(
                prepared.by_group(inputs.key),
                prepared.by_token(inputs.value),
                prepared.left().mul_(prepared.strength),
            )
        return prepared.local

    def _pulled(self, prepared: Prepared, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient of each chunk's first state from outputs of the chunk; made once."""
        if prepared.pulled is None or prepared.grad is not grad:
            query = prepared.by_group(prepared.inputs.query)
            prepared.grad = grad
            prepared.pulled = written(query, prepared.by_token(grad), prepared.sums.exp())
        return prepared.pulled

    def summary(self, prepared: Prepared) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Recurrence`."""
        _, last = sweep(prepared.chunks, prepared.gain, added=self._local(prepared), initial=None)
        whole = prepared.sums[..., -1:].exp()[..., None]  # [n, H, 1, 1]
        one = whole.new_ones(()).expand(prepared.chunks.sequence_count, *whole.shape[1:])
        nothing = whole.new_zeros(()).expand_as(whole)
        return _by_head(last), sweep(prepared.chunks, whole, added=nothing, initial=one)[1]

    def state_gradient(self, prepared: Prepared, grad: torch.Tensor) -> torch.Tensor:
        """See `Recurrence`."""
        pulled = self._pulled(prepared, grad)
        return _by_head(sweep_back(prepared.chunks, prepared.gain, added=pulled, grad_last=None)[1])

    def backward(
        self, prepared: Prepared, grad: torch.Tensor, grad_last: torch.Tensor | None
    ) -> tuple[RecurrenceInputs, torch.Tensor]:
        """See `Recurrence`."""
        inputs, chunks, sums = prepared.inputs, prepared.chunks, prepared.sums
        pulled = self._pulled(prepared, grad)
        prepared.grad = prepared.pulled = None
        if grad_last is not None:
            grad_last = _by_group(grad_last, prepared.groups)
        ends, first = sweep_back(chunks, prepared.gain, added=pulled, grad_last=grad_last)
        given = _read_by_blocks(prepared)
        found = Gradients(
            torch.empty(given.value.shape, dtype=given.value.dtype, device=given.value.device),
            torch.empty(given.query.shape, dtype=sums.dtype, device=sums.device),
            torch.empty(given.key.shape, dtype=sums.dtype, device=sums.device),
            *(torch.empty_like(sums) for _ in range(3)),
            sums.new_empty(sums.shape[:2]),
        )
        pulls = prepared.by_token(grad)
        for scratch, *parts in blocks(4, sums.dtype, *given, pulls, ends, *found):
            block, (pull, end), target = Block(*parts[:6]), parts[6:8], Gradients(*parts[8:])
            differentiate(block, scratch, grad=pull, ends=end, found=target)
        return RecurrenceInputs(
            _by_row(chunks, found.query, inputs.query.dtype),
            _by_row(chunks, found.key, inputs.key.dtype),
            chunks.put_back(found.value.flatten(2, 3)),
            _by_row(chunks, found.decay(), inputs.decay.dtype),
            _by_row(chunks, found.strength, inputs.strength.dtype),
        ), _by_head(first)


def _read_by_blocks(prepared: Prepared) -> Block:
    """Return what all chunks read, as one block."""
    inputs = prepared.inputs
    query, key = prepared.by_group(inputs.query), prepared.by_group(inputs.key)
    value, states = prepared.by_token(inputs.value), prepared.states
    assert states is not None, "a sweep comes before what reads states"
    return Block(value, query, key, prepared.sums, prepared.strength, states)


def _by_chunk(chunks: Chunks, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [n, H, C] from x [t, H]."""
    return chunks.take(x).transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)


def _by_row(chunks: Chunks, grid: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [t, H, ...] from grid [n, H, C, ...]."""
    return chunks.put_back(grid.transpose(1, 2).to(dtype))


def _by_group(states: torch.Tensor, groups: int) -> torch.Tensor:
    """Return [N, G, K, r, V] from states [N, H, K, V]."""
    return states.unflatten(1, (groups, -1)).transpose(2, 3)


def _by_head(states: torch.Tensor) -> torch.Tensor:
    """Return [N, H, K, V] from states [N, G, K, r, V]."""
    return states.transpose(2, 3).flatten(1, 2)
