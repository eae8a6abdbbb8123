# SPDX-License-Identifier: Apache-2.0
"""The real TransformerEngine: losses of its layers and recipes, and its weight quantization.

A test is skipped with the reason if it is not installed or the GPU does not support the recipe.
"""

from __future__ import annotations

import importlib

import pytest

from megatron.core.extensions import QuantizationConfig, transformer_engine_problem
from tests.functional_tests.small_run import flags, losses, run_in_process, write_tokens
from tests.unit_tests.core.extensions.test_gathered_tensors import (
    CASES,
    max_data_mismatch,
    mismatch_fractions,
)

pytestmark = [pytest.mark.gpu, pytest.mark.machine]

RECIPES = {
    "delayed": "--fp8-format hybrid --fp8-recipe delayed",
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
    "nvfp4": "--fp4-format e2m1",
}
STEPS = 50
RUN = (
    "--bf16 --hidden-size 128 --ffn-hidden-size 256 --kv-channels 32 --seq-length 64 "
    "--micro-batch-size 4 --global-batch-size 8 --attention-dropout 0 --hidden-dropout 0 "
    f"--lr 1e-3 --lr-warmup-iters 10 --eval-interval 0 --train-iters {STEPS}"
)


@pytest.fixture(scope="module")
def te():
    """The module of TransformerEngine's layers."""
    problem = transformer_engine_problem()
    if problem is not None:
        pytest.skip(problem)
    return importlib.import_module("megatron.core.extensions.transformer_engine")


@pytest.fixture(scope="module")
def folder(te, tmp_path_factory):
    return tmp_path_factory.mktemp("te")


@pytest.fixture(scope="module")
def prefix(folder):
    return write_tokens(folder / "tokens")


def run_losses(prefix, folder, name, words, device):
    metrics = folder / f"{name}.jsonl"
    argv = flags(prefix, f"{RUN} --device {device.type} --metrics-file {metrics} {words}")
    assert run_in_process(argv) == 0
    loss_by_step = losses(metrics)
    assert len(loss_by_step) == STEPS
    return loss_by_step


@pytest.fixture(scope="module")
def local(prefix, folder, device):
    """The losses of local layers in bf16."""
    return run_losses(prefix, folder, "local", "", device)


def need(te, recipe):
    problem = te.quantization_problem(QuantizationConfig(recipe=recipe))
    if problem is not None:
        pytest.skip(problem)


def test_bf16_losses_match_local_layers(te, prefix, folder, device, local):
    te_losses = run_losses(prefix, folder, "te", "--transformer-impl transformer_engine", device)
    assert te_losses == pytest.approx(local, rel=1e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_of_each_recipe_are_close_to_bf16(te, prefix, folder, device, local, recipe):
    need(te, recipe)
    words = f"--transformer-impl transformer_engine {RECIPES[recipe]}"
    te_losses = run_losses(prefix, folder, recipe, words, device)
    assert te_losses == pytest.approx(local, rel=0.01)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_gathered_tensors_match_transformer_engine(te, device, case, backward):
    need(te, CASES[case][0])
    data_difference, *scale_differences = mismatch_fractions(case, backward=backward, device=device)
    assert data_difference <= max_data_mismatch(case)
    assert not any(scale_differences)
