# SPDX-License-Identifier: Apache-2.0
"""A model of TransformerEngine's layers in FP8 trains nearly like a model in fp32.

TE's Python code and quantizers run on a fake extension that rounds to FP8 and multiplies exactly
(`support.te_fp8`). This proves which tensors are quantized, when and with which scale; it does not
test TE's kernels.
"""

import importlib
from unittest import mock

import pytest
import torch

from megatron.core.extensions import QuantizationConfig
from tests.parity.experts import NUM_EXPERTS
from tests.parity.pieces import assembled
from tests.parity.rows import CUT_WEIGHTS, label, row_with, world_of
from tests.parity.training import rank_of_row, single_run
from tests.support import te_extension, te_wheel
from tests.support.ranks import run_ranks

needs_te = pytest.mark.skipif(
    not te_wheel.is_there(), reason="TransformerEngine is not in build/: run make te-wheels"
)

QUANTIZERS = {
    "delayed": "Float8Quantizer",
    "tensorwise": "Float8CurrentScalingQuantizer",
    "mxfp8": "MXFP8Quantizer",
}


def fp8_row(recipe, *, recipe_options=None, **changes):
    """Return a row with sizes that FP8 supports, and a recipe."""
    config = QuantizationConfig(recipe=recipe, hybrid=recipe != "mxfp8", **(recipe_options or {}))
    row = row_with(**{"tp": 1, "accumulation": 3, **changes})
    # Delayed scaling starts with scale 1, where small gradients round to zero. A tiny learning
    # rate keeps the weights fixed until all scales are known.
    steps = {"steps": 6, "rate": 1e-6} if recipe == "delayed" else {}
    return {**row, **steps, "aligned": True, "quantization": config}


def runs_of(row, initial, release=te_wheel.NEWEST):
    te_row = {**row, "te": release}
    return run_ranks(rank_of_row, world_of(row), te_row, initial, timeout=100.0)


def check_near(row, release=te_wheel.NEWEST, run=runs_of):
    """Train a row with FP8 by `run`, and compare it with local layers in fp32 on one process."""
    plain = {k: v for k, v in row.items() if k != "quantization"}
    initial = assembled(single_run(plain, None).initial)
    expected = single_run(plain, initial)
    runs = run(row, initial, release)
    for run in runs:
        for step, expected_step in zip(run.steps, expected.steps, strict=True):
            assert step.loss == pytest.approx(expected_step.loss, rel=0.01)
    gradients = assembled([chunk for run in runs for chunk in run.steps[-1].gradients])
    exact = assembled(expected.steps[-1].gradients)
    errors = {n: float((gradients[n] - exact[n]).norm() / exact[n].norm()) for n in exact}
    # Measured: at most 0.19, and 0.36 where a token goes to another expert.
    assert 0.01 < max(errors.values()) < (0.25 if row["experts"] is None else 0.5), errors
    for calls in (run.te_calls for run in runs):
        check_counts(row, calls)
    return runs


def check_counts(row, calls):
    """Each product quantizes four tensors: its input, the output's gradient, and the weight in
    forward and in backward, where it is gathered again; but not the weight if the gather format
    is the recipe's format."""
    tensors = 4 if row["wire"] == "bf16" else 2
    products = calls["Linear"] + calls["LayerNormLinear"]
    products += calls.get("GroupedLinear", 0) * NUM_EXPERTS // row["ep"]
    count = calls[QUANTIZERS[row["quantization"].recipe]]
    if row["recompute"] == "none" and not row.get("frozen"):
        assert count == tensors * products
    else:
        assert 0 < count <= tensors * products
    assert sum(calls.get(name, 0) for name in QUANTIZERS.values()) == count


ROW = fp8_row("delayed", tp=2, sequence_parallel=True)
GATHERED_ROW = {
    **fp8_row("mxfp8", gtp=2, link="late", wire="mxfp8", accumulation=1),
    "steps": 2,
}
ROWS_AT_NIGHT = [
    fp8_row("tensorwise"),
    fp8_row("tensorwise", tp=2, sequence_parallel=True, bias="all"),
    fp8_row("tensorwise", gtp=2, link="late", recompute="full"),
    fp8_row("tensorwise", pp=2, schedule="zb-h1", experts="softmax"),
    fp8_row("tensorwise", frozen=("down.weight", "qkv.weight")),
    fp8_row("delayed", dp=2, placement=CUT_WEIGHTS, recompute="full"),
    fp8_row("delayed", gtp=2, link="late"),
    fp8_row("delayed", pp=2, schedule="zb-h1"),
    fp8_row("delayed", dp=2, ep=2, experts="softmax"),
    fp8_row("mxfp8", dp=2, ep=2, experts="sigmoid", placement=CUT_WEIGHTS),
    fp8_row("mxfp8", tp=2, norm="LayerNorm"),
    fp8_row("mxfp8", tp=2, sequence_parallel=True, accumulation=2),
    fp8_row("mxfp8", tp=2, sequence_parallel=True, gtp=2, wire="mxfp8", bias="all"),
    fp8_row("mxfp8", pp=2, schedule="zb-h1", recompute="full"),
    fp8_row("mxfp8", tp=2, frozen=("down.weight", "qkv.weight")),
    fp8_row("mxfp8", gtp=2, link="late", wire="mxfp8"),
    fp8_row("mxfp8", gtp=2, wire="mxfp8", scale_blocks="1d", recompute="full"),
    fp8_row("mxfp8", gtp=2, egtp=2, experts="softmax", wire="mxfp8", link="late"),
    fp8_row("mxfp8", tp=2, gtp=2, wire="mxfp8", frozen=("down.weight", "qkv.weight")),
    fp8_row("tensorwise", gtp=2, pp=2, schedule="zb-h1", wire="fp8"),
]


def name_of(row):
    return f"{row['quantization'].recipe}-{label(row)}"


@needs_te
def test_delayed_scaling_is_equal_on_tensor_parallel_ranks():
    runs = check_near(ROW)
    # Both ranks hold equal scales, and each scale has changed.
    for name, state in runs[0].states.items():
        assert torch.equal(state, runs[1].states[name])
        in_use = bool(((state > 0.0) & (state != 1.0)).all())
        assert in_use, name
    assert runs[0].states


def _also_quantized_again(rank, world, row, initial):
    """Return a run, and the calls of a run that dequantizes and requantizes gathered weights."""
    run = rank_of_row(rank, world, row, initial)
    te_extension.CALLS.clear()
    module = importlib.import_module("megatron.core.extensions.transformer_engine")
    gathered = module.WeightQuantization.gathered

    def again(self, *args, backward, **options):
        tensors = gathered(self, *args, backward=backward, **options)
        plain = [tensor.dequantize().detach().requires_grad_() for tensor in tensors]
        return [t._quantizer(p) for t, p in zip(tensors, plain, strict=True)] if backward else plain

    with mock.patch.object(module.WeightQuantization, "gathered", again):
        return run, rank_of_row(rank, world, row, initial).te_calls


@needs_te
def test_gathered_weights_are_not_requantized():
    planted = []

    def run(row, initial, release):
        te_row = {**row, "te": release}
        results = run_ranks(_also_quantized_again, 2, te_row, initial, timeout=100.0)
        planted.extend(calls for _, calls in results)
        return [run for run, _ in results]

    check_near(GATHERED_ROW, run=run)
    assert len(planted) == 2
    for calls in planted:
        with pytest.raises(AssertionError):
            check_counts(GATHERED_ROW, calls)


@needs_te
@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS_AT_NIGHT, ids=name_of)
def test_further_recipe_layouts_train_like_fp32(row):
    check_near(row)


@needs_te
@pytest.mark.slow
@pytest.mark.parametrize("release", te_wheel.releases()[1:])
@pytest.mark.parametrize("recipe", QUANTIZERS)
def test_recipes_of_other_releases_train_like_fp32(recipe, release):
    if not te_wheel.is_there(release):
        pytest.skip(f"TransformerEngine {release} is not in build/: run make te-wheels")
    check_near(fp8_row(recipe, dp=2, ep=2, experts="softmax"), release)
