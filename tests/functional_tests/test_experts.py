# SPDX-License-Identifier: Apache-2.0
"""A run with experts in several layouts: each phase resumes from the last checkpoint, with the
losses and expert biases of a single process, and the expert loads are plotted."""

from __future__ import annotations

import sys
from unittest import mock

import pytest

from megatron.cli.errors import ExitCode
from megatron.core.dist_checkpointing import read_manifest
from megatron.training import plot
from megatron.training.monitoring.metrics import EXPERT_LOAD, read_metrics
from tests.functional_tests.small_run import (
    digests,
    flags,
    losses,
    run_on,
    running,
    write_tokens,
)
from tests.functional_tests.torchrun_job import torchrun

EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
STRATEGY = "--data-parallel-sharding-strategy"
MODEL = (
    "--num-layers 4 --num-experts 8 --moe-layer-freq [0]*1+[1]*3 --moe-ffn-hidden-size 40 "
    "--moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate "
    "--moe-router-score-function sigmoid --moe-router-num-groups 4 --moe-router-group-topk 2 "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 "
    "--moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 0.001 --moe-input-jitter-eps 0.02"
)
COMMON = f"{MODEL} --eval-interval 0 --train-iters 12"

#: Processes, layout and exit iteration of the phases after the first.
PHASES = (
    (4, f"{EP} 2 {TP} 2 --ddp-bucket-size 4000", 7),
    (4, f"{EP} 2 {TP} 2 {ETP} 1 --sequence-parallel {STRATEGY} optim_grads_params", 8),
    (4, f"{EP} 2 {PP} 2 --pipeline-schedule zb-h1 --moe-token-dispatcher-type allgather", 10),
    (4, f"{EP} 2 {TP} 2 --context-parallel-size 2 {STRATEGY} optim --check-collectives", 11),
    (1, "", 12),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Train in one process without interruption and return its folder, next to the data."""
    root = tmp_path_factory.mktemp("experts")
    prefix = write_tokens(root / "tokens")
    run_on(1, flags(prefix, f"{COMMON} --save {root / 'whole'}"))
    expected = losses(root / "whole" / "metrics.jsonl")
    assert expected[12] < expected[2] - 0.1, "the model has not learnt anything"
    return root / "whole"


def resume(prefix, resumed, world, layout, exit_iteration):
    """Train from the last checkpoint up to an iteration."""
    options = (
        f"{COMMON} {layout} --save {resumed} --load {resumed} --exit-interval {exit_iteration}"
    )
    run_on(world, flags(prefix, options))
    assert max(losses(resumed / "metrics.jsonl")) == exit_iteration


@pytest.mark.timeout(300)
@pytest.mark.covers("matches a single process")
@pytest.mark.covers("resume on another layout")
@pytest.mark.gpus(4)
def test_run_on_ep4_resumes_on_ep2_tp2(whole, tmp_path):
    prefix, resumed = whole.with_name("tokens"), tmp_path / "parts"
    resume(prefix, resumed, 4, f"{EP} 4", 5)
    resume(prefix, resumed, 4, f"{EP} 2 {TP} 2", 12)
    compare(whole, resumed)
    check_plot(resumed)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.covers("matches a single process")
@pytest.mark.covers("resume on another layout")
@pytest.mark.gpus(4)
def test_experts_resume_in_any_layout(whole, tmp_path):
    prefix, resumed = whole.with_name("tokens"), tmp_path / "parts"
    start_flags = f"{COMMON} {EP} 4 --save {resumed} --exit-interval 5"
    job = torchrun(flags(prefix, start_flags), "--standalone", processes=4)
    output, _ = job.communicate(timeout=100)
    assert job.returncode == 0, output
    assert "experts: 8 in 3 of 4 layers, a token goes to 2 and a shared one by sigmoid" in output
    assert "tokens by alltoall: fewest rows per rank" in output
    assert "| load balance: worst " in output
    for world, layout, exit_iteration in PHASES:
        resume(prefix, resumed, world, layout, exit_iteration)
    compare(whole, resumed)


def compare(uninterrupted, resumed):
    """Assert that a resumed run has the losses, loads and biases of the uninterrupted run."""
    expected, actual = (losses(folder / "metrics.jsonl") for folder in (uninterrupted, resumed))
    assert actual.keys() == expected.keys()
    for iteration, loss in actual.items():
        assert loss == pytest.approx(expected[iteration], rel=1e-6), iteration
    check_loads(
        read_metrics(uninterrupted / "metrics.jsonl"), read_metrics(resumed / "metrics.jsonl")
    )
    check_biases(uninterrupted / "iter_0000012", resumed / "iter_0000012")


def check_loads(expected, resumed_events):
    """Compare expert loads, which are exact counts over their mean, and router statistics."""
    trained = [[e for e in events if e["kind"] == "train"] for events in (expected, resumed_events)]
    for expected_event, resumed_event in zip(*trained, strict=True):
        assert expected_event[EXPERT_LOAD] == resumed_event[EXPERT_LOAD], expected_event[
            "iteration"
        ]
        assert list(expected_event[EXPERT_LOAD]) == ["layer 1", "layer 2", "layer 3"]
        assert all(len(row) == 8 for row in expected_event[EXPERT_LOAD].values())
        for name in ("expert_load_max", "router_entropy", "aux_loss", "z_loss"):
            assert resumed_event[name] == pytest.approx(expected_event[name], rel=1e-5), name


def check_biases(uninterrupted, resumed):
    """Assert that expert biases are saved, equal, and have changed."""
    names = [f"decoder.blocks.{block}.moe.router.expert_bias" for block in (3, 5, 7)]
    hashes = digests(uninterrupted), digests(resumed)
    bias_names = [name for name in read_manifest(uninterrupted).tensors if "expert_bias" in name]
    assert len(bias_names) == 3
    for name in names:
        (key,) = [k for k in bias_names if name in k]
        assert hashes[0][key] == hashes[1][key]
    assert len({hashes[0][key] for key in bias_names}) == 3, "biases have not moved"


def check_plot(folder):
    """Plot the loads with the plot command and assert that it shows every expert of every layer."""
    html, picture = folder / "load.html", folder / "load.png"
    words = ["plot", "--metrics", str(folder), "--html", str(html), "--output", str(picture)]
    with mock.patch.object(sys, "argv", words):
        plot.main()
    text = html.read_text(encoding="utf-8")
    for layer in (1, 2, 3):
        for expert in range(8):
            assert f"<title>layer {layer}, expert {expert}: " in text
    assert picture.stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_run_over_capacity_ends_everywhere_and_resumes_with_more(tmp_path):
    prefix, saved = write_tokens(tmp_path / "tokens"), tmp_path / "saved"
    common = f"--num-experts 8 {EP} 2 --eval-interval 0 --device cpu"
    factor, save = "--moe-expert-rank-capacity-factor", f"--save {saved} --load {saved}"
    run_on(2, flags(prefix, f"{common} --save {tmp_path / 'plain'}"))
    run_on(2, flags(prefix, f"{common} {save} {factor} 2 --exit-interval 4"))
    with running(2, flags(prefix, f"{common} {save} {factor} 1.01")) as ranks:
        outcomes = ranks.outcomes(timeout=100.0)
        text = "".join(ranks.log(rank) for rank in range(2))
    assert [outcome.exit_code for outcome in outcomes] == [ExitCode.USER_ERROR] * 2, text
    assert f"{factor} 1.01 x its even share" in text
    assert "no weight has changed" in text
    run_on(2, flags(prefix, f"{common} {save} {factor} 2"))
    expected, actual = (losses(f / "metrics.jsonl") for f in (tmp_path / "plain", saved))
    assert actual == pytest.approx(expected, rel=1e-5)
