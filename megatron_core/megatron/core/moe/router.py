# SPDX-License-Identifier: Apache-2.0
"""Router: which experts a token goes to and what each of them counts for, in fp32.

    logits = W x
    scores = softmax(logits) or sigmoid(logits)
    the k experts with the highest score + bias, within the best groups if those are limited
    weights = their scores, over their sum if normalised, times a factor

The ranks of a pipeline stage route different tokens, so the gradient of W is partial on tp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from megatron.core.comm import all_reduce
from megatron.core.moe.choice import chosen_experts, within_capacity
from megatron.core.moe.config import MoEConfig
from megatron.core.moe.jitter import jitter_key, jittered
from megatron.core.moe.losses import balance_loss, carry, tokens_of_experts, z_loss
from megatron.core.moe.share import Share
from megatron.core.transformer.build import LayerBuild
from megatron.core.weight_sharding import WeightSharding

#: What a router counts, behind the tokens of each expert. The losses are without coefficients.
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
        logits = _Logits.apply(rows, self.weight.anchor, self.weight)  # [t, E]
        softmax = config.score_function == "softmax"
        scores = logits.softmax(-1) if softmax else logits.sigmoid()
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
        """Return which places [t, k] their experts take."""
        if share.filler:
            return torch.zeros_like(experts, dtype=torch.bool)
        if self.capacity_factor is None:
            return None
        wanted = share.counted * experts.shape[1]
        capacity = math.ceil(self.capacity_factor * wanted / self.num_experts)
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
        own = tokens_of_experts(
            experts, self.num_experts, sets=sets, num_sets=number, real=share.real
        )
        if share.real is not None:
            shares = shares * share.real.unsqueeze(1)
        balance = z = own.new_zeros(())
        weights = routing.weights
        balances = config.balance != "none" and config.aux_loss_coeff > 0.0
        if aux_factor is not None and (balances or config.z_loss_coeff > 0.0):
            counts = all_reduce(own, self.group)  # [sets, E]
            tokens = counts.sum() / config.topk
            if balances:
                balance = balance_loss(shares, counts, topk=config.topk, sets=sets)
                weights = carry(weights, balance, aux_factor * config.aux_loss_coeff)
            if config.z_loss_coeff > 0.0:
                z = z_loss(logits, tokens, real=share.real)
                weights = carry(weights, z, aux_factor * config.z_loss_coeff)
        if not share.filler:
            self._count(own.sum(0), routing, shares, balance, z)
        return Routing(experts, weights, routing.kept)

    @torch.no_grad()
    def _count(
        self,
        wanted: torch.Tensor,
        routing: Routing,
        shares: torch.Tensor,
        balance: torch.Tensor,
        z: torch.Tensor,
    ) -> None:
        """Add to `counted`; as ranks have parts of the losses, each counts a part of the
        microbatch."""
        places = wanted.sum()
        taken = places if routing.kept is None else routing.kept.sum().float()
        entropy = torch.special.entr(shares).sum()
        part = torch.full_like(places, 1.0 / self.group.size)
        measures = torch.stack([places, places - taken, entropy, balance, z, part])
        self.counted += torch.cat([wanted, measures])


class _Logits(torch.autograd.Function):
    """forward x Wᵀ in fp32; dgrad dy W in x's dtype; wgrad dyᵀ x in fp32. Saves x."""

    @staticmethod
    def forward(ctx, x, anchor, handle):
        ctx.handle = handle
        ctx.save_for_backward(x)
        return x.float() @ handle.get().float().t()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        handle = ctx.handle
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (grad @ handle.get().float()).to(x.dtype)
        if handle.trainable:
            handle.written_gradient(partial(_write_product, grad.detach(), x.detach()))
        return dx, None, None


def _write_product(
    grad: torch.Tensor, x: torch.Tensor, slot: torch.Tensor, *, overwrite: bool
) -> None:
    """Put dyᵀ x [E, h] into the slot, summed in fp32 whatever the slot's dtype."""
    product = grad.t() @ x.float()
    if overwrite:
        slot.copy_(product)
    else:
        slot.add_(product)
