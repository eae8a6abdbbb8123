# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in plain torch, chunk by chunk: the definition, and the CPU's path.

Chunk form (Yang et al. 2024, arXiv 2412.06464, section 3), per chunk of C tokens and value head,
with G_i the decay summed up to token i, D_ij = exp(G_i - G_j) for i >= j else 0, B = diag(beta),
Γ = diag(exp(G)), e = diag(exp(G_C - G)), and queries that hold their scale:

    A = tril(B (K Kᵀ ∘ D), -1)      T = (I + A)⁻¹      U = T B V      W = T B Γ K
    P = Q Kᵀ ∘ D                    M = exp(G_C) I - (e K)ᵀ W          X = (e K)ᵀ U
    S_next = M S + X                O = (Γ Q - P W) S + P U

So all but `M S + X` is done for all chunks and heads at once. The inverse is a triangular solve; A
has no entry that grows with the decay, since all of D is at most 1. Backward, given dO and the
gradients dS of the states behind the chunks, with V' = U - W S what the tokens change states by:

    dV' = Pᵀ dO + e K dS            x = Tᵀ dV'
    Z = (dO V'ᵀ) ∘ D                N = tril((x V'ᵀ) ∘ D, -1)
    dQ = Γ dO Sᵀ + Z K              f = Γ x Sᵀ + N K
    dK = w - β f                    w = Zᵀ Q - (B N)ᵀ K + e V' dSᵀ
    dV = β x                        dβ = x · v - f · k
    dG = Q · dQ - k · (β f + w)     and <S_next, dS> on top at the last token of a chunk

-β f is the gradient of a key where it reads the state, w where it writes to it. G scales queries
and keys that read by exp(G), keys that write by exp(-G): so its gradient needs no C x C sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from megatron.core.ops.dispatch import accumulation_dtype
from megatron.core.ops.recurrence import RecurrenceInputs
from megatron.core.ops.sequences import Chunks, Sequences
from megatron.core.ops.state_sweep import chained, sweep, sweep_back


class _Chunked:
    """What all chunks have, each made at first use: n chunks, H = G · r heads, C tokens.

    Args:
        inputs: of all tokens.
        chunks: where they lie.
        scale: of queries.
        inverse: T [n, H, C, C] if known.
    """

    def __init__(
        self,
        inputs: RecurrenceInputs,
        chunks: Chunks,
        *,
        scale: float,
        inverse: torch.Tensor | None,
    ) -> None:
        dtype = accumulation_dtype(inputs.value.dtype)
        n, size, (groups, keys) = chunks.count, chunks.size, inputs.key.shape[1:]
        self.groups, self.keys = groups, keys
        self.heads, self.values = inputs.value.shape[1:]
        self.shared = self.heads // groups  # r
        # Queries above keys [n, G, 2C, K]: most products are with both.
        self.pair = inputs.key.new_empty((n, groups, 2 * size, keys), dtype=dtype)
        chunks.heads(inputs.query, dtype=dtype, out=self.pair[:, :, :size]).mul_(scale)
        self.key = chunks.heads(inputs.key, dtype=dtype, out=self.pair[:, :, size:])
        self.value = chunks.heads(inputs.value, dtype=dtype)  # [n, H, C, V]
        self.beta = chunks.heads(inputs.strength, dtype=dtype)  # [n, H, C]
        self.total = chunks.heads(inputs.decay, dtype=dtype).cumsum(-1)  # G
        self.growth = self.total.exp()  # Γ
        self.left = (self.total[..., -1:] - self.total).exp_()  # e
        self.scale = scale
        self.chunks, self.size, self._inverse = chunks, size, inverse

    def by_group(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [n, H, ...] as [n, G, r, ...]."""
        return x.unflatten(1, (self.groups, self.shared))

    @cached_property
    def falls(self) -> torch.Tensor:
        """D [n, H, C, C]; masked before the exponential, which would be infinite above."""
        above = self.total.new_full((self.size, self.size), -torch.inf).triu_(1)
        return (self.total[..., None] - self.total[..., None, :]).add_(above).exp_()

    @cached_property
    def seen(self) -> torch.Tensor:
        """P [n, H, C, C]."""
        return self._products(self.pair[:, :, : self.size])

    def _products(self, left: torch.Tensor) -> torch.Tensor:
        """Return (left Kᵀ) ∘ D [n, H, C, C] for left [n, G, C, K]."""
        found = torch.bmm(left.flatten(0, 1), self.key.flatten(0, 1).mT)
        found = found.view(-1, self.groups, 1, self.size, self.size)
        return (found * self.by_group(self.falls)).flatten(1, 2)

    @cached_property
    def inverse(self) -> torch.Tensor:
        """T [n, H, C, C]."""
        if self._inverse is not None:
            return self._inverse
        lower = self._products(self.key).mul_(self.beta[..., None])
        identity = torch.eye(self.size, dtype=lower.dtype, device=lower.device)
        return torch.linalg.solve_triangular(
            lower, identity.expand_as(lower), upper=False, unitriangular=True
        )

    @cached_property
    def solved(self) -> torch.Tensor:
        """[U | -W] [n, H, C, V + K]."""
        given = torch.empty_like(self.value, memory_format=torch.contiguous_format).new_empty(
            (*self.value.shape[:-1], self.values + self.keys)
        )
        torch.mul(self.value, self.beta[..., None], out=given[..., : self.values])
        factor = (self.beta * self.growth).neg_()[..., None]
        keys = self.by_group(given)[..., self.values :]
        torch.mul(self.key[:, :, None], self.by_group(factor), out=keys)
        return _product(self.inverse, given)

    @cached_property
    def written(self) -> torch.Tensor:
        """E K [n, H, C, K]."""
        left = self.by_group(self.left)[..., None]
        return (self.key[:, :, None] * left).flatten(1, 2)

    @cached_property
    def affine(self) -> torch.Tensor:
        """[X | M] [n, H, K, V + K]."""
        found = _product(self.written.mT, self.solved)
        return self._with_decay(found, self.values)

    @cached_property
    def transition(self) -> torch.Tensor:
        """M [n, H, K, K]."""
        if "affine" in self.__dict__:
            return self.affine[..., self.values :]
        return self._with_decay(_product(self.written.mT, self.solved[..., self.values :]), 0)

    def _with_decay(self, found: torch.Tensor, offset: int) -> torch.Tensor:
        """Add the decay of whole chunks to the diagonal of M, which begins at column `offset`."""
        found.diagonal(offset, -2, -1).add_(self.growth[..., -1:])
        return found

    def readers(self, *, with_values: bool) -> torch.Tensor:
        """Return Γ Q - P W [n, H, C, K], behind P U [n, H, C, V] if `with_values`."""
        first = 0 if with_values else self.values
        found = _product(self.seen, self.solved[..., first:])
        growth = self.by_group(self.growth)[..., None]
        reads = self.by_group(found)[..., self.values - first :]
        reads.addcmul_(self.pair[:, :, None, : self.size], growth)
        return found


@dataclass
class _Prepared:
    """What `DeltaRecurrence` keeps between its operations."""

    inputs: RecurrenceInputs
    sequences: Sequences
    inverse: torch.Tensor
    starts: torch.Tensor | None = None
    chunked: _Chunked | None = field(default=None, repr=False)


@dataclass(frozen=True)
class DeltaRecurrence:
    """The gated delta rule as a `Recurrence`.

    Between forward and backward it keeps, beside the inputs, T and the state before each chunk;
    products of one batched matrix multiplication are made again.

    Args:
        scale: of queries; None is K^-0.5.
        chunk_size: tokens C of a chunk.
    """

    scale: float | None = None
    chunk_size: int = 64

    def prepare(self, inputs: RecurrenceInputs, sequences: Sequences) -> _Prepared:
        """See `Recurrence`."""
        chunked = self._chunked(inputs, sequences, None)
        return _Prepared(inputs, sequences, chunked.inverse, chunked=chunked)

    def _chunked(
        self, inputs: RecurrenceInputs, sequences: Sequences, inverse: torch.Tensor | None
    ) -> _Chunked:
        scale = inputs.key.shape[-1] ** -0.5 if self.scale is None else self.scale
        chunks = sequences.chunks(self.chunk_size)
        return _Chunked(inputs, chunks, scale=scale, inverse=inverse)

    def _again(self, prepared: _Prepared) -> _Chunked:
        """Return what the chunks have; make it once more if it was dropped."""
        if prepared.chunked is None:
            prepared.chunked = self._chunked(prepared.inputs, prepared.sequences, prepared.inverse)
        return prepared.chunked

    def sweep(
        self, prepared: _Prepared, initial: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Recurrence`."""
        chunked = self._again(prepared)
        values, affine = chunked.values, chunked.affine
        prepared.starts, last = sweep(
            chunked.chunks, affine[..., values:], affine[..., :values], initial
        )
        found = chunked.readers(with_values=True)
        out = found[..., :values].flatten(0, 1)
        out.baddbmm_(found[..., values:].flatten(0, 1), prepared.starts.flatten(0, 1))
        prepared.chunked = None
        dtype = prepared.inputs.value.dtype
        return chunked.chunks.tokens(found[..., :values], dtype=dtype), last

    def summary(self, prepared: _Prepared) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Recurrence`."""
        chunked = self._again(prepared)
        added, transition = chunked.affine.split([chunked.values, chunked.keys], -1)
        _, last = sweep(chunked.chunks, transition, added, None)
        return last, chained(chunked.chunks, transition)

    def state_gradient(self, prepared: _Prepared, grad: torch.Tensor) -> torch.Tensor:
        """See `Recurrence`."""
        chunked = self._again(prepared)
        grad = chunked.chunks.heads(grad, dtype=chunked.value.dtype)
        added = _product(chunked.readers(with_values=False).mT, grad)
        return sweep_back(chunked.chunks, chunked.transition, added, None)[1]

    def backward(
        self, prepared: _Prepared, grad: torch.Tensor, grad_last: torch.Tensor | None
    ) -> tuple[RecurrenceInputs, torch.Tensor]:
        """See `Recurrence`."""
        chunked, starts = self._again(prepared), prepared.starts
        prepared.chunked = None
        shape = (*chunked.value.shape[:2], 2 * chunked.size, chunked.values)
        pulls = chunked.value.new_empty(shape)  # [dO ; x]
        grad = chunked.chunks.heads(grad, dtype=pulls.dtype, out=pulls[:, :, : chunked.size])
        added = _product(chunked.readers(with_values=False).mT, grad)
        ends, first = sweep_back(chunked.chunks, chunked.transition, added, grad_last)
        changes = torch.baddbmm(
            *(chunked.solved[..., : chunked.values].flatten(0, 1),),
            chunked.solved[..., chunked.values :].flatten(0, 1),
            starts.flatten(0, 1),
        ).view(chunked.value.shape)  # V'
        pulled = _product(chunked.seen.mT, grad)  # dV'
        pulled.flatten(0, 1).baddbmm_(chunked.written.flatten(0, 1), ends.flatten(0, 1))
        torch.bmm(
            chunked.inverse.flatten(0, 1).mT,
            pulled.flatten(0, 1),
            out=pulls[:, :, chunked.size :].flatten(0, 1),
        )
        return _input_gradients(chunked, prepared.inputs, pulls, changes, starts, ends), first


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply [n, H, a, b] by [n, H, b, c] in one batch, without copies."""
    found = torch.bmm(left.flatten(0, 1), right.flatten(0, 1))
    return found.view(*left.shape[:2], *found.shape[1:])


def _input_gradients(chunked, inputs, pulls, changes, starts, ends):
    n, size = chunked.chunks.count, chunked.size
    groups, shared, heads, keys = chunked.groups, chunked.shared, chunked.heads, chunked.keys
    beta = chunked.beta
    reads = _product(pulls, starts.mT)  # [n, H, 2C, K]
    reads.view(n, heads, 2, size, keys).mul_(chunked.growth[:, :, None, :, None])
    within = _product(pulls, changes.mT)  # [n, H, 2C, C]
    halves = within.view(n, heads, 2, size, size).mul_(chunked.falls[:, :, None])
    halves[:, :, 1].diagonal(0, -2, -1).zero_()
    rows = shared * 2 * size
    reads.view(n * groups, rows, keys).baddbmm_(
        within.view(n * groups, rows, size), chunked.key.flatten(0, 1)
    )
    along = (chunked.by_group(reads) * chunked.pair[:, :, None]).sum(-1)
    along = along.view(n, heads, 2, size)
    x = pulls[:, :, size:]
    grad_beta = (x * chunked.value).sum(-1).sub_(along[:, :, 1])
    halves[:, :, 1].mul_(beta.neg()[..., None])
    carried = _product(changes, ends.mT).mul_(chunked.left[..., None])  # e V' dS
    key = chunked.key[:, :, None]
    falling = (chunked.by_group(carried) * key).sum((-2, -1)).flatten(1, 2)
    falling += (starts * ends).sum((-2, -1)).mul_(chunked.growth[..., -1])
    wrote = chunked.by_group(carried)
    split = chunked.by_group(within)
    for j in range(shared):
        target = wrote[:, :, j].flatten(0, 1) if shared == 1 else wrote.flatten(0, 1)[:, j]
        left = split.flatten(0, 1)[:, j]
        target.baddbmm_(left.mT, chunked.pair.flatten(0, 1))
    grad_total = along[:, :, 0] - along[:, :, 1] * beta
    grad_total -= (wrote * key).sum(-1).flatten(1, 2)
    grad_total[..., -1] += falling
    grad_decay = grad_total.flip(-1).cumsum(-1).flip(-1)
    split_reads = reads.view(n, heads, 2, size, keys)
    grad_key = wrote.flatten(1, 2).addcmul_(split_reads[:, :, 1], beta[..., None], value=-1)
    grad_query = split_reads[:, :, 0]
    if shared > 1:
        grad_key = chunked.by_group(grad_key).sum(2)
        grad_query = chunked.by_group(grad_query).sum(2)
    grad_value = x * beta[..., None]
    tokens = chunked.chunks.tokens
    return RecurrenceInputs(
        tokens(grad_query, dtype=inputs.query.dtype).mul_(chunked.scale),
        tokens(grad_key, dtype=inputs.key.dtype),
        tokens(grad_value, dtype=inputs.value.dtype),
        tokens(grad_decay, dtype=inputs.decay.dtype),
        tokens(grad_beta, dtype=inputs.strength.dtype),
    )
