# SPDX-License-Identifier: Apache-2.0
"""State-space duality: a state per head that fades, to which tokens add, and that is read.

In plain torch, the definition and the CPU's path, it goes chunk by chunk.

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

A block is as many chunks as keep the few buffers that a pass needs in a core's cache; the buffers
are used again by the next block. Shapes are those of m chunks: [m, C, G, r, V] lies token by token,
[m, G, r, C, ...] head by head, and [m, G, C, r · V] group by group, where the heads of a group are
columns of one product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch

from megatron.core.ops.backend_choice import accumulation_dtype, apply_function, choose
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

__all__ = ["add_skip", "state_space_dual", "state_space_recurrence", "state_space_step"]


def state_space_recurrence(
    chunk_size: int = CHUNK_SIZE, *, implementation: str | None = None
) -> Recurrence:
    """Return state-space duality as the local operations of a recurrence.

    Args:
        chunk_size: tokens that are worked out at once.
        implementation: "reference", "triton" or None (by device and sizes).

    Raises:
        ValueError: an empty chunk.
    """
    if chunk_size < 1:
        raise ValueError(f"state_space_dual: chunk_size {chunk_size}: use 1 or more")
    return ByDevice(
        op="state_space_dual",
        reference=StateSpaceDual(chunk_size),
        kept=PreparedStateSpace,
        corrects=False,
        scale=1.0,
        chunk_size=chunk_size,
        implementation=implementation,
    )


def state_space_dual(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    dt: torch.Tensor,
    *,
    sequences: Sequences,
    initial: torch.Tensor | None = None,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence of Mamba-2 over sequences (Dao & Gu 2024, arXiv 2405.21060, section 6).

    Per head, with state S [K, V], token after token:
    S <- exp(decay) S + dt key value^T;  out = S^T query.
    In its words query is C, key is B, value is x, decay is dt A. Group g serves heads
    g r ... g r + r - 1, r = H / G.

    Args:
        query, key: [t, G, K].
        value: [t, H, V].
        decay: [t, H], logarithms, at most 0; fp32 or wider.
        dt: [t, H], how much of a token the state takes.
        sequences: where they begin and end.
        initial: [N, H, K, V], the first states; None is zeros.
        implementation: "reference", "triton" or None (by device and sizes).

    Returns:
        (out [t, H, V] in value's dtype, last states [N, H, K, V] in fp32, or fp64 of fp64).

    Raises:
        ValueError: shapes or dtypes that do not fit, an implementation that cannot take them.
    """
    op = "state_space_dual"
    inputs = RecurrenceInputs(query, key, value, decay, dt)
    require_sequences(op, sequences)
    sequences.check(op, query=query, key=key, value=value, decay=decay, dt=dt)
    check_inputs(op, inputs, strength="dt")
    check_initial(op, inputs, initial, count=sequences.count)
    recurrence = state_space_recurrence(implementation=implementation)
    return recur(recurrence, inputs, sequences, initial=initial)


@torch.no_grad()
def state_space_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    dt: torch.Tensor,
    *,
    state: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Run the recurrence of Mamba-2 for one more token of each row, in place; not differentiable.

    Args:
        query, key: [b, G, K].
        value: [b, H, V].
        decay, dt: [b, H].
        state: [slots, H, K, V], changed in the rows that `slots` names.
        slots: int64 [b], each row's state, none twice; -1 is a padding row: whatever it holds, its
            output is zero and no state is touched.

    Returns:
        out [b, H, V] in value's dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    op = "state_space_step"
    inputs = RecurrenceInputs(query, key, value, decay, dt)
    check_inputs(op, inputs, strength="dt")
    check_slots(op, inputs, state=state, slots=slots)
    return step(inputs, state=state, slots=slots)


def add_skip(
    out: torch.Tensor, x: torch.Tensor, skip: torch.Tensor, *, implementation: str | None = None
) -> torch.Tensor:
    """Return out + D x, which Mamba-2 adds to what is read from the state.

    Args:
        out, x: [t, H, V].
        skip: D [H].
        implementation: "reference", "triton" or None (by device).

    Returns:
        [t, H, V] in out's dtype.

    Raises:
        ValueError: shapes that do not fit, an implementation that cannot take them.
    """
    if x.ndim != 3 or out.shape != x.shape or skip.shape != x.shape[1:2]:
        raise ValueError(
            f"add_skip: out {tuple(out.shape)} and x {tuple(x.shape)} must be (tokens, heads, "
            f"features), skip {tuple(skip.shape)} a number for each head"
        )
    if choose(implementation, x, "add_skip") == "triton":
        from megatron.core.ops.state_space_dual.triton import AddSkip as Kernels

        return apply_function(Kernels, out, x, skip)
    return apply_function(AddSkip, out, x, skip)


# --- reference: plain torch

# Elements of one buffer of a block on a CPU: fewer stay in the cache, more save calls.
ELEMENTS_IN_CACHE = 1 << 19
# On other devices: 256 MB of fp32.
ELEMENTS_ELSEWHERE = 1 << 26


# Below e to these nothing counts, and denormal numbers would follow, on which a processor is slow.
_FLOORS = MappingProxyType({torch.float32: -70.0, torch.float64: -600.0})


def power(exponent: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return exp of exponents; as if those above 0 were 0, and 0 where it would be next to it."""
    floor = _FLOORS[exponent.dtype]
    found = torch.clamp(exponent, floor, 0.0, out=out).exp_()
    return torch.threshold_(found, 2 * math.exp(floor), 0.0)


class StateSpaceChunks(NamedTuple):
    """What a block reads.

    Args:
        value: [m, C, G, r, V].
        query, key: [m, G, C, K], in the accumulation dtype as all that follows.
        strength: dt [m, H, C].
        growth: exp(a) [m, H, C].
        left: exp(a_C - a) [m, H, C].
        rows, columns: [m, H, C, 4] and [m, H, 4, C], whose product is a_i - a_j.
        states: [m, G, K, r, V], before each chunk.
    """

    value: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    strength: torch.Tensor
    growth: torch.Tensor
    left: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    states: torch.Tensor


class Gradients(NamedTuple):
    """Where a block writes gradients.

    Args:
        value: [m, C, G, r, V].
        query, key: [m, G, C, K].
        strength: [m, H, C].
        sums: [m, H, C], of a from what reads the chunk's tokens or the state before it; in fp64,
            in which what no decay acts on cancels, when these are summed up.
        felt: [m, H, C], (x' · u): what all decays behind a token pull through the last state.
        kept: [m, H], exp(a_C) <S, dS>: what all decays of the chunk pull from the first to the
            last state.
    """

    value: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    strength: torch.Tensor
    sums: torch.Tensor
    felt: torch.Tensor
    kept: torch.Tensor

    def decay(self) -> torch.Tensor:
        """Return the gradient of decays [n, H, C].

        A decay acts on what its token and later ones read, on what earlier tokens leave behind, and
        on the state; each is summed up by itself.
        """
        found = self.sums.flip(-1).cumsum(-1).flip(-1).add_(self.kept[..., None])
        found[..., 1:] += self.felt[..., :-1].cumsum(-1)
        return found


class ChunkBuffers:
    """Buffers that blocks use one after another.

    Args:
        value: [m, C, G, r, V], of the largest block.
        count: buffers.
        dtype: of what is accumulated.
    """

    def __init__(self, value: torch.Tensor, count: int, dtype: torch.dtype) -> None:
        most = value.shape[0] * _elements(value)
        self._flat = torch.empty((count, most), dtype=dtype, device=value.device).unbind()
        self._wide: torch.Tensor | None = None

    def view(self, number: int, *shape: int) -> torch.Tensor:
        """Return buffer `number` in a shape."""
        return self._flat[number][: math.prod(shape)].view(shape)

    def wide(self, *shape: int) -> torch.Tensor:
        """Return one more buffer in a shape, in fp64."""
        if self._wide is None:
            self._wide = torch.empty_like(self._flat[0], dtype=torch.float64)
        return self._wide[: math.prod(shape)].view(shape)


def _elements(value: torch.Tensor) -> int:
    """Count what a chunk's widest buffer holds: a row of C or V for each token and head."""
    _, size, groups, shared, width = value.shape
    return size * groups * shared * max(size, width)


def blocks(
    buffers: int, dtype: torch.dtype, value: torch.Tensor, *others: torch.Tensor
) -> Iterator[tuple]:
    """Yield where each block is, a `ChunkBuffers` that all share, and the block's parts.

    Args:
        buffers: that the scratch has.
        dtype: of these.
        value: [n, C, G, r, V].
        others: [n, ...].
    """
    most = ELEMENTS_IN_CACHE if value.device.type == "cpu" else ELEMENTS_ELSEWHERE
    size = max(1, most // max(1, _elements(value)))
    scratch = ChunkBuffers(value[:size], buffers, dtype)
    for first in range(0, value.shape[0], size):
        block = slice(first, min(first + size, value.shape[0]))
        yield block, scratch, *(x[block] for x in (value, *others))


def by_group(
    x: torch.Tensor, scale: torch.Tensor, scratch: ChunkBuffers, buffer: int
) -> torch.Tensor:
    """Return x [m, C, G, r, V] times scale [m, H, C] as [m, G, C, r, V], in a buffer."""
    m, size, groups, shared, width = x.shape
    scale = scale.view(m, groups, shared, size, 1).transpose(2, 3)
    out = scratch.view(buffer, m, groups, size, shared, width)
    return torch.mul(x.transpose(1, 2), scale, out=out)


def written(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return Kᵀ x [m, G, K, r, V], what x [m, G, C, r, V] adds to states by keys [m, G, C, K]."""
    found = torch.bmm(_flat(key).mT, _columns(x))
    return found.view(*key.shape[:2], key.shape[-1], *x.shape[3:])


def read(block: StateSpaceChunks, scratch: ChunkBuffers, out: torch.Tensor) -> None:
    """Write P x' + exp(a) Q S to `out` [m, C, G, r, V]; `scratch` has three buffers."""
    m, size, groups, shared, width = block.value.shape
    heads = (m, groups, shared, size)
    seen = _falls(block, scratch, 0).mul_(_scores(block))
    x = _written(block, scratch, 1)
    within = scratch.view(2, *heads, width)
    torch.bmm(seen.flatten(0, 2), x.flatten(0, 2), out=within.flatten(0, 2))
    before = _products(block.query, block.states, scratch, 1)
    growth = _by_token(block.growth, groups)
    torch.addcmul(within.permute(0, 3, 1, 2, 4), before.transpose(1, 2), growth, out=out)


def differentiate(
    block: StateSpaceChunks,
    scratch: ChunkBuffers,
    *,
    grad: torch.Tensor,
    ends: torch.Tensor,
    found: Gradients,
) -> None:
    """Write the gradients of what a block reads.

    Args:
        block: what it reads.
        scratch: of five buffers, the last with exp(a) dO [m, G, C, r, V].
        grad: dO [m, C, G, r, V].
        ends: dS [m, G, K, r, V], of the states behind the chunks.
        found: where they go.
    """
    within = _differentiate_within(block, scratch, grad, found)
    _differentiate_behind(block, scratch, ends=ends, within=within, found=found)
    pulled = scratch.view(4, *block.query.shape[:3], *block.value.shape[3:])
    _flat(found.query).baddbmm_(_columns(pulled), _columns(block.states).mT)
    before = _products(block.query, block.states, scratch, 1)
    found.sums.add_(torch.linalg.vecdot(before, pulled).transpose(2, 3).flatten(1, 2))
    kept = (block.states * ends).sum((2, 4)).flatten(1)  # [m, H]
    torch.mul(kept, block.growth[..., -1], out=found.kept)


def _differentiate_within(
    block: StateSpaceChunks, scratch: ChunkBuffers, grad: torch.Tensor, found: Gradients
) -> torch.Tensor:
    """Pull back P x'; return its part of dx' [m, C, G, r, V], in buffer 3."""
    m, size, groups, shared, width = block.value.shape
    heads = (m, groups, shared, size)
    scores, falls = _scores(block), _falls(block, scratch, 0)
    x = _written(block, scratch, 1)
    pull = scratch.view(2, *heads, width).copy_(grad.permute(0, 2, 3, 1, 4))
    weights = scratch.view(3, *heads, size)
    torch.bmm(pull.flatten(0, 2), x.flatten(0, 2).mT, out=weights.flatten(0, 2))
    weights.mul_(falls)
    total = weights.sum(2).flatten(0, 1)  # Z: the heads of a group share its scores
    torch.bmm(total, _flat(block.key), out=_flat(found.query))
    torch.bmm(total.mT, _flat(block.query), out=_flat(found.key))
    weights.mul_(scores).diagonal(0, -2, -1).zero_()
    wide = scratch.wide(*weights.shape).copy_(weights)
    torch.sub(wide.sum(-1).flatten(1, 2), wide.sum(-2).flatten(1, 2), out=found.sums)
    seen, within = falls.mul_(scores), scratch.view(3, *heads, width)
    torch.bmm(seen.flatten(0, 2).mT, pull.flatten(0, 2), out=within.flatten(0, 2))
    return within.permute(0, 3, 1, 2, 4)


def _differentiate_behind(
    block: StateSpaceChunks,
    scratch: ChunkBuffers,
    *,
    ends: torch.Tensor,
    within: torch.Tensor,
    found: Gradients,
) -> None:
    """Pull back what tokens leave in the state behind the chunk, and gather dx'."""
    value, strength, groups = block.value, block.strength, block.value.shape[2]
    left, reach = block.left, strength * block.left
    behind = _products(block.key, ends, scratch, 0).transpose(1, 2)  # [m, C, G, r, V]
    product = scratch.view(1, *value.shape)
    along = _gates_by_head(torch.mul(value, behind, out=product).sum(-1))
    torch.mul(along, reach, out=found.felt)
    torch.mul(value, within, out=product)
    torch.addcmul(_gates_by_head(product.sum(-1)), along, left, out=found.strength)
    torch.mul(within, _by_token(strength, groups), out=product)
    torch.addcmul(product, behind, _by_token(reach, groups), out=found.value)
    wrote = by_group(value, reach, scratch, 1)
    _flat(found.key).baddbmm_(_columns(wrote), _columns(ends).mT)


def _scores(block: StateSpaceChunks) -> torch.Tensor:
    """Return Q Kᵀ [m, G, 1, C, C], which the heads of a group share."""
    return torch.bmm(_flat(block.query), _flat(block.key).mT).unflatten(
        0, (-1, block.query.shape[1], 1)
    )


def _falls(block: StateSpaceChunks, scratch: ChunkBuffers, buffer: int) -> torch.Tensor:
    """Return L [m, G, r, C, C]."""
    m, size, groups, shared, _ = block.value.shape
    falls = scratch.view(buffer, m, groups, shared, size, size)
    rows, columns = block.rows.flatten(0, 1), block.columns.flatten(0, 1)
    decay_differences(rows, columns, out=falls.flatten(0, 2))
    return power(falls, out=falls)


def _written(block: StateSpaceChunks, scratch: ChunkBuffers, buffer: int) -> torch.Tensor:
    """Return x' [m, G, r, C, V]."""
    m, size, groups, shared, width = block.value.shape
    out = scratch.view(buffer, m, groups, shared, size, width)
    strength = block.strength.view(m, groups, shared, size, 1)
    return torch.mul(block.value.permute(0, 2, 3, 1, 4), strength, out=out)


def _products(
    rows: torch.Tensor, states: torch.Tensor, scratch: ChunkBuffers, buffer: int
) -> torch.Tensor:
    """Return rows [m, G, C, K] times states [m, G, K, r, V] as [m, G, C, r, V]."""
    out = scratch.view(buffer, *rows.shape[:3], *states.shape[3:])
    torch.bmm(_flat(rows), _columns(states), out=_columns(out))
    return out


def _by_token(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Return x [m, H, C] as [m, C, G, r, 1]."""
    return x.unflatten(1, (groups, -1)).permute(0, 3, 1, 2)[..., None]


def _gates_by_head(x: torch.Tensor) -> torch.Tensor:
    """Return x [m, C, G, r] as [m, H, C]."""
    return x.flatten(2, 3).transpose(1, 2)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return [m, G, a, b] as [m · G, a, b], a batch of one product."""
    return x.flatten(0, 1)


def _columns(x: torch.Tensor) -> torch.Tensor:
    """Return [m, G, a, r, V] as [m · G, a, r · V]."""
    return x.flatten(0, 1).flatten(2, 3)


class AddSkip(torch.autograd.Function):
    """y = out + D x. dgrad: g to out, D g to x. wgrad: dD = sum of g x over tokens and channels.

    One pass forward; saves x and D.
    """

    @staticmethod
    def forward(ctx, out, x, skip):
        ctx.save_for_backward(x, skip)
        y = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        return torch.addcmul(out, x, skip[:, None], out=y)

    @staticmethod
    def backward(ctx, grad):
        x, skip = ctx.saved_tensors
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.mul(grad, skip[:, None], out=grad_x)
        wide = accumulation_dtype(grad.dtype)
        grad_skip = torch.linalg.vecdot(grad.to(wide), x.to(wide)).sum(0)
        return grad, grad_x, grad_skip.to(skip.dtype)


def step(inputs: RecurrenceInputs, *, state: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Change the states of `slots` by one token a row; return what is read from them.

    The host never waits. A padding row does what the first row with a slot does, and writes the
    same to the same place; where no row has a slot, all write back what was there.

    Args:
        inputs: [b, ...].
        state: [slots, H, K, V].
        slots: int64 [b]; -1 is a padding row.

    Returns:
        out [b, H, V] in value's dtype, zero in padding rows.
    """
    rows, heads, width = inputs.value.shape
    if not rows:
        return torch.zeros_like(inputs.value)
    wide = accumulation_dtype(inputs.value.dtype)
    alive = slots >= 0
    source = torch.where(
        alive, torch.arange(rows, device=slots.device), alive.to(torch.uint8).argmax()
    )
    query, key, value, decay, dt = (x.index_select(0, source).to(wide) for x in inputs)
    place = slots.index_select(0, source).clamp_(min=0)
    old = state.index_select(0, place)
    groups, shared = key.shape[1], heads // key.shape[1]
    shape = (rows, groups, shared, -1, width)  # [b, G, r, K, V]
    written = key[:, :, None, :, None] * (value * dt[..., None]).view(
        rows, groups, shared, 1, width
    )
    new = written.addcmul_(old.to(wide).view(shape), decay.exp().view(rows, groups, shared, 1, 1))
    out = (query[:, :, None, None] @ new).view(rows, heads, width).to(inputs.value.dtype)
    new = new.view_as(old).to(state.dtype)
    state.index_copy_(0, place, torch.where(alive.any(), new, old))
    return torch.where(alive[:, None, None], out, 0)


@dataclass
class PreparedStateSpace:
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
        grid = self.chunks.to_chunks(x).to(self.dtype).transpose(1, 2)
        # The one group of a chunk is a view; several lie far apart.
        return grid if self.groups == 1 else grid.contiguous()

    def by_token(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, C, G, r, V] from x [t, H, V]."""
        return self.chunks.to_chunks(x).unflatten(2, (self.groups, -1))

    @property
    def left(self) -> torch.Tensor:
        """exp(a_C - a) [n, H, C], how much of a token is left behind the chunk."""
        return power((self.sums[..., -1:] - self.sums).to(self.dtype))

    @property
    def growth(self) -> torch.Tensor:
        """exp(a) [n, H, C]."""
        return power(self.sums.to(self.dtype))

    def read(self) -> tuple[torch.Tensor, ...]:
        """Return what all chunks read, as `StateSpaceChunks` has it, without states."""
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

    def prepare(self, inputs: RecurrenceInputs, sequences: Sequences) -> PreparedStateSpace:
        """See `Recurrence`."""
        chunks = sequences.chunks(min(self.chunk_size, max(1, *sequences.lengths)))
        dtype = accumulation_dtype(inputs.value.dtype)
        sums = decay_sums(chunks.to_chunks(inputs.decay).transpose(1, 2))
        strength = chunks.to_chunks(inputs.strength).transpose(1, 2)
        strength = strength.to(dtype, memory_format=torch.contiguous_format)
        return PreparedStateSpace(inputs, chunks, sums, strength)

    def sweep(
        self,
        prepared: PreparedStateSpace,
        initial: torch.Tensor | None,
        *,
        keep_states: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Recurrence`."""
        del keep_states  # they are always kept
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
            read(StateSpaceChunks(*parts, states.starts[block]), scratch, target)
        prepared.states, prepared.local = states.starts, None
        return chunks.from_chunks(out.flatten(2, 3)), _by_head(states.last())

    def summary(self, prepared: PreparedStateSpace) -> tuple[torch.Tensor, torch.Tensor]:
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

    def state_gradient(self, prepared: PreparedStateSpace, grad: torch.Tensor) -> torch.Tensor:
        """See `Recurrence`."""
        query, prepared.grad = prepared.by_group(prepared.inputs.query), grad
        prepared.pulled = _added(query, prepared.by_token(grad), prepared.growth)
        grads = SweepBack(prepared.chunks, prepared.states_or_zeros(None))
        grads.through(slice(0, prepared.chunks.count), prepared.gain, prepared.pulled)
        return _by_head(grads.first())

    def backward(
        self, prepared: PreparedStateSpace, grad: torch.Tensor, grad_last: torch.Tensor | None
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
            read_by, pull, target = StateSpaceChunks(*part[:9]), part[9], Gradients(*part[10:])
            scaled = by_group(pull, growth[block], scratch, 4)
            added = written(read_by.query, scaled) if pulled is None else pulled[block]
            grads.through(block, gain[block], added)
            differentiate(read_by, scratch, grad=pull, ends=grads.ends[block], found=target)
        return RecurrenceInputs(
            _by_row(chunks, found.query, inputs.query.dtype),
            _by_row(chunks, found.key, inputs.key.dtype),
            chunks.from_chunks(found.value.flatten(2, 3)),
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
    return chunks.from_chunks(grid.transpose(1, 2).to(dtype))


def _by_group(states: torch.Tensor, groups: int) -> torch.Tensor:
    """Return [N, G, K, r, V] from states [N, H, K, V]."""
    return states.unflatten(1, (groups, -1)).transpose(2, 3)


def _by_head(states: torch.Tensor) -> torch.Tensor:
    """Return [N, H, K, V] from states [N, G, K, r, V]."""
    return states.transpose(2, 3).flatten(1, 2)
