# SPDX-License-Identifier: Apache-2.0
"""Runs with multi-token prediction on context and pipeline parallel ranks, and after a restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import read_manifest
from megatron.training.monitoring.metrics import read_metrics
from tests.functional_tests.small_run import flags, losses, run_on, write_tokens

PACKED = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
DEPTHS = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5"
COMMON = f"--train-iters 4 --eval-interval 2 --lr-warmup-iters 0 {PACKED} {DEPTHS}"
CP_PP = "--context-parallel-size 2 --pipeline-model-parallel-size 2"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> Path:
    """Write documents that end with token 3 and return their prefix."""
    prefix = write_tokens(tmp_path_factory.mktemp("data") / "tokens")
    described = {"tokenizer": {"vocab_size": 61, "eod": 3}}
    prefix.with_suffix(".json").write_text(json.dumps(described))
    return prefix


def depth_losses(metrics: Path, depth: int) -> dict[int, float]:
    """Return the losses of an MTP depth of a run by iteration."""
    events = (e for e in read_metrics(metrics) if e["kind"] == "train")
    return {e["iteration"]: e[f"mtp_{depth}_loss"] for e in events}


@pytest.mark.covers("matches a single process")
@pytest.mark.covers("resume on another layout")
@pytest.mark.gpus(4)
def test_mtp_run_resumes_on_cp2_pp2(prefix, tmp_path):
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "parts"
    run_on(1, flags(prefix, f"{COMMON} --metrics-file {whole}"))
    run_on(1, flags(prefix, f"{COMMON} --save {resumed} --exit-interval 2"))
    # The MTP options come from the checkpoint.
    options = f"{CP_PP} --pipeline-schedule zb-h1 --use-checkpoint-args"
    run_on(
        4,
        flags(prefix, f"{COMMON.replace(DEPTHS, '')} {options} --save {resumed} --load {resumed}"),
    )
    expected, actual = losses(whole), losses(resumed / "metrics.jsonl")
    assert actual == pytest.approx(expected, rel=1e-6)
    validation = losses(resumed / "metrics.jsonl", "validation")
    assert validation == pytest.approx(losses(whole, "validation"), rel=1e-6)
    # Each depth's loss matches one process, and differs from the main loss.
    for depth in (1, 2):
        expected_mtp, logged = (
            depth_losses(path, depth) for path in (whole, resumed / "metrics.jsonl")
        )
        assert logged == pytest.approx(expected_mtp, rel=1e-6)
        assert expected_mtp.keys() == expected.keys()
        assert min(abs(expected_mtp[i] - expected[i]) for i in expected_mtp) > 1e-4
    tensors = read_manifest(resumed / "iter_0000004").tensors
    assert "mtp.1.projection.weight" in tensors
    assert "optimizer.exp_avg/mtp.1.projection.weight" in tensors
