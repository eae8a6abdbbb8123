# SPDX-License-Identifier: Apache-2.0
"""Generalized tensor parallelism by its flags: a run goes on over layouts with and without it, with
the losses of a single process, and what cannot be is refused before it starts."""

from __future__ import annotations

import pytest

from megatron.training import pretrain_gpt
from tests.functional_tests.small_run import flags, losses, run_on, write_tokens
from tests.functional_tests.torchrun_job import torchrun

TP, SHARDS = "--tensor-model-parallel-size", "--tensor-parallel-num-weight-shards"
EXPERT_SHARDS = "--expert-tensor-parallel-num-weight-shards"
STRATEGY = "--data-parallel-sharding-strategy"
COMMON = (
    "--eval-interval 4 --train-iters 12 --hidden-dropout 0.1 --attention-dropout 0.1 "
    "--position-embedding-type learned_absolute --max-position-embeddings 30"
)
EXPERTS = (
    "--num-experts 4 --moe-ffn-hidden-size 40 --moe-shared-expert-intermediate-size 24 "
    "--moe-aux-loss-coeff 0.02 --eval-interval 0 --train-iters 6 "
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
)


def train(prefix, save, world, more):
    """Train to the end, or to `--exit-interval`; return the losses."""
    run_on(world, flags(prefix, f"{more} --save {save} --load {save}"))
    return losses(save / "metrics.jsonl")


@pytest.mark.timeout(200)
@pytest.mark.covers("numbers of one process", runs="ranks")
@pytest.mark.covers("resumed on another layout", runs="loads")
def test_a_run_goes_on_with_and_without_weight_shards(tmp_path):
    prefix = write_tokens(tmp_path / "tokens")
    expected = train(prefix, tmp_path / "whole", 1, COMMON)
    assert expected[12] < expected[2] - 0.1, "the model has not learnt anything"
    parts = tmp_path / "parts"
    for world, layout, last in (
        (2, f"{SHARDS} 2", 2),
        (4, f"{SHARDS} 2 {STRATEGY} optim --overlap-param-gather", 4),
        (4, f"{TP} 2 --sequence-parallel {SHARDS} 4 --pipeline-model-parallel-size 1", 6),
        (4, f"{SHARDS} 4 --check-collectives", 8),
        (2, f"{SHARDS} 2 {STRATEGY} optim_grads_params", 10),
        (1, "", 12),
    ):
        found = train(prefix, parts, world, f"{COMMON} {layout} --exit-interval {last}")
        assert max(found) == last
    assert found.keys() == expected.keys()
    for iteration, loss in found.items():
        assert loss == pytest.approx(expected[iteration], rel=1e-6), iteration
    validation = [
        losses(tmp_path / run / "metrics.jsonl", "validation") for run in ("whole", "parts")
    ]
    assert validation[0].keys() == validation[1].keys() != set()
    for iteration, loss in validation[0].items():
        assert validation[1][iteration] == pytest.approx(loss, rel=1e-6), iteration


@pytest.mark.timeout(200)
@pytest.mark.covers("numbers of one process", runs="ranks")
def test_experts_have_weight_shards_of_their_own(tmp_path):
    prefix = write_tokens(tmp_path / "tokens")
    alone = EXPERTS.replace("--expert-model-parallel-size 2 ", "")
    expected = train(prefix, tmp_path / "whole", 1, alone)
    layout = f"{EXPERTS} {SHARDS} 4 {EXPERT_SHARDS} 2"
    argv = flags(prefix, f"{layout} --save {tmp_path / 'parts'} --exit-interval 4")
    job = torchrun(argv, "--standalone", processes=4)
    output, _ = job.communicate(timeout=100)
    assert job.returncode == 0, output
    line = next(line for line in output.splitlines() if "weight shards: " in line)
    assert "over gtp 4" in line
    assert "of experts over egtp 2" in line
    found = train(prefix, tmp_path / "parts", 1, alone)
    assert found.keys() == expected.keys()
    for iteration, loss in found.items():
        assert loss == pytest.approx(expected[iteration], rel=1e-6), iteration


@pytest.mark.parametrize(
    ("world", "layout", "names"),
    [
        (4, f"{TP} 2 {SHARDS} 3", [f"{SHARDS} 3", f"{TP} 2"]),
        (2, f"{SHARDS} 4", [f"{SHARDS} 4", "there are 2"]),
        (4, f"{SHARDS} 2 --num-distributed-optimizer-instances 2 {STRATEGY} optim",
         ["--num-distributed-optimizer-instances 2", SHARDS]),
        (2, f"{EXPERT_SHARDS} 2", [EXPERT_SHARDS, "--num-experts"]),
        (4, f"--num-experts 4 --expert-tensor-parallel-size 2 {TP} 2 {EXPERT_SHARDS} 3 {SHARDS} 3",
         [f"{EXPERT_SHARDS} 3", f" {SHARDS} 3"]),
    ],
)  # fmt: skip
def test_impossible_weight_shards_are_refused_at_once(tmp_path, world, layout, names, capfd):
    prefix = write_tokens(tmp_path / "tokens")
    argv = [*flags(prefix, layout), "--print-config"]
    launcher = {"WORLD_SIZE": str(world), "RANK": "0", "LOCAL_RANK": "0"}
    launcher |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert pretrain_gpt.main(argv, launcher) == 2
    text = capfd.readouterr().err
    for name in names:
        assert name in text
