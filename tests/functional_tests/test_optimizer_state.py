# SPDX-License-Identifier: Apache-2.0
"""Weight groups and bf16 moments: saved, resharded, converted; a pattern for no weight."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import read_extra, read_manifest
from megatron.training.exit_codes import ExitCode
from tests.functional_tests.small_run import flags, losses, run_here, run_on, write_tokens

COMMON = "--eval-interval 0 --train-iters 4 --micro-batch-size 4 --adam-beta2 0.95"
GROUPS = "--lr-group embedding.*=0.3 --weight-decay-group *norm*=0.5 --decoupled-lr 1e-2"
NARROW = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"


def dtypes(checkpoint: Path) -> dict[str, str]:
    """Return the dtype of each kind of optimizer state in a checkpoint."""
    return {
        name.split("/")[0].removeprefix("optimizer."): tensor.dtype
        for name, tensor in read_manifest(checkpoint).tensors.items()
        if name.startswith("optimizer.")
    }


@pytest.mark.timeout(120)
def test_narrow_moments_go_on_on_another_layout_and_in_another_dtype(tmp_path, capfd):
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


def test_a_pattern_for_no_weight_ends_the_run_with_a_line(tmp_path, capfd):
    prefix = write_tokens(tmp_path / "tokens")
    assert run_here(flags(prefix, "--lr-group nothing.*=0.5")) == ExitCode.USER_ERROR
    said = capfd.readouterr()
    assert "no weight is called nothing.*: weights have names such as" in said.out + said.err
