# SPDX-License-Identifier: Apache-2.0
"""State-space duality, some chunks at a time: what a block of chunks writes, reads, and pulls back.

A block is as many chunks as keep the few buffers that a pass needs in a core's cache; the buffers
are used again by the next block. Shapes are those of m chunks: [m, C, G, r, V] lies token by token,
[m, G, r, C, ...] head by head, and [m, G, C, r · V] group by group, where the heads of a group are
columns of one product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import MappingProxyType
from typing import NamedTuple

import torch

from megatron.core.ops.decay import decay_differences

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


class Block(NamedTuple):
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


class Scratch:
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
    """Yield where each block is, a `Scratch` that all share, and the block's parts.

    Args:
        buffers: that the scratch has.
        dtype: of these.
        value: [n, C, G, r, V].
        others: [n, ...].
    """
    most = ELEMENTS_IN_CACHE if value.device.type == "cpu" else ELEMENTS_ELSEWHERE
    size = max(1, most // max(1, _elements(value)))
    scratch = Scratch(value[:size], buffers, dtype)
    for first in range(0, value.shape[0], size):
        block = slice(first, min(first + size, value.shape[0]))
        yield block, scratch, *(x[block] for x in (value, *others))


def by_group(x: torch.Tensor, scale: torch.Tensor, scratch: Scratch, buffer: int) -> torch.Tensor:
    """Return x [m, C, G, r, V] times scale [m, H, C] as [m, G, C, r, V], in a buffer."""
    m, size, groups, shared, width = x.shape
    scale = scale.view(m, groups, shared, size, 1).transpose(2, 3)
    out = scratch.view(buffer, m, groups, size, shared, width)
    return torch.mul(x.transpose(1, 2), scale, out=out)


def written(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return Kᵀ x [m, G, K, r, V], what x [m, G, C, r, V] adds to states by keys [m, G, C, K]."""
    found = torch.bmm(_flat(key).mT, _columns(x))
    return found.view(*key.shape[:2], key.shape[-1], *x.shape[3:])


def read(block: Block, scratch: Scratch, out: torch.Tensor) -> None:
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
    block: Block, scratch: Scratch, *, grad: torch.Tensor, ends: torch.Tensor, found: Gradients
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
    block: Block, scratch: Scratch, grad: torch.Tensor, found: Gradients
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
    block: Block,
    scratch: Scratch,
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
    along = _by_head(torch.mul(value, behind, out=product).sum(-1))
    torch.mul(along, reach, out=found.felt)
    torch.mul(value, within, out=product)
    torch.addcmul(_by_head(product.sum(-1)), along, left, out=found.strength)
    torch.mul(within, _by_token(strength, groups), out=product)
    torch.addcmul(product, behind, _by_token(reach, groups), out=found.value)
    wrote = by_group(value, reach, scratch, 1)
    _flat(found.key).baddbmm_(_columns(wrote), _columns(ends).mT)


def _scores(block: Block) -> torch.Tensor:
    """Return Q Kᵀ [m, G, 1, C, C], which the heads of a group share."""
    return torch.bmm(_flat(block.query), _flat(block.key).mT).unflatten(
        0, (-1, block.query.shape[1], 1)
    )


def _falls(block: Block, scratch: Scratch, buffer: int) -> torch.Tensor:
    """Return L [m, G, r, C, C]."""
    m, size, groups, shared, _ = block.value.shape
    falls = scratch.view(buffer, m, groups, shared, size, size)
    rows, columns = block.rows.flatten(0, 1), block.columns.flatten(0, 1)
    decay_differences(rows, columns, out=falls.flatten(0, 2))
    return power(falls, out=falls)


def _written(block: Block, scratch: Scratch, buffer: int) -> torch.Tensor:
    """Return x' [m, G, r, C, V]."""
    m, size, groups, shared, width = block.value.shape
    out = scratch.view(buffer, m, groups, shared, size, width)
    strength = block.strength.view(m, groups, shared, size, 1)
    return torch.mul(block.value.permute(0, 2, 3, 1, 4), strength, out=out)


def _products(
    rows: torch.Tensor, states: torch.Tensor, scratch: Scratch, buffer: int
) -> torch.Tensor:
    """Return rows [m, G, C, K] times states [m, G, K, r, V] as [m, G, C, r, V]."""
    out = scratch.view(buffer, *rows.shape[:3], *states.shape[3:])
    torch.bmm(_flat(rows), _columns(states), out=_columns(out))
    return out


def _by_token(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Return x [m, H, C] as [m, C, G, r, 1]."""
    return x.unflatten(1, (groups, -1)).permute(0, 3, 1, 2)[..., None]


def _by_head(x: torch.Tensor) -> torch.Tensor:
    """Return x [m, C, G, r] as [m, H, C]."""
    return x.flatten(2, 3).transpose(1, 2)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return [m, G, a, b] as [m · G, a, b], a batch of one product."""
    return x.flatten(0, 1)


def _columns(x: torch.Tensor) -> torch.Tensor:
    """Return [m, G, a, r, V] as [m · G, a, r · V]."""
    return x.flatten(0, 1).flatten(2, 3)
