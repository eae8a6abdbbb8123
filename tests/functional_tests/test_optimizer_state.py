# SPDX-License-Identifier: Apache-2.0
"""Weight groups and bf16 moments: saved, resharded, converted; a pattern for no weight."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.cli.errors import ExitCode
from megatron.core.dist_checkpointing import read_extra, read_manifest
from tests.functional_tests.small_run import flags, losses, run_here, run_on, write_tokens
from tests.support.older_checkpoints import leave_out

COMMON = "--eval-interval 0 --train-iters 4 --micro-batch-size 4 --adam-beta2 0.95"
GROUPS = "--lr-group embedding.*=0.3 --weight-decay-group *norm*=0.5 --decoupled-lr 1e-2"
NARROW = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"

CUT = "--data-parallel-sharding-strategy optim_grads_params"


def dtypes(checkpoint: Path) -> dict[str, str]:
    """Return the dtype of each kind of optimizer state in a checkpoint."""
    return {
        name.split("/")[0].removeprefix("optimizer."): tensor.dtype
        for name, tensor in read_manifest(checkpoint).tensors.items()
        if name.startswith("optimizer.")
    }


@pytest.mark.timeout(120)
@pytest.mark.covers("resumed on another layout", runs="loads")
@pytest.mark.gpus(2)
def test_bf16_moments_resume_on_other_layout_and_dtype(tmp_path, capfd):
    prefix = write_tokens(tmp_path / "tokens")
    original = tmp_path / "original"
    first = f"{COMMON} {GROUPS} {NARROW} --use-distributed-optimizer --bf16"
    run_on(2, flags(prefix, f"{first} --save-interval 2 --save {original}"))
    start = original / "iter_0000002"
    assert dtypes(start) == {"master": "F32", "exp_avg": "BF16", "exp_avg_sq": "BF16"}
    assert read_extra(start)["config"]["lr-group"] == ["embedding.*=0.3"]
    wanted = losses(original / "metrics.jsonl")
    capfd.readouterr()
    for dtype, bound in (("bf16", 1e-4), ("fp32", 1e-2)):
        narrow = NARROW.replace("bf16", dtype)
        metrics, saved = tmp_path / f"{dtype}.jsonl", tmp_path / dtype
        more = f"{COMMON} {GROUPS} {narrow} --bf16 --load {start} --save {saved}"
        assert run_here(flags(prefix, f"{more} --metrics-file {metrics}")) == 0
        said = capfd.readouterr()
        told = "converting optimizer state" in said.out + said.err
        assert told is (dtype == "fp32")
        wide = "BF16" if dtype == "bf16" else "F32"
        assert dtypes(saved / "iter_0000004")["exp_avg"] == wide
        found = losses(metrics)
        assert sorted(found) == [3, 4]
        for iteration, loss in found.items():
            assert loss == pytest.approx(wanted[iteration], rel=bound), (dtype, iteration)


def test_patterns_for_no_weight_end_the_run_with_a_line(tmp_path, capfd):
    prefix = write_tokens(tmp_path / "tokens")
    folder = tmp_path / "save"
    more = f"--lr-group nothing.*=0.5 --weight-decay-group none=0 --save {folder}"
    assert run_here(flags(prefix, more)) == ExitCode.USER_ERROR
    said = capfd.readouterr().err
    assert "--lr-group: no weight matches nothing.*: weights have names such as" in said
    assert "; --weight-decay-group: no weight matches none: " in said
    assert said.count("\n") == 1
    assert not folder.exists()


def kinds(checkpoint: Path) -> dict[str, set[str]]:
    """Return the kinds of optimizer state of each weight in a checkpoint."""
    found: dict[str, set[str]] = {}
    for name in read_manifest(checkpoint).tensors:
        if name.startswith("optimizer."):
            kind, _, weight = name.removeprefix("optimizer.").partition("/")
            found.setdefault(weight, set()).add(kind)
    return found


@pytest.mark.timeout(120)
@pytest.mark.covers("resumed on another layout", runs="loads")
@pytest.mark.gpus(2)
def test_muon_resumes_on_other_layout_but_not_as_other_optimizer(tmp_path, capfd):
    prefix = write_tokens(tmp_path / "tokens")
    original, muon = tmp_path / "original", f"{COMMON} --optimizer muon --muon-scale-mode rms"
    run_on(2, flags(prefix, f"{muon} {CUT} --save-interval 2 --save {original}"))
    start = original / "iter_0000002"
    found = kinds(start)
    assert found.pop("embedding.weight") == found.pop("head.weight") == {"exp_avg", "exp_avg_sq"}
    matrices = {name for name, kept in found.items() if kept == {"momentum"}}
    assert {name for name in found if "norm" not in name} == matrices
    assert len(matrices) == 2 * 7, "q, k, v, output, gate, up and down of two layers"
    wanted, metrics = losses(original / "metrics.jsonl"), tmp_path / "m"
    more = f"{muon} --load {start} --metrics-file {metrics}"
    run_on(2, flags(prefix, f"{more} --tensor-model-parallel-size 2"))
    assert sorted(losses(metrics)) == [3, 4]
    for iteration, loss in losses(metrics).items():
        assert loss == pytest.approx(wanted[iteration], rel=1e-6), iteration
    for words, message in (
        (f"{COMMON} --load {start}", "optimizer: 'muon' in the checkpoint, 'adam' in"),
        (f"{more} --muon-adam-weights *.down.*", "lacks optimizer state of this run: optimizer."),
    ):
        capfd.readouterr()
        assert run_here(flags(prefix, words)) == ExitCode.USER_ERROR
        said = capfd.readouterr()
        assert message in said.out + said.err
        assert "--no-load-optim" in said.out + said.err


@pytest.mark.parametrize("qkv", ["", "--no-muon-split-qkv"], ids=["each", "together"])
@pytest.mark.gpus(1)
def test_a_resumed_muon_keeps_its_matrices(tmp_path, capfd, qkv):
    """Runs saved before --muon-split-matrices split every tensor off, or with --no-muon-split-qkv
    none; a new run has the matrices of Megatron-LM, of which q, k and v are split alone."""
    prefix, muon = write_tokens(tmp_path / "tokens"), f"{COMMON} --optimizer muon {qkv}"
    found = {}
    for name, own in (("new", ""), ("old", f"--muon-split-matrices {'whole' if qkv else 'all'}")):
        saved, metrics = tmp_path / name, tmp_path / f"{name}.jsonl"
        assert run_here(flags(prefix, f"{muon} {own} --save-interval 2 --save {saved}")) == 0
        start, entire = saved / "iter_0000002", losses(saved / "metrics.jsonl")
        if name == "old":
            leave_out(start, "config", "muon-split-matrices")
        (tmp_path / "run.yaml").write_text("optimizer: muon\n")
        capfd.readouterr()
        more = f"{COMMON} {qkv} --config {tmp_path / 'run.yaml'} --load {start}"
        assert run_here(flags(prefix, f"{more} --metrics-file {metrics}")) == 0
        assert ("--muon-split-matrices is" in capfd.readouterr().err) == (name == "old")
        assert losses(metrics) == {i: loss for i, loss in entire.items() if i > 2}
        found[name] = entire
    assert (found["new"] == found["old"]) == bool(qkv), "here whole products are Megatron's"
    other = f"{muon} --muon-split-matrices {'megatron' if qkv else 'whole'} --load {start}"
    assert run_here(flags(prefix, f"{other} --metrics-file {tmp_path / 'other.jsonl'}")) == 0
    assert f"{start} was trained with" in capfd.readouterr().err


@pytest.mark.timeout(120)
@pytest.mark.covers("resumed on another layout", runs="loads")
@pytest.mark.gpus(2)
def test_state_in_host_memory_is_saved_like_any_other(tmp_path):
    prefix = write_tokens(tmp_path / "tokens")
    original, metrics = tmp_path / "original", tmp_path / "m"
    offload = f"{COMMON} --bf16 --optimizer-cpu-offload"
    run_on(2, flags(prefix, f"{offload} {CUT} --save-interval 2 --save {original}"))
    start, wanted = original / "iter_0000002", losses(original / "metrics.jsonl")
    assert dtypes(start) == {"master": "F32", "exp_avg": "F32", "exp_avg_sq": "F32"}
    for host in ("", "--optimizer-cpu-offload --optimizer-offload-fraction 0.5"):
        words = f"{COMMON} --bf16 {host} --load {start} --metrics-file {metrics}"
        assert run_here(flags(prefix, words)) == 0
        assert sorted(losses(metrics)) == [3, 4]
        for iteration, loss in losses(metrics).items():
            assert loss == pytest.approx(wanted[iteration], rel=1e-4), iteration
