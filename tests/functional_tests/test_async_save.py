# SPDX-License-Identifier: Apache-2.0
"""Asynchronously written checkpoints equal synchronously written ones bit for bit."""

from __future__ import annotations

import pytest

from megatron.training.monitoring.metrics import read_metrics
from tests.functional_tests.small_run import digests, flags, run_on, timeless, write_tokens

CUT = "--data-parallel-sharding-strategy optim_grads_params --overlap-param-gather"
EXPERTS = (
    "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
)


@pytest.mark.parametrize(
    "options",
    [
        f"{CUT} --bf16 --optimizer muon",
        pytest.param(
            f"{EXPERTS} --use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce",
            marks=pytest.mark.slow,
        ),
        pytest.param("--tensor-model-parallel-size 2 --sequence-parallel", marks=pytest.mark.slow),
        pytest.param("--pipeline-model-parallel-size 2", marks=pytest.mark.slow),
        pytest.param("--context-parallel-size 2 --seq-length 24", marks=pytest.mark.slow),
        pytest.param(
            f"{CUT} --fsdp-all-gather-in-start-param-sync --exp-avg-dtype bf16 --bf16",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "--data-parallel-sharding-strategy optim_grads --optimizer-cpu-offload",
            marks=pytest.mark.slow,
        ),
        pytest.param("--fp16 --initial-loss-scale 4e6 --optimizer sgd", marks=pytest.mark.slow),
    ],
)
@pytest.mark.covers("asynchronous save")
@pytest.mark.gpus(2)
def test_async_save_snapshots_state_between_updates(tmp_path, options):
    """Save at every step: each checkpoint is copied while the next step computes."""
    prefix = write_tokens(tmp_path / "tokens")
    common = f"--train-iters 5 --save-interval 1 --eval-interval 0 {options}"
    run_on(2, flags(prefix, f"{common} --save {tmp_path / 'waits'}"))
    run_on(2, flags(prefix, f"{common} --async-save --save {tmp_path / 'goes_on'}"))
    for iteration in range(1, 6):
        name = f"iter_{iteration:07d}"
        actual = digests(tmp_path / "goes_on" / name)
        assert actual == digests(tmp_path / "waits" / name), name
        assert len(actual) > 30
    # As text: a gradient norm may be NaN, which equals nothing.
    assert str(timeless(tmp_path / "goes_on/metrics.jsonl")) == str(
        timeless(tmp_path / "waits/metrics.jsonl")
    )
    events = [e for e in read_metrics(tmp_path / "goes_on/metrics.jsonl") if e["kind"] == "save"]
    assert sorted(e["iteration"] for e in events if "seconds" in e) == [1, 2, 3, 4]
