# SPDX-License-Identifier: Apache-2.0
"""The fp16 loss scaler: growth, hysteresis, floor, exact resume."""

import json
import random

import pytest

from megatron.core.optimizer import ConstantLossScaler, DynamicLossScaler, DynamicLossScalerConfig


def run(scaler, steps):
    """Update with steps written as "." (good) and "x" (overflow); return the scale after each."""
    scales = []
    for step in steps:
        scaler.update(step == "x")
        scales.append(scaler.scale)
    return scales


def make_scaler(**changes):
    config = {"initial_scale": 64.0, "growth_interval": 3, **changes}
    return DynamicLossScaler(DynamicLossScalerConfig(**config))


def test_defaults_match_published_behaviour():
    scaler = DynamicLossScaler()
    assert scaler.scale == 2.0**32
    assert run(scaler, "." * 999)[-1] == 2.0**32
    assert run(scaler, ".") == [2.0**33]  # every 1000 good steps
    assert run(scaler, "x") == [2.0**33]  # hysteresis ignores the first overflow
    assert run(scaler, "x") == [2.0**32]
    for _ in range(40):
        scaler.update(True)
    assert scaler.scale == 1.0


def test_growth_needs_an_unbroken_interval():
    assert run(make_scaler(), "..x...") == [64, 64, 64, 64, 64, 128]


def test_hysteresis_is_spent_until_a_full_interval_is_good():
    # Once hysteresis is used up, every overflow halves the scale; only growth resets it.
    assert run(make_scaler(), "xx.x") == [64, 32, 32, 16]
    assert run(make_scaler(), "xx...xx") == [64, 32, 32, 32, 64, 64, 32]
    assert run(make_scaler(hysteresis=1), "x") == [32]


def test_loss_scale_never_drops_below_minimum():
    assert run(make_scaler(min_scale=24.0), "xxxx") == [64, 32, 24, 24]


def test_resumed_scaler_continues_exactly():
    steps = "".join(random.Random(5).choices(".x", weights=(6, 1), k=300))
    uninterrupted = run(make_scaler(), steps)
    for num_steps in (0, 1, 17, 150, 299):
        scaler, resumed = make_scaler(), make_scaler(initial_scale=2.0)
        run(scaler, steps[:num_steps])
        resumed.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
        assert run(resumed, steps[num_steps:]) == uninterrupted[num_steps:]


def test_constant_scale_never_changes():
    scaler = ConstantLossScaler(128.0)
    assert run(scaler, "xx...x") == [128.0] * 6
    scaler.load_state_dict(json.loads(json.dumps(ConstantLossScaler(64.0).state_dict())))
    assert scaler.scale == 128.0


def test_state_of_another_scaler_kind_is_refused():
    with pytest.raises(ValueError, match="resume with the original loss scaling"):
        DynamicLossScaler().load_state_dict(ConstantLossScaler().state_dict())
    with pytest.raises(ValueError, match="resume with the original loss scaling"):
        ConstantLossScaler().load_state_dict(DynamicLossScaler().state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"initial_scale": 0.5}, "use 0 < minimum <= start"),
        ({"growth_factor": 1.0}, "use more than 1"),
        ({"backoff_factor": 1.0}, "use one between 0 and 1"),
        ({"hysteresis": 0}, "use at least 1"),
    ],
)
def test_invalid_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        DynamicLossScalerConfig(**change)
    with pytest.raises(ValueError, match="loss scale is 0"):
        ConstantLossScaler(0.0)
