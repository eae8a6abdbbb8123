# SPDX-License-Identifier: Apache-2.0
"""Runs with multi-token prediction: on ranks that share tokens and layers, and over a restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import read_manifest
from megatron.training.monitoring.metrics import read_metrics
from tests.functional_tests.small_run import flags, losses, run_here, run_on, write_tokens

PACKED = "--reset-position-ids --reset-attention-mask --eod-mask-loss"
DEPTHS = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5"
COMMON = f"--train-iters 4 --eval-interval 2 --lr-warmup-iters 0 {PACKED} {DEPTHS}"
BOTH = "--context-parallel-size 2 --pipeline-model-parallel-size 2"


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> Path:
    """Return where documents are, which a token ends."""
    prefix = write_tokens(tmp_path_factory.mktemp("data") / "tokens")
    described = {"tokenizer": {"vocab_size": 61, "eod": 3}}
    prefix.with_suffix(".json").write_text(json.dumps(described))
    return prefix


def depth_losses(metrics: Path, depth: int) -> dict[int, float]:
    """Return the losses of a depth of a run by iteration."""
    events = (e for e in read_metrics(metrics) if e["kind"] == "train")
    return {e["iteration"]: e[f"mtp_{depth}_loss"] for e in events}


@pytest.mark.covers("numbers of one process", runs="ranks")
@pytest.mark.covers("resumed on another layout", runs="loads")
@pytest.mark.gpus(4)
def test_a_run_goes_on_over_ranks_that_share_tokens_and_layers(prefix, tmp_path):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts"
    run_on(1, flags(prefix, f"{COMMON} --metrics-file {whole}"))
    run_on(1, flags(prefix, f"{COMMON} --save {parts} --exit-interval 2"))
    # The depths come from the checkpoint.
    more = f"{BOTH} --pipeline-schedule zb-h1 --use-checkpoint-args"
    run_on(4, flags(prefix, f"{COMMON.replace(DEPTHS, '')} {more} --save {parts} --load {parts}"))
    expected, found = losses(whole), losses(parts / "metrics.jsonl")
    assert found == pytest.approx(expected, rel=1e-6)
    reached = losses(parts / "metrics.jsonl", "validation")
    assert reached == pytest.approx(losses(whole, "validation"), rel=1e-6)
    # Each depth's loss is that of one process too, and no other than the main one's by chance.
    for depth in (1, 2):
        wanted, logged = (depth_losses(path, depth) for path in (whole, parts / "metrics.jsonl"))
        assert logged == pytest.approx(wanted, rel=1e-6)
        assert wanted.keys() == expected.keys()
        assert min(abs(wanted[i] - expected[i]) for i in wanted) > 1e-4
    held = read_manifest(parts / "iter_0000004").tensors
    assert "mtp.1.projection.weight" in held
    assert "optimizer.exp_avg/mtp.1.projection.weight" in held


def test_what_cannot_be_predicted_is_refused(prefix, capsys):
    cases = {
        "--mtp-num-layers 24": "--mtp-num-layers 24: samples of 24 tokens are too short",
        "--mtp-num-layers 0": "--mtp-num-layers",
        "--mtp-loss-scaling-factor 0.5": "has no effect without --mtp-num-layers: add that",
        "--mtp-num-layers 1 --mtp-loss-scaling-factor -1": "--mtp-loss-scaling-factor",
    }
    for more, wanted in cases.items():
        assert run_here(flags(prefix, more)) == 2
        said = capsys.readouterr().err
        assert wanted in said
        assert said.count("\n") == 1
