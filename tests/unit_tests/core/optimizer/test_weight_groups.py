# SPDX-License-Identifier: Apache-2.0
"""Factors by weight name and bf16 moments against a plain fp64 AdamW, on any layout."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

import pytest
import torch

from megatron.core import ProcessGroupCollection, RankGrid
from megatron.core.optimizer import OptimizerConfig
from tests.support.closeness import assert_all_close, assert_piece_close
from tests.support.ranks import run_ranks
from tests.unit_tests.core.optimizer.gradient_steps import SHAPES, Training, random_gradients

LR = (("q", 0.25), ("down*", 3.0), ("*.bias", 7.0), ("experts", 0.0))
DECAY = (("table", 0.0), ("norm", 2.0), ("k", 5.0))
#: (lr factor, decay factor) by weight: the first match wins, other weights keep the default.
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


def config(**overrides: object) -> OptimizerConfig:
    """Return Adam's settings with factors by name."""
    options = {"lr_factors": LR, "decay_factors": DECAY, "clip_grad": 0.0, **overrides}
    return OptimizerConfig(adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_eps=1e-5, **options)  # type: ignore[arg-type]


def formula(
    start: dict[str, torch.Tensor], factors: dict[str, tuple[float, float]], *, rounding=None
) -> dict[str, torch.Tensor]:
    """Return weights after AdamW's steps by the paper's equations, in fp64.

    Args:
        rounding: applied to the moments after every step.
    """
    round_moment = rounding or (lambda moment: moment)
    weights = {name: w.double() for name, w in start.items()}
    moments = {name: [torch.zeros_like(w), torch.zeros_like(w)] for name, w in weights.items()}
    for step in range(STEPS):
        for name, gradient in random_gradients(step).items():
            g = gradient.double()
            lr, decay = 0.1 * factors[name][0], 0.1 * factors[name][1]
            first_moment = BETAS[0] * moments[name][0] + (1 - BETAS[0]) * g
            second_moment = BETAS[1] * moments[name][1] + (1 - BETAS[1]) * g * g
            root = (second_moment / (1 - BETAS[1] ** (step + 1))).sqrt() + 1e-5
            move = first_moment / (1 - BETAS[0] ** (step + 1)) / root
            weights[name] = weights[name] * (1 - lr * decay) - lr * move
            moments[name] = [round_moment(first_moment), round_moment(second_moment)]
    return weights


def train(training: Training) -> Training:
    for step in range(STEPS):
        training.step(random_gradients(step), lr=0.1, weight_decay=0.1)
    return training


def test_factors_by_name_match_the_formula():
    training = Training(ProcessGroupCollection.single(), config())
    start = training.logical()
    ranges = [len(state.updates) for state in training.optimizer.ranges]
    assert max(ranges) > 2, "ranges are divided by factor"
    weights = train(training).logical()
    assert_all_close(weights, formula(start, FACTORS), bound=2e-6)
    assert torch.equal(weights["experts"], start["experts"])
    for name in SHAPES:  # a wrong factor of any weight exceeds the bound
        if name == "experts":
            continue
        wrong = {**FACTORS, name: (FACTORS[name][0], FACTORS[name][1] + 0.5)}
        difference = (formula(start, wrong)[name] - weights[name]).abs().max()
        assert difference > 1e-4 * weights[name].abs().max(), name


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_decoupled_lr_applies_unless_a_factor_matches(kind):
    training = Training(
        ProcessGroupCollection.single(), config(kind=kind, decoupled=("table", "norm", "q", "none"))
    )
    start = training.logical()
    for step in range(STEPS):
        training.step(random_gradients(step), lr=0.1, weight_decay=0.1, decoupled_lr=0.03)
    weights = training.logical()
    expected = formula(start, FACTORS | {"table": (0.3, 0.0), "norm": (0.3, 2.0)})
    names = ("norm", "down.bias") if kind == "muon" else SHAPES  # vectors are AdamW's
    assert_all_close({n: weights[n] for n in names}, {n: expected[n] for n in names}, bound=2e-6)


def test_sgd_applies_factors_by_name():
    training = Training(ProcessGroupCollection.single(), config(kind="sgd"))
    start = training.logical()
    training.step(random_gradients(0), lr=0.1, weight_decay=0.1)
    expected = {}
    for name, weight in start.items():
        lr, decay = FACTORS[name]
        expected[name] = weight - 0.1 * lr * (random_gradients(0)[name] + 0.1 * decay * weight)
    assert_all_close(training.logical(), expected, bound=2e-6)


def rounded(moment: torch.Tensor) -> torch.Tensor:
    return moment.float().bfloat16().double()


def test_bf16_moments_match_formula_rounded_each_step():
    settings = config(exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16)
    training = Training(ProcessGroupCollection.single(), settings)
    start = training.logical()
    weights = train(training).logical()
    for state in training.optimizer.ranges:
        assert {t.dtype for t in state.named_tensors().values()} == {torch.bfloat16}
    # A moment close to a rounding boundary may round the other way, by 1/256 of its value.
    rounded_weights, fp32_weights = (
        formula(start, FACTORS, rounding=rounded),
        formula(start, FACTORS),
    )
    num_equal = num_different = 0
    for name, values in weights.items():
        bound = 2e-6 * rounded_weights[name].abs().max()
        num_equal += int(((values - rounded_weights[name]).abs() <= bound).sum())
        num_different += int(((values - fp32_weights[name]).abs() > bound).sum())
    total = sum(math.prod(shape) for shape in SHAPES.values())
    assert num_equal >= 0.98 * total
    assert num_different >= 0.5 * total, "moments are rounded"


def train_on_two_ranks(rank: int, world: int) -> list[dict]:
    runs = []
    for grid in (RankGrid(world_size=2, tp=2), RankGrid(world_size=2)):
        groups = ProcessGroupCollection.create(grid, rank=rank)
        for strategy in ("no_shard", "optim"):
            for dtype in (torch.float32, torch.bfloat16):
                settings = config(exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype, clip_grad=2.5)
                training = train(Training(groups, settings, strategy=strategy))
                runs.append({"dtype": dtype, "shards": training.shards()})
    return runs


def test_every_layout_and_strategy_applies_the_same_factors():
    expected = {}
    for dtype in (torch.float32, torch.bfloat16):
        settings = config(exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype, clip_grad=2.5)
        expected[dtype] = train(Training(ProcessGroupCollection.single(), settings)).logical()
    for runs in run_ranks(train_on_two_ranks, 2):
        assert len(runs) == 8
        for run in runs:
            # a norm summed in a different order moves a few moments over a rounding boundary
            bound = 2e-6 if run["dtype"] is torch.float32 else 2e-3
            for name, offsets, values in run["shards"]:
                assert_piece_close(name, values, expected[run["dtype"]][name], offsets, bound=bound)


@pytest.mark.parametrize("settings", [{"kind": "adam"}, {"kind": "sgd"}, {"offload_fraction": 1.0}])
def test_bf16_gradients_are_upcast_to_fp32(settings: dict):
    """Only the gradient is rounded: the update then computes in fp32."""
    bf16_training, fp32_training = (
        Training(ProcessGroupCollection.single(), config(**settings), grad_dtype=dtype)
        for dtype in (torch.bfloat16, torch.float32)
    )
    for step in range(STEPS):
        rounded_once = {name: g.bfloat16().float() for name, g in random_gradients(step).items()}
        step_results = [
            bf16_training.step(random_gradients(step), lr=0.1, weight_decay=0.1),
            fp32_training.step(rounded_once, lr=0.1, weight_decay=0.1),
        ]
        assert step_results[0].grad_norm == pytest.approx(step_results[1].grad_norm, rel=1e-6)
    gradients = {state.owned.gradients.dtype for state in bf16_training.optimizer.ranges}
    assert gradients == {torch.bfloat16}
    expected = fp32_training.logical()
    assert all(torch.equal(w, expected[name]) for name, w in bf16_training.logical().items())


def test_pattern_without_a_matching_weight_is_named():
    groups = ProcessGroupCollection.single()
    with pytest.raises(ValueError, match=r"learning rate groups: no weight matches Q or x\*"):
        Training(groups, OptimizerConfig(lr_factors=(("Q", 1.0), ("q", 1.0), ("x*", 1.0))))
    with pytest.raises(ValueError, match="weight decay groups: no weight matches head"):
        Training(groups, OptimizerConfig(decay_factors=(("head", 1.0),)))
    assert all(any(fnmatchcase(name, p) for name in SHAPES) for p, _ in LR + DECAY)


def test_all_invalid_group_settings_are_reported_at_once():
    with pytest.raises(ValueError) as caught:
        OptimizerConfig(
            exp_avg_dtype=torch.float16,
            exp_avg_sq_dtype=torch.bfloat16,
            lr_factors=(("a", -1.0), ("b", math.inf)),
            decay_factors=(("c", 1.0), ("c", 2.0)),
        )
    text = str(caught.value)
    for problem in (
        "exp_avg_dtype is torch.float16",
        "exp_avg_sq in bf16 with adam_beta2 0.999: rounding loses its updates",
        "learning rate of a=-1.0",
        "learning rate of b=inf",
        "weight decay of c is given twice",
    ):
        assert problem in text
    with pytest.raises(ValueError, match="exp_avg"):
        OptimizerConfig(kind="sgd", exp_avg_dtype=torch.bfloat16)
