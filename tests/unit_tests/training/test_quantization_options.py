# SPDX-License-Identifier: Apache-2.0
"""What a run says of products in FP8 and FP4 before it starts."""

import importlib.metadata

import pytest

from megatron.training.monitoring.describe import layers_line
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
    assert ("as they are gathered" in line) is (twice is False)
