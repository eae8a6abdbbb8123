# SPDX-License-Identifier: Apache-2.0
"""Auxiliary losses of a router against fp64 loops over tokens, and their way into the gradient."""

from __future__ import annotations

import pytest
import torch

from megatron.core.moe.router import attach_aux_loss, balance_loss, count_expert_tokens, z_loss
from tests.support.closeness import assert_all_close, assert_close_by_metric
from tests.support.inputs import generator

TOKENS, EXPERTS, TOPK, SETS = 29, 7, 3, 4


def routed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits [t, E], experts [t, k], each token's set and which are real."""
    logits = 2 * torch.randn(TOKENS, EXPERTS, generator=generator(1))
    experts = logits.topk(TOPK).indices
    sets = torch.randint(0, SETS, (TOKENS,), generator=generator(2))
    real = torch.rand(TOKENS, generator=generator(3)) > 0.3
    return logits, experts, sets, real


def loop_balance(
    logits: torch.Tensor, experts: torch.Tensor, sets: list[int], real: list[bool], count: int
) -> torch.Tensor:
    """Return the mean over sets of E/(k·T²) Σ_e tokens_e · Σ_t share_te in fp64, token by token."""
    total = logits.new_zeros(())
    for number in range(count):
        mine = [t for t in range(len(logits)) if sets[t] == number and real[t]]
        tokens, sums = [0] * EXPERTS, [logits.new_zeros(())] * EXPERTS
        for t in mine:
            for e in experts[t].tolist():
                tokens[e] += 1
            share = logits[t].exp() / logits[t].exp().sum()
            sums = [s + p for s, p in zip(sums, share, strict=True)]
        products = [n * s for n, s in zip(tokens, sums, strict=True)]
        total = total + EXPERTS / (TOPK * max(1, len(mine)) ** 2) * sum(products)
    return total / count


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("by_set", [False, True])
def test_balance_of_tokens_and_of_each_set(padded: bool, by_set: bool):
    logits, experts, sets, real = routed()
    keep = real if padded else torch.ones_like(real)
    if by_set:
        keep = keep & (sets != 1)  # a set without any token
    given = {"sets": sets if by_set else None}
    count = SETS if by_set else 1
    x = logits.clone().requires_grad_(True)
    counts = count_expert_tokens(
        experts, EXPERTS, num_sets=count, real=keep if padded or by_set else None, **given
    )
    shares = x.softmax(-1) * keep.unsqueeze(1)
    loss = balance_loss(shares, counts, topk=TOPK, **given)
    loss.backward()
    y = logits.double().requires_grad_(True)
    numbers = sets.tolist() if by_set else [0] * TOKENS
    wanted = loop_balance(y, experts, numbers, keep.tolist(), count)
    wanted.backward()
    assert_all_close({"loss": loss, "dx": x.grad}, {"loss": wanted, "dx": y.grad})
    assert counts.sum() == TOPK * keep.sum()
    # what a rank counts is its part: halves add up, with the counts of both
    half = TOKENS // 2
    parts = [
        balance_loss(shares[rows].detach(), counts, topk=TOPK, sets=sets[rows] if by_set else None)
        for rows in (slice(0, half), slice(half, None))
    ]
    assert_close_by_metric("the sum of the parts", sum(parts), wanted)


def test_even_routing_is_one():
    tokens, experts = 14, 7
    chosen = torch.stack([torch.arange(tokens), torch.arange(tokens) + 3], dim=1) % experts
    shares = torch.full((tokens, experts), 1 / experts, dtype=torch.float64)
    counts = count_expert_tokens(chosen, experts).double()
    assert counts.tolist() == [[4.0] * experts]
    assert balance_loss(shares, counts, topk=2).item() == pytest.approx(1.0, abs=1e-14)
    worst = torch.zeros_like(shares)
    worst[:, 0] = 1.0
    alone = count_expert_tokens(torch.zeros(tokens, 1, dtype=torch.int64), experts).double()
    assert balance_loss(worst, alone, topk=1).item() == experts


@pytest.mark.parametrize("padded", [False, True])
def test_z_loss(padded: bool):
    logits, _, _, real = routed()
    x, y = logits.clone().requires_grad_(True), logits.double().requires_grad_(True)
    keep = real.tolist() if padded else [True] * TOKENS
    z = z_loss(x, torch.tensor(float(sum(keep))), real=real if padded else None)
    terms = [y[t].exp().sum().log() ** 2 for t in range(TOKENS) if keep[t]]
    wanted = sum(terms) / len(terms)
    z.backward()
    wanted.backward()
    assert_all_close({"loss": z, "dx": x.grad}, {"loss": wanted, "dx": y.grad})
    if padded:
        assert not x.grad[~real].any()


def test_sets_without_tokens_have_no_loss():
    nobody = torch.zeros(3, dtype=torch.bool)
    counts = count_expert_tokens(torch.zeros(3, 2, dtype=torch.int64), EXPERTS, real=nobody)
    assert balance_loss(torch.zeros(3, EXPERTS), counts, topk=2) == 0
    assert z_loss(torch.ones(3, EXPERTS), torch.tensor(0.0), real=nobody) == 0


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_attached_aux_loss_gradient_has_factor_and_loss_scale(scale: float):
    x = torch.randn(5, 3, generator=generator(4)).requires_grad_(True)
    w = torch.randn(3, generator=generator(5)).requires_grad_(True)
    factor = torch.tensor(0.37) * scale  # what the step multiplies its loss by is in the factor
    out = attach_aux_loss(x, (w**3).sum(), factor)
    assert torch.equal(out, x), "values do not change"
    upstream = torch.randn(5, 3, generator=generator(6))
    (out * upstream * scale).sum().backward()
    assert torch.equal(x.grad, upstream * scale)
    wanted = 0.37 * scale * 3 * w.detach().double() ** 2
    assert_close_by_metric("gradient of the loss", w.grad, wanted)
    assert factor.grad is None
