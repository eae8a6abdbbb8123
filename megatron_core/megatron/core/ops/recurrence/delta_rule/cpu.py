# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule: a state per head, which each token decays, corrects and reads.

The plain torch version is the specification and the CPU path. It processes chunks of tokens.

Chunk form (Yang et al. 2024, arXiv 2412.06464, section 3), per chunk of C tokens and value head,
with G_i the cumulative decay up to token i, D_ij = exp(G_i - G_j) for i >= j else 0,
B = diag(beta), Γ = diag(exp(G)), e = diag(exp(G_C - G)), and the scale included in the queries:

    T = (I + tril(B K Kᵀ, -1))⁻¹    W = T B K           U = (T ∘ D) B V     P = Q Kᵀ ∘ D
    M = exp(G_C) (I - Kᵀ W)         X = (e K)ᵀ U
    S_next = M S + X                O = Γ (Q - tril(Q Kᵀ) W) S + P U

All terms but `M S + X` are computed for all chunks and heads at once. The inverse, by a triangular
solve, contains no decay: the decays along a path of tokens multiply to an entry of D, and the
decays from the start of the chunk to Γ. Backward, given dO and the gradients dS of the states after
the chunks, with the new values V' = U - Γ W S:

    dV' = Pᵀ dO + e K dS            x = (T ∘ D)ᵀ dV'
    Z = (dO V'ᵀ) ∘ D                N = tril((x V'ᵀ) ∘ D, -1)
    dQ = Γ dO Sᵀ + Z K              f = Γ x Sᵀ + N K
    dK = w - β f                    w = Zᵀ Q - (B N)ᵀ K + e V' dSᵀ
    dV = β x                        dβ = x · v - f · k

-β f is the gradient of a key as a reader of the state, w as a writer. A decay scales every read
after it of every write before it, and its gradient sums all such terms. Q · dQ and K · dK
would give it as a difference of sums whose common terms no decay scales, but the rounding error of
these sums exceeds the gradient of a strong decay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch

from megatron.core.ops.backend_choice import accumulation_dtype
from megatron.core.ops.recurrence.chunks import (
    Chunks,
    Sweep,
    SweepBack,
    decay_cumsum,
    decay_differences,
    difference_factors,
    zero_clamped_grad,
)
from megatron.core.ops.recurrence.interface import CHUNK_SIZE, RecurrenceInputs
from megatron.core.ops.sequences import Sequences

# Exponents below this give 0: smaller decays vanish in the rounding error of the others, and
# products of two such numbers would be denormal, which a CPU multiplies a hundred times slower.
SMALLEST_EXPONENT = MappingProxyType({torch.float32: -40.0, torch.float64: -300.0})


class DeltaRuleChunks:
    """The terms of m chunks of C tokens, each computed at first use; H = G · r heads of values.

    Args:
        grids: the inputs of the chunks, [m, C, ...], zero after the end of a sequence.
        scale: factor of queries.
        dtype: the dtype of all terms.
        inverse: T [m, H, C, C], or the buffer for it; None allocates one.
        is_solved: whether `inverse` contains T already.
    """

    def __init__(
        self,
        grids: RecurrenceInputs,
        *,
        scale: float,
        dtype: torch.dtype,
        inverse: torch.Tensor | None = None,
        is_solved: bool = False,
    ) -> None:
        count, self.size, self.groups, self.keys = grids.key.shape
        self.heads, self.values = grids.value.shape[2:]
        self.group_heads, self.scale = self.heads // self.groups, scale
        # Queries stacked on keys [m, G, 2C, K]: most products need both.
        self.pair = grids.key.new_empty((count, self.groups, 2 * self.size, self.keys), dtype=dtype)
        self.query, self.key = self.pair.split(self.size, 2)
        self.query.copy_(grids.query.transpose(1, 2)).mul_(
            scale
        )  # scaled in the accumulation dtype
        self.key.copy_(grids.key.transpose(1, 2))
        self.value = _heads(grids.value, dtype)  # [m, H, C, V]
        self.beta = _heads(grids.beta, dtype)  # [m, H, C]
        self.decay = grids.decay.transpose(1, 2)  # [m, H, C]
        cumsum = decay_cumsum(self.decay)  # G in fp64; a small tensor
        self.cumsum, self.decay_from_start = cumsum, _power(cumsum.to(dtype, copy=True))  # Γ
        self.decay_to_end = _power((cumsum[..., -1:] - cumsum).to(dtype))  # e
        self._inverse, self._is_solved = inverse, is_solved

    def by_group(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [m, H, ...] as [m, G, r, ...]."""
        return x.unflatten(1, (self.groups, self.group_heads))

    def repeat_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [m, G, a, b] repeated for each head, [m, H, a, b]; x itself if r is 1."""
        if self.group_heads == 1:
            return x
        return x.repeat_interleave(self.group_heads, 1)

    @cached_property
    def decay_mask(self) -> torch.Tensor:
        """D [m, H, C, C]."""
        # Masked before the exponential, which overflows above the diagonal.
        exponents = decay_differences(
            *difference_factors(self.cumsum.flatten(0, 1), self.beta.dtype)
        )
        return _power(exponents).view(*self.beta.shape, self.size)

    @cached_property
    def gram(self) -> torch.Tensor:
        """[Q Kᵀ ; K Kᵀ] [m, G, 2C, C]."""
        return product(self.pair, self.key.mT)

    @cached_property
    def scores(self) -> torch.Tensor:
        """P = Q Kᵀ ∘ D [m, H, C, C]."""
        return (self.gram[:, :, None, : self.size] * self.by_group(self.decay_mask)).flatten(1, 2)

    @cached_property
    def inverse(self) -> torch.Tensor:
        """T [m, H, C, C]."""
        if self._is_solved and self._inverse is not None:
            return self._inverse
        beta = self.by_group(self.beta)[..., None]
        lower = (self.gram[:, :, None, self.size :] * beta).flatten(1, 2)
        identity = torch.eye(self.size, dtype=lower.dtype, device=lower.device)
        # The solve reads only the entries of `lower` below the diagonal.
        return torch.linalg.solve_triangular(
            lower,
            identity.expand_as(lower),
            upper=False,
            unitriangular=True,
            out=self._inverse,
        )

    @cached_property
    def decayed_inverse(self) -> torch.Tensor:
        """T ∘ D [m, H, C, C]."""
        return self.inverse * self.decay_mask

    @cached_property
    def u(self) -> torch.Tensor:
        """U [m, H, C, V]."""
        return product(self.decayed_inverse, self.value * self.beta[..., None])

    @cached_property
    def neg_w(self) -> torch.Tensor:
        """-W [m, H, C, K]."""
        factor = self.by_group(self.beta.neg())[..., None]
        return product(self.inverse, (self.key[:, :, None] * factor).flatten(1, 2))

    @cached_property
    def k_decayed(self) -> torch.Tensor:
        """e K [m, H, C, K]."""
        return (self.key[:, :, None] * self.by_group(self.decay_to_end)[..., None]).flatten(1, 2)

    @cached_property
    def addend(self) -> torch.Tensor:
        """X [m, H, K, V]."""
        return product(self.k_decayed.mT, self.u)

    @cached_property
    def transition(self) -> torch.Tensor:
        """M [m, H, K, K]."""
        matrix = product(self.repeat_heads(self.key).mT, self.neg_w)
        matrix.diagonal(0, -2, -1).add_(1.0)
        return matrix.mul_(self.decay_from_start[..., -1:, None])

    @cached_property
    def q_state(self) -> torch.Tensor:
        """Γ (Q - tril(Q Kᵀ) W) [m, H, C, K]."""
        queries = product(self.repeat_heads(self.gram[:, :, : self.size].tril()), self.neg_w)
        self.by_group(queries).add_(self.query[:, :, None])
        return queries.mul_(self.decay_from_start[..., None])

    def out(self, states_before: torch.Tensor) -> torch.Tensor:
        """Return O [m, H, C, V] from the states before the chunks."""
        return add_product_(product(self.scores, self.u), self.q_state, states_before)

    def gradients(
        self, d_out_x: torch.Tensor, states_before: torch.Tensor, d_states_after: torch.Tensor
    ) -> RecurrenceInputs:
        """Return the gradients of the inputs, head by head [m, H or G, C, ...].

        Args:
            d_out_x: [m, H, 2C, V], dO in the upper half; x is written to the lower half.
            states_before: the states before the chunks.
            d_states_after: the gradients of the states after the chunks.
        """
        size, beta = self.size, self.beta[..., None]
        neg_w_decayed = self.neg_w * self.decay_from_start[..., None]
        v_new = add_product_(self.u, neg_w_decayed, states_before)  # V'
        d_out, x = d_out_x.split(size, 2)
        dv = add_product_(product(self.scores.mT, d_out), self.k_decayed, d_states_after)  # dV'
        x.copy_(product(self.decayed_inverse.mT, dv))
        d_reads = product(d_out_x, states_before.mT)  # dO Sᵀ, x Sᵀ
        d_reads.unflatten(2, (2, size)).mul_(self.decay_from_start[:, :, None, :, None])
        from_start = torch.linalg.vecdot(self.by_group(d_reads), self.pair[:, :, None]).flatten(
            1, 2
        )
        query_terms, key_terms = from_start.split(size, -1)
        d_scores = product(d_out_x, v_new.mT)  # [Z ; N]
        score_halves = d_scores.unflatten(2, (2, size)).mul_(self.decay_mask[:, :, None])
        score_halves[:, :, 1].diagonal(0, -2, -1).zero_()
        pairs = (self.by_group(d_scores) * self.gram[:, :, None]).flatten(1, 2)
        d_beta = torch.linalg.vecdot(x, self.value).sub_(key_terms).sub_(pairs[:, :, size:].sum(-1))
        # The heads of a group share K, so their rows are stacked for one product.
        flat_reads = d_reads.view(-1, self.group_heads * 2 * size, self.keys)
        flat_reads.baddbmm_(d_scores.view(*flat_reads.shape[:2], size), self.key.flatten(0, 1))
        d_query, f = d_reads.split(size, 2)  # dQ, f
        d_key_writes = product(v_new, d_states_after.mT).mul_(
            self.decay_to_end[..., None]
        )  # e V' dSᵀ
        to_end = torch.linalg.vecdot(d_key_writes, self.repeat_heads(self.key))
        d_decay = self._decay_gradient(query_terms - key_terms * self.beta, pairs, to_end)
        d_decay += (
            torch.linalg.vecdot(states_before, d_states_after)
            .sum(-1)
            .mul_(self.decay_from_start[..., -1])[..., None]
        )
        d_scores[:, :, size:].mul_(beta.neg())
        add_product_(d_key_writes, d_scores.mT, self.repeat_heads(self.pair))  # w
        d_key = d_key_writes.addcmul_(f, beta, value=-1)
        if self.group_heads > 1:
            d_query, d_key = (self.by_group(y).sum(2) for y in (d_query, d_key))
        return RecurrenceInputs(
            query=d_query * self.scale,
            key=d_key,
            value=x * beta,
            decay=zero_clamped_grad(d_decay, self.decay),
            beta=d_beta,
        )

    def _decay_gradient(
        self, from_start: torch.Tensor, pairs: torch.Tensor, to_end: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of decays, without the term from the initial to the final state.

        Each term is added once, to the decays that scale it. A difference of larger sums would be
        cheaper, but its rounding error exceeds the gradient of a strong decay.

        Args:
            from_start: [m, H, C], token i reads the initial state, which decays up to i scale.
            pairs: [m, H, 2C, C], token i reads the write of token j, by its query and by its key;
                decays j + 1 to i scale it. Overwritten.
            to_end: [m, H, C], the write of token j in the final state; decays from j + 1 on scale
                it.
        """
        by_query, by_key = pairs.split(self.size, 2)
        by_query.addcmul_(by_key, self.beta[..., None], value=-1)  # [i, j]
        upper = by_query.new_ones((self.size, self.size)).triu_()  # [t, i]: i >= t
        flat_pairs = by_query.flatten(0, 1)
        suffix_sums = torch.bmm(upper.expand(flat_pairs.shape), flat_pairs)  # [t, j]
        suffix_sums.mul_(upper.new_ones(upper.shape).tril_(-1))  # j < t
        d_decay = suffix_sums.sum(-1).view(from_start.shape)
        d_decay.add_(from_start.flip(-1).cumsum(-1).flip(-1))
        d_decay[..., 1:] += to_end.cumsum(-1)[..., :-1]
        return d_decay


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply [m, H, a, b] by [m, H, b, c] in one batch, without copies."""
    flat_product = torch.bmm(*_flat(left, right))
    return flat_product.view(*left.shape[:2], *flat_product.shape[1:])


def add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add the product of two batches of matrices to a third in place; return it."""
    total.flatten(0, 1).baddbmm_(*_flat(left, right))
    return total


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """Return exp of exponents at most 0, in place; zero from `SMALLEST_EXPONENT` down.

    exp is ten to two hundred times slower where its argument is -inf or its result denormal.
    """
    floor = SMALLEST_EXPONENT[exponent.dtype]
    return torch.threshold_(exponent.clamp_(min=floor).exp_(), 2 * math.exp(floor), 0.0)


def _flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.flatten(0, 1) for tensor in tensors]


def _heads(grid: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [m, H, C, ...] from [m, C, H, ...] in one copy."""
    grid = grid.transpose(1, 2)
    return grid.new_empty(grid.shape, dtype=dtype).copy_(grid)


# Elements of one term of a block, such as its values: enough to keep all threads of a product busy,
# few enough that the memory of the twenty or so terms stays in the cache for the next block.
ELEMENTS_IN_CACHE = 1 << 20


@dataclass
class PreparedDeltaRule:
    """State of a `DeltaRecurrence` between its operations.

    Args:
        inputs: the inputs.
        sequences: the boundaries of the tokens.
        inverse: T [n, H, C, C], set by `sweep`.
        states_before: [n, H, K, V], the state before each chunk, set by `sweep`.
    """

    inputs: RecurrenceInputs
    sequences: Sequences
    inverse: torch.Tensor | None = None
    states_before: torch.Tensor | None = None


@dataclass(frozen=True)
class DeltaRecurrence:
    """The gated delta rule as a `Recurrence`.

    It saves the inputs, T and the state before each chunk; backward recomputes the other terms,
    which take one batched product each.

    Args:
        scale: factor of queries; None is K^-0.5.
        chunk_size: tokens C of a chunk.
    """

    scale: float | None = None
    chunk_size: int = CHUNK_SIZE

    def prepare(self, inputs: RecurrenceInputs, sequences: Sequences) -> PreparedDeltaRule:
        """See `Recurrence`; the sweep computes every term, while its block is in the cache."""
        return PreparedDeltaRule(inputs, sequences)

    def sweep(
        self,
        prepared: PreparedDeltaRule,
        initial: torch.Tensor | None,
        *,
        keep_states: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Recurrence`."""
        del keep_states  # the states are always saved
        call = _ChunkedCall(self, prepared)
        value = call.grids.value
        states = Sweep(call.chunks, call.states_or_zeros(initial))
        out = value.new_empty(value.shape)
        # Column-major, as the triangular solve writes it without a copy.
        size = call.chunks.size
        inverse = value.new_empty((len(value), call.heads, size, size), dtype=call.dtype).mT
        for span in call.blocks():
            block = call.block(span, inverse[span])
            states.advance(span, block.transition, block.addend)
            out[span] = block.out(states.states_before[span]).transpose(1, 2)
        prepared.inverse, prepared.states_before = inverse, states.states_before
        return call.chunks.from_chunks(out), states.final()

    def summary(self, prepared: PreparedDeltaRule) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Recurrence`."""
        call = _ChunkedCall(self, prepared)
        local = Sweep(call.chunks, call.states_or_zeros(None))
        keys = call.grids.key.shape[-1]
        identity = torch.eye(keys, dtype=call.dtype, device=call.grids.key.device)
        shape = (call.chunks.sequence_count, call.heads, keys, keys)
        transitions = Sweep(call.chunks, identity.expand(shape))
        for span in call.blocks():
            block = call.block(span)
            local.advance(span, block.transition, block.addend)
            transitions.advance(span, block.transition, None)
        return local.final(), transitions.final()

    def state_gradient(self, prepared: PreparedDeltaRule, d_out: torch.Tensor) -> torch.Tensor:
        """See `Recurrence`."""
        call = _ChunkedCall(self, prepared)
        d_out_grid = call.chunks.to_chunks(d_out).transpose(1, 2)  # [n, H, C, V]
        grads = SweepBack(call.chunks, call.states_or_zeros(None))
        for span in reversed(call.blocks()):
            block = call.block(span)
            addend = product(block.q_state.mT, d_out_grid[span].to(call.dtype))
            grads.advance(span, block.transition, addend)
        return grads.d_initial()

    def backward(
        self, prepared: PreparedDeltaRule, d_out: torch.Tensor, d_final: torch.Tensor | None
    ) -> tuple[RecurrenceInputs, torch.Tensor]:
        """See `Recurrence`."""
        call = _ChunkedCall(self, prepared)
        d_out_grid = call.chunks.to_chunks(d_out).transpose(1, 2)  # [n, H, C, V]
        grads = SweepBack(call.chunks, call.states_or_zeros(d_final))
        d_grids = RecurrenceInputs(*(x.new_empty(x.shape) for x in call.grids))
        assert prepared.states_before is not None, "the forward sweep must run before gradients"
        for span in reversed(call.blocks()):
            block = call.block(span)
            shape = (*block.value.shape[:2], 2 * block.size, block.values)
            d_out_x = block.value.new_empty(shape)  # [dO ; x]
            d_out_x[:, :, : block.size] = d_out_grid[span]
            addend = product(block.q_state.mT, d_out_x[:, :, : block.size])
            grads.advance(span, block.transition, addend)
            d_block = block.gradients(
                d_out_x, prepared.states_before[span], grads.d_states_after[span]
            )
            for d_grid, d_chunk in zip(d_grids, d_block, strict=True):
                d_grid[span] = d_chunk.transpose(1, 2)
        return RecurrenceInputs(*map(call.chunks.from_chunks, d_grids)), grads.d_initial()


class _ChunkedCall:
    """The chunks of one operation, processed in blocks that fit in the cache."""

    def __init__(self, recurrence: DeltaRecurrence, prepared: PreparedDeltaRule) -> None:
        inputs = prepared.inputs
        self.chunks: Chunks = Chunks.of(prepared.sequences, recurrence.chunk_size)
        self.grids = RecurrenceInputs(*map(self.chunks.to_chunks, inputs))
        self.dtype = accumulation_dtype(inputs.value.dtype)
        self.heads = inputs.value.shape[1]
        scale = recurrence.scale
        self.scale = inputs.key.shape[-1] ** -0.5 if scale is None else scale
        self._inverse = prepared.inverse

    def blocks(self) -> list[slice]:
        """Return the slice of chunks of each block."""
        count, width = self.chunks.count, max(self.chunks.size, *self.grids.value.shape[-1:])
        step = max(1, ELEMENTS_IN_CACHE // (self.heads * self.chunks.size * width))
        if self.grids.value.device.type != "cpu":
            step = max(1, count)
        return [slice(i, min(i + step, count)) for i in range(0, count, step)]

    def block(self, span: slice, inverse: torch.Tensor | None = None) -> DeltaRuleChunks:
        """Return the terms of the chunks `span`; T is written to `inverse`."""
        return DeltaRuleChunks(
            RecurrenceInputs(*(grid[span] for grid in self.grids)),
            scale=self.scale,
            dtype=self.dtype,
            inverse=inverse if self._inverse is None else self._inverse[span],
            is_solved=self._inverse is not None,
        )

    def states_or_zeros(self, states: torch.Tensor | None) -> torch.Tensor:
        """Return states [N, H, K, V] in the accumulation dtype; zeros if None."""
        if states is not None:
            return states.to(self.dtype)
        key, value = self.grids.key, self.grids.value
        shape = (self.chunks.sequence_count, self.heads, key.shape[-1], value.shape[-1])
        return value.new_zeros((), dtype=self.dtype).expand(shape)
