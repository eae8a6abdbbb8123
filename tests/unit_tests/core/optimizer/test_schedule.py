# SPDX-License-Identifier: Apache-2.0
"""Learning-rate and weight-decay schedules against closed forms at chosen sample counts."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.optimizer import LearningRateSchedule, WeightDecaySchedule
from megatron.core.optimizer.schedule import ANNEAL_STYLES, DECAY_STYLES

# max 3e-4, min 3e-5, warm-up 100 samples from 1e-5, decay to 1100; wsd decays over the last 400.
LR = {
    "max_lr": 3e-4,
    "min_lr": 3e-5,
    "init_lr": 1e-5,
    "warmup_samples": 100,
    "decay_samples": 1100,
    "wsd_decay_samples": 400,
}


@pytest.mark.parametrize("style", DECAY_STYLES)
def test_warmup_is_linear_and_equal_for_every_style(style):
    schedule = LearningRateSchedule(**LR, style=style)
    for samples, expected in [(0, 1e-5), (1, 1.29e-5), (50, 1.55e-4), (100, 3e-4)]:
        assert schedule.lr(samples) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("style", "points"),
    [
        ("constant", {101: 3e-4, 1100: 3e-4, 1101: 3e-4, 10**9: 3e-4}),
        ("linear", {350: 2.325e-4, 600: 1.65e-4, 1100: 3e-5, 1101: 3e-5, 10**9: 3e-5}),
        # cos(pi/4) and cos(pi/3): r = 1/4 at 350, 1/2 at 600
        (
            "cosine",
            {350: 3e-5 + 2.7e-4 * (2 + math.sqrt(2)) / 4, 600: 1.65e-4, 1100: 3e-5, 1101: 3e-5},
        ),
        # At 4 and 9 times the warm-up: a half and a third of the maximum. The last decay sample is
        # still on the curve; unlike the other styles, the curve does not end at the minimum.
        (
            "inverse-square-root",
            {400: 1.5e-4, 900: 1e-4, 1100: 3e-4 / math.sqrt(11), 1101: 3e-5, 10**9: 3e-5},
        ),
    ],
)
def test_decay_styles_match_closed_forms(style, points):
    schedule = LearningRateSchedule(**LR, style=style)
    for samples, expected in points.items():
        assert schedule.lr(samples) == pytest.approx(expected, rel=1e-12), samples


def test_inverse_square_root_stops_at_the_floor():
    schedule = LearningRateSchedule(**{**LR, "min_lr": 1.2e-4}, style="inverse-square-root")
    assert schedule.lr(400) == pytest.approx(1.5e-4)
    assert schedule.lr(900) == pytest.approx(1.2e-4)
    no_warmup = LearningRateSchedule(max_lr=1.0, decay_samples=100, style="inverse-square-root")
    assert [no_warmup.lr(n) for n in (0, 1, 4, 16)] == [1.0, 1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    ("style", "quarter", "half"),
    [
        ("linear", 0.75, 0.5),
        ("cosine", (2 + math.sqrt(2)) / 4, 0.5),
        ("exponential", 2 ** (3 / 4) - 1, math.sqrt(2) - 1),
        ("minus_sqrt", 0.5, 1 - math.sqrt(0.5)),
    ],
)
def test_wsd_schedule_is_constant_and_then_decays(style, quarter, half):
    schedule = LearningRateSchedule(**LR, style="wsd", wsd_decay_style=style)
    for samples in (101, 500, 700):  # 700 = decay 1100 - anneal 400
        assert schedule.lr(samples) == 3e-4
    for samples, share in [(800, quarter), (900, half), (1100, 0.0), (1101, 0.0)]:
        assert schedule.lr(samples) == pytest.approx(3e-5 + 2.7e-4 * share, rel=1e-12), samples


@settings(max_examples=60, deadline=None)
@given(
    style=st.sampled_from([s for s in DECAY_STYLES if s != "constant"]),
    anneal=st.sampled_from(ANNEAL_STYLES),
    warmup=st.integers(0, 50),
    length=st.integers(1, 200),
    data=st.data(),
)
def test_rates_warm_up_and_then_never_increase(style, anneal, warmup, length, data):
    schedule = LearningRateSchedule(
        max_lr=1.0,
        min_lr=0.1,
        warmup_samples=warmup,
        decay_samples=warmup + length,
        style=style,
        wsd_decay_samples=data.draw(st.integers(1, length)),
        wsd_decay_style=anneal,
    )
    rates = [schedule.lr(n) for n in range(warmup + length + 3)]
    assert all(a < b for a, b in itertools.pairwise(rates[: warmup + 1]))
    assert rates[warmup] == 1.0
    assert all(a >= b - 1e-15 for a, b in itertools.pairwise(rates[warmup:]))
    assert rates[-1] == 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_lr": 1e-3}, "use 0 <= min <= max"),
        ({"init_lr": 1e-3}, "warm-up starts at 0.001"),
        ({"warmup_samples": 1100}, "use 0 <= warm-up < decay"),
        ({"style": "cosin"}, "'cosin'"),
        ({"style": "wsd", "wsd_decay_samples": None}, "needs wsd_decay_samples"),
        ({"style": "wsd", "wsd_decay_samples": 1001}, "use 1 to 1000"),
        ({"style": "wsd", "wsd_decay_style": "sqrt"}, "'sqrt'"),
    ],
)
def test_invalid_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        LearningRateSchedule(**{**LR, **change})


def test_all_problems_are_reported_at_once():
    with pytest.raises(ValueError, match=r"min <= max; .*unknown decay style.*; warm-up of 1100"):
        LearningRateSchedule(**{**LR, "min_lr": 1.0, "style": "x", "warmup_samples": 1100})


@pytest.mark.parametrize(
    ("style", "points"),
    [
        ("linear", {0: 0.01, 25: 0.0325, 50: 0.055, 100: 0.1, 1000: 0.1}),
        ("cosine", {0: 0.01, 25: 0.01 + 0.09 * (2 - math.sqrt(2)) / 4, 50: 0.055, 100: 0.1}),
    ],
)
def test_weight_decay_ramps_match_closed_forms(style, points):
    schedule = WeightDecaySchedule(start=0.01, end=0.1, ramp_samples=100, style=style)
    for samples, expected in points.items():
        assert schedule.weight_decay(samples) == pytest.approx(expected, rel=1e-12)


def test_constant_weight_decay_and_invalid_settings():
    assert WeightDecaySchedule(start=0.1, end=0.1).weight_decay(0) == 0.1
    for settings_, message in [
        ({"start": 0.1, "end": 0.2}, "make them equal, or use style"),
        ({"start": 0.2, "end": 0.1, "style": "linear", "ramp_samples": 9}, "0 <= start <= end"),
        ({"start": 0.1, "end": 0.2, "style": "linear"}, "ramps over 0 samples"),
        ({"start": 0.1, "end": 0.1, "style": "step"}, "unknown weight decay style 'step'"),
    ]:
        with pytest.raises(ValueError, match=message):
            WeightDecaySchedule(**settings_)
