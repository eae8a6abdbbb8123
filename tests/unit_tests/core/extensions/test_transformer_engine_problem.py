# SPDX-License-Identifier: Apache-2.0
"""Problems that prevent the use of TransformerEngine are reported in one line with the fix."""

import importlib.metadata
from unittest import mock

import pytest
import torch

from megatron.core.extensions import transformer_engine_problem
from megatron.training.config.check import check
from tests.support import te_extension, te_wheel
from tests.support.ranks import run_ranks
from tests.unit_tests.training.small_config import small_config


@pytest.mark.parametrize(
    ("release", "message"),
    [
        (None, "TransformerEngine is not installed"),
        ("2.18.0", "TransformerEngine 2.18.0 has no distributed weights"),
        ("2.19rc1", "TransformerEngine 2.19rc1 cannot be used (No module named"),
        ("3.0.1+cu13", "TransformerEngine 3.0.1+cu13 cannot be used (No module named"),
    ],
)
def test_problem_is_one_line_with_the_fix(release, message, monkeypatch):
    def version(name):
        if release is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return release

    monkeypatch.setattr(importlib.metadata, "version", version)
    problem = transformer_engine_problem()
    assert problem is not None
    assert problem.startswith(message)
    assert "pip install 'megatron-lm[te]'" in problem
    assert "\n" not in problem


RECIPES = {
    "delayed": "--fp8-format hybrid --fp8-recipe delayed",
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": "--fp4-format e2m1",
}


def _refusals(rank, world, capability):
    """Return the problems of each recipe on a GPU with CUDA 12.8, reported by TE's Python code."""
    te_extension.install(te_wheel.tree(), capability)
    sizes = "--hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2"
    impl = "--transformer-impl transformer_engine"
    refusals = {}
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.version, "cuda", "12.8"),
    ):
        for recipe, flags in RECIPES.items():
            problems = check(small_config(f"{sizes} {impl} {flags}"), 1)
            refusals[recipe] = [line for line in problems if "this GPU does not support" in line]
    return refusals


@pytest.mark.skipif(not te_wheel.is_there(), reason="run make te-wheels")
@pytest.mark.parametrize(
    ("capability", "unsupported"),
    [
        ((9, 0), ["blockwise", "mxfp8", "nvfp4"]),
        pytest.param((10, 0), ["blockwise"], marks=pytest.mark.slow),
        pytest.param((8, 0), list(RECIPES), marks=pytest.mark.slow),
    ],
)
def test_unsupported_recipe_is_refused(capability, unsupported):
    (refusals,) = run_ranks(_refusals, 1, capability)
    assert [recipe for recipe, lines in refusals.items() if lines] == unsupported
    for recipe in unsupported:
        (line,) = refusals[recipe]
        assert recipe in line
        assert "apability" in line  # TE's reason
        assert "\n" not in line
