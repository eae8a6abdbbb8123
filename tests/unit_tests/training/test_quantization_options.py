# SPDX-License-Identifier: Apache-2.0
"""What a run says of products in FP8 and FP4 before it starts."""

import importlib.metadata
import subprocess
import sys
from dataclasses import replace

import pytest

from megatron.core.backend import LOCAL
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups import ProcessGroupCollection
from megatron.training.config.check import check
from megatron.training.config.model_table import gpt_config
from megatron.training.config.resolve import resolve
from megatron.training.monitoring.describe import delayed_scaling_line, layers_line
from tests.unit_tests.training.small_config import small_config

TE = "--transformer-impl transformer_engine"
GTP = "--tensor-parallel-num-weight-shards 2 --weight-gather-format"


@pytest.mark.parametrize(
    ("words", "twice"),
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
def test_a_run_says_whether_gathered_weights_are_quantized_twice(words, twice, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.20.2")
    line = layers_line(small_config(f"{TE} {words}"))
    assert ("quantized twice" in line) is (twice is True)
    assert ("used as gathered" in line) is (twice is False)


def test_a_run_says_when_scales_of_earlier_steps_change():
    words = f"{TE} --fp8-format hybrid --fp8-recipe"
    line = delayed_scaling_line(small_config(f"{words} delayed --fp8-amax-history-len 16"))
    assert line is not None
    assert "once per step" in line
    assert "16 steps" in line
    assert delayed_scaling_line(small_config(f"{words} tensorwise")) is None


LATENT = "--multi-latent-attention --normalization RMSNorm"
DELTA = "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 16"
MAMBA = "--mamba-head-dim 16 --mamba-num-groups 2 --mamba-state-dim 16"
HYBRID = "--num-layers 4 --hybrid-layer-pattern"
WIDE = "--hidden-size 64 --num-attention-heads 8 --kv-channels 16 --seq-length 32"


def _shapes(config):
    """Return the shapes of the linear layers that a model is built with."""
    found = []

    def recorded(kind):
        def build(*args, **options):
            made = kind(*args, **options)
            found.append(tuple(made.weight.shape))
            return made

        return build

    parts = {name: recorded(getattr(LOCAL, name)) for name in ("column_linear", "row_linear")}
    groups = ProcessGroupCollection.single()
    model = gpt_config(resolve(config, 1).config, 32)
    GPTModel(model, groups, seed=1, backend=replace(LOCAL, **parts))
    assert found
    return found


@pytest.mark.parametrize(
    ("words", "names"),
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
def test_sizes_that_a_recipe_does_not_take_are_named(words, names):
    config = small_config(f"{WIDE} --fp8-format e4m3 --fp8-recipe tensorwise {words}")
    found = [problem for problem in check(config, 1) if "multiples of 16" in problem]
    assert bool(found) is bool(names), found
    refused = any(size % 16 for shape in _shapes(config) for size in shape)
    assert refused is bool(names)
    for name in names:
        assert any(name in problem for problem in found), (name, found)


def test_sizes_are_checked_without_torch():
    words = f"{WIDE} --fp8-format e4m3 --fp8-recipe mxfp8 {LATENT} --kv-lora-rank 40"
    code = (
        "import sys; from megatron.training.config.quantization import problems; "
        "from tests.unit_tests.training.small_config import small_config; "
        f"found = list(problems(small_config('{words}'))); "
        "assert any('--kv-lora-rank' in problem for problem in found), found; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
