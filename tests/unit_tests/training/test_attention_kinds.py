# SPDX-License-Identifier: Apache-2.0
"""The options of a second kind of attention: which layers have the window and which are rotary."""

from __future__ import annotations

import pytest

from megatron.training.config.check import check
from megatron.training.config.model_table import gpt_config, model_options
from megatron.training.config.resolve import resolve
from tests.unit_tests.training.small_config import small_config

LAYERS = "--num-layers 6 --position-embedding-type rope"


def problems_of(flags: str) -> list[str]:
    return check(small_config(f"{LAYERS} {flags}"), 1)


@pytest.mark.parametrize(
    ("flags", "pattern", "windows", "rotary"),
    [
        ("--window-size 5 --window-attn-skip-freq 3", "WW*WW*", (None, 5), (True, True)),
        ("--window-size 5 --window-attn-skip-freq ([1]*5+[0])", "WWWWW*", (None, 5), (True, True)),
        ("--window-size 5 --window-attn-skip-freq 1,1,1,1,1,1", "", (5, None), (True, None)),
        ("--no-rope-freq 3", "**W**W", (None, None), (True, False)),
        ("--no-rope-freq 0,0,1,0,0,1 --window-size 5", "**W**W", (5, 5), (True, False)),
        (
            "--window-size 5 --window-attn-skip-freq 3 --no-rope-freq 3",
            "WW*WW*",
            (None, 5),
            (False, True),
        ),
        ("--hybrid-layer-pattern W-*-W- --window-size 5", "W*W", (None, 5), (True, True)),
    ],
)
def test_layers_have_the_described_kinds(flags, pattern, windows, rotary):
    layers = LAYERS.replace("6", "3") if "pattern" in flags else LAYERS
    run = resolve(small_config(f"{layers} {flags}"), 1)
    assert check(run.config, 1) == []
    model = gpt_config(run.config, 61)
    second = model.second_attention
    attentions = "".join(symbol for symbol in model.blocks if symbol in "*W")
    assert attentions == (pattern or "******")
    kinds = [(kind.window, kind.rotary) for kind in (model.attention, second) if kind is not None]
    expected = [pair for pair in zip(windows, rotary, strict=True) if pair[1] is not None]
    assert kinds == expected
    again = small_config(
        " ".join(
            f"--{name}" if value is True else f"--{name} {value}"
            for name, value in model_options(model).items()
            if value is not False and value is not None
        )
    )
    assert gpt_config(resolve(again, 1).config, 61) == model


def test_second_kind_has_its_own_sinks_base_and_scaling():
    flags = (
        "--window-size 5 --window-attn-skip-freq 2 --softmax-type learnable --rotary-base 1e6 "
        "--window-softmax-type vanilla --window-rotary-base 500 --window-rope-scaling unscaled "
        "--rotary-seq-len-interpolation-factor 8"
    )
    model = gpt_config(resolve(small_config(f"{LAYERS} {flags}"), 1).config, 61)
    assert (model.attention.sinks, model.second_attention.sinks) == (True, False)
    assert (model.rope.base, model.rope.scaling.factor) == (1e6, 8.0)
    assert (model.window_rope.base, model.window_rope.scaling) == (500.0, None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--window-size 5 --window-attn-skip-freq 0,x", "neither a number above 0 nor a list"),
        ("--window-size 5 --window-attn-skip-freq 1,0", "has 2 layers, --num-layers is 6"),
        ("--window-size 5 --window-attn-skip-freq 1", "no layer has the window: drop it"),
        ("--window-attn-skip-freq 2", "needs --window-size"),
        ("--no-rope-freq 1", "use --position-embedding-type none"),
        ("--window-size 5 --window-attn-skip-freq 2 --no-rope-freq 3", "more than two kinds"),
        ("--window-rotary-base 500", "no second kind of attention is rotary"),
        (
            "--no-rope-freq 2 --window-rope-scaling unscaled",
            "no second kind of attention is rotary",
        ),
        ("--window-softmax-type learnable", "all attention is of one kind"),
        ("--hybrid-layer-pattern W-W-W-W-W-W-", "has 'W' without '*'"),
        (
            "--hybrid-layer-pattern W-*-W-*-W-*- --window-size 5 --window-attn-skip-freq 2",
            "both specify which attention has the window",
        ),
    ],
)
def test_contradicting_options_are_refused(flags, message):
    assert any(message in problem for problem in problems_of(flags)), problems_of(flags)
