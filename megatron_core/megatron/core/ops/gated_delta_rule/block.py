# SPDX-License-Identifier: Apache-2.0
"""A block of chunks of the gated delta rule: everything that does not wait for other chunks.

The formulas, and their letters, are those of `reference`.
"""

from __future__ import annotations

from functools import cached_property

import torch

from megatron.core.ops.recurrence import RecurrenceInputs


class Block:
    """m chunks of C tokens, each part made at first use; H = G · r heads of values.

    Args:
        grids: the inputs of these chunks, [m, C, ...], zero where a sequence has ended.
        scale: of queries.
        dtype: to compute in.
        inverse: T [m, H, C, C], memory with columns next to each other; filled unless `solved`.
        solved: whether `inverse` is known.
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
        total = _heads(grids.decay, dtype).cumsum(-1)  # G
        self.total, self.growth = total, total.exp()  # Γ
        self.left = (total[..., -1:] - total).exp_()  # e
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
        above = self.total.new_full((self.size, self.size), -torch.inf).triu_(1)
        return (self.total[..., None] - self.total[..., None, :]).add_(above).exp_()

    def _products(self, left: torch.Tensor) -> torch.Tensor:
        """Return (left Kᵀ) ∘ D [m, H, C, C] for left [m, G, C, K]."""
        found = product(left, self.key.mT)[:, :, None] * self.by_group(self.falls)
        return found.flatten(1, 2)

    @cached_property
    def seen(self) -> torch.Tensor:
        """P [m, H, C, C]."""
        return self._products(self.query)

    @cached_property
    def inverse(self) -> torch.Tensor:
        """T [m, H, C, C]."""
        if self._is_solved:
            return self._inverse
        lower = self._products(self.key).mul_(self.beta[..., None])
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
    def solved(self) -> torch.Tensor:
        """[U | -W] [m, H, C, V + K]."""
        given = self.value.new_empty((*self.value.shape[:-1], self.values + self.keys))
        torch.mul(self.value, self.beta[..., None], out=given[..., : self.values])
        factor = (self.beta * self.growth).neg_()[..., None]
        keys = self.by_group(given)[..., self.values :]
        torch.mul(self.key[:, :, None], self.by_group(factor), out=keys)
        return product(self.inverse, given)

    @property
    def written_values(self) -> torch.Tensor:
        """U [m, H, C, V]."""
        return self.solved[..., : self.values]

    @property
    def minus_read(self) -> torch.Tensor:
        """-W [m, H, C, K]."""
        return self.solved[..., self.values :]

    @cached_property
    def written(self) -> torch.Tensor:
        """E K [m, H, C, K]."""
        return (self.key[:, :, None] * self.by_group(self.left)[..., None]).flatten(1, 2)

    @cached_property
    def added(self) -> torch.Tensor:
        """X [m, H, K, V]."""
        return product(self.written.mT, self.written_values)

    @cached_property
    def transition(self) -> torch.Tensor:
        """M [m, H, K, K]."""
        found = product(self.written.mT, self.minus_read)
        found.diagonal(0, -2, -1).add_(self.growth[..., -1:])
        return found

    @cached_property
    def readers(self) -> torch.Tensor:
        """Γ Q - P W [m, H, C, K]."""
        found = product(self.seen, self.minus_read)
        growth = self.by_group(self.growth)[..., None]
        self.by_group(found).addcmul_(self.query[:, :, None], growth)
        return found

    def out(self, starts: torch.Tensor) -> torch.Tensor:
        """Return O [m, H, C, V] from the states before the chunks."""
        return add_product_(product(self.seen, self.written_values), self.readers, starts)

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
        changes = torch.baddbmm(*(_flat(self.written_values, self.minus_read, starts)))
        changes = changes.view(self.value.shape)  # V'
        grad, x = pulls.split(size, 2)
        pulled = add_product_(product(self.seen.mT, grad), self.written, ends)  # dV'
        x.copy_(product(self.inverse.mT, pulled))
        reads, within = self._pulled(pulls, changes, starts)
        along = (self.by_group(reads) * self.pair[:, :, None]).sum(-1).flatten(1, 2)
        along_query, along_key = along.split(size, -1)
        grad_query, faded = reads.split(size, 2)  # dQ, f
        within[:, :, size:].mul_(beta.neg())
        written = product(changes, ends.mT).mul_(self.left[..., None])  # e V' dSᵀ
        keys = self.shared_by(self.key)
        at_end = (written * keys).sum((-2, -1))
        at_end += (starts * ends).sum((-2, -1)).mul_(self.growth[..., -1])
        add_product_(written, within.mT, self.shared_by(self.pair))  # w
        grad_total = along_query - along_key * self.beta - (written * keys).sum(-1)
        grad_total[..., -1] += at_end
        grad_key = written.addcmul_(faded, beta, value=-1)
        if self.shared > 1:
            grad_query, grad_key = (self.by_group(y).sum(2) for y in (grad_query, grad_key))
        return RecurrenceInputs(
            query=grad_query * self.scale,
            key=grad_key,
            value=x * beta,
            decay=grad_total.flip(-1).cumsum(-1).flip(-1),
            strength=(x * self.value).sum(-1).sub_(along_key),
        )

    def _pulled(
        self, pulls: torch.Tensor, changes: torch.Tensor, starts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [dQ ; f] [m, H, 2C, K] and [Z ; N] [m, H, 2C, C]."""
        size = self.size
        within = product(pulls, changes.mT)
        halves = within.unflatten(2, (2, size)).mul_(self.falls[:, :, None])
        halves[:, :, 1].diagonal(0, -2, -1).zero_()
        reads = product(pulls, starts.mT)
        reads.unflatten(2, (2, size)).mul_(self.growth[:, :, None, :, None])
        # The heads of a group stand above each other.
        rows = reads.view(-1, self.shared * 2 * size, self.keys)
        rows.baddbmm_(within.view(*rows.shape[:2], size), self.key.flatten(0, 1))
        return reads, within


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply [m, H, a, b] by [m, H, b, c] in one batch, without copies."""
    found = torch.bmm(*_flat(left, right))
    return found.view(*left.shape[:2], *found.shape[1:])


def add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add the product of two batches of matrices to a third in place; return it."""
    total.flatten(0, 1).baddbmm_(*_flat(left, right))
    return total


def _flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.flatten(0, 1) for tensor in tensors]


def _heads(grid: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [m, H, C, ...] from [m, C, H, ...] in one copy."""
    grid = grid.transpose(1, 2)
    return grid.new_empty(grid.shape, dtype=dtype).copy_(grid)
