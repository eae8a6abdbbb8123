# SPDX-License-Identifier: Apache-2.0
"""Router: which experts a token goes to and with what weight, in fp32.

    logits = W x
    scores = softmax(logits) or sigmoid(logits)
    the k experts with the highest score + bias, within the best groups if those are limited
    weights = their scores, over their sum if normalised, times a factor

The ranks of a pipeline stage route different tokens, so the gradient of W is partial on tp. With
sequence parallelism the tp ranks have different rows already. Without it all have the same rows:
each then routes its share of them (`Share`), and the results are gathered; rows that do not divide
are padded. An expert of limited capacity drops tokens (`within_capacity`). The jitter of the
router's input is a function of sample, position and feature, without state.

Padding (`SequenceLayout.padding`) is in no count, loss or capacity, and no expert takes it, so that
results do not depend on the length of packed rows. How many tokens are no padding only the device
knows: the host waits for nothing here.

Biases of experts, once a step (Wang et al. 2024, arXiv 2408.15664), by the tokens of its whole
batch on all data-parallel ranks, before any are dropped:

    b_e += rate · sign(mean over experts of their tokens - tokens of e)

Auxiliary losses, each over a set of T tokens on several ranks:

    balance   E / (k · T²) · sum over experts of (its tokens) · (sum of its shares of scores)
    z         mean over tokens of logsumexp(logits)²

Token counts are summed over the ranks; each rank computes the terms of its own tokens, and the
terms of all ranks add up to the loss. `carry` attaches a loss to an activation, through which it
gets into the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.backend import LayerBuild
from megatron.core.comm import all_reduce
from megatron.core.comm.conjugates import gather_from_group, scatter_to_group
from megatron.core.context_parallel import SequenceLayout
from megatron.core.moe.moe_config import MoEConfig, RouterConfig
from megatron.core.ops.backend_choice import apply_function
from megatron.core.ops.batch_invariant import tiled_matmul
from megatron.core.ops.dropout import dropout_key
from megatron.core.ops.dropout.reference import hash_index, mix_rows_and_columns
from megatron.core.process_groups import Group
from megatron.core.tensor_parallel import TensorParallelRegion
from megatron.core.weight_sharding import WeightSharding


def chosen_experts(
    scores: torch.Tensor, config: RouterConfig, *, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the k experts of each token with the highest score + bias, int64 [t, k].

    Args:
        scores: fp32 [t, E].
        bias: fp32 [E].
    """
    if bias is not None:
        scores = scores + bias
    if config.num_groups is not None:
        assert config.group_topk is not None
        grouped = scores.view(len(scores), config.num_groups, -1)  # [t, groups, E/groups]
        best = grouped.topk(config.group_candidates, dim=-1).values.sum(-1)  # [t, groups]
        allowed = torch.zeros_like(best, dtype=torch.bool)
        allowed.scatter_(1, best.topk(config.group_topk, dim=-1).indices, True)
        scores = grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(1)
    return scores.topk(config.topk, dim=-1).indices


def within_capacity(
    experts: torch.Tensor,
    weights: torch.Tensor,
    *,
    capacity: int | torch.Tensor,
    policy: str,
    real: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return which places their experts take, at most `capacity` each, bool [t, k].

    Args:
        experts: int64 [t, k].
        weights: fp32 [t, k].
        capacity: places of each expert; a scalar on the device where the host does not know it.
        policy: "probs" takes the places of the highest weight, "position" the first ones; among
            equal ones the first.
        real: bool [t]; padding takes no room and is taken by none. None is all True.
    """
    order = torch.arange(experts.numel(), device=experts.device)
    if policy == "probs":
        order = weights.flatten().argsort(descending=True, stable=True)
    assignments = experts.flatten()
    if real is not None:  # after all others
        assignments = assignments.where(real.repeat_interleave(experts.shape[1]), experts.numel())
    order = order[assignments[order].argsort(stable=True)]  # by expert
    sorted_experts = assignments[order]
    expert_starts = torch.searchsorted(
        sorted_experts, sorted_experts
    )  # where each one's expert begins
    ranks = torch.arange(len(order), device=order.device) - expert_starts
    is_kept = torch.empty_like(ranks, dtype=torch.bool)
    is_kept[order] = ranks < capacity
    is_kept = is_kept.view(experts.shape)
    return is_kept if real is None else is_kept & real.unsqueeze(1)


def expert_capacity(
    tokens: int | torch.Tensor, *, factor: float, topk: int, num_experts: int
) -> int | torch.Tensor:
    """Return ceil(factor · tokens · k / E), how many places each expert takes.

    Args:
        tokens: of a rank, without padding: a number, or an int64 scalar on the device.

    Returns:
        An int, or an fp64 scalar on the device of `tokens`.
    """
    if isinstance(tokens, int):
        return math.ceil(factor * (tokens * topk) / num_experts)
    return (factor * (tokens * topk).double() / num_experts).ceil()


_BITS = 24


def jitter_key(seed: int, name: str) -> int:
    """Return the key of a router's jitter."""
    return dropout_key(seed, name, "jitter")


def jittered(
    rows: torch.Tensor, sample_ids: torch.Tensor, positions: torch.Tensor, *, rate: float, key: int
) -> torch.Tensor:
    """Return rows [t, h] times uniform numbers in [1 - rate, 1 + rate).

    Args:
        sample_ids, places: int64 [t], each row's sample and its place there.
    """
    line = hash_index(key, hash_index(key, sample_ids) ^ positions)  # [t]
    columns = hash_index(key + 1, torch.arange(rows.shape[1], device=rows.device))  # [h]
    bits = mix_rows_and_columns(line.unsqueeze(1), columns) & ((1 << _BITS) - 1)
    uniform = bits.float() * 2.0**-_BITS  # [t, h] in [0, 1)
    return (rows.float() * (1.0 + rate * (2.0 * uniform - 1.0))).to(rows.dtype)


def tokens_of_experts(
    experts: torch.Tensor,
    num_experts: int,
    *,
    sets: torch.Tensor | None = None,
    num_sets: int = 1,
    real: torch.Tensor | None = None,
) -> torch.Tensor:
    """Count the tokens of each set that go to each expert, fp32 [sets, E].

    Args:
        experts: int64 [t, k].
        sets: int64 [t], the number of each token's set; None is one set.
        real: bool [t]; padding does not count. None is all True.
    """
    bins = experts if sets is None else experts + num_experts * sets.unsqueeze(1)
    ones = torch.ones(experts.numel(), device=experts.device)
    if real is not None:
        ones = real.float().repeat_interleave(experts.shape[1])
    counts = torch.zeros(num_sets * num_experts, device=experts.device)
    return counts.index_add_(0, bins.flatten(), ones).view(num_sets, num_experts)


def balance_loss(
    shares: torch.Tensor, counts: torch.Tensor, *, topk: int, sets: torch.Tensor | None = None
) -> torch.Tensor:
    """Return this rank's share of the mean over sets of the balance loss, a scalar.

    Args:
        shares: fp32 [t, E], each token's scores, adding up to 1; zeros for padding.
        counts: fp32 [sets, E], of all ranks.
        sets: as in `tokens_of_experts`.
    """
    num_sets, num_experts = counts.shape
    if sets is None:
        sums = shares.sum(0, keepdim=True)
    else:
        sums = shares.new_zeros(num_sets, num_experts).index_add(0, sets, shares)
    tokens = (counts.sum(-1, keepdim=True) / topk).clamp(min=1.0)  # [sets, 1]
    return (counts * sums / tokens.square()).sum() * (num_experts / (topk * num_sets))


def z_loss(
    logits: torch.Tensor, tokens: torch.Tensor, *, real: torch.Tensor | None = None
) -> torch.Tensor:
    """Return this rank's share of the mean of the squared log-sum-exp of logits [t, E], a scalar.

    Args:
        tokens: of all ranks, a scalar.
        real: bool [t]; padding does not count. None is all True.
    """
    squares = logits.logsumexp(-1).square()
    if real is not None:
        squares = squares * real
    return squares.sum() / tokens.clamp(min=1.0)


def carry(x: torch.Tensor, loss: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return x, through which factor · loss takes part in whatever is differentiated."""
    return apply_function(_Carry, x, loss, factor)


class _Carry(torch.autograd.Function):
    """forward x; dgrad of x as it comes, of the loss the factor. Saves the factor."""

    @staticmethod
    def forward(ctx, x, loss, factor):
        ctx.save_for_backward(factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        (factor,) = ctx.saved_tensors
        return grad, factor, None


class Share:
    """One rank's rows.

    Args:
        hidden: [s, b, h] ([s/tp, b, h] under sequence parallelism).
        layout: of the microbatch.
        region: the tp group.

    Attributes:
        batch: b.
        has_padding: whether the layout marks padding, which no expert takes.
        real: bool [t], False for padding and for rows that only make the ranks' shares equal; None
            where there are none of these.
    """

    def __init__(
        self, hidden: torch.Tensor, layout: SequenceLayout, *, region: TensorParallelRegion
    ) -> None:
        self.shape, self.batch = hidden.shape, hidden.shape[1]
        self._layout, self._region = layout, region
        self.has_padding = layout.padding is not None
        self._divides = region.group.size > 1 and not region.scatters
        present = hidden.shape[0] * hidden.shape[1]
        num_shards = region.group.size if self._divides else 1
        self._missing = -present % num_shards
        self.count = (present + self._missing) // num_shards  # t
        self._device = hidden.device
        self.real = self._real()

    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows [t, h]."""
        flat = hidden.flatten(0, 1)
        if not self._divides:
            return flat
        if self._missing:
            flat = F.pad(flat, (0, 0, 0, self._missing))
        return scatter_to_group(flat, self._region.group)

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [s, b, h], as `hidden` was, from every rank's rows [t, h]."""
        if self._divides:
            rows = gather_from_group(rows, self._region.group)
            rows = rows[: len(rows) - self._missing]
        return rows.view(self.shape)

    @property
    def samples(self) -> torch.Tensor | None:
        """Each row's sample, int64 [t]; None outside training."""
        samples = self._layout.sample_ids
        return None if samples is None else samples[self.sequences]

    @property
    def sequences(self) -> torch.Tensor:
        """Each row's sequence 0 … `num_sequences` - 1, int64 [t]."""
        samples = self._layout.sample_numbers
        if samples is None:
            return self._numbers % self.batch
        return samples[(self._numbers // self.batch).clamp(max=len(samples) - 1)]

    @property
    def num_sequences(self) -> int:
        """How many sequences the microbatch has."""
        layout = self._layout
        if layout.sample_length is None or layout.cut is None:
            return self.batch
        return layout.cut.length // layout.sample_length

    @property
    def num_tokens(self) -> int | torch.Tensor:
        """Rows without padding: `count`, or an int64 scalar on the device."""
        return self.count if self.real is None else self.real.sum()

    @property
    def places(self) -> torch.Tensor:
        """Position of each row in its sequence, int64 [t]; -1 for padding of the sequence."""
        positions = self._layout.sample_places  # [s]
        assert positions.ndim == 1, "layouts with sample ids have one place per column"
        return positions[(self._numbers // self.batch).clamp(max=len(positions) - 1)]

    @property
    def _numbers(self) -> torch.Tensor:
        """Each row's number among the [s, b] of all tp ranks; that of padding may be above."""
        return torch.arange(self._first, self._first + self.count, device=self._device)

    @property
    def _first(self) -> int:
        """The number of the first row."""
        return self._region.group.rank * self.count

    def _real(self) -> torch.Tensor | None:
        padding = self._layout.padding  # [s, b], of all tp ranks
        if padding is None:
            return self._numbers < self.shape[0] * self.batch if self._missing else None
        flat = padding.flatten()
        if self._missing:
            flat = torch.cat([flat, flat.new_ones(self._missing)])
        return ~flat[self._first : self._first + self.count]


#: What a router counts, after the tokens of each expert. The losses are without coefficients.
MEASURES = ("places", "dropped", "entropy", "balance_loss", "z_loss", "microbatches")


@dataclass(frozen=True, eq=False)
class Routing:
    """Where tokens go.

    Args:
        experts: int64 [t, k].
        weights: fp32 [t, k].
        kept: bool [t, k], False where the expert does not take the token; None is all True.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    kept: torch.Tensor | None = None


class Router(nn.Module):
    """Route tokens to experts.

    Attributes:
        expert_bias: fp32 [E], or None; `Balance` moves it.
        counted: fp64 [E + measures], sums over training forwards since somebody cleared it: the
            places of tokens that want each expert, then `MEASURES`.
    """

    def __init__(self, name: str, *, config: MoEConfig, build: LayerBuild) -> None:
        super().__init__()
        self.name, self.config, self.num_experts = name, config.router, config.num_experts
        self.capacity_factor, self.drop_policy = config.capacity_factor, config.drop_policy
        self.group = build.store.groups["tp_cp"]
        shape = (config.num_experts, build.hidden_size)
        sharding = WeightSharding.of(f"{name}.weight", shape, gradient={"tp": "partial"})
        self.weight = build.store.declare(sharding, build.init)
        self.expert_bias: torch.Tensor | None = None
        if self.config.expert_bias:
            self.expert_bias = build.store.declare_state(f"{name}.expert_bias", shape[:1])
        self.jitter_key = jitter_key(build.seed, name)
        self._sigmoid = build.backend.elementwise(torch.sigmoid)
        self.counted = torch.zeros(
            config.num_experts + len(MEASURES), dtype=torch.float64, device=build.store.device
        )

    def forward(
        self, rows: torch.Tensor, share: Share, *, aux_factor: torch.Tensor | None = None
    ) -> Routing:
        """Choose the experts of rows [t, h].

        Args:
            share: which rows of the microbatch these are.
            aux_factor: fp32 scalar, of the auxiliary losses in the step's loss; None has none.
        """
        config = self.config
        if config.jitter > 0.0 and share.samples is not None:
            where = share.samples, share.places
            rows = jittered(rows, *where, rate=config.jitter, key=self.jitter_key)
        logits = apply_function(_Logits, rows, self.weight.anchor, self.weight)  # [t, E]
        softmax = config.score_function == "softmax"
        scores = logits.softmax(-1) if softmax else self._sigmoid(logits)
        experts = chosen_experts(scores.detach(), config, bias=self.expert_bias)  # [t, k]
        weights = scores.gather(1, experts)
        if config.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if config.scaling_factor != 1.0:
            weights = weights * config.scaling_factor
        routing = Routing(experts, weights, self._kept(experts, weights, share))
        if not torch.is_grad_enabled():
            return routing
        shares = scores if softmax else scores / (scores.sum(-1, keepdim=True) + 1e-20)
        return self._balanced(routing, logits, shares, share=share, aux_factor=aux_factor)

    def _kept(
        self, experts: torch.Tensor, weights: torch.Tensor, share: Share
    ) -> torch.Tensor | None:
        """Return which places [t, k] their experts take; None is all of them."""
        if self.capacity_factor is None:
            if not share.has_padding:
                return None
            assert share.real is not None
            return share.real.unsqueeze(1).expand_as(experts)
        capacity = expert_capacity(
            share.num_tokens,
            factor=self.capacity_factor,
            topk=experts.shape[1],
            num_experts=self.num_experts,
        )
        return within_capacity(
            experts, weights.detach(), capacity=capacity, policy=self.drop_policy, real=share.real
        )

    def _balanced(
        self,
        routing: Routing,
        logits: torch.Tensor,
        shares: torch.Tensor,
        *,
        share: Share,
        aux_factor: torch.Tensor | None,
    ) -> Routing:
        """Count a training forward, and give its auxiliary losses a way into the gradient.

        Args:
            logits, shares: fp32 [t, E].
        """
        config, experts = self.config, routing.experts
        by_sequence = config.balance == "seq_aux_loss"
        sets = share.sequences if by_sequence else None
        number = share.num_sequences if by_sequence else 1
        local_tokens = tokens_of_experts(
            experts, self.num_experts, sets=sets, num_sets=number, real=share.real
        )
        if share.real is not None:
            shares = shares * share.real.unsqueeze(1)
        balance = z = local_tokens.new_zeros(())
        weights, tokens = routing.weights, local_tokens.sum() / config.topk
        balances = config.balance != "none" and config.aux_loss_coeff > 0.0
        if aux_factor is not None and (balances or config.z_loss_coeff > 0.0):
            counts = all_reduce(local_tokens, self.group)  # [sets, E]
            tokens = counts.sum() / config.topk
            if balances:
                balance = balance_loss(shares, counts, topk=config.topk, sets=sets)
                weights = carry(weights, balance, aux_factor * config.aux_loss_coeff)
            if config.z_loss_coeff > 0.0:
                z = z_loss(logits, tokens, real=share.real)
                weights = carry(weights, z, aux_factor * config.z_loss_coeff)
        self._count(local_tokens.sum(0), routing, shares, (balance, z, tokens))
        return Routing(experts, weights, routing.kept)

    @torch.no_grad()
    def _count(
        self,
        assigned: torch.Tensor,
        routing: Routing,
        shares: torch.Tensor,
        losses: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """Add to `counted`; as ranks have shares of the losses, each counts a share of the
        microbatch, or nothing of one that is padding alone.

        Args:
            losses: the balance loss, the z loss, and the tokens that they are of.
        """
        balance, z, tokens = losses
        num_assigned = assigned.sum()
        num_kept = num_assigned if routing.kept is None else routing.kept.sum().float()
        entropy = torch.special.entr(shares).sum()
        active_share = (tokens > 0).float() / self.group.size
        measures = torch.stack(
            [num_assigned, num_assigned - num_kept, entropy, balance, z, active_share]
        )
        self.counted += torch.cat([assigned, measures])


class _Logits(torch.autograd.Function):
    """forward x Wᵀ in fp32; dgrad dy W in x's dtype; wgrad dyᵀ x in fp32. Saves x."""

    @staticmethod
    def forward(ctx, x, anchor, handle):
        ctx.handle = handle
        ctx.save_for_backward(x)
        rows, matrix = x.float(), handle.get().float().t()
        return tiled_matmul(rows, matrix) if handle.row_tiles else rows @ matrix

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        handle = ctx.handle
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (grad @ handle.get(backward=True).float()).to(x.dtype)
        if handle.trainable:
            handle.accumulate_written_grad(partial(_write_product, grad.detach(), x.detach()))
        return dx, None, None


def _write_product(
    grad: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor, *, overwrite: bool
) -> None:
    """Put dyᵀ x [E, h] into `main_grad`, summed in fp32 whatever its dtype."""
    product = grad.t() @ x.float()
    if overwrite:
        main_grad.copy_(product)
    else:
        main_grad.add_(product)


@dataclass(frozen=True)
class RouterLoad:
    """What a router did since the report before.

    Args:
        name: of the router.
        tokens: places of tokens that wanted each expert.
        dropped: share of the places that their experts did not take.
        entropy: mean over tokens of that of their shares of scores, in nats.
        balance_loss, z_loss: means over microbatches, without coefficients; 0 where they have none.
    """

    name: str
    tokens: tuple[int, ...]
    dropped: float
    entropy: float
    balance_loss: float
    z_loss: float

    @property
    def imbalance(self) -> float:
        """The tokens of the busiest expert over the mean; 1 is even."""
        return max(self.tokens) * len(self.tokens) / max(1, sum(self.tokens))


def routers_of(model: nn.Module) -> list[Router]:
    """Return the routers among a model's modules."""
    return [module for module in model.modules() if isinstance(module, Router)]


class Balance:
    """Sum what routers count, and keep their loads even.

    Args:
        routers: of this rank.
        names: of all routers of the model, in its order; the same on every rank.
        config: of them all.
        world: all ranks; those of a pipeline stage have routed different tokens.
        device: where this rank computes.
    """

    def __init__(
        self,
        routers: Sequence[Router],
        names: Sequence[str],
        *,
        config: MoEConfig,
        world: Group,
        device: torch.device | str = "cpu",
    ) -> None:
        unknown = [router.name for router in routers if router.name not in names]
        if unknown:
            raise ValueError(f"routers {', '.join(unknown)} are not among the model's: {names}")
        self.routers, self.names, self.world = list(routers), tuple(names), world
        self.config, self.device = config, torch.device(device)
        self._rows = [self.names.index(router.name) for router in self.routers]
        self._totals = [torch.zeros_like(router.counted) for router in self.routers]

    def finish(self, *, applied: bool) -> None:
        """End a step: move the biases, if there are any; every rank calls it.

        Args:
            applied: whether the step changed weights; otherwise biases stay as well.
        """
        counted = [router.counted.clone() for router in self.routers]
        for router, total, counts in zip(self.routers, self._totals, counted, strict=True):
            total += counts
            router.counted.zero_()
        if not (self.config.router.expert_bias and applied):
            return
        sums = self._summed(counted)
        for router, row in zip(self.routers, self._rows, strict=True):
            assert router.expert_bias is not None
            tokens = sums[row, : router.num_experts]
            behind = torch.sign(tokens.mean() - tokens).float()
            router.expert_bias += router.config.bias_update_rate * behind

    def report(self) -> list[RouterLoad]:
        """Return the loads of all routers since the last report; every rank calls it."""
        sums = self._summed(self._totals).tolist()
        for total in self._totals:
            total.zero_()
        return [self._load(name, row) for name, row in zip(self.names, sums, strict=True)]

    def _summed(self, counted: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return [routers of the model, E + measures] of all ranks."""
        shape = len(self.names), self.config.num_experts + len(MEASURES)
        whole = torch.zeros(shape, dtype=torch.float64, device=self.device)
        for row, counts in zip(self._rows, counted, strict=True):
            whole[row] = counts
        return all_reduce(whole, self.world)

    def _load(self, name: str, row: list[float]) -> RouterLoad:
        tokens, measures = (
            row[: -len(MEASURES)],
            dict(zip(MEASURES, row[-len(MEASURES) :], strict=True)),
        )
        num_assigned, microbatches = (
            max(1.0, measures["places"]),
            max(1.0, measures["microbatches"]),
        )
        return RouterLoad(
            name=name,
            tokens=tuple(round(count) for count in tokens),
            dropped=measures["dropped"] / num_assigned,
            entropy=measures["entropy"] / num_assigned * self.config.router.topk,
            balance_loss=measures["balance_loss"] / microbatches,
            z_loss=measures["z_loss"] / microbatches,
        )
