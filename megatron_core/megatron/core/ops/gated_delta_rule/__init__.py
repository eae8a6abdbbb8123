# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule: a state per head that fades, is corrected by each token, and is read.

In plain torch, the definition and the CPU's path, it goes chunk by chunk.

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

import math
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch

from megatron.core.ops.backend_choice import accumulation_dtype
from megatron.core.ops.recurrence import (
    CHUNK_SIZE,
    Recurrence,
    RecurrenceInputs,
    Sweep,
    SweepBack,
    check_initial,
    check_inputs,
    check_slots,
    decay_differences,
    decay_sums,
    in_two_parts,
    recur,
    without_clamped,
)
from megatron.core.ops.recurrence_by_device import ByDevice
from megatron.core.ops.sequences import Chunks, Sequences, require_sequences

__all__ = ["delta_recurrence", "gated_delta_rule", "gated_delta_step"]


def delta_recurrence(
    scale: float | None = None, chunk_size: int = CHUNK_SIZE, *, implementation: str | None = None
) -> Recurrence:
    """Return the gated delta rule as the local operations of a recurrence.

    Args:
        scale: of queries; None is K^-0.5.
        chunk_size: tokens that are worked out at once.
        implementation: "reference", "triton" or None (by device and sizes).

    Raises:
        ValueError: an empty chunk.
    """
    if chunk_size < 1:
        raise ValueError(f"gated_delta_rule: chunk_size {chunk_size}: use 1 or more")
    return ByDevice(
        op="gated_delta_rule",
        reference=DeltaRecurrence(scale, chunk_size),
        kept=PreparedDeltaRule,
        corrects=True,
        scale=scale,
        chunk_size=chunk_size,
        implementation=implementation,
    )


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    sequences: Sequences,
    initial: torch.Tensor | None = None,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the gated delta rule over sequences (Yang et al. 2024, arXiv 2412.06464, equation 10).

    Per value head, with state S [K, V], token after token:
    S <- exp(decay) S;  S <- S + key (beta (value - S^T key))^T;  out = S^T query / sqrt(K).
    Key head h serves value heads h r ... h r + r - 1, r = Hv / Hk. For another scale
    `recur` over a `delta_recurrence`.

    Args:
        query, key: [t, Hk, K], of length 1 (`l2norm`).
        value: [t, Hv, V].
        decay: [t, Hv], logarithms, at most 0; fp32 or wider.
        beta: [t, Hv], from 0 to 1.
        sequences: where they begin and end.
        initial: [N, Hv, K, V], the first states; None is zeros.
        implementation: "reference", "triton" or None (by device and sizes).

    Returns:
        (out [t, Hv, V] in value's dtype, last states [N, Hv, K, V] in fp32, or fp64 of fp64).

    Raises:
        ValueError: shapes or dtypes that do not fit, an implementation that cannot take them.
    """
    op = "gated_delta_rule"
    inputs = RecurrenceInputs(query, key, value, decay, beta)
    require_sequences(op, sequences)
    sequences.check(op, query=query, key=key, value=value, decay=decay, beta=beta)
    check_inputs(op, inputs, strength="beta")
    check_initial(op, inputs, initial, count=sequences.count)
    recurrence = delta_recurrence(implementation=implementation)
    return recur(recurrence, inputs, sequences, initial=initial)


@torch.no_grad()
def gated_delta_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    state: torch.Tensor,
    slots: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Run the gated delta rule for one more token of each row, in place; not differentiable.

    Args:
        query, key: [b, Hk, K], of length 1.
        value: [b, Hv, V].
        decay, beta: [b, Hv].
        state: [slots, Hv, K, V], changed in the rows that `slots` names.
        slots: int64 [b], each row's state, none twice; -1 is a padding row: whatever it holds, its
            output is zero and no state is touched.
        scale: of queries; None is K^-0.5.

    Returns:
        out [b, Hv, V] in value's dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    op = "gated_delta_step"
    inputs = RecurrenceInputs(query, key, value, decay, beta)
    check_inputs(op, inputs, strength="beta")
    check_slots(op, inputs, state=state, slots=slots)
    if scale is not None and not scale > 0:
        raise ValueError(f"{op}: scale {scale}: use more than 0, or None")
    return step(inputs, state=state, slots=slots, scale=scale)


# --- reference: plain torch

# What has faded below this is nothing beside the rounding of what has not. Products of two such
# numbers would be denormal, which processors multiply a hundred times slower.
SMALLEST_EXPONENT = MappingProxyType({torch.float32: -40.0, torch.float64: -300.0})


class DeltaRuleChunks:
    """m chunks of C tokens, each part made at first use; H = G · r heads of values.

    Args:
        grids: the inputs of these chunks, [m, C, ...], zero where a sequence has ended.
        scale: of queries.
        dtype: to compute in.
        inverse: T [m, H, C, C], or where to write it; None is new memory.
        is_solved: whether `inverse` is T already.
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
        self.shared, self.scale = self.heads // self.groups, scale
        # Queries above keys [m, G, 2C, K]: most products are with both.
        self.pair = grids.key.new_empty((count, self.groups, 2 * self.size, self.keys), dtype=dtype)
        self.query, self.key = self.pair.split(self.size, 2)
        self.query.copy_(grids.query.transpose(1, 2)).mul_(scale)  # widened, then scaled
        self.key.copy_(grids.key.transpose(1, 2))
        self.value = _heads(grids.value, dtype)  # [m, H, C, V]
        self.beta = _heads(grids.strength, dtype)  # [m, H, C]
        self.decay = grids.decay.transpose(1, 2)  # [m, H, C]
        total = decay_sums(self.decay)  # G; of few numbers
        self.total, self.growth = total, _power(total.to(dtype, copy=True))  # Γ
        self.left = _power((total[..., -1:] - total).to(dtype))  # e
        self._inverse, self._is_solved = inverse, is_solved

    def by_group(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [m, H, ...] as [m, G, r, ...]."""
        return x.unflatten(1, (self.groups, self.shared))

    def shared_by(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [m, G, a, b] for each head, [m, H, a, b]; a copy where heads share."""
        if self.shared == 1:
            return x
        return x.repeat_interleave(self.shared, 1)

    @cached_property
    def falls(self) -> torch.Tensor:
        """D [m, H, C, C]; masked before the exponential, which would be infinite above."""
        found = decay_differences(*in_two_parts(self.total.flatten(0, 1), self.beta.dtype))
        return _power(found).view(*self.beta.shape, self.size)

    @cached_property
    def raw(self) -> torch.Tensor:
        """[Q Kᵀ ; K Kᵀ] [m, G, 2C, C]."""
        return product(self.pair, self.key.mT)

    @cached_property
    def seen(self) -> torch.Tensor:
        """P = Q Kᵀ ∘ D [m, H, C, C]."""
        return (self.raw[:, :, None, : self.size] * self.by_group(self.falls)).flatten(1, 2)

    @cached_property
    def inverse(self) -> torch.Tensor:
        """T [m, H, C, C]."""
        if self._is_solved:
            return self._inverse
        beta = self.by_group(self.beta)[..., None]
        lower = (self.raw[:, :, None, self.size :] * beta).flatten(1, 2)
        identity = torch.eye(self.size, dtype=lower.dtype, device=lower.device)
        # Of `lower` only what is below the diagonal is read.
        return torch.linalg.solve_triangular(
            lower,
            identity.expand_as(lower),
            upper=False,
            unitriangular=True,
            out=self._inverse,
        )

    @cached_property
    def faded_inverse(self) -> torch.Tensor:
        """T ∘ D [m, H, C, C]."""
        return self.inverse * self.falls

    @cached_property
    def given(self) -> torch.Tensor:
        """U [m, H, C, V]."""
        return product(self.faded_inverse, self.value * self.beta[..., None])

    @cached_property
    def returned(self) -> torch.Tensor:
        """-W [m, H, C, K]."""
        factor = self.by_group(self.beta.neg())[..., None]
        return product(self.inverse, (self.key[:, :, None] * factor).flatten(1, 2))

    @cached_property
    def written(self) -> torch.Tensor:
        """E K [m, H, C, K]."""
        return (self.key[:, :, None] * self.by_group(self.left)[..., None]).flatten(1, 2)

    @cached_property
    def added(self) -> torch.Tensor:
        """X [m, H, K, V]."""
        return product(self.written.mT, self.given)

    @cached_property
    def transition(self) -> torch.Tensor:
        """M [m, H, K, K]."""
        found = product(self.shared_by(self.key).mT, self.returned)
        found.diagonal(0, -2, -1).add_(1.0)
        return found.mul_(self.growth[..., -1:, None])

    @cached_property
    def readers(self) -> torch.Tensor:
        """Γ (Q - tril(Q Kᵀ) W) [m, H, C, K]."""
        found = product(self.shared_by(self.raw[:, :, : self.size].tril()), self.returned)
        self.by_group(found).add_(self.query[:, :, None])
        return found.mul_(self.growth[..., None])

    def out(self, starts: torch.Tensor) -> torch.Tensor:
        """Return O [m, H, C, V] from the states before the chunks."""
        return add_product_(product(self.seen, self.given), self.readers, starts)

    def gradients(
        self, pulls: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
    ) -> RecurrenceInputs:
        """Return the gradients of the inputs, head by head [m, H or G, C, ...].

        Args:
            pulls: [m, H, 2C, V], dO above; below is room for x.
            starts: the states before the chunks.
            ends: the gradients of those behind them.
        """
        size, beta = self.size, self.beta[..., None]
        returned = self.returned * self.growth[..., None]
        changes = add_product_(self.given, returned, starts)  # V'
        grad, x = pulls.split(size, 2)
        pulled = add_product_(product(self.seen.mT, grad), self.written, ends)  # dV'
        x.copy_(product(self.faded_inverse.mT, pulled))
        reads = product(pulls, starts.mT)  # of states
        reads.unflatten(2, (2, size)).mul_(self.growth[:, :, None, :, None])
        along = torch.linalg.vecdot(self.by_group(reads), self.pair[:, :, None]).flatten(1, 2)
        along_query, along_key = along.split(size, -1)
        within = product(pulls, changes.mT)  # [Z ; N]
        halves = within.unflatten(2, (2, size)).mul_(self.falls[:, :, None])
        halves[:, :, 1].diagonal(0, -2, -1).zero_()
        pairs = (self.by_group(within) * self.raw[:, :, None]).flatten(1, 2)
        grad_beta = (
            torch.linalg.vecdot(x, self.value).sub_(along_key).sub_(pairs[:, :, size:].sum(-1))
        )
        # The heads of a group stand above each other.
        rows = reads.view(-1, self.shared * 2 * size, self.keys)
        rows.baddbmm_(within.view(*rows.shape[:2], size), self.key.flatten(0, 1))
        grad_query, faded = reads.split(size, 2)  # dQ, f
        written = product(changes, ends.mT).mul_(self.left[..., None])  # e V' dSᵀ
        left = torch.linalg.vecdot(written, self.shared_by(self.key))
        grad_decay = self._decay_gradient(along_query - along_key * self.beta, pairs, left)
        grad_decay += (
            torch.linalg.vecdot(starts, ends).sum(-1).mul_(self.growth[..., -1])[..., None]
        )
        within[:, :, size:].mul_(beta.neg())
        add_product_(written, within.mT, self.shared_by(self.pair))  # w
        grad_key = written.addcmul_(faded, beta, value=-1)
        if self.shared > 1:
            grad_query, grad_key = (self.by_group(y).sum(2) for y in (grad_query, grad_key))
        return RecurrenceInputs(
            query=grad_query * self.scale,
            key=grad_key,
            value=x * beta,
            decay=without_clamped(grad_decay, self.decay),
            strength=grad_beta,
        )

    def _decay_gradient(
        self, reads: torch.Tensor, pairs: torch.Tensor, left: torch.Tensor
    ) -> torch.Tensor:
        """Return what decays between tokens, the first state and the last state contribute.

        Only terms that a decay acts on are added up, each once: a difference of larger sums would
        leave their rounding, which is more than the gradient of a strong decay.

        Args:
            reads: [m, H, C], of token i reading the first state: acted on by decays up to i.
            pairs: [m, H, 2C, C], of i reading what j wrote, by queries and keys: those from j + 1
                to i. It is overwritten.
            left: [m, H, C], of what j wrote and is left at the end: those from j + 1 on.
        """
        by_query, by_key = pairs.split(self.size, 2)
        by_query.addcmul_(by_key, self.beta[..., None], value=-1)  # [i, j]
        behind = by_query.new_ones((self.size, self.size)).triu_()  # [t, i]: i >= t
        flat = by_query.flatten(0, 1)
        over = torch.bmm(behind.expand(flat.shape), flat)  # [t, j]
        over.mul_(behind.new_ones(behind.shape).tril_(-1))  # j < t
        found = over.sum(-1).view(reads.shape).add_(reads.flip(-1).cumsum(-1).flip(-1))
        found[..., 1:] += left.cumsum(-1)[..., :-1]
        return found


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply [m, H, a, b] by [m, H, b, c] in one batch, without copies."""
    found = torch.bmm(*_flat(left, right))
    return found.view(*left.shape[:2], *found.shape[1:])


def add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add the product of two batches of matrices to a third in place; return it."""
    total.flatten(0, 1).baddbmm_(*_flat(left, right))
    return total


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """Return exp of exponents at most 0, in place; zero from `SMALLEST_EXPONENT` on.

    Exponentials of -inf, or that are denormal, take ten to two hundred times as long as others.
    """
    floor = SMALLEST_EXPONENT[exponent.dtype]
    return torch.threshold_(exponent.clamp_(min=floor).exp_(), 2 * math.exp(floor), 0.0)


def _flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.flatten(0, 1) for tensor in tensors]


def _heads(grid: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [m, H, C, ...] from [m, C, H, ...] in one copy."""
    grid = grid.transpose(1, 2)
    return grid.new_empty(grid.shape, dtype=dtype).copy_(grid)


def step(
    inputs: RecurrenceInputs, *, state: torch.Tensor, slots: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Change the states of `slots` by one token a row; return what is read from them.

    The host never waits. A padding row works on a copy of nothing, and writes what the first row
    with a slot writes, to the same place.

    Args:
        inputs: [b, ...].
        state: [slots, Hv, K, V].
        slots: int64 [b]; -1 is a padding row.
        scale: of queries; None is K^-0.5.

    Returns:
        out [b, Hv, V] in value's dtype, zero in padding rows.
    """
    query, key, value, decay, beta = inputs
    if not value.shape[0]:
        return torch.zeros_like(value)
    wide = accumulation_dtype(value.dtype)
    shared = value.shape[1] // key.shape[1]
    query, key = (x.to(wide).repeat_interleave(shared, 1).unsqueeze(2) for x in (query, key))
    query = query * (key.shape[-1] ** -0.5 if scale is None else scale)  # [b, Hv, 1, K]
    alive = slots >= 0
    first = alive.to(torch.uint8).argmax()  # 0 if there is none
    row = torch.arange(slots.shape[0], device=slots.device)
    source = torch.where(alive, row, first)
    place = slots.index_select(0, source).clamp_(min=0)
    old = state.index_select(0, place)
    kept = old.to(wide) * decay.to(wide).exp()[..., None, None].index_select(0, source)
    key = key.index_select(0, source)
    delta = value.to(wide).index_select(0, source).unsqueeze(2) - key @ kept  # [b, Hv, 1, V]
    delta = delta * beta.to(wide)[..., None, None].index_select(0, source)
    new = torch.addcmul(kept, key.mT, delta)
    out = (query.index_select(0, source) @ new).squeeze(2).to(value.dtype)
    state[place] = torch.where(alive.any(), new.to(state.dtype), old)
    return torch.where(alive[:, None, None], out, 0)


# Elements of one part of a block, e.g. its values: so many that products keep all threads busy, so
# few that the twenty or so parts of the next block find their memory in place.
ELEMENTS_IN_CACHE = 1 << 20


@dataclass
class PreparedDeltaRule:
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
    chunk_size: int = CHUNK_SIZE

    def prepare(self, inputs: RecurrenceInputs, sequences: Sequences) -> PreparedDeltaRule:
        """See `Recurrence`; everything waits for the sweep, to go through a cache once."""
        return PreparedDeltaRule(inputs, sequences)

    def sweep(
        self,
        prepared: PreparedDeltaRule,
        initial: torch.Tensor | None,
        *,
        keep_states: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Recurrence`."""
        del keep_states  # they are always kept
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
        return work.chunks.from_chunks(out), states.last()

    def summary(self, prepared: PreparedDeltaRule) -> tuple[torch.Tensor, torch.Tensor]:
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

    def state_gradient(self, prepared: PreparedDeltaRule, grad: torch.Tensor) -> torch.Tensor:
        """See `Recurrence`."""
        work = _Work(self, prepared)
        grids = work.chunks.to_chunks(grad).transpose(1, 2)  # [n, H, C, V]
        grads = SweepBack(work.chunks, work.states_or_zeros(None))
        for where in reversed(work.blocks()):
            block = work.block(where)
            pulled = product(block.readers.mT, grids[where].to(work.dtype))
            grads.through(where, block.transition, pulled)
        return grads.first()

    def backward(
        self, prepared: PreparedDeltaRule, grad: torch.Tensor, grad_last: torch.Tensor | None
    ) -> tuple[RecurrenceInputs, torch.Tensor]:
        """See `Recurrence`."""
        work = _Work(self, prepared)
        grids = work.chunks.to_chunks(grad).transpose(1, 2)  # [n, H, C, V]
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
        return RecurrenceInputs(*map(work.chunks.from_chunks, found)), grads.first()


class _Work:
    """The chunks of one operation, and how they are cut in blocks."""

    def __init__(self, recurrence: DeltaRecurrence, prepared: PreparedDeltaRule) -> None:
        inputs = prepared.inputs
        self.chunks: Chunks = prepared.sequences.chunks(recurrence.chunk_size)
        self.grids = RecurrenceInputs(*map(self.chunks.to_chunks, inputs))
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

    def block(self, where: slice, inverse: torch.Tensor | None = None) -> DeltaRuleChunks:
        """Return the block of some chunks; its T goes to `inverse`."""
        return DeltaRuleChunks(
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
