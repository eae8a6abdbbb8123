# SPDX-License-Identifier: Apache-2.0
"""A run with experts through several layouts: each part goes on from the last checkpoint, with
the losses and the biases of experts of a single process, and its loads are drawn."""

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

#: Processes, layout and last iteration of each further part.
PARTS = (
    (4, f"{EP} 2 {TP} 2 --ddp-bucket-size 4000", 7),
    (4, f"{EP} 2 {TP} 2 {ETP} 1 --sequence-parallel {STRATEGY} optim_grads_params", 8),
    (4, f"{EP} 2 {PP} 2 --pipeline-schedule zb-h1 --moe-token-dispatcher-type allgather", 10),
    (4, f"{EP} 2 {TP} 2 --context-parallel-size 2 {STRATEGY} optim --check-collectives", 11),
    (1, "", 12),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Train in one process without interruption; return its folder, beside the data."""
    root = tmp_path_factory.mktemp("experts")
    prefix = write_tokens(root / "tokens")
    run_on(1, flags(prefix, f"{COMMON} --save {root / 'whole'}"))
    expected = losses(root / "whole" / "metrics.jsonl")
    assert expected[12] < expected[2] - 0.1, "the model has not learnt anything"
    return root / "whole"


def go_on(prefix, parts, world, layout, last):
    """Train from the last checkpoint up to an iteration."""
    more = f"{COMMON} {layout} --save {parts} --load {parts} --exit-interval {last}"
    run_on(world, flags(prefix, more))
    assert max(losses(parts / "metrics.jsonl")) == last


@pytest.mark.timeout(300)
@pytest.mark.covers("numbers of one process", runs="ranks")
@pytest.mark.covers("resumed on another layout", runs="loads")
@pytest.mark.gpus(4)
def test_run_on_ep4_resumes_on_ep2_tp2(whole, tmp_path):
    prefix, parts = whole.with_name("tokens"), tmp_path / "parts"
    go_on(prefix, parts, 4, f"{EP} 4", 5)
    go_on(prefix, parts, 4, f"{EP} 2 {TP} 2", 12)
    compare(whole, parts)
    check_plot(parts)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.covers("numbers of one process", runs="ranks")
@pytest.mark.covers("resumed on another layout", runs="loads")
@pytest.mark.gpus(4)
def test_experts_go_on_in_any_layout(whole, tmp_path):
    prefix, parts = whole.with_name("tokens"), tmp_path / "parts"
    first = f"{COMMON} {EP} 4 --save {parts} --exit-interval 5"
    job = torchrun(flags(prefix, first), "--standalone", processes=4)
    output, _ = job.communicate(timeout=100)
    assert job.returncode == 0, output
    assert "experts: 8 in 3 of 4 layers, a token goes to 2 and a shared one by sigmoid" in output
    assert "tokens by alltoall: fewest rows per rank" in output
    assert "| load balance: worst " in output
    for world, layout, last in PARTS:
        go_on(prefix, parts, world, layout, last)
    compare(whole, parts)


def compare(whole, parts):
    """See that a run in parts has the losses, loads and biases of one that is whole."""
    expected, found = (losses(folder / "metrics.jsonl") for folder in (whole, parts))
    assert found.keys() == expected.keys()
    for iteration, loss in found.items():
        assert loss == pytest.approx(expected[iteration], rel=1e-6), iteration
    check_loads(read_metrics(whole / "metrics.jsonl"), read_metrics(parts / "metrics.jsonl"))
    check_biases(whole / "iter_0000012", parts / "iter_0000012")


def check_loads(expected, loads):
    """Compare the loads of experts, which are whole numbers over their mean, and what routers
    measured."""
    trained = [[e for e in events if e["kind"] == "train"] for events in (expected, loads)]
    for one, other in zip(*trained, strict=True):
        assert one[EXPERT_LOAD] == other[EXPERT_LOAD], one["iteration"]
        assert list(one[EXPERT_LOAD]) == ["layer 1", "layer 2", "layer 3"]
        assert all(len(row) == 8 for row in one[EXPERT_LOAD].values())
        for name in ("expert_load_max", "router_entropy", "aux_loss", "z_loss"):
            assert other[name] == pytest.approx(one[name], rel=1e-5), name


def check_biases(whole, parts):
    """See that the biases of experts are saved, equal, and have moved."""
    names = [f"decoder.blocks.{block}.moe.router.expert_bias" for block in (3, 5, 7)]
    hashes = digests(whole), digests(parts)
    kept = [name for name in read_manifest(whole).tensors if "expert_bias" in name]
    assert len(kept) == 3
    for name in names:
        (key,) = [k for k in kept if name in k]
        assert hashes[0][key] == hashes[1][key]
    assert len({hashes[0][key] for key in kept}) == 3, "biases have not moved"


def check_plot(folder):
    """Draw the loads by the command that users give, and see every expert of every layer."""
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
    expected, found = (losses(f / "metrics.jsonl") for f in (tmp_path / "plain", saved))
    assert found == pytest.approx(expected, rel=1e-5)
