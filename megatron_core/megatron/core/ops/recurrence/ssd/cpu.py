# SPDX-License-Identifier: Apache-2.0
"""State-space duality (SSD): a state per head, which each token decays, adds to and reads.

The plain torch version is the specification and the CPU path. It processes chunks of tokens.

Within a chunk of C tokens, with a_i the cumulative decay up to token i, L_ij = exp(a_i - a_j) for
i >= j else 0, and x' = dt · value (Dao & Gu 2024, arXiv 2405.21060, section 6):

    out = (Q Kᵀ ∘ L) x' + exp(a) Q S        S_next = exp(a_C) S + Kᵀ (exp(a_C - a) x')

All exponents are differences of cumulative decays that are at most 0, so no factor exceeds 1. The
r = H / G heads of a group share Q and K, so their states are columns of one matrix, [n, G, K, r,
V], and take one product. Backward, given dO and the gradients dS of the states after the chunks:

    W = dO x'ᵀ      P = Q Kᵀ ∘ L      Z = Σ_heads W ∘ L      u = exp(a_C - a) (K dS)
    dQ = Z K + Σ_heads (exp(a) dO) Sᵀ           dK = Zᵀ Q + Σ_heads (exp(a_C - a) x') dSᵀ
    dx' = Pᵀ dO + u            dvalue = dt dx'            ddt = value · dx'
    ddecay_j = Σ_{i >= j} (rowsum - colsum of W ∘ P without its diagonal, + dO · exp(a) Q S)_i
               + Σ_{i < j} (x' · u)_i + exp(a_C) <S, dS>

The last sums leave out the terms that cancel (the diagonal, and a token's undecayed write): under a
strong decay their rounding error would exceed the result.

A block has as many chunks as its buffers allow in a core's cache; the next block reuses the
buffers. Shapes of a block of m chunks are [m, C, G, r, V] by token, [m, G, r, C, ...] by head, and
[m, G, C, r · V] by group, where the heads of a group are columns of one product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

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
from megatron.core.ops.recurrence.interface import RecurrenceInputs
from megatron.core.ops.sequences import Sequences

# Elements of one buffer of a block on a CPU: fewer stay in the cache, more save calls.
ELEMENTS_IN_CACHE = 1 << 19
# Elements on other devices: 256 MB in fp32.
ELEMENTS_ELSEWHERE = 1 << 26


# Exponents below these give 0: smaller factors vanish in rounding errors, and a CPU is slow on the
# denormal numbers that would follow.
_FLOORS = MappingProxyType({torch.float32: -70.0, torch.float64: -600.0})


def power(exponent: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return exp of exponents clamped to at most 0; 0 below the floor of their dtype."""
    floor = _FLOORS[exponent.dtype]
    powers = torch.clamp(exponent, floor, 0.0, out=out).exp_()
    return torch.threshold_(powers, 2 * math.exp(floor), 0.0)


class StateSpaceChunks(NamedTuple):
    """The inputs of a block of m chunks; all but `value` in the accumulation dtype.

    Args:
        value: [m, C, G, r, V].
        query, key: [m, G, C, K].
        dt: [m, H, C].
        decay_from_start: exp(a) [m, H, C].
        decay_to_end: exp(a_C - a) [m, H, C].
        rows, columns: [m, H, C, 4] and [m, H, 4, C], whose product is a_i - a_j.
        states: [m, G, K, r, V], the state before each chunk.
    """

    value: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    dt: torch.Tensor
    decay_from_start: torch.Tensor
    decay_to_end: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    states: torch.Tensor


class Gradients(NamedTuple):
    """The gradients of a block, as buffers to write.

    Args:
        value: [m, C, G, r, V].
        query, key: [m, G, C, K].
        dt: [m, H, C].
        d_cumsum: [m, H, C], gradient of a from the outputs of the chunk; in fp64, so that the terms
            that no decay scales cancel exactly in its sums.
        d_to_end: [m, H, C], x' · u: gradient of each decay after a token, through the final state.
        d_chunk_decay: [m, H], exp(a_C) <S, dS>: gradient of each decay of the chunk, from the
            initial to the final state.
    """

    value: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    dt: torch.Tensor
    d_cumsum: torch.Tensor
    d_to_end: torch.Tensor
    d_chunk_decay: torch.Tensor

    def decay(self) -> torch.Tensor:
        """Return the gradient of decays [n, H, C].

        A decay scales the reads of its token and later tokens, the writes of earlier tokens to the
        final state, and the state; the three terms are summed separately.
        """
        d_decay = self.d_cumsum.flip(-1).cumsum(-1).flip(-1).add_(self.d_chunk_decay[..., None])
        d_decay[..., 1:] += self.d_to_end[..., :-1].cumsum(-1)
        return d_decay


class ChunkBuffers:
    """Scratch buffers that consecutive blocks reuse.

    Args:
        value: [m, C, G, r, V], values of the largest block.
        count: number of buffers.
        dtype: the accumulation dtype.
    """

    def __init__(self, value: torch.Tensor, count: int, dtype: torch.dtype) -> None:
        elements = value.shape[0] * _elements(value)
        self._flat = torch.empty((count, elements), dtype=dtype, device=value.device).unbind()
        self._fp64: torch.Tensor | None = None

    def view(self, index: int, *shape: int) -> torch.Tensor:
        """Return a view of buffer `index` with a shape."""
        return self._flat[index][: math.prod(shape)].view(shape)

    def fp64_view(self, *shape: int) -> torch.Tensor:
        """Return a view with a shape of one more buffer, in fp64."""
        if self._fp64 is None:
            self._fp64 = torch.empty_like(self._flat[0], dtype=torch.float64)
        return self._fp64[: math.prod(shape)].view(shape)


def _elements(value: torch.Tensor) -> int:
    """Return the elements of a chunk's largest buffer: a row of C or V for each token and head."""
    _, size, groups, group_heads, value_size = value.shape
    return size * groups * group_heads * max(size, value_size)


def blocks(
    buffers: int, dtype: torch.dtype, value: torch.Tensor, *tensors: torch.Tensor
) -> Iterator[tuple]:
    """Yield (slice of chunks, shared `ChunkBuffers`, slice of value, slices of tensors) per block.

    Args:
        buffers: number of scratch buffers.
        dtype: the dtype of the buffers.
        value: [n, C, G, r, V].
        tensors: [n, ...].
    """
    elements = ELEMENTS_IN_CACHE if value.device.type == "cpu" else ELEMENTS_ELSEWHERE
    size = max(1, elements // max(1, _elements(value)))
    scratch = ChunkBuffers(value[:size], buffers, dtype)
    for start in range(0, value.shape[0], size):
        block = slice(start, min(start + size, value.shape[0]))
        yield block, scratch, *(x[block] for x in (value, *tensors))


def by_group(
    x: torch.Tensor, scale: torch.Tensor, scratch: ChunkBuffers, buffer: int
) -> torch.Tensor:
    """Return x [m, C, G, r, V] times scale [m, H, C] as [m, G, C, r, V], in a buffer."""
    m, size, groups, group_heads, value_size = x.shape
    scale = scale.view(m, groups, group_heads, size, 1).transpose(2, 3)
    out = scratch.view(buffer, m, groups, size, group_heads, value_size)
    return torch.mul(x.transpose(1, 2), scale, out=out)


def state_addend(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return Kᵀ x [m, G, K, r, V], the addend of states, from keys [m, G, C, K] and x [m, G, C, r,
    V]."""
    addend = torch.bmm(_flat(key).mT, _columns(x))
    return addend.view(*key.shape[:2], key.shape[-1], *x.shape[3:])


def chunk_output(block: StateSpaceChunks, scratch: ChunkBuffers, out: torch.Tensor) -> None:
    """Write P x' + exp(a) Q S to `out` [m, C, G, r, V]; uses three buffers of `scratch`."""
    m, size, groups, group_heads, value_size = block.value.shape
    heads = (m, groups, group_heads, size)
    scores = _decay_mask(block, scratch, 0).mul_(_scores(block))
    x = _weighted_values(block, scratch, 1)
    chunk_out = scratch.view(2, *heads, value_size)
    torch.bmm(scores.flatten(0, 2), x.flatten(0, 2), out=chunk_out.flatten(0, 2))
    state_out = _state_products(block.query, block.states, scratch, 1)
    decay_from_start = _by_token(block.decay_from_start, groups)
    torch.addcmul(
        chunk_out.permute(0, 3, 1, 2, 4), state_out.transpose(1, 2), decay_from_start, out=out
    )


def differentiate(
    block: StateSpaceChunks,
    scratch: ChunkBuffers,
    *,
    d_out: torch.Tensor,
    d_states_after: torch.Tensor,
    grads: Gradients,
) -> None:
    """Write the gradients of a block's inputs.

    Args:
        block: the inputs.
        scratch: five buffers; the last contains exp(a) dO [m, G, C, r, V].
        d_out: dO [m, C, G, r, V].
        d_states_after: dS [m, G, K, r, V], gradients of the states after the chunks.
        grads: the output buffers.
    """
    d_x = _differentiate_within(block, scratch, d_out, grads)
    _differentiate_final(block, scratch, d_states_after=d_states_after, d_x=d_x, grads=grads)
    d_out_decayed = scratch.view(4, *block.query.shape[:3], *block.value.shape[3:])
    _flat(grads.query).baddbmm_(_columns(d_out_decayed), _columns(block.states).mT)
    state_out = _state_products(block.query, block.states, scratch, 1)
    grads.d_cumsum.add_(torch.linalg.vecdot(state_out, d_out_decayed).transpose(2, 3).flatten(1, 2))
    state_dot = (block.states * d_states_after).sum((2, 4)).flatten(1)  # [m, H]
    torch.mul(state_dot, block.decay_from_start[..., -1], out=grads.d_chunk_decay)


def _differentiate_within(
    block: StateSpaceChunks, scratch: ChunkBuffers, d_out: torch.Tensor, grads: Gradients
) -> torch.Tensor:
    """Differentiate P x'; return its contribution Pᵀ dO to dx' [m, C, G, r, V], in buffer 3."""
    m, size, groups, group_heads, value_size = block.value.shape
    heads = (m, groups, group_heads, size)
    scores, decay_mask = _scores(block), _decay_mask(block, scratch, 0)
    x = _weighted_values(block, scratch, 1)
    d_out_heads = scratch.view(2, *heads, value_size).copy_(d_out.permute(0, 2, 3, 1, 4))
    d_scores = scratch.view(3, *heads, size)
    torch.bmm(d_out_heads.flatten(0, 2), x.flatten(0, 2).mT, out=d_scores.flatten(0, 2))
    d_scores.mul_(decay_mask)
    group_d_scores = d_scores.sum(2).flatten(0, 1)  # Z: the heads of a group share its scores
    torch.bmm(group_d_scores, _flat(block.key), out=_flat(grads.query))
    torch.bmm(group_d_scores.mT, _flat(block.query), out=_flat(grads.key))
    d_scores.mul_(scores).diagonal(0, -2, -1).zero_()
    in_fp64 = scratch.fp64_view(*d_scores.shape).copy_(d_scores)
    torch.sub(in_fp64.sum(-1).flatten(1, 2), in_fp64.sum(-2).flatten(1, 2), out=grads.d_cumsum)
    decayed_scores, d_x = decay_mask.mul_(scores), scratch.view(3, *heads, value_size)
    torch.bmm(decayed_scores.flatten(0, 2).mT, d_out_heads.flatten(0, 2), out=d_x.flatten(0, 2))
    return d_x.permute(0, 3, 1, 2, 4)


def _differentiate_final(
    block: StateSpaceChunks,
    scratch: ChunkBuffers,
    *,
    d_states_after: torch.Tensor,
    d_x: torch.Tensor,
    grads: Gradients,
) -> None:
    """Differentiate the writes to the state after the chunk, and sum dx'."""
    value, dt, groups = block.value, block.dt, block.value.shape[2]
    decay_to_end, dt_to_end = block.decay_to_end, dt * block.decay_to_end
    d_x_state = _state_products(block.key, d_states_after, scratch, 0).transpose(
        1, 2
    )  # [m, C, G, r, V]
    product = scratch.view(1, *value.shape)
    dots = _gates_by_head(torch.mul(value, d_x_state, out=product).sum(-1))
    torch.mul(dots, dt_to_end, out=grads.d_to_end)
    torch.mul(value, d_x, out=product)
    torch.addcmul(_gates_by_head(product.sum(-1)), dots, decay_to_end, out=grads.dt)
    torch.mul(d_x, _by_token(dt, groups), out=product)
    torch.addcmul(product, d_x_state, _by_token(dt_to_end, groups), out=grads.value)
    decayed_values = by_group(value, dt_to_end, scratch, 1)
    _flat(grads.key).baddbmm_(_columns(decayed_values), _columns(d_states_after).mT)


def _scores(block: StateSpaceChunks) -> torch.Tensor:
    """Return Q Kᵀ [m, G, 1, C, C], which the heads of a group share."""
    return torch.bmm(_flat(block.query), _flat(block.key).mT).unflatten(
        0, (-1, block.query.shape[1], 1)
    )


def _decay_mask(block: StateSpaceChunks, scratch: ChunkBuffers, buffer: int) -> torch.Tensor:
    """Return L [m, G, r, C, C]."""
    m, size, groups, group_heads, _ = block.value.shape
    decay_mask = scratch.view(buffer, m, groups, group_heads, size, size)
    rows, columns = block.rows.flatten(0, 1), block.columns.flatten(0, 1)
    decay_differences(rows, columns, out=decay_mask.flatten(0, 2))
    return power(decay_mask, out=decay_mask)


def _weighted_values(block: StateSpaceChunks, scratch: ChunkBuffers, buffer: int) -> torch.Tensor:
    """Return x' [m, G, r, C, V]."""
    m, size, groups, group_heads, width = block.value.shape
    out = scratch.view(buffer, m, groups, group_heads, size, width)
    dt = block.dt.view(m, groups, group_heads, size, 1)
    return torch.mul(block.value.permute(0, 2, 3, 1, 4), dt, out=out)


def _state_products(
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


@dataclass
class PreparedStateSpace:
    """State of a `StateSpaceDual` between its operations.

    Args:
        inputs: the inputs.
        chunks: the n chunks of the tokens.
        cumsum: cumulative decays a [n, H, C], in fp64.
        dt: [n, H, C], in the accumulation dtype.
        addends: [n, G, K, r, V], the write of each chunk to its final state; set by `summary`,
            freed by `sweep`.
        states: [n, G, K, r, V], the state before each chunk; set by `sweep`.
        d_out: an output gradient; set by `state_gradient`, freed by `backward`.
        d_states_local: [n, G, K, r, V], gradient of each chunk's initial state from `d_out` in the
            chunk alone.
    """

    inputs: RecurrenceInputs
    chunks: Chunks
    cumsum: torch.Tensor
    dt: torch.Tensor
    addends: torch.Tensor | None = None
    states: torch.Tensor | None = None
    d_out: torch.Tensor | None = None
    d_states_local: torch.Tensor | None = None

    @property
    def groups(self) -> int:
        """Number of groups G."""
        return self.inputs.key.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The accumulation dtype."""
        return self.dt.dtype

    @property
    def gain(self) -> torch.Tensor:
        """exp(a_C) [n, G, 1, r, 1]."""
        gain = power(self.cumsum[..., -1].to(self.dtype))
        return gain.unflatten(1, (self.groups, 1, -1))[..., None]

    def by_group(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, G, C, K], in the accumulation dtype, from x [t, G, K]."""
        grid = self.chunks.to_chunks(x).to(self.dtype).transpose(1, 2)
        # A single group stays a view; several would be strided operands of the products.
        return grid if self.groups == 1 else grid.contiguous()

    def by_token(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, C, G, r, V] from x [t, H, V]."""
        return self.chunks.to_chunks(x).unflatten(2, (self.groups, -1))

    @property
    def decay_to_end(self) -> torch.Tensor:
        """exp(a_C - a) [n, H, C], the decay of tokens to the end of the chunk."""
        return power((self.cumsum[..., -1:] - self.cumsum).to(self.dtype))

    @property
    def decay_from_start(self) -> torch.Tensor:
        """exp(a) [n, H, C]."""
        return power(self.cumsum.to(self.dtype))

    def chunk_inputs(self) -> tuple[torch.Tensor, ...]:
        """Return the fields of `StateSpaceChunks` for all chunks, without `states`."""
        query, key = self.by_group(self.inputs.query), self.by_group(self.inputs.key)
        gates = (
            self.dt,
            self.decay_from_start,
            self.decay_to_end,
            *difference_factors(self.cumsum, self.dtype),
        )
        return self.by_token(self.inputs.value), query, key, *gates

    def states_or_zeros(self, states: torch.Tensor | None) -> torch.Tensor:
        """Return [N, G, K, r, V] from states [N, H, K, V], or zeros."""
        if states is not None:
            return _by_group(states.to(self.dtype), self.groups)
        heads, value_size = self.inputs.value.shape[1:]
        group_heads, keys = heads // self.groups, self.inputs.key.shape[-1]
        shape = (self.chunks.sequence_count, self.groups, keys, group_heads, value_size)
        return self.dt.new_zeros(()).expand(shape)


@dataclass(frozen=True)
class StateSpaceDual:
    """SSD as a `Recurrence`; M is a scalar per head.

    It saves the inputs and the state before each chunk for backward.

    Args:
        chunk_size: tokens C of a chunk, at most the length of the longest sequence.
    """

    chunk_size: int

    def prepare(self, inputs: RecurrenceInputs, sequences: Sequences) -> PreparedStateSpace:
        """See `Recurrence`."""
        chunks = Chunks.of(sequences, min(self.chunk_size, max(1, *sequences.lengths)))
        dtype = accumulation_dtype(inputs.value.dtype)
        cumsum = decay_cumsum(chunks.to_chunks(inputs.decay).transpose(1, 2))
        dt = chunks.to_chunks(inputs.beta).transpose(1, 2)
        dt = dt.to(dtype, memory_format=torch.contiguous_format)
        return PreparedStateSpace(inputs, chunks, cumsum, dt)

    def sweep(
        self,
        prepared: PreparedStateSpace,
        initial: torch.Tensor | None,
        *,
        keep_states: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Recurrence`."""
        del keep_states  # the states are always saved
        chunks, gain = prepared.chunks, prepared.gain
        states = Sweep(chunks, prepared.states_or_zeros(initial))
        inputs = prepared.chunk_inputs()
        dt_to_end = prepared.dt * prepared.decay_to_end
        out = torch.empty(inputs[0].shape, dtype=inputs[0].dtype, device=inputs[0].device)
        for span, scratch, *block_inputs, block_out in blocks(3, dt_to_end.dtype, *inputs, out):
            addends = prepared.addends
            if addends is None:
                addend = state_addend(
                    block_inputs[2], by_group(block_inputs[0], dt_to_end[span], scratch, 0)
                )
            else:
                addend = addends[span]
            states.advance(span, gain[span], addend)
            chunk_output(
                StateSpaceChunks(*block_inputs, states.states_before[span]),  # pyright: ignore[reportCallIssue]
                scratch,
                block_out,
            )
        prepared.states, prepared.addends = states.states_before, None
        return chunks.from_chunks(out.flatten(2, 3)), _by_head(states.final())

    def summary(self, prepared: PreparedStateSpace) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Recurrence`."""
        key, value = (
            prepared.by_group(prepared.inputs.key),
            prepared.by_token(prepared.inputs.value),
        )
        prepared.addends = _state_addends(key, value, prepared.dt * prepared.decay_to_end)
        states = Sweep(prepared.chunks, prepared.states_or_zeros(None))
        states.advance(slice(0, prepared.chunks.count), prepared.gain, prepared.addends)
        chunk_decay = prepared.decay_from_start[..., -1:, None]  # [n, H, 1, 1]
        ones = chunk_decay.new_ones(()).expand(
            prepared.chunks.sequence_count, *chunk_decay.shape[1:]
        )
        transition = Sweep(prepared.chunks, ones)
        transition.advance(slice(0, prepared.chunks.count), chunk_decay, None)
        return _by_head(states.final()), transition.final()

    def state_gradient(self, prepared: PreparedStateSpace, d_out: torch.Tensor) -> torch.Tensor:
        """See `Recurrence`."""
        query, prepared.d_out = prepared.by_group(prepared.inputs.query), d_out
        prepared.d_states_local = _state_addends(
            query, prepared.by_token(d_out), prepared.decay_from_start
        )
        d_states = SweepBack(prepared.chunks, prepared.states_or_zeros(None))
        d_states.advance(slice(0, prepared.chunks.count), prepared.gain, prepared.d_states_local)
        return _by_head(d_states.d_initial())

    def backward(
        self, prepared: PreparedStateSpace, d_out: torch.Tensor, d_final: torch.Tensor | None
    ) -> tuple[RecurrenceInputs, torch.Tensor]:
        """See `Recurrence`."""
        inputs, chunks, gain = prepared.inputs, prepared.chunks, prepared.gain
        addends = prepared.d_states_local if prepared.d_out is d_out else None
        prepared.d_out = prepared.d_states_local = None
        d_states = SweepBack(chunks, prepared.states_or_zeros(d_final))
        block_inputs, states = prepared.chunk_inputs(), prepared.states
        assert states is not None, "the forward sweep must run before gradients"
        value, query, key, *_ = block_inputs
        grads = _empty_gradients(value, query, key, prepared.cumsum, prepared.dt)
        decay_from_start, d_out_grid = block_inputs[4], prepared.by_token(d_out)
        slices = blocks(5, decay_from_start.dtype, *block_inputs, states, d_out_grid, *grads)
        for span, scratch, *tensors in reversed(list(slices)):
            block, block_d_out = StateSpaceChunks(*tensors[:9]), tensors[9]
            # `differentiate` reads exp(a) dO from buffer 4, even if the addends exist already.
            d_out_decayed = by_group(block_d_out, decay_from_start[span], scratch, 4)
            if addends is None:
                addend = state_addend(block.query, d_out_decayed)
            else:
                addend = addends[span]
            d_states.advance(span, gain[span], addend)
            differentiate(
                block,
                scratch,
                d_out=block_d_out,
                d_states_after=d_states.d_states_after[span],
                grads=Gradients(*tensors[10:]),
            )
        return RecurrenceInputs(
            _by_row(chunks, grads.query, inputs.query.dtype),
            _by_row(chunks, grads.key, inputs.key.dtype),
            chunks.from_chunks(grads.value.flatten(2, 3)),
            zero_clamped_grad(_by_row(chunks, grads.decay(), inputs.decay.dtype), inputs.decay),
            _by_row(chunks, grads.dt, inputs.beta.dtype),
        ), _by_head(d_states.d_initial())


def _state_addends(key: torch.Tensor, value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return Kᵀ (scale · x) of all chunks: [n, G, K, r, V] of [n, G, C, K], [n, C, G, r, V]."""
    n, _, groups, group_heads, value_size = value.shape
    states = key.new_empty((n, groups, key.shape[-1], group_heads, value_size))
    for _, scratch, x, keys, scales, out in blocks(1, key.dtype, value, key, scale, states):
        out.copy_(state_addend(keys, by_group(x, scales, scratch, 0)))
    return states


def _empty_gradients(value, query, key, cumsum, dt) -> Gradients:
    """Allocate the gradients of all chunks."""
    return Gradients(
        torch.empty(value.shape, dtype=value.dtype, device=value.device),
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        torch.empty_like(dt),
        torch.empty_like(cumsum),
        torch.empty_like(dt),
        dt.new_empty(dt.shape[:2]),
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
