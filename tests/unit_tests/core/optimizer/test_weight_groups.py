# SPDX-License-Identifier: Apache-2.0
"""Factors by weight name and moments in bf16, against a plain fp64 AdamW, on any layout."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

import pytest
import torch

from megatron.core.optimizer import OptimizerConfig
from megatron.core.process_groups import ProcessGroupCollection, RankGrid
from tests.support.closeness import assert_all_close, assert_piece_close
from tests.support.ranks import run_ranks
from tests.unit_tests.core.optimizer.gradient_steps import SHAPES, Training, drawn

LR = (("q", 0.25), ("down*", 3.0), ("*.bias", 7.0), ("experts", 0.0))
DECAY = (("table", 0.0), ("norm", 2.0), ("k", 5.0))
#: What the patterns come to: the first match wins, the rest keep the default.
FACTORS = {
    "table": (1.0, 0.0),
    "norm": (1.0, 2.0),
    "q": (0.25, 1.0),
    "k": (1.0, 5.0),
    "down": (3.0, 1.0),
    "down.bias": (3.0, 0.0),
    "experts": (0.0, 1.0),
}
BETAS = (0.8, 0.95)
STEPS = 4


def config(**more: object) -> OptimizerConfig:
    """Return Adam's settings with groups."""
    given = {"lr_factors": LR, "decay_factors": DECAY, "clip_grad": 0.0, **more}
    return OptimizerConfig(adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_eps=1e-5, **given)  # type: ignore[arg-type]


def formula(
    start: dict[str, torch.Tensor], factors: dict[str, tuple[float, float]], *, rounding=None
) -> dict[str, torch.Tensor]:
    """Return weights after AdamW's steps as its paper writes them, in fp64.

    Args:
        rounding: what becomes of a moment between steps.
    """
    kept = rounding or (lambda moment: moment)
    weights = {name: w.double() for name, w in start.items()}
    moments = {name: [torch.zeros_like(w), torch.zeros_like(w)] for name, w in weights.items()}
    for step in range(STEPS):
        for name, gradient in drawn(step).items():
            g = gradient.double()
            lr, decay = 0.1 * factors[name][0], 0.1 * factors[name][1]
            first = BETAS[0] * moments[name][0] + (1 - BETAS[0]) * g
            second = BETAS[1] * moments[name][1] + (1 - BETAS[1]) * g * g
            root = (second / (1 - BETAS[1] ** (step + 1))).sqrt() + 1e-5
            move = first / (1 - BETAS[0] ** (step + 1)) / root
            weights[name] = weights[name] * (1 - lr * decay) - lr * move
            moments[name] = [kept(first), kept(second)]
    return weights


def train(training: Training) -> Training:
    for step in range(STEPS):
        training.step(drawn(step), lr=0.1, weight_decay=0.1)
    return training


def test_factors_by_name_are_those_of_the_formula():
    training = Training(ProcessGroupCollection.single(), config())
    start = training.logical()
    ranges = [len(state.updates) for state in training.optimizer.ranges]
    assert max(ranges) > 2, "nothing was set apart"
    found = train(training).logical()
    assert_all_close(found, formula(start, FACTORS), bound=2e-6)
    assert torch.equal(found["experts"], start["experts"])
    for name in SHAPES:  # a wrong factor anywhere is seen
        if name == "experts":
            continue
        wrong = {**FACTORS, name: (FACTORS[name][0], FACTORS[name][1] + 0.5)}
        moved = (formula(start, wrong)[name] - found[name]).abs().max()
        assert moved > 1e-4 * found[name].abs().max(), name


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_decoupled_lr_applies_unless_a_factor_matches(kind):
    training = Training(
        ProcessGroupCollection.single(), config(kind=kind, decoupled=("table", "norm", "q", "none"))
    )
    start = training.logical()
    for step in range(STEPS):
        training.step(drawn(step), lr=0.1, weight_decay=0.1, decoupled_lr=0.03)
    found = training.logical()
    wanted = formula(start, FACTORS | {"table": (0.3, 0.0), "norm": (0.3, 2.0)})
    names = ("norm", "down.bias") if kind == "muon" else SHAPES  # vectors are AdamW's
    assert_all_close({n: found[n] for n in names}, {n: wanted[n] for n in names}, bound=2e-6)


def test_sgd_takes_factors_too():
    training = Training(ProcessGroupCollection.single(), config(kind="sgd"))
    start = training.logical()
    training.step(drawn(0), lr=0.1, weight_decay=0.1)
    wanted = {}
    for name, weight in start.items():
        lr, decay = FACTORS[name]
        wanted[name] = weight - 0.1 * lr * (drawn(0)[name] + 0.1 * decay * weight)
    assert_all_close(training.logical(), wanted, bound=2e-6)


def rounded(moment: torch.Tensor) -> torch.Tensor:
    return moment.float().bfloat16().double()


def test_bf16_moments_match_formula_rounded_each_step():
    settings = config(exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16)
    training = Training(ProcessGroupCollection.single(), settings)
    start = training.logical()
    found = train(training).logical()
    for state in training.optimizer.ranges:
        assert {t.dtype for t in state.named_tensors().values()} == {torch.bfloat16}
    # A moment next to a rounding border may fall to the other side: 1/256 of it, once.
    exact, wide = formula(start, FACTORS, rounding=rounded), formula(start, FACTORS)
    close = far = 0
    for name, values in found.items():
        bound = 2e-6 * exact[name].abs().max()
        close += int(((values - exact[name]).abs() <= bound).sum())
        far += int(((values - wide[name]).abs() > bound).sum())
    total = sum(math.prod(shape) for shape in SHAPES.values())
    assert close >= 0.98 * total
    assert far >= 0.5 * total, "nothing was rounded"


def two_ranks(rank: int, world: int) -> list[dict]:
    found = []
    for grid in (RankGrid(world_size=2, tp=2), RankGrid(world_size=2)):
        groups = ProcessGroupCollection.create(grid, rank=rank)
        for strategy in ("no_shard", "optim"):
            for dtype in (torch.float32, torch.bfloat16):
                settings = config(exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype, clip_grad=2.5)
                training = train(Training(groups, settings, strategy=strategy))
                found.append({"dtype": dtype, "pieces": training.pieces()})
    return found


def test_every_layout_and_strategy_takes_the_same_factors():
    wanted = {}
    for dtype in (torch.float32, torch.bfloat16):
        settings = config(exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype, clip_grad=2.5)
        wanted[dtype] = train(Training(ProcessGroupCollection.single(), settings)).logical()
    for found in run_ranks(two_ranks, 2):
        assert len(found) == 8
        for one in found:
            # a norm in another order of addition moves a few moments over a rounding border
            bound = 2e-6 if one["dtype"] is torch.float32 else 2e-3
            for name, offsets, values in one["pieces"]:
                assert_piece_close(name, values, wanted[one["dtype"]][name], offsets, bound=bound)


@pytest.mark.parametrize("more", [{"kind": "adam"}, {"kind": "sgd"}, {"offload_fraction": 1.0}])
def test_gradients_in_bf16_are_widened(more: dict):
    """What is rounded is the gradient alone: the update then computes as from fp32."""
    narrow, wide = (
        Training(ProcessGroupCollection.single(), config(**more), grad_dtype=dtype)
        for dtype in (torch.bfloat16, torch.float32)
    )
    for step in range(STEPS):
        rounded_once = {name: g.bfloat16().float() for name, g in drawn(step).items()}
        results = [
            narrow.step(drawn(step), lr=0.1, weight_decay=0.1),
            wide.step(rounded_once, lr=0.1, weight_decay=0.1),
        ]
        assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-6)
    gradients = {state.owned.gradients.dtype for state in narrow.optimizer.ranges}
    assert gradients == {torch.bfloat16}
    wanted = wide.logical()
    assert all(torch.equal(w, wanted[name]) for name, w in narrow.logical().items())


def test_a_pattern_without_a_weight_is_named():
    groups = ProcessGroupCollection.single()
    with pytest.raises(ValueError, match=r"learning rate groups: no weight matches Q or x\*"):
        Training(groups, OptimizerConfig(lr_factors=(("Q", 1.0), ("q", 1.0), ("x*", 1.0))))
    with pytest.raises(ValueError, match="weight decay groups: no weight matches head"):
        Training(groups, OptimizerConfig(decay_factors=(("head", 1.0),)))
    assert all(any(fnmatchcase(name, p) for name in SHAPES) for p, _ in LR + DECAY)


def test_what_cannot_be_is_named_at_once():
    with pytest.raises(ValueError) as caught:
        OptimizerConfig(
            exp_avg_dtype=torch.float16,
            exp_avg_sq_dtype=torch.bfloat16,
            lr_factors=(("a", -1.0), ("b", math.inf)),
            decay_factors=(("c", 1.0), ("c", 2.0)),
        )
    text = str(caught.value)
    for part in (
        "exp_avg_dtype is torch.float16",
        "exp_avg_sq in bf16 with adam_beta2 0.999: rounding loses its updates",
        "learning rate of a=-1.0",
        "learning rate of b=inf",
        "weight decay of c is given twice",
    ):
        assert part in text
    with pytest.raises(ValueError, match="optimizer sgd has no exp_avg"):
        OptimizerConfig(kind="sgd", exp_avg_dtype=torch.bfloat16)
