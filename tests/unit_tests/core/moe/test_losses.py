# SPDX-License-Identifier: Apache-2.0
"""Auxiliary losses of a router and their gradient, against fp64 loops over tokens."""

from __future__ import annotations

import pytest
import torch

from megatron.core.moe.router import attach_aux_loss, balance_loss, count_expert_tokens, z_loss
from tests.support.closeness import assert_all_close, assert_close_by_metric
from tests.support.inputs import generator

TOKENS, EXPERTS, TOPK, SETS = 29, 7, 3, 4


def routing_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits [t, E], experts [t, k], each token's set and a mask of real tokens."""
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
    for index in range(count):
        members = [t for t in range(len(logits)) if sets[t] == index and real[t]]
        tokens, sums = [0] * EXPERTS, [logits.new_zeros(())] * EXPERTS
        for t in members:
            for e in experts[t].tolist():
                tokens[e] += 1
            share = logits[t].exp() / logits[t].exp().sum()
            sums = [s + p for s, p in zip(sums, share, strict=True)]
        products = [n * s for n, s in zip(tokens, sums, strict=True)]
        total = total + EXPERTS / (TOPK * max(1, len(members)) ** 2) * sum(products)
    return total / count


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("by_set", [False, True])
def test_balance_loss_matches_token_loop(padded: bool, by_set: bool):
    logits, experts, sets, real = routing_inputs()
    keep = real if padded else torch.ones_like(real)
    if by_set:
        keep = keep & (sets != 1)  # a set without any token
    options = {"sets": sets if by_set else None}
    count = SETS if by_set else 1
    x = logits.clone().requires_grad_(True)
    counts = count_expert_tokens(
        experts, EXPERTS, num_sets=count, real=keep if padded or by_set else None, **options
    )
    shares = x.softmax(-1) * keep.unsqueeze(1)
    loss = balance_loss(shares, counts, topk=TOPK, **options)
    loss.backward()
    y = logits.double().requires_grad_(True)
    set_ids = sets.tolist() if by_set else [0] * TOKENS
    expected = loop_balance(y, experts, set_ids, keep.tolist(), count)
    expected.backward()
    assert_all_close({"loss": loss, "dx": x.grad}, {"loss": expected, "dx": y.grad})
    assert counts.sum() == TOPK * keep.sum()
    # Ranks compute their share of the loss with the summed counts, so the halves add up.
    half = TOKENS // 2
    halves = [
        balance_loss(shares[rows].detach(), counts, topk=TOPK, sets=sets[rows] if by_set else None)
        for rows in (slice(0, half), slice(half, None))
    ]
    assert_close_by_metric("sum of the halves", sum(halves), expected)


def test_even_routing_has_balance_loss_one():
    tokens, experts = 14, 7
    chosen = torch.stack([torch.arange(tokens), torch.arange(tokens) + 3], dim=1) % experts
    shares = torch.full((tokens, experts), 1 / experts, dtype=torch.float64)
    counts = count_expert_tokens(chosen, experts).double()
    assert counts.tolist() == [[4.0] * experts]
    assert balance_loss(shares, counts, topk=2).item() == pytest.approx(1.0, abs=1e-14)
    collapsed = torch.zeros_like(shares)
    collapsed[:, 0] = 1.0
    collapsed_counts = count_expert_tokens(
        torch.zeros(tokens, 1, dtype=torch.int64), experts
    ).double()
    assert balance_loss(collapsed, collapsed_counts, topk=1).item() == experts


@pytest.mark.parametrize("padded", [False, True])
def test_z_loss_matches_token_loop(padded: bool):
    logits, _, _, real = routing_inputs()
    x, y = logits.clone().requires_grad_(True), logits.double().requires_grad_(True)
    keep = real.tolist() if padded else [True] * TOKENS
    z = z_loss(x, torch.tensor(float(sum(keep))), real=real if padded else None)
    terms = [y[t].exp().sum().log() ** 2 for t in range(TOKENS) if keep[t]]
    expected = sum(terms) / len(terms)
    z.backward()
    expected.backward()
    assert_all_close({"loss": z, "dx": x.grad}, {"loss": expected, "dx": y.grad})
    if padded:
        assert not x.grad[~real].any()


def test_batch_without_real_tokens_has_no_loss():
    no_tokens = torch.zeros(3, dtype=torch.bool)
    counts = count_expert_tokens(torch.zeros(3, 2, dtype=torch.int64), EXPERTS, real=no_tokens)
    assert balance_loss(torch.zeros(3, EXPERTS), counts, topk=2) == 0
    assert z_loss(torch.ones(3, EXPERTS), torch.tensor(0.0), real=no_tokens) == 0


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_attached_aux_loss_gradient_has_factor_and_loss_scale(scale: float):
    x = torch.randn(5, 3, generator=generator(4)).requires_grad_(True)
    w = torch.randn(3, generator=generator(5)).requires_grad_(True)
    factor = torch.tensor(0.37) * scale  # the factor includes the step's loss scale
    out = attach_aux_loss(x, (w**3).sum(), factor)
    assert torch.equal(out, x), "values do not change"
    upstream = torch.randn(5, 3, generator=generator(6))
    (out * upstream * scale).sum().backward()
    assert torch.equal(x.grad, upstream * scale)
    expected = 0.37 * scale * 3 * w.detach().double() ** 2
    assert_close_by_metric("gradient of the loss", w.grad, expected)
    assert factor.grad is None
