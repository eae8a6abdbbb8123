# SPDX-License-Identifier: Apache-2.0
"""A model of TransformerEngine's layers trains like local layers on one process.

TE's Python code runs on a fake of its compiled extension (`support.te_extension`). This tests TE's
modules with Megatron's arguments, its protocol for distributed weights and the weight handles; it
does not test TE's kernels.
"""

import importlib
from unittest import mock

import pytest

from tests.parity.pieces import assembled
from tests.parity.rows import CUT_WEIGHTS, label, row_with, world_of
from tests.parity.training import rank_of_row, single_run, steps_of, transformer_engine
from tests.parity.verdict import assert_same_numbers, reference_of
from tests.support import te_extension, te_wheel
from tests.support.closeness import assert_all_close
from tests.support.ranks import run_ranks

ROWS = [
    row_with(tp=2, sequence_parallel=True, bias="all", accumulation=3, zero_centered=True),
    row_with(tp=1, gtp=2, link="late", recompute="full", accumulation=3),
    row_with(
        tp=1, dp=2, ep=2, experts="sigmoid", shared="gated", placement=CUT_WEIGHTS, accumulation=3,
        recompute="selective",
    ),
    row_with(
        tp=1, pp=2, schedule="zb-h1", accumulation=3, bias="all", experts="softmax", ep=1,
        norm="LayerNorm",
    ),
    row_with(
        tp=1, accumulation=3, frozen=("down.weight", "qkv.weight"), bias="all",
        documents="packed", window=5, sinks=True,
    ),
]  # fmt: skip
ROWS_AT_NIGHT = [
    row_with(tp=1, dp=2, placement=CUT_WEIGHTS, accumulation=3, early_gather=True, tied=True),
    row_with(tp=2, attention="latent", groups=8, predictions=1),
    row_with(tp=2),
    row_with(tp=2, norm="LayerNorm", gated=False, bias="all"),
    row_with(tp=1, dp=2, placement="optim", accumulation=3, early_gather=True, tied=True),
    row_with(tp=2, gtp=2, sequence_parallel=True, bias="qkv", link="late"),
    row_with(tp=1, pp=2, accumulation=3, bias="all"),
    row_with(tp=1, pp=2, schedule="interleaved", accumulation=8),
    row_with(
        tp=1, pp=2, dp=2, ep=2, schedule="zb-h1", accumulation=3, experts="softmax",
        placement="optim_grads",
    ),
    row_with(tp=2, dp=2, etp=2, ep=2, experts="softmax", sequence_parallel=True),
    row_with(tp=1, dp=2, ep=1, experts="softmax", capacity="probs", accumulation=3),
    row_with(tp=1, cp=2, qk_norm=True, documents="packed"),
    row_with(tp=2, mixer="mamba"),
    row_with(tp=2, mixer="delta", linear_mode="segments"),
]  # fmt: skip

needs_te = pytest.mark.skipif(
    not te_wheel.is_there(), reason="TransformerEngine is not in build/: run make te-wheels"
)


def _check(row, release=te_wheel.NEWEST):
    ref = reference_of(row)
    of_te = {**ref.row, "te": release}
    runs = run_ranks(rank_of_row, world_of(row), of_te, ref.initial, timeout=100.0)
    assert_same_numbers(row, runs, ref)
    batches = steps_of(row) * row["accumulation"]
    for calls in (run.te_calls for run in runs):
        # A norm and the first product of attention and MLPs are one layer.
        assert calls["LayerNormLinear"] >= (0 if row["attention"] == "latent" else batches), calls
        assert calls["Linear"] >= batches, calls
        # forward, input gradient and weight gradient
        layers = calls["Linear"] + calls["LayerNormLinear"]
        whole = row["recompute"] != "full" and not row.get("frozen")
        assert calls["generic_gemm"] == 3 * layers or not whole, calls
    attended, packed = (
        sum(run.te_calls.get(name, 0) for run in runs)
        for name in ("UnfusedDotProductAttention", "convert_thd_to_bshd")
    )
    assert (attended >= batches) is (row["cp"] == 1)
    assert bool(packed) is (row["cp"] == 1 and row["documents"] == "packed")
    norms = {name for run in runs for name in run.te_calls if "norm" in name}
    kind = "rmsnorm" if row["norm"] == "RMSNorm" else "layernorm"
    assert norms == {f"{kind}_fwd", f"{kind}_bwd"}
    grouped = [run.te_calls.get("te_general_grouped_gemm", 0) for run in runs]
    assert any(grouped) is (row["experts"] is not None)


@needs_te
@pytest.mark.parametrize("row", ROWS, ids=label)
def test_te_layers_train_like_single_process_local_layers(row):
    _check(row)


@needs_te
@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS_AT_NIGHT, ids=label)
def test_further_te_layouts_train_like_local_layers(row):
    _check(row)


@needs_te
@pytest.mark.slow
@pytest.mark.parametrize("release", te_wheel.releases()[1:])
@pytest.mark.parametrize("row", ROWS, ids=label)
def test_te_layouts_of_other_releases_train_like_local(row, release):
    if not te_wheel.is_there(release):
        pytest.skip(f"TransformerEngine {release} is not in build/: run make te-wheels")
    _check(row, release)


def _without_window(self, *, scale, window):
    self._scale, self._window, self._module = scale, (-1, 0), None


#: Faults between TE and the weight handles.
FAULTS = {
    "finalise skipped": (
        "HandleWeight.finalize_group_grads",
        lambda self, written: [None] * self.matrices.count,
    ),
    "buffer not added": ("_add_written_gradient", lambda whole, main_grad, overwrite: None),
    "requires_grad lost": (
        "Matrices.get",
        lambda self, backward=False: self._split(self.handle.get(backward=backward).detach()),
    ),
    "another matrix": (
        "Matrices.get",
        lambda self, backward=False: [
            (2.0 * m if backward else m).detach().requires_grad_()
            for m in self._split(self.handle.get(backward=backward))
        ],
    ),
    "window lost": ("TEAttention.__init__", _without_window),
}


def _with_faults(rank, world, row, initial):
    """Return the gradients of the last step without a fault (key None) and with each fault."""
    del rank, world
    transformer_engine(row["te"])
    module = importlib.import_module("megatron.core.extensions.transformer_engine")
    weights, of = [], module.HandleWeight.of

    def recorded_of(*args, **options):
        handle_weights = of(*args, **options)
        weights.extend(handle_weights)
        return handle_weights

    with mock.patch.object(module.HandleWeight, "of", recorded_of):
        gradients_by_fault = {None: assembled(single_run(row, initial).steps[-1].gradients)}
    # After a step neither the weights nor their shared matrices hold a buffer.
    assert {name for weight in weights for name in vars(weight)} == {"matrices", "number"}
    assert not any(w.matrices._buffers or w.matrices._whole is not None for w in weights)
    for name, (where, fault) in FAULTS.items():
        with mock.patch(f"{module.__name__}.{where}", fault):
            gradients_by_fault[name] = assembled(single_run(row, initial).steps[-1].gradients)
    return gradients_by_fault


@needs_te
def test_faults_between_te_and_weight_handles_are_detected():
    row = row_with(tp=1, accumulation=3, experts="softmax", documents="packed", window=5)
    ref = reference_of(row)
    expected = assembled(ref.run.steps[-1].gradients)
    of_te = {**ref.row, "te": te_wheel.NEWEST}
    (gradients_by_fault,) = run_ranks(_with_faults, 1, of_te, ref.initial, timeout=100.0)
    assert_all_close(gradients_by_fault.pop(None), expected)
    assert list(gradients_by_fault) == list(FAULTS)
    for gradients in gradients_by_fault.values():
        with pytest.raises(AssertionError, match="error"):
            assert_all_close(gradients, expected)


def test_fake_te_extension_needs_the_wheel(tmp_path):
    with pytest.raises(ValueError, match="te_wheel"):
        te_extension.install(tmp_path)
