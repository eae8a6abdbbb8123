# SPDX-License-Identifier: Apache-2.0
"""Router: the experts of each token and their weights, in fp32.

    logits = W x, plus a bias
    scores = softmax(logits) or sigmoid(logits)
    the k experts with the highest score + bias, within the best groups if these are limited
    weights = their scores, over their sum if normalised, times a factor

The ranks of a pipeline stage route different tokens, so the gradient of W is partial on tp. With
sequence parallelism the tp ranks already have different rows. Without it all tp ranks have the same
rows: each routes its share (`Share`), and the results are gathered; rows that do not divide are
padded. An expert of limited capacity drops tokens (`within_capacity`). The jitter of the router's
input is a stateless function of sample, position and feature.

Padding (`SequenceLayout.padding`) is excluded from counts, losses and capacities, and has no
expert, so that results do not depend on the length of packed rows. Only the device knows the number
of real tokens: the host never waits for it here.

Expert biases are updated once per step (Wang et al. 2024, arXiv 2408.15664), from the tokens of the
whole batch on all data-parallel ranks, before any token is dropped:

    b_e += rate · sign(mean over experts of their tokens - tokens of e)

Auxiliary losses, each over a set of T tokens on several ranks:

    balance   E / (k · T²) · sum over experts of (its tokens) · (sum of its normalized scores)
    z         mean over tokens of logsumexp(logits)²

Token counts are summed over the ranks; each rank computes the terms of its own tokens, and the
terms of all ranks sum to the loss. `attach_aux_loss` attaches a loss to an activation, so that
backward adds its gradient.
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
from megatron.core.initialize import InitSpec
from megatron.core.moe.moe_config import MoEConfig, RouterConfig
from megatron.core.ops.backend_choice import apply_function
from megatron.core.ops.dropout import dropout_key
from megatron.core.ops.dropout.cpu import hash_index, mix_rows_and_columns
from megatron.core.ops.matmul.batch_invariant import tiled_matmul
from megatron.core.process_groups import Group
from megatron.core.tensor_parallel import TensorParallelRegion
from megatron.core.weight_gather import WeightHandle
from megatron.core.weight_sharding import WeightSharding


def choose_experts(
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
    """Return which copies are within their expert's capacity, bool [t, k].

    Args:
        experts: int64 [t, k].
        weights: fp32 [t, k].
        capacity: copies per expert; a scalar on the device if the host does not know it.
        policy: "probs" keeps the copies of the highest weight, "position" the first copies; on ties
            the first.
        real: bool [t]; padding uses no capacity and is never kept. None is all True.
    """
    order = torch.arange(experts.numel(), device=experts.device)
    if policy == "probs":
        order = weights.flatten().argsort(descending=True, stable=True)
    assignments = experts.flatten()
    if real is not None:  # padding is sorted last
        assignments = assignments.where(real.repeat_interleave(experts.shape[1]), experts.numel())
    order = order[assignments[order].argsort(stable=True)]  # by expert
    sorted_experts = assignments[order]
    # Index of the first copy of the same expert.
    expert_starts = torch.searchsorted(sorted_experts, sorted_experts)
    index_in_expert = torch.arange(len(order), device=order.device) - expert_starts
    keep_mask = torch.empty_like(index_in_expert, dtype=torch.bool)
    keep_mask[order] = index_in_expert < capacity
    keep_mask = keep_mask.view(experts.shape)
    return keep_mask if real is None else keep_mask & real.unsqueeze(1)


def expert_capacity(
    tokens: int | torch.Tensor, *, factor: float, topk: int, num_experts: int
) -> int | torch.Tensor:
    """Return ceil(factor · tokens · k / E), the number of copies per expert.

    Args:
        tokens: a rank's tokens without padding: a number, or an int64 scalar on the device.

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
        sample_ids, positions: int64 [t], each row's sample and its position in it.
    """
    row_hashes = hash_index(key, hash_index(key, sample_ids) ^ positions)  # [t]
    columns = hash_index(key + 1, torch.arange(rows.shape[1], device=rows.device))  # [h]
    bits = mix_rows_and_columns(row_hashes.unsqueeze(1), columns) & ((1 << _BITS) - 1)
    uniform = bits.float() * 2.0**-_BITS  # [t, h] in [0, 1)
    return (rows.float() * (1.0 + rate * (2.0 * uniform - 1.0))).to(rows.dtype)


def count_expert_tokens(
    experts: torch.Tensor,
    num_experts: int,
    *,
    sets: torch.Tensor | None = None,
    num_sets: int = 1,
    real: torch.Tensor | None = None,
) -> torch.Tensor:
    """Count the tokens of each set for each expert, fp32 [sets, E].

    Args:
        experts: int64 [t, k].
        sets: int64 [t], index of each token's set; None is one set.
        real: bool [t]; padding does not count. None is all True.
    """
    bins = experts if sets is None else experts + num_experts * sets.unsqueeze(1)
    ones = torch.ones(experts.numel(), device=experts.device)
    if real is not None:
        ones = real.float().repeat_interleave(experts.shape[1])
    counts = torch.zeros(num_sets * num_experts, device=experts.device)
    return counts.index_add_(0, bins.flatten(), ones).view(num_sets, num_experts)


def balance_loss(
    probs: torch.Tensor, counts: torch.Tensor, *, topk: int, sets: torch.Tensor | None = None
) -> torch.Tensor:
    """Return this rank's terms of the mean over sets of the balance loss, a scalar.

    Args:
        probs: fp32 [t, E], each token's scores, normalized to sum to 1; zeros for padding.
        counts: fp32 [sets, E], of all ranks.
        sets: as in `count_expert_tokens`.
    """
    num_sets, num_experts = counts.shape
    if sets is None:
        prob_sums = probs.sum(0, keepdim=True)
    else:
        prob_sums = probs.new_zeros(num_sets, num_experts).index_add(0, sets, probs)
    tokens = (counts.sum(-1, keepdim=True) / topk).clamp(min=1.0)  # [sets, 1]
    return (counts * prob_sums / tokens.square()).sum() * (num_experts / (topk * num_sets))


def z_loss(
    logits: torch.Tensor, tokens: torch.Tensor, *, real: torch.Tensor | None = None
) -> torch.Tensor:
    """Return this rank's terms of the mean squared log-sum-exp of logits [t, E], a scalar.

    Args:
        tokens: of all ranks, a scalar.
        real: bool [t]; padding does not count. None is all True.
    """
    squares = logits.logsumexp(-1).square()
    if real is not None:
        squares = squares * real
    return squares.sum() / tokens.clamp(min=1.0)


def attach_aux_loss(x: torch.Tensor, loss: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return x, and add factor · loss to every loss that is differentiated through x."""
    return apply_function(_AttachAuxLoss, x, loss, factor)


class _AttachAuxLoss(torch.autograd.Function):
    """forward x; dgrad of x unchanged, dgrad of the loss: factor. Saves the factor."""

    @staticmethod
    def forward(ctx, x, loss, factor):
        ctx.save_for_backward(factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        (factor,) = ctx.saved_tensors
        return grad, factor, None


class Share:
    """The rows of a microbatch that this rank routes.

    Args:
        hidden: [s, b, h] ([s/tp, b, h] under sequence parallelism).
        layout: layout of the microbatch.
        region: the tp group.

    Attributes:
        batch: b.
        has_padding: whether the layout marks padding, which has no expert.
        real: bool [t], False for padding and for rows that were added to make the ranks' shares
            equal; None if there are none.
    """

    def __init__(
        self, hidden: torch.Tensor, layout: SequenceLayout, *, region: TensorParallelRegion
    ) -> None:
        self.shape, self.batch = hidden.shape, hidden.shape[1]
        self._layout, self._region = layout, region
        self.has_padding = layout.padding is not None
        self._divides = region.group.size > 1 and not region.scatters
        num_rows = hidden.shape[0] * hidden.shape[1]
        num_shards = region.group.size if self._divides else 1
        self._num_padding = -num_rows % num_shards
        self.count = (num_rows + self._num_padding) // num_shards  # t
        self._device = hidden.device
        self.real = self._real()

    def rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows [t, h]."""
        flat = hidden.flatten(0, 1)
        if not self._divides:
            return flat
        if self._num_padding:
            flat = F.pad(flat, (0, 0, 0, self._num_padding))
        return scatter_to_group(flat, self._region.group)

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [s, b, h], in the shape of `hidden`, from every rank's rows [t, h]."""
        if self._divides:
            rows = gather_from_group(rows, self._region.group)
            rows = rows[: len(rows) - self._num_padding]
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
            return self._row_indices % self.batch
        return samples[(self._row_indices // self.batch).clamp(max=len(samples) - 1)]

    @property
    def num_sequences(self) -> int:
        """Number of sequences of the microbatch."""
        layout = self._layout
        if layout.sample_length is None or layout.sharding is None:
            return self.batch
        return layout.sharding.length // layout.sample_length

    @property
    def num_tokens(self) -> int | torch.Tensor:
        """Rows without padding: `count`, or an int64 scalar on the device."""
        return self.count if self.real is None else self.real.sum()

    @property
    def positions(self) -> torch.Tensor:
        """Position of each row in its sequence, int64 [t]; -1 for padding of the sequence."""
        positions = self._layout.sample_positions  # [s]
        assert positions.ndim == 1, "layouts with sample ids have one position per column"
        return positions[(self._row_indices // self.batch).clamp(max=len(positions) - 1)]

    @property
    def _row_indices(self) -> torch.Tensor:
        """Each row's index among the [s, b] rows of all tp ranks; padding may exceed it."""
        return torch.arange(self._start, self._start + self.count, device=self._device)

    @property
    def _start(self) -> int:
        """Index of the first row."""
        return self._region.group.rank * self.count

    def _real(self) -> torch.Tensor | None:
        padding = self._layout.padding  # [s, b], of all tp ranks
        if padding is None:
            return self._row_indices < self.shape[0] * self.batch if self._num_padding else None
        flat = padding.flatten()
        if self._num_padding:
            flat = torch.cat([flat, flat.new_ones(self._num_padding)])
        return ~flat[self._start : self._start + self.count]


#: Measures that a router sums, after the tokens of each expert; losses without coefficients, and
#: "assigned" the copies of all tokens before drops.
MEASURES = ("assigned", "dropped", "entropy", "balance_loss", "z_loss", "microbatches")


@dataclass(frozen=True, eq=False)
class Routing:
    """Experts of each token.

    Args:
        experts: int64 [t, k].
        weights: fp32 [t, k].
        keep_mask: bool [t, k], False if the expert drops the token; None is all True.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    keep_mask: torch.Tensor | None = None


class Router(nn.Module):
    """Route tokens to experts.

    Attributes:
        expert_bias: fp32 [E], or None; updated by `Balance`.
        counted: fp64 [E + measures], sums over training forwards since the last reset: the copies
            routed to each expert before drops, then `MEASURES`.
    """

    def __init__(self, name: str, *, config: MoEConfig, build: LayerBuild) -> None:
        super().__init__()
        self.name, self.config, self.num_experts = name, config.router, config.num_experts
        self.capacity_factor, self.drop_policy = config.capacity_factor, config.drop_policy
        self.group = build.store.groups["tp_cp"]
        shape = (config.num_experts, build.hidden_size)
        sharding = WeightSharding.of(f"{name}.weight", shape, gradient={"tp": "partial"})
        self.weight = build.store.declare(sharding, build.init)
        self.bias: WeightHandle | None = None
        if self.config.bias:
            sharding = WeightSharding.of(
                f"{name}.bias", shape[:1], gradient={"tp": "partial"}, weight_decay=False
            )
            self.bias = build.store.declare(sharding, InitSpec.constant(0.0))
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
            share: describes these rows of the microbatch.
            aux_factor: fp32 scalar, factor of the auxiliary losses in the step's loss; None omits
                them.
        """
        config = self.config
        if config.jitter > 0.0 and share.samples is not None:
            ids = share.samples, share.positions
            rows = jittered(rows, *ids, rate=config.jitter, key=self.jitter_key)
        logits = apply_function(_Logits, rows, self.weight.anchor, self.weight)  # [t, E]
        if self.bias is not None:
            logits = logits + self.bias.use(torch.float32)
        softmax = config.score_function == "softmax"
        scores = logits.softmax(-1) if softmax else self._sigmoid(logits)
        experts = choose_experts(scores.detach(), config, bias=self.expert_bias)  # [t, k]
        weights = scores.gather(1, experts)
        if config.normalize:
            total = weights.sum(-1, keepdim=True)
            total = total.clamp(min=config.norm_min) if config.norm_min else total + 1e-20
            weights = weights / total
        if config.scaling_factor != 1.0:
            weights = weights * config.scaling_factor
        routing = Routing(experts, weights, self._keep_mask(experts, weights, share))
        if not torch.is_grad_enabled():
            return routing
        probs = scores if softmax else scores / (scores.sum(-1, keepdim=True) + 1e-20)
        return self._balanced(routing, logits, probs, share=share, aux_factor=aux_factor)

    def _keep_mask(
        self, experts: torch.Tensor, weights: torch.Tensor, share: Share
    ) -> torch.Tensor | None:
        """Return which copies [t, k] are within their expert's capacity; None is all."""
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
        probs: torch.Tensor,
        *,
        share: Share,
        aux_factor: torch.Tensor | None,
    ) -> Routing:
        """Count a training forward, and attach its auxiliary losses to the weights.

        Args:
            logits, probs: fp32 [t, E].
        """
        config, experts = self.config, routing.experts
        by_sequence = config.balance == "seq_aux_loss"
        sets = share.sequences if by_sequence else None
        num_sets = share.num_sequences if by_sequence else 1
        local_tokens = count_expert_tokens(
            experts, self.num_experts, sets=sets, num_sets=num_sets, real=share.real
        )
        if share.real is not None:
            probs = probs * share.real.unsqueeze(1)
        balance = z = local_tokens.new_zeros(())
        weights, tokens = routing.weights, local_tokens.sum() / config.topk
        balances = config.balance != "none" and config.aux_loss_coeff > 0.0
        if aux_factor is not None and (balances or config.z_loss_coeff > 0.0):
            counts = all_reduce(local_tokens, self.group)  # [sets, E]
            tokens = counts.sum() / config.topk
            if balances:
                balance = balance_loss(probs, counts, topk=config.topk, sets=sets)
                weights = attach_aux_loss(weights, balance, aux_factor * config.aux_loss_coeff)
            if config.z_loss_coeff > 0.0:
                z = z_loss(logits, tokens, real=share.real)
                weights = attach_aux_loss(weights, z, aux_factor * config.z_loss_coeff)
        self._count(local_tokens.sum(0), routing, probs, (balance, z, tokens))
        return Routing(experts, weights, routing.keep_mask)

    @torch.no_grad()
    def _count(
        self,
        assigned: torch.Tensor,
        routing: Routing,
        probs: torch.Tensor,
        losses: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """Add a microbatch to `counted`.

        Each rank has terms of the losses, so it counts 1 / ranks of the microbatch, or 0 if the
        microbatch is all padding.

        Args:
            losses: the balance loss, the z loss, and the number of their tokens.
        """
        balance, z, tokens = losses
        num_assigned = assigned.sum()
        num_kept = num_assigned if routing.keep_mask is None else routing.keep_mask.sum().float()
        entropy = torch.special.entr(probs).sum()
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
    """Write dyᵀ x [E, h] to `main_grad`, or add it; computed in fp32 for any dtype of x."""
    product = grad.t() @ x.float()
    if overwrite:
        main_grad.copy_(product)
    else:
        main_grad.add_(product)


@dataclass(frozen=True)
class RouterLoad:
    """Statistics of a router since the previous report.

    Args:
        name: name of the router.
        tokens: copies routed to each expert, before drops.
        dropped: fraction of dropped copies.
        entropy: mean over tokens of the entropy of their normalized scores, in nats.
        balance_loss, z_loss: means over microbatches, without coefficients; 0 if disabled.
    """

    name: str
    tokens: tuple[int, ...]
    dropped: float
    entropy: float
    balance_loss: float
    z_loss: float

    @property
    def imbalance(self) -> float:
        """Tokens of the busiest expert over the mean; 1 is even."""
        return max(self.tokens) * len(self.tokens) / max(1, sum(self.tokens))


def routers_of(model: nn.Module) -> list[Router]:
    """Return the routers among a model's modules."""
    return [module for module in model.modules() if isinstance(module, Router)]


class Balance:
    """Accumulate the routers' statistics and update the expert biases.

    Args:
        routers: this rank's routers.
        names: names of all routers of the model, in order; the same on every rank.
        config: the config of every MoE layer.
        world: all ranks; the ranks of a pipeline stage routed different tokens.
        device: this rank's device.
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
        """Finish a step: update the expert biases, if any; every rank calls it.

        Args:
            applied: whether the step changed weights; otherwise biases are not updated.
        """
        counted = [router.counted.clone() for router in self.routers]
        for router, total, counts in zip(self.routers, self._totals, counted, strict=True):
            total += counts
            router.counted.zero_()
        if not (self.config.router.expert_bias and applied):
            return
        totals = self._summed(counted)
        for router, row in zip(self.routers, self._rows, strict=True):
            assert router.expert_bias is not None
            tokens = totals[row, : router.num_experts]
            below_mean = torch.sign(tokens.mean() - tokens).float()
            router.expert_bias += router.config.bias_update_rate * below_mean

    def report(self) -> list[RouterLoad]:
        """Return the loads of all routers since the last report; every rank calls it."""
        totals = self._summed(self._totals).tolist()
        for total in self._totals:
            total.zero_()
        return [self._load(name, row) for name, row in zip(self.names, totals, strict=True)]

    def _summed(self, counted: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return [routers of the model, E + measures], summed over all ranks."""
        shape = len(self.names), self.config.num_experts + len(MEASURES)
        table = torch.zeros(shape, dtype=torch.float64, device=self.device)
        for row, counts in zip(self._rows, counted, strict=True):
            table[row] = counts
        return all_reduce(table, self.world)

    def _load(self, name: str, row: list[float]) -> RouterLoad:
        tokens, measures = (
            row[: -len(MEASURES)],
            dict(zip(MEASURES, row[-len(MEASURES) :], strict=True)),
        )
        num_assigned, microbatches = (
            max(1.0, measures["assigned"]),
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
