# SPDX-License-Identifier: Apache-2.0
"""Log lines and checks of FP8 and FP4 matmuls before a run starts."""

import importlib.metadata
from dataclasses import replace

import pytest

from megatron.core import ProcessGroupCollection
from megatron.core.backend import LOCAL
from megatron.core.models import GPTModel
from megatron.training.config.check import check
from megatron.training.config.model_table import gpt_config
from megatron.training.config.resolve import resolve
from megatron.training.startup_report import delayed_scaling_line, layers_line
from tests.unit_tests.training.small_config import small_config

TE = "--transformer-impl transformer_engine"
GTP = "--tensor-parallel-num-weight-shards 2 --weight-gather-format"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"--fp8-format e4m3 --fp8-recipe mxfp8 {GTP} mxfp8", False),
        (f"--fp8-format hybrid --fp8-recipe tensorwise {GTP} fp8", False),
        (f"--fp4-format e2m1 {GTP} nvfp4", False),
        (f"--fp8-format e4m3 --fp8-recipe mxfp8 {GTP} fp8", True),
        (f"--fp8-format hybrid --fp8-recipe delayed {GTP} fp8", True),
        (f"--fp8-format e4m3 --fp8-recipe blockwise {GTP} mxfp8", True),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", None),
    ],
)
def test_log_states_if_gathered_weights_are_requantized(flags, expected, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.20.2")
    line = layers_line(small_config(f"{TE} {flags}"))
    assert ("quantized twice" in line) is (expected is True)
    assert ("used as gathered" in line) is (expected is False)


def test_log_states_the_delayed_scaling_interval():
    flags = f"{TE} --fp8-format hybrid --fp8-recipe"
    line = delayed_scaling_line(small_config(f"{flags} delayed --fp8-amax-history-len 16"))
    assert line is not None
    assert "once per step" in line
    assert "16 steps" in line
    assert delayed_scaling_line(small_config(f"{flags} tensorwise")) is None


LATENT = "--multi-latent-attention --normalization RMSNorm"
DELTA = "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 16"
MAMBA = "--mamba-head-dim 16 --mamba-num-groups 2 --mamba-state-dim 16"
HYBRID = "--num-layers 4 --hybrid-layer-pattern"
MODEL_FLAGS = "--hidden-size 64 --num-attention-heads 8 --kv-channels 16 --seq-length 32"


def _shapes(config):
    """Return the shapes of the linear layers in a model."""
    shapes = []

    def record_shape(kind):
        def build(*args, **options):
            layer = kind(*args, **options)
            shapes.append(tuple(layer.weight.shape))
            return layer

        return build

    layers = {name: record_shape(getattr(LOCAL, name)) for name in ("column_linear", "row_linear")}
    groups = ProcessGroupCollection.single()
    model = gpt_config(resolve(config, 1).config, 32)
    GPTModel(model, groups, seed=1, backend=replace(LOCAL, **layers))
    assert shapes
    return shapes


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", []),
        ("--ffn-hidden-size 72", ["--ffn-hidden-size"]),
        ("--num-attention-heads 4 --kv-channels 6", ["--kv-channels"]),
        (f"{LATENT} --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8", []),
        (f"{LATENT} --kv-lora-rank 40", ["--kv-lora-rank"]),
        (f"{LATENT} --q-lora-rank 24", ["--q-lora-rank"]),
        (f"{LATENT} --v-head-dim 3", ["--v-head-dim", "--qk-head-dim"]),
        (f"{LATENT} --qk-head-dim 5", ["--qk-head-dim", "--qk-pos-emb-head-dim"]),
        (f"{HYBRID} G-*- {DELTA} --linear-value-head-dim 18", ["--linear-value"]),
        (f"{HYBRID} M-*- {MAMBA} --mamba-num-heads 10", ["--mamba-num-heads"]),
        (f"{HYBRID} M-*- {MAMBA} --mamba-num-heads 16", []),
    ],
)
def test_sizes_unsupported_by_a_recipe_are_reported(flags, expected):
    config = small_config(f"{MODEL_FLAGS} --fp8-format e4m3 --fp8-recipe tensorwise {flags}")
    problems = [problem for problem in check(config, 1) if "multiples of 16" in problem]
    assert bool(problems) is bool(expected), problems
    unsupported = any(size % 16 for shape in _shapes(config) for size in shape)
    assert unsupported is bool(expected)
    for name in expected:
        assert any(name in problem for problem in problems), (name, problems)
