# SPDX-License-Identifier: Apache-2.0
"""Weight groups and bf16 moments: saved, resharded, converted; a pattern without a match."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.cli.errors import ExitCode
from megatron.core.dist_checkpointing import read_extra, read_manifest
from tests.functional_tests.small_run import flags, losses, run_in_process, run_on, write_tokens
from tests.support.edited_manifests import leave_out

COMMON = "--eval-interval 0 --train-iters 4 --micro-batch-size 4 --adam-beta2 0.95"
GROUPS = "--lr-group embedding.*=0.3 --weight-decay-group *norm*=0.5 --decoupled-lr 1e-2"
BF16_MOMENTS = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"

CUT = "--data-parallel-sharding-strategy optim_grads_params"


def dtypes(checkpoint: Path) -> dict[str, str]:
    """Return the dtype of each kind of optimizer state in a checkpoint."""
    return {
        name.split("/")[0].removeprefix("optimizer."): tensor.dtype
        for name, tensor in read_manifest(checkpoint).tensors.items()
        if name.startswith("optimizer.")
    }


@pytest.mark.timeout(120)
@pytest.mark.covers("resume on another layout")
@pytest.mark.gpus(2)
def test_bf16_moments_resume_on_other_layout_and_dtype(tmp_path, capfd):
    prefix = write_tokens(tmp_path / "tokens")
    original = tmp_path / "original"
    start_flags = f"{COMMON} {GROUPS} {BF16_MOMENTS} --use-distributed-optimizer --bf16"
    run_on(2, flags(prefix, f"{start_flags} --save-interval 2 --save {original}"))
    start = original / "iter_0000002"
    assert dtypes(start) == {"master": "F32", "exp_avg": "BF16", "exp_avg_sq": "BF16"}
    assert read_extra(start)["config"]["lr-group"] == ["embedding.*=0.3"]
    expected = losses(original / "metrics.jsonl")
    capfd.readouterr()
    for dtype, bound in (("bf16", 1e-4), ("fp32", 1e-2)):
        moment_flags = BF16_MOMENTS.replace("bf16", dtype)
        metrics, saved = tmp_path / f"{dtype}.jsonl", tmp_path / dtype
        options = f"{COMMON} {GROUPS} {moment_flags} --bf16 --load {start} --save {saved}"
        assert run_in_process(flags(prefix, f"{options} --metrics-file {metrics}")) == 0
        printed = capfd.readouterr()
        is_converted = "converting optimizer state" in printed.out + printed.err
        assert is_converted is (dtype == "fp32")
        expected_dtype = "BF16" if dtype == "bf16" else "F32"
        assert dtypes(saved / "iter_0000004")["exp_avg"] == expected_dtype
        actual = losses(metrics)
        assert sorted(actual) == [3, 4]
        for iteration, loss in actual.items():
            assert loss == pytest.approx(expected[iteration], rel=bound), (dtype, iteration)


def test_group_patterns_without_a_match_are_refused(tmp_path, capfd):
    prefix = write_tokens(tmp_path / "tokens")
    folder = tmp_path / "save"
    options = f"--lr-group nothing.*=0.5 --weight-decay-group none=0 --save {folder}"
    assert run_in_process(flags(prefix, options)) == ExitCode.USER_ERROR
    err = capfd.readouterr().err
    assert "--lr-group: no weight matches nothing.*: weights have names such as" in err
    assert "; --weight-decay-group" in err
    assert err.count("\n") == 1
    assert not folder.exists()


def kinds(checkpoint: Path) -> dict[str, set[str]]:
    """Return the kinds of optimizer state of each weight in a checkpoint."""
    kinds_by_weight: dict[str, set[str]] = {}
    for name in read_manifest(checkpoint).tensors:
        if name.startswith("optimizer."):
            kind, _, weight = name.removeprefix("optimizer.").partition("/")
            kinds_by_weight.setdefault(weight, set()).add(kind)
    return kinds_by_weight


@pytest.mark.timeout(120)
@pytest.mark.covers("resume on another layout")
@pytest.mark.gpus(2)
def test_muon_resumes_on_other_layout_but_not_as_other_optimizer(tmp_path, capfd):
    prefix = write_tokens(tmp_path / "tokens")
    original, muon = tmp_path / "original", f"{COMMON} --optimizer muon --muon-scale-mode rms"
    run_on(2, flags(prefix, f"{muon} {CUT} --save-interval 2 --save {original}"))
    start = original / "iter_0000002"
    state_kinds = kinds(start)
    assert (
        state_kinds.pop("embedding.weight")
        == state_kinds.pop("head.weight")
        == {"exp_avg", "exp_avg_sq"}
    )
    matrices = {
        name for name, kinds_of_weight in state_kinds.items() if kinds_of_weight == {"momentum"}
    }
    assert {name for name in state_kinds if "norm" not in name} == matrices
    assert len(matrices) == 2 * 7, "q, k, v, output, gate, up and down of two layers"
    expected, metrics = losses(original / "metrics.jsonl"), tmp_path / "m"
    options = f"{muon} --load {start} --metrics-file {metrics}"
    run_on(2, flags(prefix, f"{options} --tensor-model-parallel-size 2"))
    assert sorted(losses(metrics)) == [3, 4]
    for iteration, loss in losses(metrics).items():
        assert loss == pytest.approx(expected[iteration], rel=1e-6), iteration
    for words, message in (
        (f"{COMMON} --load {start}", "optimizer: 'muon' in the checkpoint, 'adam' in"),
        (
            f"{options} --muon-adam-weights *.down.*",
            "lacks optimizer state of this run: optimizer.",
        ),
    ):
        capfd.readouterr()
        assert run_in_process(flags(prefix, words)) == ExitCode.USER_ERROR
        printed = capfd.readouterr()
        assert message in printed.out + printed.err
        assert "--no-load-optim" in printed.out + printed.err


@pytest.mark.parametrize("qkv", ["", "--no-muon-split-qkv"], ids=["each", "together"])
@pytest.mark.gpus(1)
def test_resumed_muon_run_keeps_its_matrix_splits(tmp_path, capfd, qkv):
    """Runs saved before --muon-split-matrices split every tensor, or no tensor with
    --no-muon-split-qkv; a new run splits only q, k and v, like Megatron-LM."""
    prefix, muon = write_tokens(tmp_path / "tokens"), f"{COMMON} --optimizer muon {qkv}"
    run_losses = {}
    for name, split_flags in (
        ("new", ""),
        ("old", f"--muon-split-matrices {'whole' if qkv else 'all'}"),
    ):
        saved, metrics = tmp_path / name, tmp_path / f"{name}.jsonl"
        assert (
            run_in_process(flags(prefix, f"{muon} {split_flags} --save-interval 2 --save {saved}"))
            == 0
        )
        start, entire = saved / "iter_0000002", losses(saved / "metrics.jsonl")
        if name == "old":
            leave_out(start, "config", "muon-split-matrices")
        (tmp_path / "run.yaml").write_text("optimizer: muon\n")
        capfd.readouterr()
        options = f"{COMMON} {qkv} --config {tmp_path / 'run.yaml'} --load {start}"
        assert run_in_process(flags(prefix, f"{options} --metrics-file {metrics}")) == 0
        assert ("--muon-split-matrices is" in capfd.readouterr().err) == (name == "old")
        assert losses(metrics) == {i: loss for i, loss in entire.items() if i > 2}
        run_losses[name] = entire
    assert (run_losses["new"] == run_losses["old"]) == bool(qkv), (
        "without split q, k and v, Megatron's matrices are whole products"
    )
    changed = f"{muon} --muon-split-matrices {'megatron' if qkv else 'whole'} --load {start}"
    assert (
        run_in_process(flags(prefix, f"{changed} --metrics-file {tmp_path / 'other.jsonl'}")) == 0
    )
    assert f"{start} was trained with" in capfd.readouterr().err
