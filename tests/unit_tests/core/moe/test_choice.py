# SPDX-License-Identifier: Apache-2.0
"""Choice of experts and the capacity mask, against loops over tokens."""

from __future__ import annotations

import pytest
import torch

from megatron.core.moe import RouterConfig
from megatron.core.moe.router import choose_experts, within_capacity
from tests.support.inputs import generator

TOKENS, EXPERTS = 23, 12


def choose_for_token(scores: list[float], config: RouterConfig, bias: list[float]) -> set[int]:
    """Return the experts of one token."""
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    candidates = range(len(biased))
    if config.num_groups is not None:
        group_size = len(biased) // config.num_groups
        groups = [range(g * group_size, (g + 1) * group_size) for g in range(config.num_groups)]
        worth = [
            sum(sorted((biased[e] for e in group), reverse=True)[: config.group_candidates])
            for group in groups
        ]
        best = sorted(range(len(groups)), key=lambda g: -worth[g])[: config.group_topk]
        candidates = [e for g in best for e in groups[g]]
    return set(sorted(candidates, key=lambda e: -biased[e])[: config.topk])


@pytest.mark.parametrize(
    "config",
    [
        RouterConfig(topk=3),
        RouterConfig(topk=1, normalize=False),
        RouterConfig(topk=EXPERTS),
        RouterConfig(topk=4, num_groups=4, group_topk=2),
        RouterConfig(topk=3, num_groups=3, group_topk=1, group_candidates=1),
        RouterConfig(topk=2, num_groups=6, group_topk=6, group_candidates=2),
    ],
)
@pytest.mark.parametrize("offset", [None, 0.0, -2.0])
def test_topk_is_limited_to_best_groups(config: RouterConfig, offset: float | None):
    assert config.problems(EXPERTS) == []
    scores = torch.rand(TOKENS, EXPERTS, generator=generator(1))
    bias = None
    if offset is not None:  # at -2 every biased score is negative, and below those left out at 0
        bias = 0.4 * torch.rand(EXPERTS, generator=generator(2)) + offset
    before = scores.clone()
    experts = choose_experts(scores, config, bias=bias)
    assert experts.shape == (TOKENS, config.topk)
    assert torch.equal(scores, before)
    biases = [0.0] * EXPERTS if bias is None else bias.tolist()
    expected = [choose_for_token(token, config, biases) for token in scores.tolist()]
    assert [set(token) for token in experts.tolist()] == expected
    plain = choose_experts(scores, RouterConfig(topk=config.topk))
    if config.topk < EXPERTS and (bias is not None or (config.group_topk or 6) < 6):
        assert not torch.equal(experts.sort().values, plain.sort().values), "nothing was limited"


def greedy_capacity_mask(
    experts: torch.Tensor, weights: torch.Tensor, real: torch.Tensor, capacity: int, policy: str
) -> torch.Tensor:
    """Assign slots of experts one after the other."""
    tokens, topk = experts.shape
    assignments = [(t, j) for t in range(tokens) for j in range(topk) if real[t]]
    if policy == "probs":
        assignments.sort(key=lambda assignment: -weights[assignment].item())  # stable
    mask, room = torch.zeros(tokens, topk, dtype=torch.bool), [capacity] * EXPERTS
    for assignment in assignments:
        expert = int(experts[assignment])
        if room[expert]:
            room[expert] -= 1
            mask[assignment] = True
    return mask


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_capacity_mask_matches_greedy_loop(policy: str, padded: bool, ties: bool):
    topk = 3
    scores = torch.rand(TOKENS, EXPERTS, generator=generator(3))
    scores[:, 5] += 0.7  # nearly all tokens choose it
    scores[:, 2] -= 2.0  # no token chooses it
    experts = scores.topk(topk).indices
    weights = torch.rand(TOKENS, topk, generator=generator(4))
    if ties:
        weights = (weights * 3).round() / 3
    real = torch.ones(TOKENS, dtype=torch.bool)
    if padded:
        real[::4] = False
    full = experts.flatten().bincount(minlength=EXPERTS)
    assert full[2] == 0
    assert full[5] > TOKENS // 2
    for capacity in (1, 2, 5, int(full.max()), 10 * TOKENS):
        mask = within_capacity(
            experts, weights, capacity=capacity, policy=policy, real=real if padded else None
        )
        assert torch.equal(mask, greedy_capacity_mask(experts, weights, real, capacity, policy)), (
            capacity
        )
        drops_none = bool((mask == real[:, None]).all())
        assert drops_none == (capacity >= full.max())


def test_padding_takes_no_capacity():
    experts, weights = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    no_tokens = torch.zeros(4, dtype=torch.bool)
    mask = within_capacity(experts, weights, capacity=2, policy="probs", real=no_tokens)
    assert not mask.any()
    empty = within_capacity(experts[:0], weights[:0], capacity=2, policy="probs")
    assert empty.shape == (0, 1)
